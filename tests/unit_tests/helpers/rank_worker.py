"""The child's side of the process harness: run functions on this rank and send what came of them.

This module imports neither torch nor Megatron at its top: the environment has to be set first.
"""

import enum
import faulthandler
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.unit_tests.helpers.process_state import (
    enable_cpu_device,
    quiet_environment,
    reset_megatron,
)

STACKS_SIGNAL = signal.SIGUSR1
# gloo's own time-out lies behind the harness's, which shows the stacks of all ranks.
BACKEND_MARGIN_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """Which rank a process is."""

    rank: int
    world_size: int
    backend: str
    stacks: Path
    """Where this rank writes its stacks when it gets `STACKS_SIGNAL` or dies of a fatal signal."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One function call for all ranks."""

    call: bytes
    """The pickled pair of function and arguments."""
    rendezvous: Path
    timeout: float


class Kind(enum.Enum):
    """What became of a rank."""

    READY = "ready"
    RETURNED = "returned"
    SKIPPED = "skipped"
    FAILED = "failed"
    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank has to say about one call."""

    kind: Kind
    value: bytes = b""
    """The pickled return value."""
    headline: str = ""
    """One line on a failure."""
    text: str = ""
    """The traceback of a failure, the reason of a skip."""


def call_function(function: Callable[..., object], arguments: tuple[Any, ...]) -> Outcome:
    """Run ``function`` and turn whatever happens into an outcome; never raises."""
    try:
        value = function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - all of it is the parent's to judge
        if type(error).__name__ == "Skipped":  # pytest's, without importing pytest here
            return Outcome(kind=Kind.SKIPPED, text=str(error))
        return _failure(error)
    try:
        return Outcome(kind=Kind.RETURNED, value=pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - a value's own code may raise anything
        text = f"the return value, a {type(value).__name__}, cannot be pickled: {error}"
        return Outcome(kind=Kind.FAILED, headline=text, text=text)


def _failure(error: BaseException) -> Outcome:
    """Describe an exception, without the frames of this harness above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    headline = "".join(traceback.format_exception_only(error)).splitlines()[0]
    return Outcome(kind=Kind.FAILED, headline=headline, text=text)


def serve(connection: Connection, setting: RankSetting, environment: dict[str, str]) -> None:
    """Be one rank: run each task that comes through ``connection`` until ``None`` comes."""
    os.setsid()  # so that the parent can end this rank with all that it started
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    os.environ.update(
        RANK=str(setting.rank),
        LOCAL_RANK=str(setting.rank),
        WORLD_SIZE=str(setting.world_size),
        LOCAL_WORLD_SIZE=str(setting.world_size),
    )
    quiet_environment()
    _leave_with_the_parent()
    with setting.stacks.open("w", encoding="utf-8") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        connection.send(call_function(_choose_device, (setting,)))
        while (task := connection.recv()) is not None:
            connection.send(call_function(_run_task, (task, setting)))
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.disable()


def _leave_with_the_parent() -> None:
    """End this process soon after its parent, also when that was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch the parent").start()


def _choose_device(setting: RankSetting) -> None:
    if setting.backend == "gloo":
        enable_cpu_device()
    else:
        import torch

        torch.cuda.set_device(setting.rank)


def _run_task(task: Task, setting: RankSetting) -> object:
    import torch.distributed as dist

    # Unpickling imports the test's module, so this must come after the device was chosen.
    function, arguments = pickle.loads(task.call)
    dist.init_process_group(
        setting.backend,
        init_method=f"file://{task.rendezvous}",
        rank=setting.rank,
        world_size=setting.world_size,
        timeout=timedelta(seconds=task.timeout + BACKEND_MARGIN_SECONDS),
    )
    value = function(*arguments)
    # Reached only where the function succeeded: after a failure the parent ends this process.
    if dist.is_initialized():
        dist.barrier()  # a peer may still be reading what this rank sent
    reset_megatron()
    return value
