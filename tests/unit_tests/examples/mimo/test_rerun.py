"""Megatron's rerun of a suspicious step in a run of modules: in place, then from a checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import train_mimo
from tests.unit_tests.helpers.recorded_runs import train_recorded

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

COMMON = ("--train-iters", "4", "--use-distributed-optimizer")
ONE_EACH = ("--module", "vision", "--module", "language")
RESUME_TO_DISAMBIGUATE = 16
"""Exit code of Megatron: the same checkpoint is to be resumed once more."""


def exit_code(arguments: Sequence[str]) -> int:
    """Exit code of a run on this rank. Collective over the ranks."""
    try:
        train_mimo(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_rerun_from_a_checkpoint(rank_pool: Pools, tmp_path: Path) -> None:
    """A pending rerun is saved, goes on where the layout is the same, and is left where it is not.

    An error is reported to the fourth step, the second of its process. It repeats in place, so the
    run saves the state before that step and ends. The next run does the step again, and ends as
    well, since it is on the same machine and cannot tell whose fault it was. A run of another
    layout trains on from it.
    """
    saved = (*COMMON, "--save", str(tmp_path), "--load", str(tmp_path))
    assert rank_pool(2).run(exit_code, (*saved, *ONE_EACH, "--exit-interval", "2")) == [0, 0]
    error = ("--error-injection-rate", "1", "--error-injection-type", "persistent_error")
    for flags in (error, ()):
        codes = rank_pool(2).run(exit_code, (*saved, *ONE_EACH, *flags))
        assert codes == [RESUME_TO_DISAMBIGUATE] * 2
    whole = rank_pool(2).run(train_recorded, (*COMMON, *ONE_EACH))
    together = ("--module", "vision:dp=2,colocated", "--module", "language:dp=2")
    loading = ("--load", str(tmp_path), "--micro-batch-size", "1")
    for run in rank_pool(2).run(train_recorded, (*COMMON, *together, *loading)):
        assert [step.consumed for step in run.steps] == [12]
        assert run.steps[0].weights == tuple(
            digest for rank in whole for digest in rank.steps[3].weights
        )
        assert run.steps[0].moments != ()
