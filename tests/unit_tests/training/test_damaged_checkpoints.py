"""Tier 1: every kind of damage is one message on every rank, before anything is loaded from it."""

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.saves import caught, save_state

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
TIMEOUT = 240
TRACKER = 'latest_checkpointed_iteration.txt'
NEWEST = ' The newest good iteration is 2; --load-newest-good takes it.'
SHARD = '__1_0.distcp'


def save_iterations(root: Path) -> None:
    """Save the iterations 1, 2 and 3 and a tracker; collective over the world."""
    from megatron.training.trusted_checkpoints import conclude_save, write_tracker

    def announce() -> None:
        write_tracker(str(root / TRACKER), '3')

    for iteration in (1, 2, 3):
        save_state(root / f'iter_{iteration:07d}', iteration)
    conclude_save(announce if dist.get_rank() == 0 else None, None, str(root), 3)


@pytest.fixture(scope='module')
def saved(rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good iterations, for copies that are damaged."""
    root = tmp_path_factory.mktemp('saved')
    rank_pool(2).run(save_iterations, root, timeout=TIMEOUT)
    return root


def load_common(root: Path, options: dict) -> tuple[str, float | None]:
    """Read the common state as Megatron's load does first; return the error, or the iteration."""
    from megatron.training import checkpointing

    args = Namespace(
        non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None,
        exit_on_missing_checkpoint=False,
        ckpt_step=None,
        ckpt_format='torch_dist',
        async_save=False,
        load_newest_good=False,
        no_verify_checksums=False,
    )
    vars(args).update(options)
    loaded: list[float] = []

    def load() -> None:
        state, *_ = checkpointing._load_base_checkpoint(str(root), args, rank0=True)
        loaded.append(state['iteration'])

    text = caught(load)
    return text, loaded[0] if loaded else None


def last(root: Path) -> Path:
    """Return the directory of iteration 3."""
    return root / 'iter_0000003'


def truncate(root: Path) -> None:
    """A shard ends early."""
    os.truncate(last(root) / SHARD, 1000)


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit_manifest(root: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest of iteration 3."""
    path = last(root) / 'integrity.json'
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def swap(root: Path) -> None:
    """Two shards have each other's names."""
    first, second = last(root) / '__0_0.distcp', last(root) / SHARD
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def forget_common_state(root: Path) -> None:
    """The index lacks the common state, and nothing vouches for it."""
    path = last(root) / '.metadata'
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata['common_state/shard_0_1']
    path.write_bytes(pickle.dumps(metadata))
    (last(root) / 'integrity.json').unlink()


def replace_by(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file or directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def half_written(root: Path) -> None:
    """Unpatched Megatron was killed in a save of iteration 3: shards without an end."""
    for name in ('.metadata', 'metadata.json', 'integrity.json'):
        (last(root) / name).unlink()


def unverifiable_and_short(root: Path) -> None:
    """Unpatched Megatron's checkpoint, whose shard ends early."""
    (last(root) / 'integrity.json').unlink()
    truncate(root)


def damage_all(root: Path) -> None:
    """No iteration is good."""
    for folder in root.glob('iter_*'):
        (folder / '.metadata').unlink()


def tracker(text: str | bytes) -> Callable[[Path], object]:
    """Give the tracker another text."""
    content = text.encode() if isinstance(text, str) else text
    return lambda root: (root / TRACKER).write_bytes(content)


def cannot_load(reason: str, named_by: str = TRACKER, iteration: int = 3) -> str:
    """Return the message on a damaged iteration."""
    return f'cannot load iteration {iteration} in ROOT (named by {named_by}): {reason}.{NEWEST}'


DAMAGE: dict[str, tuple[Callable[[Path], object], dict, str]] = {
    'truncated shard': (truncate, {}, cannot_load(f'{SHARD}: 1000 bytes, but SIZE were saved')),
    'flipped bit in a shard': (
        lambda root: flip(last(root) / SHARD, 2000),
        {},
        cannot_load(f'{SHARD}: checksum ????????, but ???????? was saved'),
    ),
    'deleted shard': (
        lambda root: (last(root) / SHARD).unlink(),
        {},
        cannot_load(f'{SHARD}: missing'),
    ),
    'emptied shard': (
        lambda root: (last(root) / SHARD).write_bytes(b''),
        {},
        cannot_load(f'{SHARD}: 0 bytes, but SIZE were saved'),
    ),
    'shards swapped': (
        swap,
        {},
        cannot_load(
            f'__0_0.distcp: * bytes, but * were saved; {SHARD}: * bytes, but SIZE were saved'
        ),
    ),
    'shard that cannot be read': (
        lambda root: replace_by(last(root) / SHARD, lambda path: path.symlink_to(path.name)),
        {},
        cannot_load(f'{SHARD}: not readable (OSError: Too many levels of symbolic links)'),
    ),
    'stale shard of a larger run': (
        lambda root: shutil.copy(last(root) / SHARD, last(root) / '__7_0.distcp'),
        {},
        cannot_load('__7_0.distcp: not in integrity.json: not of this save'),
    ),
    'deleted .metadata': (
        lambda root: (last(root) / '.metadata').unlink(),
        {},
        cannot_load('.metadata: missing'),
    ),
    'flipped bit in .metadata': (
        lambda root: flip(last(root) / '.metadata', -10),
        {},
        cannot_load('.metadata: *'),
    ),
    'garbage in .metadata': (
        lambda root: (last(root) / '.metadata').write_bytes(b'garbage'),
        {},
        cannot_load('.metadata: 7 bytes, but SIZE were saved'),
    ),
    'no common state': (
        forget_common_state,
        {},
        cannot_load('.metadata: has no common state (arguments, iteration)'),
    ),
    'deleted metadata.json': (
        lambda root: (last(root) / 'metadata.json').unlink(),
        {},
        cannot_load('metadata.json: missing, as in a save that was cut off'),
    ),
    'garbage in metadata.json': (
        lambda root: (last(root) / 'metadata.json').write_text('{'),
        {},
        cannot_load('metadata.json: not readable (*)'),
    ),
    'garbage in the manifest': (
        lambda root: (last(root) / 'integrity.json').write_text('[1]'),
        {},
        cannot_load('integrity.json: not a readable manifest (*)'),
    ),
    'manifest without a shard': (
        lambda root: edit_manifest(root, lambda record: record['files'].pop(SHARD)),
        {},
        cannot_load(f'{SHARD}: not in integrity.json: not of this save'),
    ),
    'manifest with an unknown checksum': (
        lambda root: edit_manifest(root, lambda record: record.update(algorithm='crc16')),
        {},
        cannot_load("integrity.json: unknown checksum 'crc16'; known: crc32, sha256"),
    ),
    'no manifest, truncated shard': (
        unverifiable_and_short,
        {},
        cannot_load(f'{SHARD}: 1000 bytes, but .metadata needs SIZE'),
    ),
    'half-written by unpatched Megatron': (
        half_written,
        {},
        cannot_load('metadata.json: missing, as in a save that was cut off; .metadata: missing'),
    ),
    'empty directory': (
        lambda root: replace_by(last(root), Path.mkdir),
        {},
        cannot_load('metadata.json: missing, as in a save that was cut off; .metadata: missing'),
    ),
    'a file in place of the directory': (
        lambda root: replace_by(last(root), Path.touch),
        {},
        cannot_load('iter_0000003: not readable (NotADirectoryError: Not a directory)'),
    ),
    'tracker names a missing iteration': (
        lambda root: shutil.rmtree(last(root)),
        {},
        cannot_load('iter_0000003: does not exist'),
    ),
    '--ckpt-step names a missing iteration': (
        lambda root: shutil.rmtree(last(root)),
        {'ckpt_step': 7},
        cannot_load('iter_0000007: does not exist', '--ckpt-step 7', 7),
    ),
    'every iteration damaged': (
        damage_all,
        {},
        cannot_load('.metadata: missing').replace(NEWEST, ' There is no good iteration.'),
    ),
}
"""How to damage iteration 3, options of the load, and the message; ? is a character, * any text."""

BAD_TRACKERS: dict[str, tuple[Callable[[Path], object], str]] = {
    'empty': (tracker(''), 'is empty'),
    'garbage': (tracker('itre 3'), "names no iteration: 'itre 3'"),
    'negative': (tracker('-3'), "names no iteration: '-3'"),
    'zeros after a crash': (tracker(b'\0' * 3), "names no iteration: '\\x00\\x00\\x00'"),
    'not text': (tracker(b'\xff\xfe'), 'cannot be read (*)'),
    'a directory': (
        lambda root: replace_by(root / TRACKER, Path.mkdir),
        "cannot be read ([[]Errno 21] Is a directory: 'ROOT/latest_checkpointed_iteration.txt')",
    ),
}
"""How to damage the tracker, and what is said of it."""


def damaged(saved: Path, root: Path, damage: Callable[[Path], object]) -> Path:
    """Return a damaged copy of the good iterations."""
    shutil.copytree(saved, root, symlinks=True)
    damage(root)
    return root


def assert_says(texts: list[str], pattern: str, root: Path, size: int) -> None:
    """Every rank says the same, and it is the expected message."""
    import fnmatch

    assert len(set(texts)) == 1, texts
    expected = pattern.replace('ROOT', str(root)).replace('SIZE', str(size))
    assert fnmatch.fnmatchcase(texts[0], f'CheckpointingException: {expected}'), texts[0]


@pytest.mark.parametrize(('damage', 'options', 'message'), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_on_every_rank(
    damage: Callable[[Path], object],
    options: dict,
    message: str,
    saved: Path,
    rank_pool: Pools,
    tmp_path: Path,
) -> None:
    """The file, what is wrong, and the newest good iteration, which the flag loads."""
    root = damaged(saved, tmp_path / 'saves', damage)
    size = last(saved) / ('.metadata' if 'SIZE' in message and '.metadata: 7' in message else SHARD)
    found = rank_pool(2).run(load_common, root, options, timeout=TIMEOUT)
    assert_says([text for text, _ in found], message, root, size.stat().st_size)
    found = rank_pool(2).run(load_common, root, {**options, 'load_newest_good': True})
    if 'no good' in message:
        assert 'There is no good iteration.' in found[0][0]
    else:
        assert found == [('', 2.0), ('', 2.0)]


@pytest.mark.parametrize(('damage', 'says'), BAD_TRACKERS.values(), ids=BAD_TRACKERS.keys())
def test_bad_tracker_is_named_on_every_rank(
    damage: Callable[[Path], object], says: str, saved: Path, rank_pool: Pools, tmp_path: Path
) -> None:
    """What is wrong with the tracker, and the newest good iteration, which the flag loads."""
    root = damaged(saved, tmp_path / 'saves', damage)
    found = rank_pool(2).run(load_common, root, {}, timeout=TIMEOUT)
    newest = NEWEST.replace('2', '3')
    assert_says([text for text, _ in found], f'tracker ROOT/{TRACKER} {says}.{newest}', root, 0)
    found = rank_pool(2).run(load_common, root, {'load_newest_good': True}, timeout=TIMEOUT)
    assert found == [('', 3.0), ('', 3.0)]


def test_deleted_tracker_does_not_start_anew(saved: Path, rank_pool: Pools, tmp_path: Path) -> None:
    """Iterations that nothing names are not passed over without a word."""
    root = damaged(saved, tmp_path / 'saves', lambda root: (root / TRACKER).unlink())
    found = rank_pool(2).run(load_common, root, {}, timeout=TIMEOUT)
    message = f'there is no {TRACKER} in ROOT, but there are iterations.{NEWEST.replace("2", "3")}'
    assert_says([text for text, _ in found], message, root, 0)
    found = rank_pool(2).run(load_common, root, {'ckpt_step': 1}, timeout=TIMEOUT)
    assert found == [('', 1.0), ('', 1.0)]


def leave_half_a_save(root: Path) -> None:
    """A run was killed while it saved iteration 4, and one while it replaced iteration 3."""
    shutil.copytree(last(root), root / '.iter_0000004.saving')
    last(root).rename(root / '.iter_0000003.replaced')


def test_cut_off_saves_do_not_disturb(saved: Path, rank_pool: Pools, tmp_path: Path) -> None:
    """What killed saves left is not taken for a checkpoint; a replaced one is back in its place."""
    root = damaged(saved, tmp_path / 'saves', leave_half_a_save)
    found = rank_pool(2).run(load_common, root, {}, timeout=TIMEOUT)
    assert found == [('', 3.0), ('', 3.0)]
    assert last(root).is_dir()


def test_checkpoint_of_unpatched_megatron_loads(
    saved: Path, rank_pool: Pools, tmp_path: Path
) -> None:
    """Without a manifest it loads as it did."""
    root = damaged(saved, tmp_path / 'saves', lambda root: (last(root) / 'integrity.json').unlink())
    assert rank_pool(2).run(load_common, root, {}, timeout=TIMEOUT) == [('', 3.0), ('', 3.0)]


def test_checksums_can_be_left_out(saved: Path, rank_pool: Pools, tmp_path: Path) -> None:
    """``--no-verify-checksums`` does not see a flipped bit, but still a size."""
    options = {'no_verify_checksums': True}
    root = damaged(saved, tmp_path / 'flip', lambda root: flip(last(root) / SHARD, 2000))
    assert rank_pool(2).run(load_common, root, options, timeout=TIMEOUT) == [('', 3.0)] * 2
    root = damaged(saved, tmp_path / 'cut', truncate)
    found = rank_pool(2).run(load_common, root, options, timeout=TIMEOUT)
    assert all(f'{SHARD}: 1000 bytes' in text for text, _ in found)
