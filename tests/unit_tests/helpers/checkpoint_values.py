"""Every value of a model and its optimizer under its place in the global tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.unit_tests.helpers.mimo_models import Built


@dataclass
class Values:
    """What one rank holds, copies included, independent of the layout."""

    shards: list[tuple[str, tuple[int, ...], Any, tuple[int, ...]]] = field(default_factory=list)
    """Key, offset, values and global shape of each shard, the optimizer's among them."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Parameter groups of each module's optimizer with the step, and its sharding type."""


def values_of(built: Built) -> Values:
    """List this rank's values by the model's parameters, whatever the optimizer's own format is.

    Called on every rank; not collective.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    built.args.dist_ckpt_optim_fully_reshardable = True
    state = built.sharded_state_dict()
    apply_factories(state)
    found = Values()
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            data = value.data.detach().clone()
            shape = (1,) * value.prepend_axis_num + tuple(data.shape)
            place = (value.key, value.global_offset, data.view(shape), value.global_shape)
            found.shards.append(place)
        elif isinstance(value, ShardedObject) and "param_groups" in value.key:
            found.groups[value.key] = value.data
    return found


def assembled(ranks: Sequence[Values]) -> dict[str, Any]:
    """Put all ranks' shards together into global tensors.

    Raises:
        AssertionError: two copies of a value differ, or a value is on no rank.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for key, offset, data, shape in rank.shards:
            if key not in tensors:
                tensors[key] = torch.zeros(shape, dtype=data.dtype)
                covered[key] = torch.zeros(shape, dtype=torch.bool)
            place = tuple(
                slice(start, start + size) for start, size in zip(offset, data.shape, strict=True)
            )
            again = covered[key][place]
            assert equal_bits(tensors[key][place][again], data[again]), f"{key}: copies differ"
            tensors[key][place] = data
            covered[key][place] = True
    for key, where in covered.items():
        assert where.all(), f"{key}: {(~where).sum()} values are on no rank"
    return tensors


def equal_bits(one: Any, other: Any) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, NaN included."""
    import torch

    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        )
    )
