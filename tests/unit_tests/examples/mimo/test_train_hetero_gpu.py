"""Training runs of a MIMO model on two GPUs over NCCL."""

from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import run_ranks
from tests.unit_tests.helpers.mimo_runs import (
    DETERMINISTIC,
    DETERMINISTIC_VARIABLES,
    NO_DROPOUT,
    Run,
    train_mimo,
    train_stock_gpt,
)

pytestmark = pytest.mark.tier2(gpus=2)

LAYOUTS = {
    "disjoint": ("--module", "vision", "--module", "language"),
    "colocated": ("--module", "vision:tp=2,colocated", "--module", "language:tp=2"),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Megatron's deterministic mode asks for; the ranks inherit it."""
    for name, value in DETERMINISTIC_VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_resume_is_exact(tmp_path: Path, layout: str) -> None:
    """A run that stops half way and resumes equals one that never stopped, with dropout on."""
    arguments = ("--train-iters", "6", *DETERMINISTIC, *LAYOUTS[layout])
    saved = (*arguments, "--save", str(tmp_path / 'saved'), "--load", str(tmp_path / 'saved'))

    def run(*extra: str) -> list[Run]:
        return run_ranks(train_mimo, 2, (*extra,), tmp_path=tmp_path, backend='nccl', timeout=240)

    whole, first, second = run(*arguments), run(*saved, "--exit-interval", "3"), run(*saved)
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert second[rank].weights == whole[rank].weights
        assert second[rank].optimizer == whole[rank].optimizer
    assert len(whole[-1].losses) == 12


def test_language_only_equals_stock_gpt(tmp_path: Path) -> None:
    """Without encoders, 20 iterations give the losses and weights of a stock GPT bit for bit."""
    arguments = ("--train-iters", "20", "--mock-text-only", *NO_DROPOUT, *DETERMINISTIC)
    modules = ("--module", "language:tp=2")
    ours, stock = (
        run_ranks(function, 2, (*arguments, *modules), tmp_path=tmp_path, backend='nccl')
        for function in (train_mimo, train_stock_gpt)
    )
    assert ours[0].losses
    assert [run.losses for run in ours] == [run.losses for run in stock]
    assert [run.weights for run in ours] == [run.weights for run in stock]
