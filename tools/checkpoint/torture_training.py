"""Kills of a real training run: torchrun, the stock loop, a MIMO model on two CPU ranks."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.place import TRACKER
from tools.checkpoint.torture_findings import Finding, inspect_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_SECONDS = 400.0
_LONGEST_SECONDS = 3.0
_COMMAND = (
    *("torch.distributed.run", "--nproc-per-node", "2", "-m", "examples.mimo.train_hetero"),
    *("--module", "vision:dp=1", "--module", "language:dp=1", "--device", "cpu"),
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "24", "--max-position-embeddings", "24", "--vocab-size", "128"),
    *("--vision-num-layers", "1", "--vision-hidden-size", "32", "--mock-samples", "16"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3"),
    *("--no-create-attention-mask-in-dataloader", "--use-distributed-optimizer"),
    *("--train-iters", "1000000", "--save-interval", "1", "--save-retain-interval", "1000000"),
)


def kill_training(place: Path, kills: int, seed: int) -> Iterator[Finding]:
    """Train, kill at a random moment after a save, look; resume, and so on. Odd runs save async.

    Raises:
        CheckpointError: a run ended by itself, or never saved.
    """
    dice = random.Random(seed)  # noqa: S311 - moments, not secrets
    place.mkdir(parents=True, exist_ok=True)
    for number in range(kills):
        before = _tracked(place)
        log = place.parent / "training.log"
        _run_and_kill(place, log, dice.uniform(0, _LONGEST_SECONDS), asynchronous=number % 2 == 1)
        finding = inspect_folder(place, [iteration for iteration in [_tracked(place)] if iteration])
        if finding.tracked < before:
            message = f"iteration {before} was there before a kill, {finding.tracked} after it"
            raise CheckpointError(message)
        print(f"kill {number + 1:3d} of a training run  {finding}", flush=True)  # noqa: T201
        yield finding


def _run_and_kill(place: Path, log: Path, seconds: float, *, asynchronous: bool) -> None:
    """Start a run, wait for its next save, then so long, then kill all of it."""
    before = _tracked(place)
    command = [sys.executable, "-m", *_COMMAND, "--save", str(place), "--load", str(place)]
    command += ["--async-save"] if asynchronous else []
    with log.open("w") as output:
        run = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while _tracked(place) == before:
                if run.poll() is not None or time.monotonic() > deadline:
                    message = f"the training run did not save:\n{log.read_text()[-3000:]}"
                    raise CheckpointError(message)
                time.sleep(0.02)
            time.sleep(seconds)
        finally:
            _kill_with_children(run)


def _kill_with_children(run: subprocess.Popen) -> None:
    """Kill torchrun, its ranks, and their writers, each of which may have a session of its own."""
    processes = [psutil.Process(run.pid)] if run.poll() is None else []
    for process in processes[:1]:
        processes += process.children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()


def _tracked(place: Path) -> int:
    tracker = place / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0
