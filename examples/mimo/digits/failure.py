"""Why training processes failed: the exception of the first one, out of everybody's log."""

from __future__ import annotations

import re
import signal

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?\brank +: (\d+).*?\bexitcode +: (-?\d+)", re.DOTALL
)
_TRACEBACK = "Traceback (most recent call last):"
_LAUNCHERS_ERROR = "ChildFailedError"
_LOGGED = re.compile(r"[A-Z]\d{4} [\d:.]+ ")
"""How a line of torch's own logging starts."""
_SHOWN_LINES = 8
_MESSAGE_LINES = 4
_LAST_LINES = 10


def explain(log: str) -> str:
    """Say in a few lines why a launch failed.

    The launcher names the rank that failed first. Its traceback is found by the prefix that torch
    puts before the lines of a rank; before ranks are joined there is none, and the last traceback
    that is not the launcher's own is taken. A usage error is one line that starts with ``error:``.
    """
    lines = log.splitlines()
    usage = [line for line in lines if line.startswith("error: ")]
    if usage:
        return usage[-1]
    cause = _ROOT_CAUSE.search(log)
    rank = int(cause[1]) if cause else None
    prefix = f"[rank{rank}]:"
    own = [line.removeprefix(prefix).removeprefix(" ") for line in lines if line.startswith(prefix)]
    if block := _last_traceback(own):
        return "\n".join([f"rank {rank} failed:", *block])
    code = int(cause[2]) if cause else 0
    if code < 0:
        return f"rank {rank} was ended by {signal.Signals(-code).name}."
    if block := _last_traceback(lines):
        return "\n".join(block)
    return "\n".join(["the last lines of the log are:", *lines[-_LAST_LINES:]])


def _last_traceback(lines: list[str]) -> list[str]:
    """Last lines of the last traceback that is not the launcher's: where, and the exception."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    for start in reversed(starts):
        block = _block(lines[start:])
        if not any(_LAUNCHERS_ERROR in line for line in block):
            return block[-_SHOWN_LINES:]
    return []


def _block(lines: list[str]) -> list[str]:
    """A traceback: its heading, its indented lines and the first lines of the message."""
    end = 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    message = []
    for line in lines[end : end + _MESSAGE_LINES]:
        if not line.strip() or _LOGGED.match(line):
            break
        message.append(line)
    return lines[:end] + message
