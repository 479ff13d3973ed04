"""The ranks of a torture campaign: they resume, compare every value, and save until killed."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import time
import traceback
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tools.checkpoint.place import TRACKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

RANKS = 2
MODES = ("sync", "async")
KEPT = 3
"""Iterations that stay; older ones are removed after each save."""
_ELEMENTS = 300_000
_PAUSE_SECONDS = 0.012
_AGAIN = 0.3
"""How often a save is over the iteration that is there already."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the ranks of one kill are told."""

    place: Path
    """Where the checkpoints are."""
    mode: str
    meeting: Path
    """Where the ranks meet, and leave word for the campaign."""
    seed: int

    @property
    def started(self) -> Path:
        """A file that is there once all values were compared and a first save is done."""
        return self.meeting / "started"

    @property
    def progress(self) -> Path:
        """The iterations that were reported as saved, one a line."""
        return self.meeting / "progress"

    @property
    def failure(self) -> Path:
        """A traceback, if a rank failed by itself."""
        return self.meeting / "failure"


def read_progress(orders: Orders) -> list[int]:
    """Return the iterations that rank 0 reported as saved before it was killed."""
    if not orders.progress.exists():
        return []
    return [int(line) for line in orders.progress.read_text().split("\n")[:-1]]


def load_arguments() -> Namespace:
    """Return what a load asks Megatron's arguments for, with their defaults."""
    return Namespace(
        ckpt_step=None,
        ckpt_format="torch_dist",
        async_save=False,
        load_newest_good=False,
        no_verify_checksums=False,
    )


def save_in_a_loop(rank: int, orders: Orders) -> None:
    """Be one rank: resume, then save until killed. The target of a forked process."""
    logging.disable(logging.WARNING)
    os.setsid()  # so that a kill of the group takes the writers along
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until it is killed
    try:
        _join(rank, orders)
        iteration = _resume(orders)
        dice = random.Random(orders.seed)  # noqa: S311 - the same on both ranks
        with _stretched(orders.seed + rank):
            _save_for_ever(orders, iteration, dice)
    except BaseException:
        orders.failure.write_text(traceback.format_exc())
        raise


def _join(rank: int, orders: Orders) -> None:
    """Make the world of this kill, and the queue of write results without a fresh interpreter."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.filesystem_async import (
        get_write_results_queue,
    )

    get_write_results_queue("fork")
    if orders.mode == "async":
        AsyncCallsQueue.warmup_persistent_caller(rank, mp_mode="fork", io_priority=None)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{orders.meeting}/world",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )


def _resume(orders: Orders) -> int:
    """Load what the tracker names, as a run does, and compare every value; return the iteration."""
    from megatron.core import dist_checkpointing
    from megatron.training import trusted_checkpoints

    args = load_arguments()
    tracked = trusted_checkpoints.find_tracked(str(orders.place / TRACKER), args)
    choice = trusted_checkpoints.choose(str(orders.place), *tracked, args, first_read=True)
    if choice == trusted_checkpoints.NOTHING:
        return 0
    path = orders.place / trusted_checkpoints.directory_name(choice)
    loaded = dist_checkpointing.load(_state(choice[0]), str(path))
    expected = _values(choice[0])
    if loaded["iteration"] != choice[0] or not loaded["weight"].equal(expected):
        message = f"{path} does not hold what was saved"
        raise AssertionError(message)
    return choice[0]


def _save_for_ever(orders: Orders, iteration: int, dice: random.Random) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=True) if orders.mode == "async" else None
    while True:
        if iteration == 0 or dice.random() > _AGAIN:
            iteration += 1
        _save(orders, iteration, queue)
        orders.started.touch()


def _save(orders: Orders, iteration: int, queue: AsyncCallsQueue | None) -> None:
    """Save one iteration as a training step's end does, and train on in the background."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.training import trusted_checkpoints

    state = _state(iteration)
    weight = state["weight"].data
    path = orders.place / trusted_checkpoints.directory_name((iteration, False))
    request = dist_checkpointing.save(
        state, str(path), async_sharded_save=queue is not None, async_strategy="mcore"
    )
    announce = partial(_announce, orders, iteration) if dist.get_rank() == 0 else None
    trusted_checkpoints.conclude_save(announce, request, str(orders.place), iteration)
    if queue is None:
        return
    queue.schedule_async_request(request)
    while queue.get_num_unfinalized_calls():
        weight.add_(1.0)  # a training step, in place
        queue.maybe_finalize_async_calls(blocking=False)
        time.sleep(0.002)


def _announce(orders: Orders, iteration: int) -> None:
    """Move the tracker on, report the save, remove older iterations; on rank 0."""
    from megatron.training import trusted_checkpoints

    trusted_checkpoints.write_tracker(str(orders.place / TRACKER), str(iteration))
    with orders.progress.open("a") as file:
        file.write(f"{iteration}\n")
    old = orders.place / trusted_checkpoints.directory_name((iteration - KEPT, False))
    if iteration > KEPT and old.exists():
        trusted_checkpoints.remove_iteration(str(old))


def _values(iteration: int) -> torch.Tensor:
    """Return what this rank holds in an iteration."""
    import torch
    import torch.distributed as dist

    seeded = torch.Generator().manual_seed(1000 * iteration + dist.get_rank())
    return torch.rand(_ELEMENTS, generator=seeded)


def _state(iteration: int) -> dict[str, Any]:
    """Return this rank's part of an iteration's checkpoint."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = dist.get_rank()
    weight = ShardedTensor.from_rank_offsets("weight", _values(iteration), (0, rank, RANKS))
    return {"weight": weight, "iteration": iteration}


@contextmanager
def _stretched(seed: int) -> Iterator[None]:
    """Pause around the file operations of a save, so that a kill can fall between them."""
    dice = random.Random(seed)  # noqa: S311 - pauses, not secrets

    def paused[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            time.sleep(dice.uniform(0, _PAUSE_SECONDS))
            result = function(*args, **kwargs)
            time.sleep(dice.uniform(0, _PAUSE_SECONDS))
            return result

        return call

    with (
        mock.patch.object(os, "fsync", paused(os.fsync)),
        mock.patch.object(Path, "rename", paused(Path.rename)),
        mock.patch.object(Path, "replace", paused(Path.replace)),
        mock.patch.object(Path, "mkdir", paused(Path.mkdir)),
        mock.patch.object(shutil, "rmtree", paused(shutil.rmtree)),
        mock.patch.object(os, "unlink", paused(os.unlink)),
    ):
        yield
