"""Every step after a resume against the same step of a run that never stopped, exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.recorded_runs import train_recorded

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

EXPERTS = (
    *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--disable-bias-linear"),
)
LAYOUTS = {
    "disjoint": (3, ("--module", "vision:dp=2", "--module", "language")),
    "experts": (2, ("--module", "language:dp=2,ep=2", "--mock-text-only", *EXPERTS)),
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_streams_go_on(rank_pool: Pools, tmp_path: Path, layout: str) -> None:
    """At each step after a resume the five generators are where an unbroken run has them.

    So nothing draws between the restore and the first step. Before the first step of all, every
    rank draws a number of times of its own, so that no rank could pass with another one's streams.
    """
    world_size, modules = LAYOUTS[layout]
    arguments = ("--train-iters", "4", "--use-distributed-optimizer", *modules)
    whole = rank_pool(world_size).run(train_recorded, arguments, True)
    saved = (*arguments, "--save", str(tmp_path), "--load", str(tmp_path))
    first = rank_pool(world_size).run(train_recorded, (*saved, "--exit-interval", "2"), True)
    second = rank_pool(world_size).run(train_recorded, saved, True)
    for name in whole[0].steps[2].streams:
        assert len({rank.steps[2].streams[name] for rank in whole}) == world_size, name
    for rank in range(world_size):
        assert first[rank].steps == whole[rank].steps[:2]
        assert second[rank].steps == whole[rank].steps[2:]
        assert len(second[rank].steps) == 2
