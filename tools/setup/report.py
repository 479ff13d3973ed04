"""What the set-up says: one line per step with its time, and one sentence when it cannot go on."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "set-up: "


class SetupError(Exception):
    """The set-up cannot go on; the text is one sentence that says what to do."""


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(PREFIX + text, flush=True)  # noqa: T201 - printing is what this module is for


def complain(text: str) -> None:
    """Print one line to the error stream."""
    print(PREFIX + text, file=sys.stderr, flush=True)  # noqa: T201 - as above


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print ``title``, run the body, and end the line with the time that it took.

    Raises:
        BaseException: whatever the body raised, after the line was ended.
    """
    print(f"{PREFIX}{title} ... ", end="", flush=True)  # noqa: T201 - as above
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print(f"stopped after {time.monotonic() - start:.1f} s", flush=True)  # noqa: T201 - as above
        raise
    print(f"{time.monotonic() - start:.1f} s", flush=True)  # noqa: T201 - as above
