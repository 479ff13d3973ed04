"""Gradient finalization of a heterogeneous model: per module, then one global normalization.

Megatron's ``finalize_model_grads`` knows one set of groups. Here every module finishes its own
synchronization over its own groups with that same function, and the division by the number of loss
tokens follows once for all, since the loss lives on the language module's last stage only but its
gradient reaches every module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from examples.mimo.training.hetero.layout import LANGUAGE

if TYPE_CHECKING:
    from examples.mimo.training.hetero.model import HeteroMimoModel
    from examples.mimo.training.hetero.topology import Topology


class GradFinalizer:
    """The ``config.finalize_model_grads_func`` of a heterogeneous run."""

    def __init__(self, topology: Topology) -> None:
        """Keep the topology; its language module's groups say which ranks count tokens."""
        language = topology.collections.get(LANGUAGE)
        self._collections = topology.collections
        # One rank per (data, context) slice counts: the last stage's tensor rank 0.
        self._counts_tokens = (
            language is not None
            and language.pp.rank() == language.pp.size() - 1
            and language.tp.rank() == 0
        )

    def __call__(
        self,
        model: list[HeteroMimoModel],
        num_tokens: torch.Tensor | None = None,
        pg_collection: object = None,  # noqa: ARG002 - part of the schedule's call
        force_all_reduce: bool | None = False,  # noqa: FBT001, FBT002 - part of the schedule's call
    ) -> None:
        """Synchronize every active module's gradients and divide them by the global token count.

        Collective over the world: every rank's schedule calls it once per step.

        Args:
            model: the one MIMO model, wrapped per module.
            num_tokens: loss tokens that this rank's schedule counted, int tensor of shape ``[]``.
            pg_collection: ignored; each module has its own.
            force_all_reduce: passed on to each module's synchronization.

        Raises:
            ValueError: without per-token loss (``num_tokens`` is ``None``).
        """
        if num_tokens is None:
            msg = "a MIMO run needs --calculate-per-token-loss to normalize over all modules."
            raise ValueError(msg)
        modules = model[0].wrapped_modules()
        for name, module in modules.items():
            finalize_model_grads(
                [module],
                num_tokens=None,
                pg_collection=self._collections[name],
                force_all_reduce=force_all_reduce,
            )
        tokens = num_tokens.clone() if self._counts_tokens else torch.zeros_like(num_tokens)
        dist.all_reduce(tokens)
        scaling = 1.0 / torch.clamp(tokens, min=1)
        for module in modules.values():
            module.scale_gradients(scaling)
