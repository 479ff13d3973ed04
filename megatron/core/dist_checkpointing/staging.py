"""A checkpoint directory is complete or it does not exist: how a save gets there.

All ranks write into a hidden directory beside the target, ``.NAME.saving``. When the last byte is
on disk rank 0 adds ``metadata.json`` and the manifest, and a rename gives the directory its name. A
save that is cut off leaves the hidden directory alone behind, which no load looks at and which the
next save of that name removes before it writes.

Where the target is there already, it is moved aside to ``.NAME.replaced``, the new one takes its
name, and the old one goes. A kill between the two renames leaves no directory of that name but both
hidden ones, complete; `recover` then puts the old one back, before the next load or save.

One fsync per file (the writers do it for the shards), one for the hidden directory and one for its
parent after the rename. On object storage (Multi-Storage Client), which has no rename, a save
writes to the target itself, as in unpatched Megatron.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.integrity import (
    MANIFEST,
    FileDigest,
    is_checkpoint_file,
    make_manifest,
)
from megatron.core.dist_checkpointing.verdict import shared_verdict
from megatron.core.msc_utils import MultiStorageClientFeature

SAVING = '.saving'
REPLACED = '.replaced'
REMOVING = '.removing'


@dataclass(kw_only=True)
class Staging:
    """A save on its way, as one rank sees it."""

    directory: str
    """Where all ranks write."""
    target: Path | None
    """The name that the checkpoint is to have; None on object storage, where it has it at once."""
    digests: dict[str, FileDigest] = field(default_factory=dict)
    """On rank 0: sizes and checksums taken while the ranks wrote."""


_in_flight: dict[str, Staging] = {}
"""Saves of this process that are neither published nor given up, by where they are written."""


def staging_path(target: Path) -> Path:
    """Return where a save to ``target`` writes until it is complete."""
    return target.with_name(f'.{target.name}{SAVING}')


def replaced_path(target: Path) -> Path:
    """Return where an older ``target`` waits while a new one takes its name."""
    return target.with_name(f'.{target.name}{REPLACED}')


def open_staging(checkpoint_dir: str | os.PathLike) -> Staging:
    """Make an empty hidden directory for a save; collective over the world.

    Raises:
        CheckpointingException: the same text on every rank, when a save to the same target is in
            flight or the directory cannot be made.
    """
    if MultiStorageClientFeature.is_enabled():
        return Staging(directory=str(checkpoint_dir), target=None)
    target = Path(os.path.abspath(checkpoint_dir))
    path = staging_path(target)
    staging = Staging(directory=str(path), target=target)
    with shared_verdict(f'save checkpoint {target}'):
        if staging.directory in _in_flight:
            raise CheckpointingException('an earlier save to it is still in flight')
        if dist.get_rank() == 0:
            recover(target)
            remove_directory(path)
            path.mkdir(parents=True)
    _in_flight[staging.directory] = staging
    return staging


def publish(staging: Staging, config: CheckpointingConfig, algorithm: str) -> None:
    """Give a completely written checkpoint its name; collective over the world.

    Args:
        staging: What `open_staging` returned.
        config: The format, for ``metadata.json``.
        algorithm: The checksums of the manifest.

    Raises:
        CheckpointingException: the same text on every rank. The caller gives the save up then.
    """
    with shared_verdict(f'save checkpoint {staging.target or staging.directory}'):
        if dist.get_rank() == 0:
            if staging.target is None:
                save_config(config, staging.directory)
            else:
                _publish_on_disk(staging, staging.target, config, algorithm)
    _in_flight.pop(staging.directory, None)


def give_up(staging: Staging) -> None:
    """Forget a save that failed, and free its disk space; every rank calls it, not collective.

    Call it when no rank writes any more.
    """
    _in_flight.pop(staging.directory, None)
    if staging.target is not None and dist.get_rank() == 0:
        shutil.rmtree(staging.directory, ignore_errors=True)


def note_digests(directory: str | os.PathLike, digests: Iterable[FileDigest]) -> None:
    """Keep on this rank what the writers say of the files of a save in flight."""
    staging = _in_flight.get(os.fspath(directory))
    if staging is not None:
        staging.digests.update((digest.name, digest) for digest in digests)


def is_in_flight(checkpoint_dir: str | os.PathLike) -> bool:
    """Say whether this process has a save to a target under way, the same answer on every rank."""
    return str(staging_path(Path(os.path.abspath(checkpoint_dir)))) in _in_flight


def recover(target: Path) -> None:
    """Finish or undo the replacement of ``target`` that a kill cut off; local, on one rank.

    Raises:
        OSError: the old directory cannot be given its name back.
    """
    aside = replaced_path(target)
    if not aside.exists():
        return
    if not (target / CONFIG_FNAME).exists():
        _carry_over(target, aside)
        remove_directory(target)
        aside.rename(target)
        sync_directory(target.parent)
    remove_directory(aside)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no part of it is ever seen under its name; local, on one rank.

    It is renamed to a hidden name first. A link is removed, not what it points to.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_symlink():
        path.unlink()
        return
    if not path.exists():
        return
    going = path if path.name.startswith('.') else path.with_name(f'.{path.name}{REMOVING}')
    if going != path:
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
    shutil.rmtree(going)


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    with path.open('w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's whole text at once: a reader, or a kill, sees the old or the new one.

    Raises:
        OSError: the old text stays.
    """
    fresh = path.with_name(f'.{path.name}.new')
    write_durably(fresh, text)
    fresh.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish_on_disk(
    staging: Staging, target: Path, config: CheckpointingConfig, algorithm: str
) -> None:
    """Complete the hidden directory and rename it."""
    path = Path(staging.directory)
    if not path.is_dir():
        raise CheckpointingException(f'{path} has vanished while it was written')
    _carry_over(target, path)
    write_durably(path / CONFIG_FNAME, json.dumps(asdict(config)))
    manifest = make_manifest(path, staging.digests, algorithm)
    write_durably(path / MANIFEST, manifest.text())
    sync_directory(path)
    _take_name(path, target)


def _take_name(path: Path, target: Path) -> None:
    """Rename the complete hidden directory to its target, aside which an older one is moved."""
    aside = replaced_path(target)
    replaces = target.is_symlink() or target.exists()
    if replaces:
        remove_directory(aside)
        target.rename(aside)
    try:
        path.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    sync_directory(target.parent)
    if replaces:
        # The checkpoint is safe; what cannot be removed now is removed by the next save.
        with contextlib.suppress(OSError):
            remove_directory(aside)


def _carry_over(target: Path, path: Path) -> None:
    """Copy what others have put into the target's directory, such as the data loader's state.

    The files of an older save are not taken along.
    """
    if not target.is_dir():
        return
    for entry in target.iterdir():
        own = is_checkpoint_file(entry.name) or entry.name in (CONFIG_FNAME, MANIFEST)
        if own or (path / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, path / entry.name)
        else:
            shutil.copy2(entry, path / entry.name)
