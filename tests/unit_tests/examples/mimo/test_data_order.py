"""Samples that runs read around a resume: none twice, none left out, in any layout."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.recorded_runs import Recorded, train_recorded

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
Samples = list[tuple[int, int]]

EPOCH = 10
BATCH = 4
COMMON = (
    *("--mock-samples", str(EPOCH), "--micro-batch-size", "1", "--use-distributed-optimizer"),
    *("--dist-ckpt-optim-fully-reshardable", "--train-iters", "9"),
)
ENDS = (2, 5)
"""Iterations to resume from: in the middle of an epoch, and at the end of the second one."""
LAYOUTS = {
    2: ("vision", "language"),
    3: ("vision", "language:dp=2"),
    4: ("vision:dp=2", "language:dp=2"),
}


def options(world_size: int) -> list[str]:
    """The layout of this many ranks on the command line."""
    return [word for module in LAYOUTS[world_size] for word in ("--module", module)]


def read_by(runs: Sequence[Recorded], world_size: int, module: str) -> list[Samples]:
    """(index, epoch) of the samples that a module's ranks read at each step, each one once."""
    encoders = world_size - (1 if world_size == 2 else 2)
    ranks = range(encoders) if module == "vision" else range(encoders, world_size)
    steps = []
    for step in range(len(runs[0].samples)):
        seen = [
            (index, epoch)
            for rank in ranks
            for name, index, epoch in runs[rank].samples[step]
            if name == module
        ]
        assert len(seen) == len(set(seen)), "two replicas read the same sample"
        steps.append(sorted(seen))
    return steps


def assert_epochs_are_whole(steps: Sequence[Samples]) -> None:
    """Every epoch but the last has each sample once, the last none more often."""
    counts = Counter(sample for step in steps for sample in step)
    assert set(counts.values()) == {1}
    epochs = Counter(epoch for _, epoch in counts)
    *whole, last = sorted(epochs)
    assert whole
    assert all(epochs[epoch] == EPOCH for epoch in whole)
    assert epochs[last] <= EPOCH


@pytest.mark.parametrize('saved', [2, 4])
def test_replicas_may_change(rank_pool: Pools, tmp_path: Path, saved: int) -> None:
    """Any resumed layout reads what the unbroken run reads, step by step, in every module."""
    folder = str(tmp_path)
    saving = ("--save", folder, "--save-interval", "1", *options(saved))
    whole = rank_pool(saved).run(train_recorded, (*COMMON, "--global-batch-size", "4", *saving))
    expected = read_by(whole, saved, "language")
    assert expected == read_by(whole, saved, "vision")
    assert_epochs_are_whole(expected)
    for world_size in {2: (4,), 4: (2, 3)}[saved]:
        for end in ENDS:
            loading = ("--load", folder, "--ckpt-step", str(end), *options(world_size))
            again = rank_pool(world_size).run(
                train_recorded, (*COMMON, "--global-batch-size", "4", *loading)
            )
            for module in ("vision", "language"):
                assert read_by(again, world_size, module) == expected[end:]


def test_batch_may_change(rank_pool: Pools, tmp_path: Path) -> None:
    """A resume with another global batch size, and fewer ranks, starts at the next sample."""
    folder = str(tmp_path)
    first = rank_pool(4).run(
        train_recorded,
        (
            *COMMON,
            "--global-batch-size",
            "4",
            "--save",
            folder,
            "--exit-interval",
            "2",
            *options(4),
        ),
    )
    loading = ("--load", folder, "--no-load-scheduler", *options(3))
    second = rank_pool(3).run(train_recorded, (*COMMON, "--global-batch-size", "6", *loading))
    assert [step.consumed for step in second[0].steps] == [8, 14, 20, 26, 32, 38, 44]
    for module in ("vision", "language"):
        steps = read_by(first, 4, module) + read_by(second, 3, module)
        assert [len(step) for step in steps] == [4, 4, *[6] * 7]
        assert_epochs_are_whole(steps)
