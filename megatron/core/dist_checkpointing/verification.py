"""The ranks of a run check a checkpoint together, before any of them reads from it.

The files are shared out between the ranks by size; the verdict is shared, so that a damaged file is
named on every rank and nobody goes on alone.
"""

import os
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.integrity import (
    Damage,
    FileDigest,
    Manifest,
    check_files,
    check_structure,
)
from megatron.core.dist_checkpointing.verdict import gather_everywhere, shared_verdict

_MOST_NAMED = 8


def find_damage_together(
    directory: str | os.PathLike, *, checksums: bool = True, group: dist.ProcessGroup | None = None
) -> tuple[list[Damage], bool]:
    """Return what is wrong with a checkpoint, the same on every rank, and if it is verifiable.

    Collective over ``group``: every rank calls it with the same arguments. The first rank looks at
    names, sizes and small files; then every rank reads its share of the files for their checksums.

    Args:
        directory: An iteration's directory.
        checksums: Compare checksums as well as names and sizes.
        group: The ranks; the world when it is None.

    Returns:
        The damage, none for a complete checkpoint; and False where there is no manifest, so that
        nothing but presence and length was checked.

    Raises:
        CheckpointingException: a rank failed at looking, with the same text on every rank.
    """
    folder = Path(directory)
    structure = None
    with shared_verdict(f'look at checkpoint {folder}', group):
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            structure = check_structure(folder)
    structure = next(look for look in gather_everywhere(structure, group) if look is not None)
    manifest = structure.manifest
    if structure.damage or manifest is None or not checksums:
        return list(structure.damage), manifest is not None
    found: list[Damage] = []
    with shared_verdict(f'read checkpoint {folder}', group):
        found = check_files(folder, manifest.algorithm, _own_share(manifest, group))
    return [item for part in gather_everywhere(found, group) for item in part], True


def refuse_damaged(
    directory: str | os.PathLike,
    *,
    checksums: bool = True,
    needs_manifest: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check a checkpoint, all ranks together; collective over ``group``.

    Args:
        directory: An iteration's directory.
        checksums: Compare checksums as well as sizes.
        needs_manifest: Refuse a checkpoint that cannot be verified, too.
        group: The ranks; the world when it is None.

    Raises:
        CheckpointingException: naming the damaged files, with the same text on every rank.
    """
    damage, verifiable = find_damage_together(directory, checksums=checksums, group=group)
    if damage:
        raise CheckpointingException(f'checkpoint {directory} is damaged: {name_damage(damage)}')
    if needs_manifest and not verifiable:
        raise CheckpointingException(
            f'checkpoint {directory} cannot be verified: it was saved without integrity.json'
        )


def name_damage(damage: list[Damage]) -> str:
    """Put the damage into one line."""
    more = len(damage) - _MOST_NAMED
    named = '; '.join(str(item) for item in damage[:_MOST_NAMED])
    return f'{named}; and {more} more' if more > 0 else named


def share_out(digests: list[FileDigest], ranks: int) -> list[list[FileDigest]]:
    """Deal files out to ranks so that each has about the same number of bytes to read."""
    shares: list[list[FileDigest]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for digest in sorted(digests, key=lambda item: (-(item.size or 0), item.name)):
        rank = sizes.index(min(sizes))
        shares[rank].append(digest)
        sizes[rank] += digest.size or 1
    return shares


def _own_share(manifest: Manifest, group: dist.ProcessGroup | None) -> list[FileDigest]:
    """Return the files that this rank reads."""
    files = list(manifest.files.values())
    if not dist.is_initialized():
        return files
    return share_out(files, dist.get_world_size(group))[dist.get_rank(group)]
