"""Spawned processes: a child that starts a fresh interpreter is on the CPU device too.

A forked child inherits every redirection. A spawned one, such as the persistent checkpoint writer,
would ask for a GPU, so its target is wrapped before it is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import context
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from typing import Any

from .redirect import redirect


def _run_enabled(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Switch the child to the CPU, then run its target."""
    from megatron.training.cpu_device import enable

    enable()
    return target(*args, **kwargs)


def _started_enabled(start: Callable[[BaseProcess], Any]) -> Callable[[BaseProcess], Any]:
    """Wrap how a process is started: its target runs with the switch on.

    A manager's server process computes nothing and is left alone.
    """

    @functools.wraps(start)
    def popen(process: BaseProcess) -> Any:
        """Start ``process``."""
        target = getattr(process, "_target", None)
        serves = getattr(target, "__func__", None) is BaseManager._run_server.__func__
        if target is not None and not serves:
            process._target = functools.partial(_run_enabled, target)
        return start(process)

    return popen


def redirect_child_processes() -> None:
    """Redirect how the spawn and forkserver contexts start their processes."""
    why = "the child runs the same code as its parent"
    for owner in (context.SpawnProcess, context.ForkServerProcess):
        popen = staticmethod(_started_enabled(owner._Popen))
        redirect(owner, "_Popen", popen, to="enable() in the child first", why=why)
