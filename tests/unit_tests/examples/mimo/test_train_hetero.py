"""Training runs of a MIMO model in several layouts, compared exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, Run, train_mimo, train_stock_gpt

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
Reference = tuple[tuple[str, ...], list[float]]


def losses_of(runs: list[Run]) -> list[float]:
    """Loss sums of the last rank, which computes them in every layout."""
    assert runs[-1].losses
    return [float.fromhex(text) for text in runs[-1].losses]


ONE_EACH = ("--module", "vision", "--module", "language")
LAYOUTS = {
    "vision DP 2, language TP 2": (4, ("--module", "vision:dp=2", "--module", "language:tp=2")),
    "vision TP 2, language PP 2": (4, ("--module", "vision:tp=2", "--module", "language:pp=2")),
    "colocated TP 2": (2, ("--module", "vision:tp=2,colocated", "--module", "language:tp=2")),
}


@pytest.fixture(scope='module')
def reference(rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Initial weights from one step on two ranks, and five steps on from them."""
    folder = str(tmp_path_factory.mktemp('weights'))
    start = ("--train-iters", "1", "--save", folder, *NO_DROPOUT, *ONE_EACH)
    rank_pool(2).run(train_mimo, start)
    arguments = ("--train-iters", "5", "--load", folder, "--finetune", *NO_DROPOUT)
    return arguments, losses_of(rank_pool(2).run(train_mimo, (*arguments, *ONE_EACH)))


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts_agree(rank_pool: Pools, reference: Reference, layout: str) -> None:
    """The same weights and data give the same losses in every layout within fp32 rounding."""
    arguments, expected = reference
    world_size, modules = LAYOUTS[layout]
    runs = rank_pool(world_size).run(train_mimo, (*arguments, *modules))
    assert losses_of(runs) == pytest.approx(expected, rel=2e-5)


DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer",)
PRECISIONS = {
    "fp32": (),
    "fp32, distributed optimizer": DISTRIBUTED_OPTIMIZER,
    "bf16, distributed optimizer": ("--bf16", *DISTRIBUTED_OPTIMIZER),
}


@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('sizes', ["tp=2", "tp=1,dp=2", "pp=2"])
def test_language_only_equals_stock_gpt(rank_pool: Pools, sizes: str, precision: str) -> None:
    """Without encoders, 20 iterations give the losses and weights of a stock GPT bit for bit."""
    arguments = ("--train-iters", "20", "--mock-text-only", *NO_DROPOUT, *PRECISIONS[precision])
    modules = ("--module", f"language:{sizes}")
    ours = rank_pool(2).run(train_mimo, (*arguments, *modules))
    stock = rank_pool(2).run(train_stock_gpt, (*arguments, *modules))
    assert len(losses_of(stock)) == 20 * (1 if "dp" in sizes else 2)
    assert [run.losses for run in ours] == [run.losses for run in stock]
    assert [run.weights for run in ours] == [run.weights for run in stock]


RESUMED = {
    "disjoint": (4, ("--module", "vision:dp=2", "--module", "language:tp=2")),
    "colocated": (2, ("--module", "vision:tp=2,colocated", "--module", "language:tp=2")),
    "pipeline": (4, ("--module", "vision:tp=2", "--module", "language:pp=2")),
}


@pytest.mark.parametrize('layout', RESUMED)
def test_resume_is_exact(rank_pool: Pools, tmp_path: Path, layout: str) -> None:
    """A run that stops half way and resumes equals one that never stopped, with dropout on."""
    world_size, modules = RESUMED[layout]
    arguments = ("--train-iters", "6", "--use-distributed-optimizer", *modules)
    whole = rank_pool(world_size).run(train_mimo, arguments)
    saved = (*arguments, "--save", str(tmp_path), "--load", str(tmp_path))
    first = rank_pool(world_size).run(train_mimo, (*saved, "--exit-interval", "3"))
    second = rank_pool(world_size).run(train_mimo, saved)
    for rank in range(world_size):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert second[rank].weights == whole[rank].weights
        assert second[rank].optimizer == whole[rank].optimizer
        assert whole[rank].optimizer
    assert len(losses_of(whole)) == 12


@pytest.mark.parametrize('frozen', ["vision", "vision.encoder", "language.embedding"])
def test_frozen_parts_stay(rank_pool: Pools, frozen: str) -> None:
    """What is frozen keeps its weights while the rest trains."""
    modules = ("--module", "vision:dp=2", "--module", "language:tp=2")
    runs = [
        rank_pool(4).run(train_mimo, ("--train-iters", iterations, "--freeze", frozen, *modules))
        for iterations in ("1", "3")
    ]
    moved = {
        name: runs[0][rank].weights[name] != runs[1][rank].weights[name]
        for rank in range(4)
        for name in runs[0][rank].weights
    }
    assert moved == {"vision": frozen != "vision", "language": True}


def test_evaluation_changes_nothing(rank_pool: Pools) -> None:
    """Evaluating between steps leaves the training losses and weights as they are."""
    modules = ("--train-iters", "4", "--module", "vision:dp=2", "--module", "language:tp=2")
    plain = rank_pool(4).run(train_mimo, modules)
    evaluated = rank_pool(4).run(
        train_mimo, (*modules, "--eval-interval", "1", "--eval-iters", "2")
    )
    assert len(evaluated[-1].evaluations) == 4 * 2 * 2 + 2 * 2
    assert [run.losses for run in evaluated] == [run.losses for run in plain]
    assert [run.weights for run in evaluated] == [run.weights for run in plain]
