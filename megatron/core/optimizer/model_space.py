"""A flat slice of a parameter as blocks of the parameter's global tensor.

The distributed optimizer gives each data-parallel rank a flat slice of a parameter, which starts
and ends anywhere. Such a slice is a handful of blocks of the parameter: in two dimensions the rest
of a row, whole rows, the start of a row. Each block is a view of the rank's own state, and a
checkpoint takes any set of blocks that tiles a tensor, so a rank saves and loads its share of a
parameter as it is: nothing is gathered and nothing is held twice. Nothing here is collective.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import List, Optional, Tuple, Union

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

Shape = Tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a tensor whose elements follow each other in memory; one number per axis."""

    offset: Shape
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a checkpoint keeps of a block under one key: the block or a part of it."""

    start: int
    """First element of the block, counted from the start of the slice."""
    block: Block
    region: Tuple[slice, ...]
    """Part of the block, by axis."""
    target: ShardedTensor
    """Where the part belongs, without data, under the parameter's own key."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Look at this piece in a flat slice of the parameter, with the target's shape."""
        block = flat[self.start : self.start + prod(self.block.shape)].view(self.block.shape)
        part = block[self.region]
        return part[(None,) * (len(self.target.local_shape) - part.ndim)]


def blocks_of_slice(shape: Shape, start: int, stop: int) -> List[Block]:
    """Cut elements ``start`` to ``stop`` of a tensor into the fewest blocks, in memory order.

    Args:
        shape: of the tensor; ``()`` is one element.
        start: first element.
        stop: behind the last element.
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Block(offset=(start,) * len(shape), shape=(stop - start,) * len(shape))]
    (first, head), (last, tail) = (divmod(end, prod(shape[1:])) for end in (start, stop))
    if first == last:
        return _in_row(first, blocks_of_slice(shape[1:], head, tail))
    blocks = []
    if head:
        blocks = _in_row(first, blocks_of_slice(shape[1:], head, prod(shape[1:])))
        first += 1
    if first < last:
        whole = Block(offset=(first, *(0 for _ in shape[1:])), shape=(last - first, *shape[1:]))
        blocks.append(whole)
    return blocks + _in_row(last, blocks_of_slice(shape[1:], 0, tail))


def pieces_of_slice(
    described: Union[ShardedTensor, ShardedTensorFactory],
    shape: Shape,
    start: int,
    stop: int,
    replica: int,
) -> List[Piece]:
    """Describe the pieces of a slice of a parameter, in a fixed order.

    Args:
        described: what the model's checkpoint says of the parameter. A factory may split it, as
            that of a gated MLP does.
        shape: of the parameter on this rank.
        start: first element of the slice.
        stop: behind its last element.
        replica: last place of the replica id; the data-parallel ranks' slices differ, so it counts
            what else holds the same slice (instances of the distributed optimizer).

    Raises:
        NotImplementedError: a factory that does not split the parameter into blocks.
    """
    targets = [(described, Block(offset=(0,) * len(shape), shape=shape))]
    if isinstance(described, ShardedTensorFactory):
        whole = torch.empty(shape, device='meta')
        built = nested_values([replace(described, data=whole).build()])
        targets = [(part, _block_of_part(part, whole)) for part in built]
    pieces, position = [], 0
    for block in blocks_of_slice(shape, start, stop):
        for part, place in targets:
            common = _intersection(block, place)
            if common is not None:
                pieces.append(_piece(part, place, block, common, position, replica))
        position += prod(block.shape)
    return pieces


def _in_row(row: int, blocks: List[Block]) -> List[Block]:
    return [Block(offset=(row, *b.offset), shape=(1, *b.shape)) for b in blocks]


def _block_of_part(part: ShardedTensor, whole: torch.Tensor) -> Block:
    """Find which block of the whole a factory's part looks at.

    Raises:
        NotImplementedError: it looks at none, but was computed or rearranged.
    """
    offset, rest = [], part.data.storage_offset()
    for stride in whole.stride():
        step, rest = divmod(rest, stride)
        offset.append(step)
    is_view = part.data is whole or part.data._base is whole
    if not is_view or part.data.stride() != whole.stride():
        raise NotImplementedError(
            f"the optimizer state of '{part.key}' cannot be saved fully reshardable: its factory "
            "does not split the parameter into blocks (leave out "
            "--dist-ckpt-optim-fully-reshardable)"
        )
    return Block(offset=tuple(offset), shape=tuple(part.data.shape))


def _intersection(first: Block, second: Block) -> Optional[Block]:
    starts, sizes = [], []
    for a, n, b, m in zip(first.offset, first.shape, second.offset, second.shape, strict=True):
        starts.append(max(a, b))
        sizes.append(min(a + n, b + m) - starts[-1])
    if any(size <= 0 for size in sizes):
        return None
    return Block(offset=tuple(starts), shape=tuple(sizes))


def _piece(
    part: ShardedTensor, place: Block, block: Block, common: Block, position: int, replica: int
) -> Piece:
    """Put the common block of a slice's block and a part's place into the part's global tensor."""
    lead = part.prepend_axis_num
    inner = zip(part.global_offset[lead:], common.offset, place.offset, strict=True)
    assert len(part.replica_id) == 3, f"expected (PP, TP, DP), not {part.replica_id}"
    target = replace(
        part,
        data=None,
        local_shape=(1,) * lead + common.shape,
        global_offset=(*part.global_offset[:lead], *(a + b - c for a, b, c in inner)),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*part.replica_id[:2], replica),
    )
    region = tuple(
        slice(a - b, a - b + size)
        for a, b, size in zip(common.offset, block.offset, common.shape, strict=True)
    )
    return Piece(start=position, block=block, region=region, target=target)
