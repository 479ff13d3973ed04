"""Every step after a resume against the same step of a run that never stopped, exactly."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import with_built
from tests.unit_tests.helpers.recorded_runs import Recorded, streams, train_recorded

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

EXPERTS = (
    *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--disable-bias-linear"),
)
LAYOUTS = {
    "disjoint": (3, ("--module", "vision:dp=2", "--module", "language")),
    "experts": (2, ("--module", "language:dp=2,ep=2", "--mock-text-only", *EXPERTS)),
    "random init": (
        *(2, ("--module", "language:dp=2", "--mock-text-only", "--data-parallel-random-init")),
    ),
}


def resumed(
    pool: RankPool, folder: Path, arguments: Sequence[str], at: int, unlike: bool = False
) -> tuple[list[Recorded], list[Recorded]]:
    """Run to the end, saving on the way, and resume from iteration ``at``: both runs by rank."""
    saving = ("--save", str(folder), "--save-interval", str(at))
    whole = pool.run(train_recorded, (*arguments, *saving), unlike, timeout=300)
    loading = ("--load", str(folder), "--ckpt-step", str(at))
    return whole, pool.run(train_recorded, (*arguments, *loading), timeout=300)


def assert_same_steps(whole: list[Recorded], again: list[Recorded], at: int) -> None:
    """Each rank's steps, losses and end are those of the run that never stopped."""
    for unbroken, rank in zip(whole, again, strict=True):
        assert rank.steps == unbroken.steps[at:]
        assert len(rank.steps) > 0
        assert rank.samples == unbroken.samples[at:]
        assert rank.run.losses == unbroken.run.losses[-len(rank.run.losses) :]
        assert rank.run.weights == unbroken.run.weights
        assert rank.run.optimizer == unbroken.run.optimizer
    assert whole[-1].run.losses


@pytest.mark.parametrize('layout', LAYOUTS)
def test_streams_go_on(rank_pool: Pools, tmp_path: Path, layout: str) -> None:
    """At each step after a resume the five generators are where an unbroken run has them.

    So nothing draws between the restore and the first step. Before the first step of all, every
    rank draws a number of times of its own, so that no rank could pass with another one's streams.
    """
    world_size, modules = LAYOUTS[layout]
    arguments = ("--train-iters", "4", "--use-distributed-optimizer", *modules)
    whole, again = resumed(rank_pool(world_size), tmp_path, arguments, 2, unlike=True)
    for name in whole[0].steps[2].streams:
        assert len({rank.steps[2].streams[name] for rank in whole}) == world_size, name
    assert_same_steps(whole, again, 2)


def seeded_two_later(built: Any) -> dict[str, str]:
    """Streams with which a rank of a run whose seed is two higher starts to build its model."""
    from examples.mimo.training.hetero.seeds import seed_module

    seed_module(built.args.seed + 2, built.model.seed_offset, built.model.pg_collection)
    return streams()


def test_a_changed_module_starts_anew(rank_pool: Pools, tmp_path: Path) -> None:
    """In a new layout one module goes on with its streams; the other starts as a later run would.

    Its streams are those that a new run with the seed plus the loaded iteration begins with.
    """
    common = ("--train-iters", "3", "--use-distributed-optimizer", "--module", "vision")
    saving = ("--save", str(tmp_path), "--save-interval", "2", "--module", "language")
    reshardable = "--dist-ckpt-optim-fully-reshardable"
    whole = rank_pool(2).run(train_recorded, (*common, *saving, reshardable))
    changed = (*common, "--module", "language:tp=2")
    loading = ("--load", str(tmp_path), "--ckpt-step", "2")
    again = rank_pool(3).run(train_recorded, (*changed, *loading))
    new = rank_pool(3).run(with_built, seeded_two_later, changed)
    assert again[0].steps == whole[0].steps[2:]
    for rank in (1, 2):
        assert again[rank].steps[0].streams == new[rank]
        assert again[rank].steps[0].rates == whole[1].steps[2].rates


def test_cosine_goes_on_over_eight_ranks(rank_pool: Pools, tmp_path: Path) -> None:
    """Saved at 3 and resumed at 4, eight ranks go on with the cosine and everything else.

    So does the log: the same lines, of one iteration each.
    """
    arguments = (
        *("--train-iters", "6", "--num-layers", "3", "--use-distributed-optimizer"),
        *("--log-interval", "1"),
        *("--module", "vision:tp=1,dp=2", "--module", "language:tp=2,pp=3"),
    )
    whole, again = resumed(rank_pool(8), tmp_path, arguments, 3)
    assert_same_steps(whole, again, 3)
    assert len(again[-1].log) == 3
    assert again[-1].log == whole[-1].log[3:]
    rates = [step.rates[0][0] for step in whole[-1].steps]
    assert len(set(rates)) == 6
    assert sorted(rates, key=float.fromhex, reverse=True) == rates


DISTRIBUTED = ("--use-distributed-optimizer",)
FROZEN = ("--freeze", "vision")
FP16 = (
    *("--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"),
    *("--hysteresis", "2"),
)
PRECISIONS = {
    "fp32": (),
    "fp32, distributed, frozen encoder": (*DISTRIBUTED, *FROZEN),
    "bf16, frozen encoder": ("--bf16", *FROZEN),
    "bf16, distributed": ("--bf16", *DISTRIBUTED),
    "fp16": FP16,
    "fp16, distributed": (*FP16, *DISTRIBUTED),
    "fp16, distributed, frozen encoder": (*FP16, *DISTRIBUTED, *FROZEN),
}


@pytest.mark.parametrize('precision', PRECISIONS)
def test_precisions(rank_pool: Pools, tmp_path: Path, precision: str) -> None:
    """In each precision, with a rank that owns but a (frozen) encoder, all state comes back.

    In half precision that is the scale of the loss as well, with its tracker between two growths.
    """
    modules = ("--module", "vision", "--module", "language")
    arguments = ("--train-iters", "5", *PRECISIONS[precision], *modules)
    whole, again = resumed(rank_pool(2), tmp_path, arguments, 2)
    assert_same_steps(whole, again, 2)
    assert bool(whole[0].steps[1].moments) is ("frozen" not in precision)
    scalers = [step.scalers for step in whole[1].steps]
    is_half = precision.startswith("fp16")
    assert len(set(scalers)) == (5 if is_half else 1)
    assert len(scalers[0]) == is_half
