"""Which checkpoint of a directory a run continues from, and what is done when it is damaged.

The tracker (``latest_checkpointed_iteration.txt``) names the iteration, or ``--ckpt-step`` does.
Before anything is read from it, all ranks together verify it against its manifest; a damaged one
ends every rank with one message, which names the file and the newest good iteration. That one is
taken with ``--load-newest-good`` only.

A save is concluded on all ranks, too: rank 0 replaces the tracker, at once and durably, and only
then removes older iterations.
"""

import contextlib
import re
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.staging import (
    REMOVING,
    REPLACED,
    SAVING,
    is_in_flight,
    recover,
    remove_directory,
    replaced_path,
    write_atomically,
)
from megatron.core.dist_checkpointing.verdict import gather_everywhere, shared_verdict
from megatron.core.dist_checkpointing.verification import find_damage_together, name_damage
from megatron.core.msc_utils import MultiStorageClientFeature, maybe_msc
from megatron.training.utils import print_rank_0

TRACKER = 'latest_checkpointed_iteration.txt'
RELEASE = 'release'
_ITERATION = re.compile(r'iter_(\d{7,})')
_HIDDEN = re.compile(rf'\.(iter_\d{{7,}}|{RELEASE})({SAVING}|{REPLACED}|{REMOVING})')
_OTHER_FORMATS = ('torch_dcp', 'fsdp_dtensor')

Choice = tuple[int, bool]
"""An iteration, or 0 and True for a release; -1 and False for none."""
NOTHING: Choice = (-1, False)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A checkpoint that a run is to continue from, and who says so."""

    directory: Path
    choice: Choice
    named_by: str

    @property
    def path(self) -> Path:
        """Return the checkpoint's own directory."""
        return self.directory / directory_name(self.choice)

    def __str__(self) -> str:
        """Say which it is."""
        iteration, release = self.choice
        what = 'the release' if release else f'iteration {iteration}'
        return f'{what} in {self.directory} (named by {self.named_by})'


def directory_name(choice: Choice) -> str:
    """Return the name of a checkpoint's directory."""
    iteration, release = choice
    return RELEASE if release else f'iter_{iteration:07d}'


# --- the tracker


def write_tracker(tracker_filename: str, text: str) -> None:
    """Replace the tracker's text, at once and durably; local, on rank 0.

    Raises:
        OSError: the old text stays.
    """
    if MultiStorageClientFeature.is_enabled():
        with maybe_msc.open(tracker_filename, 'w') as file:
            file.write(text)
    else:
        write_atomically(Path(tracker_filename), text)


def tracked_before(tracker_filename: str) -> int:
    """Return the iteration that the tracker names, 0 for anything else; local, on rank 0."""
    _, (iteration, release) = _parse_tracker(tracker_filename)
    return 0 if release else max(iteration, 0)


def read_tracker(tracker_filename: str) -> Choice:
    """Return what a tracker that has to be there names; collective over the world.

    Raises:
        CheckpointingException: it is missing or names nothing; the same text on every rank.
    """
    problem, choice = _read_everywhere(tracker_filename)
    if problem or choice == NOTHING:
        raise CheckpointingException(problem or f'tracker {tracker_filename} does not exist')
    return choice


def find_tracked(tracker_filename: str, args: Namespace) -> Choice:
    """Return what the tracker of ``--load`` names, or `NOTHING`; collective over the world.

    A tracker that cannot be read is passed over with ``--load-newest-good``.

    Raises:
        CheckpointingException: the tracker names nothing; the same text on every rank.
    """
    problem, choice = _read_everywhere(tracker_filename)
    if problem and not args.ckpt_step:
        return _newest_good_or_refuse(Path(tracker_filename).parent, problem, args)
    return choice


def _read_everywhere(tracker_filename: str) -> tuple[str | None, Choice]:
    """Return what is wrong with the tracker on any rank, and what the newest of them names."""
    found = gather_everywhere(_parse_tracker(tracker_filename))
    problem = next((text for text, _ in found if text), None)
    choices = [choice for _, choice in found]
    newest = max(choices)
    if len(set(choices)) > 1 and not problem:
        print_rank_0(
            f'WARNING: the ranks read different iterations in {tracker_filename}: '
            f'{sorted({iteration for iteration, _ in choices})}; {newest[0]} counts'
        )
    return problem, newest


def _parse_tracker(tracker_filename: str) -> tuple[str | None, Choice]:
    """Return what is wrong with a tracker, and what it names; on this rank."""
    try:
        with maybe_msc.open(tracker_filename, 'r') as file:
            text = file.read().strip()
    except FileNotFoundError:
        return None, NOTHING
    except (OSError, ValueError) as error:
        return f'tracker {tracker_filename} cannot be read ({error})', NOTHING
    if text == RELEASE:
        return None, (0, True)
    if re.fullmatch(r'\d+', text):
        return None, (int(text), False)
    what = f'names no iteration: {text[:40]!r}' if text else 'is empty'
    return f'tracker {tracker_filename} {what}', NOTHING


# --- the checkpoint that is loaded

_chosen: dict[tuple[str, Choice], Choice] = {}
"""Verified for the first of the two reads of a load, its common state, until the second."""


def choose(
    load_dir: str | None, iteration: int, release: bool, args: Namespace, *, first_read: bool
) -> Choice:
    """Return the checkpoint to load, verified; collective over the world where there is one.

    Every rank calls it before it reads anything; Megatron does so twice in a load, for the common
    state and for the shards, and the second call relies on the first. Outside of a world, as where
    the arguments are read from a checkpoint, presence and sizes alone are checked.

    Args:
        load_dir: ``--load``.
        iteration: What the tracker or ``--ckpt-step`` names, -1 for nothing.
        release: The tracker names a release.
        args: Megatron's arguments.
        first_read: Whether it is for the common state.

    Raises:
        CheckpointingException: it is damaged, missing or incomplete, and ``--load-newest-good`` is
            not given or finds nothing; the same text on every rank.
    """
    if load_dir is None or not _is_ours(args):
        return iteration, release
    _finish_saves(args)
    asked = (load_dir, (iteration, release))
    if not first_read and asked in _chosen:
        return _chosen.pop(asked)
    chosen = _verified(Path(load_dir), (iteration, release), args)
    if first_read:
        _chosen[asked] = chosen
    return chosen


def _is_ours(args: Namespace) -> bool:
    """Say whether checkpoints of this run's format are the ones that the manifest is about."""
    return args.ckpt_format not in _OTHER_FORMATS and not MultiStorageClientFeature.is_enabled()


def _finish_saves(args: Namespace) -> None:
    """Wait for saves of this run that are in flight: they may be what is to be loaded."""
    from megatron.training.async_utils import is_empty_async_queue, maybe_finalize_async_save

    if args.async_save and not is_empty_async_queue():
        maybe_finalize_async_save(blocking=True)


def _verified(directory: Path, choice: Choice, args: Namespace) -> Choice:
    """Return the choice if it is good, else what to do instead."""
    if choice == NOTHING:
        return _without_tracker(directory, args)
    named_by = f'--ckpt-step {args.ckpt_step}' if args.ckpt_step else TRACKER
    wanted = Wanted(directory=directory, choice=choice, named_by=named_by)
    _recover_everywhere(wanted.path)
    if _is_legacy(wanted.path):
        return choice
    damage, verifiable = find_damage_together(wanted.path, checksums=_compares_checksums(args))
    if damage:
        problem = f'cannot load {wanted}: {name_damage(damage)}'
        return _newest_good_or_refuse(directory, problem, args, besides=choice)
    if not verifiable:
        print_rank_0(
            f'NOTE: {wanted} was saved without {MANIFEST} (by Megatron without our patches): all '
            'files are there and long enough, but their content cannot be verified.'
        )
    return choice


def _without_tracker(directory: Path, args: Namespace) -> Choice:
    """Start anew where there is no checkpoint; do not where there are some that nothing names.

    Raises:
        CheckpointingException: there are complete iterations; the same text on every rank.
    """
    if not _iterations(directory):
        return NOTHING
    good = _newest_good(directory, args)
    if good is None:
        return NOTHING
    problem = f'there is no {TRACKER} in {directory}, but there are iterations'
    return _use_or_refuse(good, problem, args)


def _newest_good_or_refuse(
    directory: Path, problem: str, args: Namespace, besides: Choice = NOTHING
) -> Choice:
    """Return the newest good iteration if the user wants that.

    Raises:
        CheckpointingException: naming the problem and the newest good iteration.
    """
    return _use_or_refuse(_newest_good(directory, args, besides), problem, args)


def _use_or_refuse(good: int | None, problem: str, args: Namespace) -> Choice:
    if good is None:
        raise CheckpointingException(f'{problem}. There is no good iteration.')
    if not args.load_newest_good:
        raise CheckpointingException(
            f'{problem}. The newest good iteration is {good}; --load-newest-good takes it.'
        )
    print_rank_0(f'WARNING: {problem}. Going on from the newest good iteration, {good}.')
    return good, False


def _newest_good(directory: Path, args: Namespace, besides: Choice = NOTHING) -> int | None:
    """Return the newest iteration that is complete; collective over the world."""
    for iteration in sorted(_iterations(directory), reverse=True):
        choice = (iteration, False)
        path = directory / directory_name(choice)
        if choice == besides:
            continue
        _recover_everywhere(path)
        damage, _ = find_damage_together(path, checksums=_compares_checksums(args))
        if not damage:
            return iteration
    return None


def _iterations(directory: Path) -> list[int]:
    """Return the iterations that rank 0 sees in a directory, on every rank."""
    found: list[int] = []
    with shared_verdict(f'look for checkpoints in {directory}'):
        if _is_rank_0() and directory.is_dir():
            names = [entry.name.removesuffix(REPLACED).lstrip('.') for entry in directory.iterdir()]
            matches = filter(None, map(_ITERATION.fullmatch, names))
            found = sorted({int(match[1]) for match in matches})
    return gather_everywhere(found)[0]


def _recover_everywhere(path: Path) -> None:
    """Put an older checkpoint back in its place whose replacement a kill cut off."""
    with shared_verdict(f'give {replaced_path(path)} its name back'):
        if _is_rank_0() and not (path / CONFIG_FNAME).exists():
            recover(path)


def _is_legacy(path: Path) -> bool:
    """Say whether it is a checkpoint of the format ``torch``, as rank 0 sees it."""
    with shared_verdict(f'look at {path}'):
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return gather_everywhere(any(name.startswith('mp_rank_0') for name in names))[0]


def _compares_checksums(args: Namespace) -> bool:
    """Checksums take reading all of it: only where all ranks share the work."""
    return dist.is_initialized() and not args.no_verify_checksums


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# --- the end of a save


def conclude_save(
    announce: Callable[[], None] | None, request: Any | None, save_dir: str, iteration: int
) -> None:
    """Move the tracker on, now or when an async save is complete; every rank calls it.

    Collective over the world, now or as the last of the request's finalize functions.

    Args:
        announce: On rank 0: writes the tracker, prints, and removes what is not to be retained.
        request: The async save, or None when all is on disk already.
        save_dir: Where the iterations are.
        iteration: The one that was saved.

    Raises:
        CheckpointingException: the same text on every rank. The checkpoint is there, but the
            tracker still names the one before.
    """

    def finish() -> None:
        with shared_verdict(f'conclude the save of iteration {iteration} in {save_dir}'):
            if announce is not None:
                announce()
        if _is_rank_0():
            remove_leftovers(Path(save_dir))

    if request is None:
        finish()
    else:
        request.add_finalize_fn(finish)


def remove_leftovers(save_dir: Path) -> None:
    """Remove what killed runs left of iterations, as far as it can be; local, on rank 0.

    Saves of this process that are in flight stay, and an older checkpoint that waits for its name.
    """
    if MultiStorageClientFeature.is_enabled() or not save_dir.is_dir():
        return
    for entry in list(save_dir.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match is None:
            continue
        target = save_dir / match[1]
        waits = match[2] == REPLACED and not (target / CONFIG_FNAME).exists()
        if not waits and not (match[2] == SAVING and is_in_flight(target)):
            shutil.rmtree(entry, ignore_errors=True)


def remove_iteration(checkpoint_name: str) -> None:
    """Remove an iteration so that no half of it is ever seen; local, on one rank.

    Raises:
        OSError: it cannot be removed.
    """
    remove_directory(Path(checkpoint_name))


def keep_newest(save_dir: str, count: int, *, on_thread: bool) -> None:
    """Remove all but the newest iterations that are complete; rank 0 does it, others return.

    Args:
        save_dir: Where the iterations are.
        count: How many stay. Directories that are no complete checkpoint do not count.
        on_thread: Do it on a thread.
    """
    directory = Path(save_dir)
    if not _is_rank_0() or not directory.is_dir():
        return
    complete = sorted(
        entry
        for entry in directory.iterdir()
        if _ITERATION.fullmatch(entry.name) and (entry / CONFIG_FNAME).exists()
    )
    going = complete[: max(0, len(complete) - count)]

    def remove() -> None:
        for entry in going:
            with contextlib.suppress(OSError):
                remove_directory(entry)

    if going:
        print_rank_0(f'Non-persistent checkpoints scheduled for removal: {list(map(str, going))}')
        threading.Thread(target=remove).start() if on_thread else remove()
