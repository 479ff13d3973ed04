"""The process harness: run a function on N ranks and get back what each of them returned.

    def exchange(scale):
        ...
        return torch.distributed.get_rank() * scale

    def test_exchange(tmp_path):
        assert run_ranks(exchange, 4, 10, tmp_path=tmp_path) == [0, 10, 20, 30]

Under plain ``pytest`` the harness starts the processes; under ``torchrun ... -m pytest`` it uses
the ranks that it is given. Either way the ranks are in one gloo (or NCCL) process group while the
function runs, the first failure is the test's failure and ends the other ranks, and a time-out
shows the stacks of all ranks. Nothing of torch or Megatron is imported in the test's own process
for it.
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.unit_tests.helpers import torchrun
from tests.unit_tests.helpers.rank_failures import RanksTimedOutError, first_failure
from tests.unit_tests.helpers.rank_worker import (
    STACKS_SIGNAL,
    Kind,
    Outcome,
    RankSetting,
    Task,
    serve,
)

START_SECONDS = 180.0
# How long the other ranks get, after one failed, to say what they know.
GRACE_SECONDS = 2.0
PRELOAD = "tests.unit_tests.helpers.preload"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    tmp_path: Path | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` new ranks and return their values in rank order.

    Args:
        function: A module-level function; ``torch.distributed`` is initialised when it starts.
        world_size: How many ranks. Under torchrun, ranks beyond it skip the test.
        args: Passed to every rank; has to be picklable, like the return values.
        timeout: Seconds that the call may take, without the start of the processes.
        tmp_path: Where the ranks meet; a temporary folder when it is not given.
        backend: "gloo" runs on the CPU, "nccl" on one GPU per rank.

    Raises:
        RankFailedError: with the traceback of the first rank that failed.
        RanksTimedOutError: with the stacks of all ranks.
    """
    __tracebackhide__ = True
    with (
        tempfile.TemporaryDirectory(dir=tmp_path, prefix="ranks-") as folder,
        RankPool(world_size, folder=Path(folder), backend=backend) as pool,
    ):
        return pool.run(function, *args, timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One child process as its parent sees it."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: Path

    def end(self) -> None:
        """Kill the process with all that it started, and wait until it is gone."""
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it has not made its own process group yet, or is gone
        self.process.join()
        self.process.close()
        self.connection.close()

    def read_stacks(self) -> str:
        """Return the stacks that the process has written, if any."""
        return self.stacks.read_text(encoding="utf-8") if self.stacks.exists() else ""


class RankPool:
    """Ranks that are started once and run one function after another.

    Each call starts in a fresh process group and with Megatron's globals unset. A call that fails
    ends the ranks; the next call starts new ones, so no state of a failure reaches another test.
    """

    def __init__(self, world_size: int, *, folder: Path, backend: str = "gloo") -> None:
        """Describe the pool; the processes start with the first call.

        Args:
            world_size: How many ranks.
            folder: Where the ranks meet and write their stacks.
            backend: "gloo" for the CPU, "nccl" for one GPU per rank.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; a pool needs at least one rank")
        if backend not in {"gloo", "nccl"}:
            raise ValueError(f"backend is {backend!r}; it can be 'gloo' or 'nccl'")
        self.world_size = world_size
        self.folder = folder
        self.backend = backend
        self._ranks: list[_Rank] = []
        self._calls = 0

    def __enter__(self) -> Self:
        """Return the pool itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Run ``function(*args)`` on every rank; see `run_ranks`."""
        __tracebackhide__ = True
        if torchrun.is_active():
            return torchrun.run(function, self.world_size, args, timeout, self.backend)
        try:
            call = pickle.dumps((function, args))
        except Exception as error:  # noqa: BLE001 - pickling raises all sorts
            raise ValueError(
                f"{function!r} cannot be sent to another process ({error}); "
                "give a module-level function and picklable arguments"
            ) from None
        try:
            self._start()
            self._calls += 1
            rendezvous = self.folder / f"rendezvous-{os.getpid()}-{self._calls}"
            task = Task(call=call, rendezvous=rendezvous, timeout=timeout)
            for rank in self._ranks:
                rank.connection.send(task)
            outcomes = self._collect(timeout)
        except BaseException:
            self.close()
            raise
        return self._values(outcomes)

    def close(self) -> None:
        """End the ranks; a later call starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()

    def _start(self) -> None:
        if self._ranks:
            return
        if self.backend == "nccl":
            context: Any = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([PRELOAD])
        for number in range(self.world_size):
            stacks = self.folder / f"stacks-{os.getpid()}-{self._calls}-{number}.txt"
            ours, theirs = context.Pipe()
            setting = RankSetting(
                rank=number, world_size=self.world_size, backend=self.backend, stacks=stacks
            )
            process = context.Process(target=serve, args=(theirs, setting, dict(os.environ)))
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process=process, connection=ours, stacks=stacks))
        outcomes = self._collect(START_SECONDS)
        self._values(outcomes)

    def _values(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """Return the ranks' values, or raise what went wrong and end the ranks."""
        __tracebackhide__ = True
        if all(outcome.kind is Kind.RETURNED for outcome in outcomes):
            return [pickle.loads(outcome.value) for outcome in outcomes]
        self.close()
        skipped = [outcome.text for outcome in outcomes if outcome.kind is Kind.SKIPPED]
        failed = any(outcome.kind in {Kind.FAILED, Kind.DIED} for outcome in outcomes)
        if skipped and not failed:
            pytest.skip(skipped[0])
        raise first_failure(outcomes)

    def _collect(self, timeout: float) -> list[Outcome]:
        """Wait for one outcome of every rank; after a failure the others get only a short grace."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(outcomes) < self.world_size:
            answered = self._wait(outcomes, deadline - time.monotonic())
            if not answered and failed:
                break
            if not answered:
                raise RanksTimedOutError(timeout, outcomes, self._dump_stacks(outcomes))
            outcomes.update(answered)
            if not failed and any(
                outcome.kind is not Kind.RETURNED for outcome in answered.values()
            ):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        stopped = Outcome(kind=Kind.STOPPED)
        return [outcomes.get(number, stopped) for number in range(self.world_size)]

    def _wait(self, outcomes: dict[int, Outcome], seconds: float) -> dict[int, Outcome]:
        """Return the outcomes that came within ``seconds``, none when that ran out."""
        pending = {
            number: rank for number, rank in enumerate(self._ranks) if number not in outcomes
        }
        sources: list[Any] = []
        for rank in pending.values():
            sources += [rank.connection, rank.process.sentinel]
        ready = wait(sources, max(0.0, seconds))
        answered: dict[int, Outcome] = {}
        for number, rank in pending.items():
            if rank.connection in ready or rank.process.sentinel in ready:
                answered[number] = self._receive(rank)
        return answered

    @staticmethod
    def _receive(rank: _Rank) -> Outcome:
        try:
            if rank.connection.poll():
                return rank.connection.recv()
        except (EOFError, ConnectionError):
            pass  # it died: its exit code says how
        rank.process.join(GRACE_SECONDS)
        headline = _describe_exit(rank.process.exitcode)
        return Outcome(kind=Kind.DIED, headline=headline, text=rank.read_stacks() or headline)

    def _dump_stacks(self, outcomes: dict[int, Outcome]) -> dict[int, str]:
        """Have every rank that has not answered write its stacks, and return them."""
        pending = {n: rank for n, rank in enumerate(self._ranks) if n not in outcomes}
        for rank in pending.values():
            if rank.process.is_alive() and rank.process.pid is not None:
                os.kill(rank.process.pid, STACKS_SIGNAL)
        time.sleep(1)  # the signal handler answers at once, on a busy machine a little later
        return {number: rank.read_stacks() for number, rank in pending.items()}


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"left with exit code {code}"
    return f"the process {how} without a word"
