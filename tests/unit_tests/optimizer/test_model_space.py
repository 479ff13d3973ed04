"""A flat slice of a parameter as blocks of its global tensor. Pure logic."""

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.model_space import Piece, blocks_of_slice, pieces_of_slice

pytestmark = pytest.mark.tier0

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 2, 2, 3)]


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements are their own places in memory."""
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_blocks_tile_every_slice(shape: tuple[int, ...]) -> None:
    """For every slice, the blocks in order are its elements in order, in fewest blocks."""
    numel = prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            blocks = blocks_of_slice(shape, start, stop)
            parts = [
                whole(shape)[
                    tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))
                ].reshape(-1)
                for b in blocks
            ]
            assert torch.equal(
                torch.cat([torch.empty(0), *parts]), torch.arange(start, stop, dtype=torch.float32)
            )
            assert len(blocks) <= max(1, 2 * len(shape) - 1)


def described(shape: tuple[int, ...], kind: str) -> Any:
    """A parameter as a model's checkpoint describes it: second of two tensor-parallel ranks."""
    data = torch.empty(shape)
    if kind == "plain":
        return ShardedTensor.from_rank_offsets('w', data, (0, 1, 2), replica_id=(0, 0, 3))
    if kind == "stacked":
        offsets = ((0, 2, 5), (1, 1, 2))
        return ShardedTensor.from_rank_offsets(
            'w', data, *offsets, replica_id=(0, 1, 3), prepend_axis_num=1
        )
    axis = {"gated": 0, "split columns": 1}[kind]

    def build(key: str, tensor: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        halves = torch.chunk(tensor, 2, dim=axis)
        return [
            ShardedTensor.from_rank_offsets(key, half, (axis, place, 4), replica_id=replica_id)
            for half, place in zip(halves, (1, 3), strict=True)
        ]

    return ShardedTensorFactory('w', data, build, torch.cat, (0, 0, 3))


def written(pieces: list[Piece], flat: torch.Tensor, into: torch.Tensor) -> None:
    """Write pieces of a flat slice to their places in the global tensor."""
    for piece in pieces:
        place = tuple(
            slice(o, o + n)
            for o, n in zip(piece.target.global_offset, piece.target.local_shape, strict=True)
        )
        assert torch.isnan(into[place]).all()
        into[place] = piece.view(flat)


@pytest.mark.parametrize('kind', ["plain", "stacked", "gated", "split columns"])
@pytest.mark.parametrize('cuts', [(0, 24), (0, 1, 24), (0, 5, 7, 23, 24), (0, 12, 18, 24)], ids=str)
def test_pieces_fill_the_parameter(kind: str, cuts: tuple[int, ...]) -> None:
    """However a parameter is cut, its ranks' pieces are what the model's own description writes."""
    entry = described((4, 6), kind)
    values = whole((4, 6))
    parts = [entry] if isinstance(entry, ShardedTensor) else entry.build()
    expected = torch.full(parts[0].global_shape, torch.nan)
    if isinstance(entry, ShardedTensorFactory):
        parts = entry.build_fn('w', values, (0, 0, 3), None)
    for part in parts:
        data = values if isinstance(entry, ShardedTensor) else part.data
        expected[part.global_slice()] = data
    found = torch.full_like(expected, torch.nan)
    for start, stop in pairwise(cuts):
        pieces = pieces_of_slice(entry, (4, 6), start, stop, 0)
        written(pieces, values.reshape(-1)[start:stop], found)
        for piece in pieces:
            assert piece.target.replica_id == (*entry.replica_id[:2], 0)
            assert piece.target.key == 'w'
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))


def test_pieces_are_views() -> None:
    """A piece of a state looks at the state's own memory, so that a load reads into place."""
    flat = torch.zeros(10)
    for piece in pieces_of_slice(described((4, 6), "stacked"), (4, 6), 5, 15, 0):
        piece.view(flat).fill_(1)
    assert flat.all()


def test_a_factory_that_computes_is_refused() -> None:
    """State that is rearranged for the checkpoint cannot be saved in place; the key is named."""

    def build(key: str, tensor: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, tensor.clone(), replica_id=replica_id)]

    entry = ShardedTensorFactory('w', torch.empty(4, 6), build, torch.cat, (0, 0, 0))
    with pytest.raises(NotImplementedError, match="'w'.*--dist-ckpt-optim-fully-reshardable"):
        pieces_of_slice(entry, (4, 6), 0, 5, 0)
