"""Random seeds per module.

The language module keeps offset 0, so that its generators equal those of a standalone
language-model run bit for bit (``megatron.training.initialize._set_random_seed``: ``seed + 100 *
pipeline rank``). Encoders get their own offsets, in the order of the ``--module`` options. The
offsets of data streams are another namespace, see ``examples.mimo.data.lanes``.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import tensor_parallel

from examples.mimo.training.hetero.layout import LANGUAGE, Layout

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

MODULE_SEED_STRIDE = 100_000
"""Distance between the seeds of two modules: above every offset that Megatron adds for tensor
(2718 + rank), expert (1024 + 100 * rank) and pipeline (100 * rank) parallelism."""


def module_seed_offset(layout: Layout, name: str) -> int:
    """Offset of a module's initialization and dropout seed: 0 for the language module."""
    if name == LANGUAGE:
        return 0
    encoders = [grid.name for grid in layout.encoders]
    return MODULE_SEED_STRIDE * (1 + encoders.index(name))


def seed_module(seed: int, offset: int, collection: ProcessGroupCollection) -> None:
    """Seed Python, NumPy, torch, the device and the tensor-parallel tracker for one module.

    Called on every rank of the module, right before the module is built; not collective. Ranks
    that differ in data parallelism only get equal generators.

    Args:
        seed: the run's ``--seed``, positive.
        offset: :func:`module_seed_offset` of the module.
        collection: the module's groups; ``tp``, ``pp``, ``ep`` and ``expt_tp`` are read.
    """
    base = seed + offset + 100 * collection.pp.rank()
    random.seed(base)
    np.random.seed(base)  # noqa: NPY002 - the legacy global generator is what checkpoints store
    torch.manual_seed(base)
    tensor_parallel.model_parallel_cuda_manual_seed(
        base,
        tp_rank=collection.tp.rank(),
        ep_rank=collection.ep.rank(),
        etp_rank=collection.expt_tp.rank(),
        force_reset_rng=True,
    )
