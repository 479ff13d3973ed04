"""The harness under ``torchrun ... -m pytest``: the ranks are there, this process is one of them.

All ranks collect the same tests in the same order. Each call meets in a corner of torchrun's own
store that is named after the test, runs, and shares every rank's outcome, so that all ranks see the
same verdict.
"""

import faulthandler
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers.process_state import (
    enable_cpu_device,
    quiet_environment,
    reset_megatron,
)
from tests.unit_tests.helpers.rank_failures import first_failure
from tests.unit_tests.helpers.rank_worker import (
    BACKEND_MARGIN_SECONDS,
    Kind,
    Outcome,
    call_function,
)

# After one rank failed, how long another may go on before it is taken to wait for the failed one.
GRACE_SECONDS = 5.0
# How long ranks may be apart in the suite: tests of tier 0 take a different time on each.
MEETING = timedelta(minutes=10)
EXIT_CODE = 86

_calls: Counter[str] = Counter()
_capture: list[Any] = []


def is_active() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return this process's rank among those that torchrun started."""
    return int(os.environ["RANK"])


def prepare(config: pytest.Config, backend: str) -> None:
    """Choose this process's device, before the tests' modules import Megatron."""
    _capture.append(config.pluginmanager.getplugin("capturemanager"))
    quiet_environment()
    if backend == "gloo":
        enable_cpu_device()
    else:
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def share(value: object) -> Any:
    """Return rank 0's ``value`` on every rank; collective over all ranks of the job."""
    corner = _next_corner(_store("test"))
    if rank() == 0:
        corner.set("value", pickle.dumps(value))
    corner.wait(["value"], MEETING)
    return pickle.loads(corner.get("value"))


def run(
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...],
    timeout: float,
    backend: str,
) -> list[Any]:
    """Run ``function(*arguments)`` on the first ``world_size`` ranks; all ranks have to call it.

    Every participating rank returns the values of all of them; rank 0's arguments are everybody's.
    The other ranks wait and skip the test. A rank that waits for one that has failed cannot be
    freed: it shows its stacks and leaves, and torchrun then ends the job.
    """
    __tracebackhide__ = True
    given = int(os.environ["WORLD_SIZE"])
    if given < world_size:
        pytest.skip(f"needs {world_size} ranks; torchrun gave {given}")
    function, arguments = share((function, arguments))
    corner = _next_corner(_store("test"))
    if rank() < world_size:
        environment = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        with mock.patch.dict(os.environ, environment), _Watch(world_size, timeout):
            call = (function, arguments, world_size, corner, timeout, backend)
            outcome = call_function(_within_group, call)
        _publish(corner, outcome)
        if outcome.kind is Kind.FAILED:
            # Peers that wait for this rank end the job before pytest gets to its report.
            _write_past_pytest(f"rank {rank()} failed:\n{outcome.text}")
    outcomes = _everybodys(corner, world_size, timeout)
    if rank() >= world_size:
        pytest.skip(f"needs only {world_size} ranks; this is rank {rank()}")
    reset_megatron()
    if all(outcome.kind is Kind.RETURNED for outcome in outcomes):
        return [pickle.loads(outcome.value) for outcome in outcomes]
    skipped = [outcome.text for outcome in outcomes if outcome.kind is Kind.SKIPPED]
    if skipped and not any(outcome.kind is Kind.FAILED for outcome in outcomes):
        pytest.skip(skipped[0])
    raise first_failure(outcomes)


def _within_group(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world_size: int,
    corner: Any,
    timeout: float,
    backend: str,
) -> object:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", corner),
        rank=rank(),
        world_size=world_size,
        timeout=timedelta(seconds=timeout + BACKEND_MARGIN_SECONDS),
    )
    value = function(*arguments)
    if dist.is_initialized():
        dist.barrier()  # a peer may still be reading what this rank sent
    return value


@cache
def _store(owner: str) -> Any:
    """Return the connection of ``owner`` to torchrun's store; one connection serves one thread."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", rank(), int(os.environ["WORLD_SIZE"])))
    assert owner in {"test", "watch"}
    return dist.PrefixStore(f"harness/{os.environ['TORCHELASTIC_RUN_ID']}", store)


def _next_corner(store: Any) -> Any:
    """Return a part of the store that belongs to this call of this test on all ranks."""
    import torch.distributed as dist

    test = os.environ.get("PYTEST_CURRENT_TEST", "outside")
    _calls[test] += 1
    return dist.PrefixStore(f"{test}/{_calls[test]}", store)


def _same_corner(store: Any) -> Any:
    """Return the part that `_next_corner` returned last, through another connection."""
    import torch.distributed as dist

    test = os.environ.get("PYTEST_CURRENT_TEST", "outside")
    return dist.PrefixStore(f"{test}/{_calls[test]}", store)


def _publish(corner: Any, outcome: Outcome) -> None:
    corner.set(f"outcome/{rank()}", pickle.dumps(outcome))


def _everybodys(corner: Any, world_size: int, timeout: float) -> Sequence[Outcome]:
    keys = [f"outcome/{number}" for number in range(world_size)]
    corner.wait(keys, MEETING + timedelta(seconds=timeout))
    return [pickle.loads(corner.get(key)) for key in keys]


class _Watch(threading.Thread):
    """End this process when it takes too long, or waits for a rank that has failed."""

    def __init__(self, world_size: int, timeout: float) -> None:
        super().__init__(daemon=True, name="watch the other ranks")
        self.corner = _same_corner(_store("watch"))
        self.others = [number for number in range(world_size) if number != rank()]
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.finished = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.finished.set()
        self.join()

    def run(self) -> None:
        """Look at the clock and at the other ranks until this rank has finished."""
        failed_since = None
        while not self.finished.wait(0.5):
            now = time.monotonic()
            if failed_since is None and any(self._failed(number) for number in self.others):
                failed_since = now
            if failed_since is not None and now > failed_since + GRACE_SECONDS:
                self._leave("waits for a rank that has failed")
            if now > self.deadline:
                self._leave(f"was still busy after {self.timeout:g} s")

    def _failed(self, number: int) -> bool:
        key = f"outcome/{number}"
        if not self.corner.check([key]):
            return False
        return pickle.loads(self.corner.get(key)).kind is not Kind.RETURNED

    def _leave(self, why: str) -> None:
        _publish(self.corner, Outcome(kind=Kind.FAILED, headline=why, text=why))
        for manager in _capture:
            manager.suspend_global_capture()
        os.write(2, f"\nrank {rank()} {why}; its stacks:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(EXIT_CODE)


def _write_past_pytest(text: str) -> None:
    """Write to the terminal although pytest captures the output of tests."""
    for manager in _capture:
        manager.suspend_global_capture()
    os.write(2, f"\n{text}\n".encode())
    for manager in _capture:
        manager.resume_global_capture()
