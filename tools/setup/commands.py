"""Run a command quietly, keep its whole output in a log, and turn a failure into one sentence."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.setup.report import SetupError


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A failure that people meet often: how it shows in the output, and what to do about it."""

    pattern: str
    advice: str


# Ordered: the first pattern found in the output names the failure.
CAUSES = (
    Cause(
        pattern=r"No space left on device|Errno 28",
        advice="the disk is full; the environment needs about 6 GB, so free some space",
    ),
    Cause(
        pattern=(
            r"NewConnectionError|Failed to establish a new connection|Name or service not known"
            r"|Temporary failure in name resolution|Connection refused|ConnectTimeout|Read timed out"
            r"|ReadTimeoutError|Network is unreachable|ProxyError|Max retries exceeded"
            r"|ConnectionResetError|SSLError|from versions: none"
        ),
        advice=(
            "the package index cannot be reached; connect this machine to the network, or point PIP_INDEX_URL"
            " (or PIP_FIND_LINKS with PIP_NO_INDEX=1) at a place that has the packages"
        ),
    ),
    Cause(
        pattern=r"No matching distribution found for (?P<what>\S+)",
        # pip says the same where an index does not have it and where it cannot be reached.
        advice=(
            "no package index within reach has '{what}' for this platform and Python; connect this"
            " machine to the network, or use what the pins are made for: 64-bit Linux with"
            " Python 3.12 or 3.13"
        ),
    ),
    Cause(
        pattern=r"error: command '?(?P<what>\S*(?:gcc|g\+\+|cc|c\+\+|clang)\S*?)'? failed|Unable to find a compiler",
        advice="a C compiler is missing; install one (Debian and Ubuntu: apt-get install build-essential)",
    ),
    Cause(
        pattern=r"Permission denied|Errno 13",
        advice="a file cannot be written; check that you own this folder and everything in it",
    ),
)


def explain(output: str) -> str:
    """Return what to do about a failed command, from what it printed.

    An unknown failure is quoted by its last telling line.
    """
    for cause in CAUSES:
        found = re.search(cause.pattern, output)
        if found:
            return cause.advice.format(**found.groupdict())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"error|refused|stale|drift", line, re.IGNORECASE)
    ]
    return "it said: " + ((telling or lines or ["nothing"])[-1])


def run_quietly(
    command: Sequence[str], *, log: Path, title: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run ``command`` with its output in ``log``.

    Raises:
        SetupError: when it fails, with the likely reason and where the whole output is.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8", errors="replace") as output:
        finished = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    if finished.returncode != 0:
        reason = explain(log.read_text(encoding="utf-8", errors="replace"))
        message = (
            f"cannot {title}: {reason}; then run the same command again (whole output: {log})."
        )
        raise SetupError(message)
