"""Small checkpoints made without ranks, in any layout."""

import io
import itertools
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from tools.checkpoint.writing import CheckpointWriter, dumped, new_iteration

GRID = {"tp": 2, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "etp": 2}
LAYOUT = {"vision": {**GRID, "tp": 1, "etp": 1, "offset": 0}, "language": {**GRID, "offset": 1}}
WEIGHTS = {
    "language_model.decoder.layers.mlp.weight": (2, 8, 4),
    "language_model.embedding.word_embeddings.weight": (16, 4),
    "modality_submodules.vision.encoders.tower.weight": (6, 4),
}


def tensors() -> dict[str, torch.Tensor]:
    """Weights and optimizer state of two modules, every value another one."""
    keys = dict(WEIGHTS)
    for key, shape in WEIGHTS.items():
        module = "language" if key.startswith("language") else "vision"
        keys[f"mimo.{module}.optimizer.state.exp_avg.{key}"] = shape
    start = itertools.count(1)
    return {
        key: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        + next(start)
        for key, shape in keys.items()
    }


def objects(**common: Any) -> dict[str, Any]:
    """What is no tensor: common state, parameter groups, random states."""
    arguments = {"module_layout": LAYOUT, "consumed_train_samples": 80, "bf16": False}
    groups = [{"lr": 0.5, "max_lr": 1.0, "weight_decay": 0.01, "step": 10, "params": []}]
    state = [{"random_rng_state": (3,), "rng_tracker_states": {"model-parallel-rng": 1}}]
    return {
        "common_state/shard_0_1": {
            "args": Namespace(**arguments),
            "iteration": 10,
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
            **common,
        },
        **{f"mimo.{name}.optimizer.mimo.{name}.param_groups/shard_0_1": groups for name in LAYOUT},
        "vision.rng_state/shard_0.0_1.1": state,
        "language.rng_state/shard_0.0_1.2": state,
        "language.rng_state/shard_0.1_1.2": state,
    }


def write(
    root: Path,
    values: Mapping[str, torch.Tensor],
    others: Mapping[str, Any],
    pieces: Sequence[int] = (1, 1, 1),
    iteration: int = 10,
    manifest: bool = False,
) -> Path:
    """Write a checkpoint whose tensors are cut into so many pieces along each dimension."""
    with new_iteration(root, iteration, manifest=manifest) as writer:
        for key, value in values.items():
            for offsets, chunk in cut(value, pieces):
                add(writer, key, value.shape, offsets, chunk)
        for key, value in others.items():
            writer.add_object(key, dumped(value))
    return root / f"iter_{iteration:07d}"


def add(
    writer: CheckpointWriter,
    key: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    chunk: torch.Tensor,
) -> None:
    """Write one chunk of a tensor."""
    buffer = io.BytesIO()
    torch.save(chunk.contiguous().clone(), buffer)
    properties = TensorProperties.create_from_tensor(chunk)
    writer.add_chunk(key, shape, offsets, chunk.shape, properties, [buffer.getvalue()])


def cut(
    value: torch.Tensor, pieces: Sequence[int]
) -> Iterable[tuple[tuple[int, ...], torch.Tensor]]:
    """Chunks of a tensor and where they lie."""
    steps = [-(-size // count) for size, count in zip(value.shape, pieces, strict=False)]
    for offsets in itertools.product(
        *(range(0, size, step) for size, step in zip(value.shape, steps, strict=True))
    ):
        spans = tuple(slice(at, at + step) for at, step in zip(offsets, steps, strict=True))
        yield offsets, value[spans]
