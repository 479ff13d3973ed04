"""Context parallelism without Transformer Engine, whose attention alone has it in Megatron."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gathered(torch.autograd.Function):
    """All ranks' parts of a tensor along a new first axis; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


class GatheredAttention(DotProductAttention):
    """Causal attention of this rank's queries over the keys and values of all ranks.

    Each rank holds chunks ``r`` and ``2 * cp - 1 - r`` of a sequence, as Megatron's
    ``get_batch_on_this_cp_rank`` deals them out.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        """Build Megatron's local attention, which refuses a config that names this parallelism."""
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
        self.cp_group = pg_collection.cp

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attend; ``[sequence / cp, batch, heads, width]`` each. Collective over the CP group."""
        places = torch.cat([self._places(rank, len(key)) for rank in range(self.cp_group.size())])
        own = self._places(self.cp_group.rank(), len(query))
        return super().forward(
            query,
            _Gathered.apply(key, self.cp_group).flatten(0, 1),
            _Gathered.apply(value, self.cp_group).flatten(0, 1),
            attention_mask=(places[None, :] > own[:, None])[None, None],
        )

    def _places(self, rank: int, length: int) -> torch.Tensor:
        """Positions in the sequence of what a rank holds."""
        chunk = length // 2
        chunks = (rank, 2 * self.cp_group.size() - 1 - rank)
        return torch.cat([torch.arange(chunk) + number * chunk for number in chunks])


@contextmanager
def local_context_parallelism() -> Iterator[None]:
    """Give local layers this attention, and let a run without Transformer Engine ask for it."""
    from examples.mimo.model_providers import clip_gpt
    from megatron.core.models.backends import LocalSpecProvider

    with (
        mock.patch.object(clip_gpt, 'check'),
        mock.patch.object(LocalSpecProvider, 'core_attention', return_value=GatheredAttention),
    ):
        yield
