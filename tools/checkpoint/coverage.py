"""Whether the chunks of a tensor make up the whole of it, once: pure arithmetic on boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.checkpoint.index import Chunk, ObjectEntry, TensorEntry


def tensor_problems(tensor: TensorEntry) -> Iterator[str]:
    """Say what is wrong with a tensor's chunks: out of bounds, overlapping, incomplete, not saved."""
    for chunk in tensor.chunks:
        if len(chunk.sizes) != len(tensor.shape) or any(
            offset < 0 or offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False)
        ):
            yield f"chunk {in_box(chunk)} lies outside of the shape {list(tensor.shape)}"
            return
        if chunk.place is None:
            yield f"no file holds its chunk {in_box(chunk)}"
    pair = first_overlap(tensor.chunks, len(tensor.shape))
    if pair is not None:
        yield f"chunks {in_box(pair[0])} and {in_box(pair[1])} overlap"
        return
    covered = sum(chunk.count for chunk in tensor.chunks)
    if covered != tensor.count:
        yield f"its chunks cover {covered:,} of {tensor.count:,} values"


def object_problems(name: str, entries: list[ObjectEntry]) -> Iterator[str]:
    """Say which shards of an object are missing."""
    grids = {entry.grid for entry in entries}
    if len(grids) > 1:
        yield f"its shards disagree on their number: {sorted(grids)}"
        return
    (grid,) = grids
    total = 1
    for size in grid:
        total *= size
    if len(entries) < total:
        yield f"{name}: {total - len(entries)} of {total} shards are missing"
    for entry in entries:
        if entry.place is None:
            yield f"no file holds {entry.key}"


def first_overlap(chunks: tuple[Chunk, ...], dimensions: int) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share a value, if any do.

    Sweeps along the dimension with the most different offsets, so that thousands of chunks in a
    row are no quadratic matter.
    """
    if dimensions == 0:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    axis = max(range(dimensions), key=lambda i: len({chunk.offsets[i] for chunk in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[axis]):
        if chunk.count == 0:
            continue
        active = [c for c in active if c.offsets[axis] + c.sizes[axis] > chunk.offsets[axis]]
        for other in active:
            if intersection(chunk, other) is not None:
                return other, chunk
        active.append(chunk)
    return None


def intersection(first: Chunk, second: Chunk) -> tuple[tuple[int, int], ...] | None:
    """Start and end, in the whole tensor, of what two chunks share along each dimension."""
    box = tuple(
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )
    return box if all(start < end for start, end in box) else None


def in_box(chunk: Chunk) -> str:
    """A chunk's place in the whole: ``[0:1, 64:128]``."""
    spans = (
        f"{offset}:{offset + size}" for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )
    return f"[{', '.join(spans)}]"
