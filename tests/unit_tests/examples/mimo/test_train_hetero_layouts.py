"""Runs over the bridge in uneven layouts, and checkpoints that change hands between runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, Run, train_mimo

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

ONE_EACH = ("--module", "vision", "--module", "language")
THREE_LAYERS = ("--num-layers", "3", "--global-batch-size", "8")
"""A depth that three stages divide, and four microbatches of two samples."""


def losses(run: Run) -> list[float]:
    """Loss sums of a rank's microbatches in order."""
    assert run.losses
    return [float.fromhex(text) for text in run.losses]


@pytest.fixture(scope='module')
def reference(rank_pool: Pools, tmp_path_factory: Any) -> tuple[tuple[str, ...], list[float]]:
    """Arguments that load common weights, and the losses of two steps from them on two ranks."""
    folder = str(tmp_path_factory.mktemp('weights'))
    shape = (*THREE_LAYERS, *NO_DROPOUT)
    rank_pool(2).run(train_mimo, (*shape, "--train-iters", "1", "--save", folder, *ONE_EACH))
    arguments = (*shape, "--train-iters", "2", "--load", folder, "--finetune")
    run = rank_pool(2).run(train_mimo, (*arguments, *ONE_EACH))[-1]
    assert len(run.losses) == 2 * 4
    return arguments, losses(run)


def test_eight_ranks(rank_pool: Pools, reference: tuple[tuple[str, ...], list[float]]) -> None:
    """Vision on two replicas and the language model on TP 2 and PP 3 give the same losses."""
    arguments, expected = reference
    modules = ("--module", "vision:tp=1,dp=2", "--module", "language:tp=2,pp=3")
    runs = rank_pool(8).run(train_mimo, (*arguments, *modules), timeout=240)
    assert [bool(run.losses) for run in runs] == [False] * 6 + [True] * 2
    assert runs[6].losses == runs[7].losses
    assert losses(runs[7]) == pytest.approx(expected, rel=2e-5)
    assert runs[0].weights == runs[1].weights


def test_fan_out(rank_pool: Pools, reference: tuple[tuple[str, ...], list[float]]) -> None:
    """One encoder feeds two language replicas, each with the next two samples of a step."""
    arguments, expected = reference
    modules = ("--module", "vision", "--module", "language:dp=2")
    _, first, second = rank_pool(3).run(train_mimo, (*arguments, *modules))
    assert losses(first) == pytest.approx(expected[0::2], rel=2e-5)
    assert losses(second) == pytest.approx(expected[1::2], rel=2e-5)
    assert first.weights == second.weights


def test_fan_in(rank_pool: Pools, reference: tuple[tuple[str, ...], list[float]]) -> None:
    """Two encoder replicas feed one language model, one sample of each microbatch each."""
    arguments, expected = reference
    modules = ("--module", "vision:dp=2", "--module", "language")
    first, second, language = rank_pool(3).run(train_mimo, (*arguments, *modules))
    assert losses(language) == pytest.approx(expected, rel=2e-5)
    assert first.weights == second.weights


@pytest.mark.parametrize('precision', [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_resume_with_a_plain_optimizer(
    rank_pool: Pools, tmp_path: Path, precision: tuple[str, ...]
) -> None:
    """Without the distributed optimizer a disjoint run resumes bit for bit as well."""
    arguments = ("--train-iters", "4", *precision, *ONE_EACH)
    whole = rank_pool(2).run(train_mimo, arguments)
    saved = (*arguments, "--save", str(tmp_path), "--load", str(tmp_path))
    first = rank_pool(2).run(train_mimo, (*saved, "--exit-interval", "2"))
    second = rank_pool(2).run(train_mimo, saved)
    assert first[1].losses + second[1].losses == whole[1].losses
    for rank in range(2):
        assert second[rank].weights == whole[rank].weights
        assert second[rank].optimizer == whole[rank].optimizer


@pytest.mark.parametrize('precision', [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_freeze_what_was_trained(
    rank_pool: Pools, tmp_path: Path, precision: tuple[str, ...]
) -> None:
    """A module that was trained and saved can be loaded frozen, and is what was saved."""
    common = ("--train-iters", "2", *precision, *ONE_EACH)
    trained = rank_pool(2).run(train_mimo, (*common, "--save", str(tmp_path)))
    frozen = ("--load", str(tmp_path), "--finetune", "--freeze", "vision")
    vision, language = rank_pool(2).run(train_mimo, (*common, *frozen))
    assert vision.weights == trained[0].weights
    assert language.weights != trained[1].weights


def test_precision_may_change(rank_pool: Pools, tmp_path: Path) -> None:
    """Weights that were saved in half precision can be loaded in full precision."""
    common = ("--train-iters", "1", *NO_DROPOUT, *ONE_EACH)
    half = rank_pool(2).run(train_mimo, (*common, "--bf16", "--save", str(tmp_path)))
    load = ("--load", str(tmp_path), "--finetune", "--lr", "0", "--weight-decay", "0")
    full = rank_pool(2).run(train_mimo, (*common, *load))
    again = rank_pool(2).run(train_mimo, (*common, *load, "--bf16"))
    assert [run.weights for run in again] == [run.weights for run in half]
    assert losses(full[1]) == pytest.approx(losses(again[1]), rel=2e-2)
