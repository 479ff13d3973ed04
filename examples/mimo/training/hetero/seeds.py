"""Random seeds per module.

The language module keeps offset 0, so that its generators equal those of a standalone
language-model run bit for bit (``megatron.training.initialize._set_random_seed``: ``seed + 100 *
pipeline rank``). Encoders get their own offsets, in the order of the ``--module`` options. The
offsets of data streams are another namespace, see ``examples.mimo.data.lanes``.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import _fork_rng

from examples.mimo.training.hetero.layout import LANGUAGE, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    Called on every rank of the module; not collective. Ranks that differ in data parallelism only
    get equal generators. The module that speaks for a rank is seeded **before** ``pretrain``, where
    stock Megatron seeds: what the stock loop draws before it builds the model (the warm-up of fused
    functions) is then drawn from the same generators as in a standalone run.

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
    )


@contextlib.contextmanager
def module_seeded(seed: int, offset: int, collection: ProcessGroupCollection) -> Iterator[None]:
    """Seed for one more module of this rank and put every generator back afterwards.

    Local to the rank. Takes the arguments of :func:`seed_module`.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - see above
    try:
        with _fork_rng():
            seed_module(seed, offset, collection)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 - see above
