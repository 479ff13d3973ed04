"""Runs over many layouts that resume bit for bit, in the middle of an epoch and with dropout on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers.checkpoint_contents import checkpoint_contents
from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import Run, train_mimo

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
Train = Callable[[Sequence[str]], Run]

RESUMED, LAST = 3, 5
"""Sample 12 of an epoch of 16, and four samples into the next one."""
DISTRIBUTED = ("--use-distributed-optimizer",)
OPTIMIZERS = {
    "plain": (),
    "distributed": DISTRIBUTED,
    "reshardable": (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"),
}
EXPERTS = ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--swiglu")


def train_with_context_parallelism(arguments: Sequence[str]) -> Run:
    """Train with a context-parallel language module. Collective over the ranks of the test."""
    from tests.unit_tests.helpers.context_parallel import local_context_parallelism

    with local_context_parallelism():
        return train_mimo(arguments)


def train_with_plain_projection(arguments: Sequence[str]) -> Run:
    """Train with torch's own linear layer behind the encoder. Collective over the ranks."""
    from examples.mimo.model_providers import clip_gpt

    with mock.patch.object(clip_gpt, '_projection_spec', plain_projection_spec):
        return train_mimo(arguments)


def plain_projection_spec(args: Any, config: Any, _collection: Any) -> Any:
    """A projection that knows nothing of tensor parallelism, in place of the provider's."""
    import torch

    from megatron.core.transformer.spec_utils import ModuleSpec

    sizes = {"in_features": args.vision_hidden_size, "out_features": args.hidden_size}
    return ModuleSpec(module=torch.nn.Linear, params={**sizes, "dtype": config.params_dtype})


@dataclass(frozen=True)
class Case:
    """A layout, its flags, and what trains it."""

    ranks: int
    modules: tuple[str, ...]
    flags: tuple[str, ...] = ()
    train: Train = train_mimo

    def arguments(self, optimizer: Sequence[str]) -> tuple[str, ...]:
        """Command line of a run to the end, without its folders."""
        modules = [part for module in self.modules for part in ("--module", module)]
        steps = ("--train-iters", str(LAST), "--save-interval", str(RESUMED))
        return (*steps, *modules, *self.flags, *optimizer)


CASES = {
    "disjoint, fp16 with a scaler": Case(
        2,
        ("vision", "language"),
        ("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "2"),
    ),
    "disjoint, not stepped before the save": Case(
        2, ("vision", "language"), ("--fp16", "--initial-loss-scale", "262144", "--hysteresis", "1")
    ),
    "colocated, TP beside DP": Case(2, ("vision:dp=2,colocated", "language:tp=2")),
    "colocated, DP beside TP": Case(2, ("vision:tp=2,colocated", "language:dp=2"), ("--bf16",)),
    "frozen tower": Case(2, ("vision", "language"), ("--bf16", "--freeze", "vision.encoder")),
    "frozen encoder": Case(2, ("vision", "language"), ("--freeze", "vision")),
    "CP 2": Case(
        2, ("language:cp=2",), ("--bf16", "--mock-text-only"), train_with_context_parallelism
    ),
    "two encoders": Case(3, ("left", "right", "language"), ("--bf16", "--image-patch-size", "4")),
    "two encoders, colocated": Case(
        2,
        ("left:tp=2,colocated", "right:dp=2,colocated", "language:tp=2"),
        ("--image-patch-size", "4"),
    ),
    "PP 2, tied embeddings": Case(3, ("vision", "language:pp=2"), ("--bf16",)),
    "gradient accumulation": Case(
        3,
        ("vision", "language:dp=2"),
        ("--micro-batch-size", "1", "--global-batch-size", "8", "--mock-samples", "32"),
    ),
    "experts, EP 2": Case(3, ("vision", "language:dp=2,ep=2"), EXPERTS),
    "experts of one stage": Case(
        4,
        ("language:pp=2,dp=2,ep=2",),
        (*EXPERTS, "--bf16", "--moe-layer-freq", "[0,1]", "--mock-text-only"),
    ),
    "experts, EP 2 of DP 4": Case(
        4, ("language:dp=4,ep=2",), (*EXPERTS, "--micro-batch-size", "1", "--mock-text-only")
    ),
    "DP 3, uneven shards": Case(
        3,
        ("language:dp=3",),
        ("--bf16", "--micro-batch-size", "1", "--global-batch-size", "3", "--mock-text-only"),
    ),
    "TP 2, a plain torch projection": Case(
        4, ("vision:tp=2", "language:tp=2"), ("--bf16",), train_with_plain_projection
    ),
    "TP 2 with TP 2 and PP 3": Case(
        8, ("vision:tp=2", "language:tp=2,pp=3"), ("--num-layers", "3")
    ),
}


ONE_OPTIMIZER = {
    "two encoders, colocated": "distributed",
    "experts of one stage": "plain",
    "experts, EP 2 of DP 4": "distributed",
    "DP 3, uneven shards": "distributed",
}
"""Cases that are about one kind of optimizer, or that others cover for the other kind."""
RUNS = [
    (name, optimizer)
    for name in CASES
    for optimizer in ("plain", "distributed")
    if ONE_OPTIMIZER.get(name, optimizer) == optimizer
]
RUNS.append(("experts of one stage", "reshardable"))


@pytest.mark.parametrize(('name', 'optimizer'), RUNS)
def test_resume_is_exact(rank_pool: Pools, tmp_path: Path, name: str, optimizer: str) -> None:
    """A run that resumes ends as the one that went on: losses, weights, and every saved value."""
    case = CASES[name]
    pool = rank_pool(case.ranks)
    arguments = case.arguments(OPTIMIZERS[optimizer])
    first, second = tmp_path / "first", tmp_path / "second"
    whole = pool.run(case.train, (*arguments, "--save", str(first)), timeout=240)
    loading = ("--load", str(first), "--ckpt-step", str(RESUMED), "--save", str(second))
    rest = pool.run(case.train, (*arguments, *loading), timeout=240)
    for uninterrupted, resumed in zip(whole, rest, strict=True):
        count = len(resumed.losses)
        assert resumed.losses == uninterrupted.losses[len(uninterrupted.losses) - count :]
        assert count * LAST == len(uninterrupted.losses) * (LAST - RESUMED)
        assert resumed.weights == uninterrupted.weights
        assert resumed.optimizer == uninterrupted.optimizer
    assert any(run.losses for run in rest)
    end = f"iter_{LAST:07}"
    assert checkpoint_contents(second / end) == checkpoint_contents(first / end)
