"""Tier 1: a checkpoint directory is complete or does not exist, whatever happens to its save."""

import json
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.saves import caught, load_state, save_state

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
TIMEOUT = 240


def damage_of(directory: Path) -> list[str]:
    """Return all that is wrong with a checkpoint."""
    from megatron.core.dist_checkpointing.integrity import find_damage

    return [str(damage) for damage in find_damage(directory)]


def save_and_load(directory: Path, value: float, options: dict) -> dict:
    """Save once, then load."""
    save_state(directory, value, **options)
    return load_state(directory)


@pytest.mark.parametrize('algorithm', ['crc32', 'sha256'])
def test_save_leaves_one_complete_directory(
    algorithm: str, rank_pool: Pools, tmp_path: Path
) -> None:
    """A save leaves its directory alone, in which every file is in the manifest."""
    options = {'verify_integrity': algorithm == 'sha256'}
    rank_pool(2).run(save_and_load, tmp_path / 'saves' / 'ckpt', 1.0, options, timeout=TIMEOUT)
    assert [path.name for path in (tmp_path / 'saves').iterdir()] == ['ckpt']
    files = {path.name for path in (tmp_path / 'saves' / 'ckpt').iterdir()}
    manifest = json.loads((tmp_path / 'saves' / 'ckpt' / 'integrity.json').read_text())
    assert manifest['algorithm'] == algorithm
    assert set(manifest['files']) == files - {'integrity.json'}
    assert damage_of(tmp_path / 'saves' / 'ckpt') == []


def test_saving_again_replaces_the_whole_directory(rank_pool: Pools, tmp_path: Path) -> None:
    """Shards of an older, larger run are gone; what others put into the directory stays."""
    target = tmp_path / 'ckpt'
    rank_pool(4).run(save_and_load, target, 1.0, {}, timeout=TIMEOUT)
    assert (target / '__3_0.distcp').exists()
    (target / 'loader_rank0.pt').write_text('state of a data loader')
    loaded = rank_pool(2).run(save_and_load, target, 2.0, {}, timeout=TIMEOUT)
    assert [part['iteration'] for part in loaded] == [2.0, 2.0]
    assert sorted(path.name for path in target.glob('*.distcp')) == ['__0_0.distcp', '__1_0.distcp']
    assert (target / 'loader_rank0.pt').read_text() == 'state of a data loader'
    assert damage_of(target) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith('.')] == []


def test_leftovers_of_a_killed_save_are_not_taken_in(rank_pool: Pools, tmp_path: Path) -> None:
    """Files in the hidden directory of an earlier run are removed before the save writes."""
    hidden = tmp_path / '.ckpt.saving'
    hidden.mkdir()
    (hidden / '__7_0.distcp').write_bytes(b'stale')
    rank_pool(2).run(save_and_load, tmp_path / 'ckpt', 1.0, {}, timeout=TIMEOUT)
    assert not (tmp_path / 'ckpt' / '__7_0.distcp').exists()
    assert damage_of(tmp_path / 'ckpt') == []


def make_checkpoint(directory: Path, text: str) -> None:
    """Make a directory that counts as a checkpoint."""
    directory.mkdir()
    (directory / 'metadata.json').write_text(text)


@pytest.mark.parametrize('name', ['.ckpt.replaced', 'ckpt'])
def test_old_checkpoint_survives_a_kill_between_renames(name: str, tmp_path: Path) -> None:
    """Cut off before or after the old one is moved aside, it is back after `recover`."""
    from megatron.core.dist_checkpointing import staging

    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target.name == name:
            raise KeyboardInterrupt  # not an Exception: nothing of ours repairs anything
        return rename(self, target)

    make_checkpoint(tmp_path / 'ckpt', 'old')
    make_checkpoint(tmp_path / '.ckpt.saving', 'new')
    with mock.patch.object(Path, 'rename', killed), pytest.raises(KeyboardInterrupt):
        staging._take_name(tmp_path / '.ckpt.saving', tmp_path / 'ckpt')
    assert (tmp_path / '.ckpt.replaced').exists() is (name == 'ckpt')
    staging.recover(tmp_path / 'ckpt')
    assert (tmp_path / 'ckpt' / 'metadata.json').read_text() == 'old'
    assert not (tmp_path / '.ckpt.replaced').exists()


def test_recover_removes_the_old_one_where_the_new_one_is_complete(tmp_path: Path) -> None:
    """Cut off after the second rename, the new checkpoint counts."""
    from megatron.core.dist_checkpointing.staging import recover

    make_checkpoint(tmp_path / 'ckpt', 'new')
    make_checkpoint(tmp_path / '.ckpt.replaced', 'old')
    recover(tmp_path / 'ckpt')
    assert [path.name for path in tmp_path.iterdir()] == ['ckpt']
    assert (tmp_path / 'ckpt' / 'metadata.json').read_text() == 'new'


def test_recover_keeps_what_others_wrote_meanwhile(tmp_path: Path) -> None:
    """A data loader's state in the place of the old checkpoint does not pass for the new one."""
    from megatron.core.dist_checkpointing.staging import recover

    make_checkpoint(tmp_path / '.ckpt.replaced', 'old')
    (tmp_path / 'ckpt').mkdir()
    (tmp_path / 'ckpt' / 'loader.pt').write_text('state')
    recover(tmp_path / 'ckpt')
    names = {path.name: path.read_text() for path in (tmp_path / 'ckpt').iterdir()}
    assert names == {'metadata.json': 'old', 'loader.pt': 'state'}


def test_rename_that_fails_puts_the_old_one_back(tmp_path: Path) -> None:
    """The second rename fails: the old checkpoint has its name again."""
    from megatron.core.dist_checkpointing import staging

    make_checkpoint(tmp_path / 'ckpt', 'old')
    with pytest.raises(FileNotFoundError):
        staging._take_name(tmp_path / '.ckpt.saving', tmp_path / 'ckpt')
    assert (tmp_path / 'ckpt' / 'metadata.json').read_text() == 'old'


def out_of_space(directory: Path, elements: int) -> tuple[str, dict, dict]:
    """Save with a limit on the size of files; load what was there; save and load without it."""
    save_state(directory, 1.0, elements)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (elements, before[1]))
    text = caught(save_state, directory, 2.0, elements)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    old = load_state(directory, elements)
    save_state(directory, 3.0, elements)
    return text, old, load_state(directory, elements)


def test_file_that_cannot_grow_fails_on_every_rank(rank_pool: Pools, tmp_path: Path) -> None:
    """One rank may not write on: both say which file, the old one stays, the next is good."""
    elements = 100_000
    outcomes = rank_pool(2).run(out_of_space, tmp_path / 'ckpt', elements, timeout=TIMEOUT)
    (text,) = {outcome[0] for outcome in outcomes}
    file = tmp_path / '.ckpt.saving' / '__1_0.distcp'
    assert f"[Errno 27] File too large: '{file}' (rank 1)" in text
    assert [outcome[1]['iteration'] for outcome in outcomes] == [1.0, 1.0]
    assert [outcome[2]['iteration'] for outcome in outcomes] == [3.0, 3.0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of one megabyte; where it cannot be mounted, the test is skipped."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(disk)]
    try:
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip('mounting a small file system takes the rights of root')
    except FileNotFoundError:
        pytest.skip('there is no mount command')
    yield disk
    subprocess.run(['umount', str(disk)], check=True)  # noqa: S607 - as mount above


def fill_up(directory: Path) -> tuple[str, dict, dict]:
    """Save what fits, then what does not, then again what fits; load after each."""
    save_state(directory / 'a', 1.0)
    text = caught(save_state, directory / 'b', 2.0, 200_000)
    dist.barrier()
    old = load_state(directory / 'a')
    save_state(directory / 'b', 3.0)
    return text, old, load_state(directory / 'b')


def test_full_disk_fails_on_every_rank(rank_pool: Pools, small_disk: Path) -> None:
    """Both ranks say that the disk is full and which file; its space is free again after it."""
    outcomes = rank_pool(2).run(fill_up, small_disk, timeout=TIMEOUT)
    (text,) = {outcome[0] for outcome in outcomes}
    assert '[Errno 28] No space left on device' in text
    assert f'{small_disk}/.b.saving/__' in text
    assert [outcome[1]['iteration'] for outcome in outcomes] == [1.0, 1.0]
    assert [outcome[2]['iteration'] for outcome in outcomes] == [3.0, 3.0]


def no_directory(directory: Path, code: int, text: str) -> str:
    """Save where rank 0 cannot make a directory, as on a file system that is mounted read-only."""
    error = OSError(code, text, str(directory.with_name('.ckpt.saving')))
    with mock.patch.object(Path, 'mkdir', side_effect=error):
        return caught(save_state, directory, 1.0)


@pytest.mark.parametrize(
    ('code', 'text'), [(30, 'Read-only file system'), (13, 'Permission denied')]
)
def test_directory_that_cannot_be_made(
    code: int, text: str, rank_pool: Pools, tmp_path: Path
) -> None:
    """Only rank 0 makes it; every rank says why it could not."""
    texts = rank_pool(2).run(no_directory, tmp_path / 'ckpt', code, text, timeout=TIMEOUT)
    expected = f"[Errno {code}] {text}: '{tmp_path / '.ckpt.saving'}' (rank 0)"
    assert (
        texts == [f'CheckpointingException: cannot save checkpoint {tmp_path}/ckpt: {expected}'] * 2
    )


def vanishing(directory: Path) -> str:
    """Remove the directory under an async save between writing and finalizing it."""
    import shutil

    request = save_state(directory, 1.0, async_sharded_save=True, async_strategy='mcore')
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory.parent)
    dist.barrier()
    return caught(request.execute_sync)


def test_directory_that_vanishes(rank_pool: Pools, tmp_path: Path) -> None:
    """The directory goes while the save runs: both ranks name the file that cannot be written."""
    (tmp_path / 'saves').mkdir()
    texts = rank_pool(2).run(vanishing, tmp_path / 'saves' / 'ckpt', timeout=TIMEOUT)
    assert texts[0] == texts[1]
    assert f"No such file or directory: '{tmp_path}/saves/.ckpt.saving/__0_0.distcp'" in texts[0]


def use_in_flight(directory: Path) -> tuple[str, str, dict]:
    """Load from and save to the target of an async save before it is finalized, then after."""
    request = save_state(directory, 1.0, async_sharded_save=True, async_strategy='mcore')
    load = caught(load_state, directory)
    save = caught(save_state, directory, 2.0)
    request.execute_sync()
    return load, save, load_state(directory)


def test_save_in_flight_is_no_checkpoint_yet(rank_pool: Pools, tmp_path: Path) -> None:
    """Loading from it and saving over it say that it is in flight; finalized, it loads."""
    for load, save, loaded in rank_pool(2).run(use_in_flight, tmp_path / 'ckpt', timeout=TIMEOUT):
        assert 'is still being saved; finalize the async save before the load' in load
        assert 'an earlier save to it is still in flight' in save
        assert loaded['iteration'] == 1.0
