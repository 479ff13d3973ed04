"""What the tool passes around: problems as frozen records, and the one domain exception."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PatchSeriesError(Exception):
    """A failure the user can act on; `main` prints it without a traceback and exits with 2."""


class Kind(enum.Enum):
    """What a problem is about, which decides whether a build may go on."""

    DRIFT = "drift"
    UNRECORDED = "unrecorded"
    CLAIM = "claim"
    GRAFT = "graft"
    SEAM = "seam"
    DROPPABLE = "droppable"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The three texts of a drift: what we wrote against, what we wrote, what is there now."""

    base: str
    ours: str
    theirs: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One finding about the series, the sparse tree or the upstream tree."""

    kind: Kind
    where: str
    message: str
    patch: str = ""
    texts: Texts | None = None

    @property
    def stops_build(self) -> bool:
        """Whether a wheel must not be built while this stands."""
        return self.kind is not Kind.DROPPABLE
