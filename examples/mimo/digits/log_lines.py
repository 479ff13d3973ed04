"""What the stock training log says, line by line, and what it says in all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_NUMBER = r"[-+.\dE]+|nan|inf"
_ITERATION = re.compile(r"\] iteration +(\d+)/ *(\d+) \|(.*)")
_FIELD = re.compile(rf" ([^|:]+): +({_NUMBER}) \|", re.IGNORECASE)
_VALIDATION = re.compile(
    rf" validation loss at iteration (\d+).*? lm loss value: ({_NUMBER}) ", re.IGNORECASE
)
_EXACT_MATCH = re.compile(r" exact match at iteration (\d+) \|(.*)")
_LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")
_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+)")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A loss line: averages since the line before."""

    iteration: int
    loss: float
    learning_rate: float
    milliseconds: float


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on the held-out samples."""

    iteration: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Share of held-out answers right to the letter, by kind of question and over all."""

    iteration: int
    shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A launch went on from a checkpoint."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint is complete."""

    iteration: int


Event = Step | Validation | ExactMatch | Loaded | Saved


def parse_line(line: str) -> Event | None:
    """Return what a line of the log says, ``None`` where it is of no interest here."""
    for pattern, read in _READERS:
        if match := pattern.search(line):
            return read(match)
    return None


def _fields(text: str) -> dict[str, float]:
    return {name.strip(): float(value) for name, value in _FIELD.findall(text)}


def _step(match: re.Match[str]) -> Step | None:
    fields = _fields(match[3])
    if "lm loss" not in fields:  # every iteration since the last line was skipped
        return None
    return Step(
        iteration=int(match[1]),
        loss=fields["lm loss"],
        learning_rate=fields["learning rate"],
        milliseconds=fields["elapsed time per iteration (ms)"],
    )


_READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Event | None]], ...] = (
    (_ITERATION, _step),
    (_VALIDATION, lambda match: Validation(iteration=int(match[1]), loss=float(match[2]))),
    (
        _EXACT_MATCH,
        lambda match: ExactMatch(iteration=int(match[1]), shares=_fields(match[2])),
    ),
    (_LOADED, lambda match: Loaded(iteration=int(match[1]))),
    (_SAVED, lambda match: Saved(iteration=int(match[1]))),
)


@dataclass(kw_only=True)
class History:
    """All that the logs of a run say, by iteration; a later launch has the last word."""

    steps: dict[int, Step] = field(default_factory=dict)
    validations: dict[int, Validation] = field(default_factory=dict)
    matches: dict[int, ExactMatch] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """Iterations from which launches went on."""
    saved: int = 0
    """Latest iteration with a complete checkpoint."""

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Step():
                self.steps[event.iteration] = event
            case Validation():
                self.validations[event.iteration] = event
            case ExactMatch():
                self.matches[event.iteration] = event
            case Loaded():
                self.resumed.append(event.iteration)
            case Saved():
                self.saved = event.iteration

    @classmethod
    def from_logs(cls, logs: Iterable[Path]) -> History:
        """Read the logs of all launches."""
        history = cls()
        for log in logs:
            with log.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if event := parse_line(line):
                        history.add(event)
        return history
