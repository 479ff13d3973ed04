"""Checkpoints of a MIMO run on one GPU: exact after a resume, and readable without a GPU."""

from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import run_ranks
from tests.unit_tests.helpers.mimo_runs import (
    DETERMINISTIC,
    DETERMINISTIC_VARIABLES,
    Run,
    train_mimo,
)

pytestmark = pytest.mark.tier2(gpus=1)

MODULES = ("--module", "vision:colocated", "--module", "language")
TRAINING = (*DETERMINISTIC, *MODULES)
WAYS = {
    "default": (),
    "fully reshardable": ("--dist-ckpt-optim-fully-reshardable",),
    "async": ("--async-save", "--async-strategy", "mcore"),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Megatron's deterministic mode asks for; the rank inherits it."""
    for name, value in DETERMINISTIC_VARIABLES.items():
        monkeypatch.setenv(name, value)


def run(tmp_path: Path, *arguments: str, backend: str = 'nccl') -> Run:
    """Train in one process and return what came of it."""
    (only,) = run_ranks(
        train_mimo, 1, (*TRAINING, *arguments), tmp_path=tmp_path, backend=backend, timeout=240
    )
    return only


@pytest.mark.parametrize('way', WAYS)
def test_resume_is_exact(tmp_path: Path, way: str) -> None:
    """However it is saved, a run that stops half way and resumes equals one that never stopped."""
    folder = str(tmp_path / 'saved')
    saved = ("--train-iters", "6", "--save", folder, "--load", folder, *WAYS[way])
    whole = run(tmp_path, "--train-iters", "6")
    first, second = run(tmp_path, *saved, "--exit-interval", "3"), run(tmp_path, *saved)
    assert len(whole.losses) == 12
    assert first.losses + second.losses == whole.losses
    assert second.weights == whole.weights
    assert second.optimizer == whole.optimizer


def test_checkpoint_moves_to_the_cpu(tmp_path: Path) -> None:
    """Weights and optimizer state of a GPU run are there, bit for bit, in a run on the CPU."""
    folder = str(tmp_path / 'saved')
    trained = run(tmp_path, "--train-iters", "3", "--save", folder)
    arguments = ("--train-iters", "3", "--load", folder, "--no-load-rng")
    loaded = run(tmp_path, *arguments, backend='gloo')
    assert not loaded.losses
    assert loaded.weights == trained.weights
    assert loaded.optimizer == trained.optimizer
    assert trained.optimizer
