"""``sh tools/setup/setup.sh [--lock]``: bring ``.venv`` in step with this checkout."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.setup.environment import Environment
from tools.setup.lock import write_constraints
from tools.setup.report import SetupError, complain, say

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up, and return the exit status: 0 done, 2 with one sentence said, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="tools/setup", description=__doc__)
    parser.add_argument(
        "--lock",
        action="store_true",
        help="afterwards, write constraints.txt from what is installed",
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    environment = Environment(ROOT)
    try:
        environment.install()
        if options.lock:
            write_constraints(environment)
    except SetupError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted; the same command takes it up again.")
        return INTERRUPTED
    say(f"ready ({time.monotonic() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
