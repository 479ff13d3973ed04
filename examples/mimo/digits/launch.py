"""Start the training processes, follow their log, and end them when asked to."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import psutil

from examples.mimo.digits.failure import explain
from examples.mimo.digits.log_lines import parse_line
from examples.mimo.digits.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from examples.mimo.digits.log_lines import Event

_GRACE_SECONDS = 15
"""How long processes get to leave before they are killed."""


class LaunchError(Exception):
    """The training processes failed; the message is what the failing one said."""


def launch(command: Sequence[str], log: Path, show: Callable[[Event], None]) -> None:
    """Run the training command to its end.

    All output of all processes goes to ``log``; events found in it go to ``show`` as they come. The
    processes are ended when this function is left early, be it by Ctrl-C.

    Raises:
        LaunchError: the command failed.
    """
    with (
        log.open("w", encoding="utf-8") as copy,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
        ) as process,
        _ended(process),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            copy.write(line)
            copy.flush()
            if event := parse_line(line):
                show(event)
        code = process.wait()
    if code:
        raise LaunchError(explain(log.read_text(encoding="utf-8")))


def _environment() -> dict[str, str]:
    """Environment of the training processes: one thread each, since they share a few cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the launcher and the ranks that it started, if they are still there at the end.

    The launcher passes a termination on to its ranks; what is left after that is killed. Only
    descendants of our own child are touched.
    """
    try:
        yield
    finally:
        if process.poll() is None:
            family = _family(process.pid)
            process.terminate()
            try:
                psutil.wait_procs(family, timeout=_GRACE_SECONDS)
            finally:  # also when Ctrl-C comes again meanwhile
                for member in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()
                psutil.wait_procs(family, timeout=_GRACE_SECONDS)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
