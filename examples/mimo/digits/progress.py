"""How a run goes, for people: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self, TextIO

from tqdm import tqdm

from examples.mimo.digits.log_lines import ExactMatch, Loaded, Saved, Step, Validation

if TYPE_CHECKING:
    from examples.mimo.digits.log_lines import Event

_PLAIN_LINES = 20
"""Loss lines of a whole run without a terminal."""


def shares_in_words(shares: dict[str, float]) -> str:
    """Shares by kind of question, without the one over all."""
    return ", ".join(f"{kind} {share:.3f}" for kind, share in shares.items() if kind != "all")


class Progress:
    """Turns the log's events of one launch into a bar or lines.

    Use it as a context manager: the bar is closed whatever happens.
    """

    def __init__(self, iterations: int, start: int, stream: TextIO = sys.stdout) -> None:
        """Begin a launch that is expected to go on from iteration ``start``."""
        self._iterations = iterations
        self._stream = stream
        self._begun = time.monotonic()
        self._ready = False
        self._match = ""
        self._next_line = start
        self._bar = (
            tqdm(
                total=iterations,
                initial=start,
                unit="it",
                file=stream,
                dynamic_ncols=True,
                leave=False,
                desc="starting",
            )
            if stream.isatty()
            else None
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away; what was said above it stays."""
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """Write a line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def show(self, event: Event) -> None:
        """Show one event of the log."""
        match event:
            case Step():
                self._show_step(event)
            case Validation():
                self.say(
                    f"  iteration {event.iteration}/{self._iterations}: validation loss "
                    f"{event.loss:.4f}{self._match}"
                )
            case ExactMatch():
                self._match = (
                    f", exact match {event.shares['all']:.3f} ({shares_in_words(event.shares)})"
                )
                if self._bar is not None:
                    self._bar.set_description(f"exact match {event.shares['all']:.3f}")
            case Loaded():
                self.say(f"  resumed from the checkpoint of iteration {event.iteration}")
            case Saved():
                pass

    def _show_step(self, step: Step) -> None:
        if not self._ready:
            self._ready = True
            if self._bar is not None:
                self._bar.unpause()  # the rate is that of the training alone
            self.say(f"  first iterations after {time.monotonic() - self._begun:.0f} s")
        if self._bar is not None:
            if self._bar.desc.startswith("starting"):
                self._bar.set_description("training")
            self._bar.set_postfix(loss=f"{step.loss:.4f}", refresh=False)
            self._bar.update(step.iteration - self._bar.n)
        elif step.iteration >= self._next_line:
            self._next_line = step.iteration + self._iterations // _PLAIN_LINES
            self.say(
                f"  iteration {step.iteration}/{self._iterations}: loss {step.loss:.4f}, "
                f"learning rate {step.learning_rate:.2e}, {1000 / step.milliseconds:.1f} it/s"
            )
