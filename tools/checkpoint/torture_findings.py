"""What a killed run left on the disk: which phase it was in, and whether anything is lost."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.checkpoint.place import TRACKER
from tools.checkpoint.torture_runs import KEPT, load_arguments

_BETWEEN = "between saves, or planning one"
_MADE = "hidden directory made"
_SHARDS = "shards being written"
_METADATA = ".metadata written"
_CONFIG = "metadata.json written"
_MANIFEST = "manifest written, not renamed"
_ASIDE = "old one moved aside"
_REPLACED = "new one in place, old one still there"
_PUBLISHED = "renamed, tracker not moved on"
_TRACKER = "tracker being written"
_REMOVING = "older iteration being removed"
PHASES = (
    _BETWEEN,
    _MADE,
    _SHARDS,
    _METADATA,
    _CONFIG,
    _MANIFEST,
    _ASIDE,
    _REPLACED,
    _PUBLISHED,
    _TRACKER,
    _REMOVING,
)
"""In the order of a save."""
_ITERATION = re.compile(r"iter_(\d{7})")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The state of a folder after a kill."""

    phase: str
    tracked: int
    """The iteration that a load takes; 0 for none."""
    saves: int
    """How many saves were reported since the ranks started."""
    lost: tuple[int, ...]
    """Iterations that were reported as saved and to be kept, and are not there or not complete."""
    half_written: tuple[str, ...]
    """Directories in sight that are no complete checkpoint, with what is wrong."""
    error: str
    """What the load says, "" when it works."""

    def to_json(self) -> str:
        """Return it for scripts."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """Say it in one line."""
        bad = [f"lost {self.lost}"] if self.lost else []
        bad += [*self.half_written, *filter(None, [self.error])]
        verdict = "; ".join(bad) if bad else f"loads iteration {self.tracked}"
        return f"{self.phase:40s} {self.saves:3d} saved   {verdict}"


def inspect_folder(place: Path, saved: list[int]) -> Finding:
    """Look at a folder whose ranks are dead, then load from it as the first rank of a run would.

    Args:
        place: Where the iterations are.
        saved: The iterations that were reported as saved, in order.
    """
    from megatron.core.dist_checkpointing.integrity import find_damage
    from megatron.training import trusted_checkpoints

    phase = find_phase(place)
    half_written = []
    complete = set()
    error, tracked = "", 0
    args = load_arguments()
    try:
        named = trusted_checkpoints.find_tracked(str(place / TRACKER), args)
        tracked = trusted_checkpoints.choose(str(place), *named, args, first_read=False)[0]
    except Exception as failure:  # noqa: BLE001 - whatever it says, the campaign counts it
        error = str(failure)
    for entry in sorted(place.iterdir()):
        match = _ITERATION.fullmatch(entry.name)
        if match and (damage := find_damage(entry)):
            half_written.append(f"{entry.name}: {damage[0]}")
        elif match:
            complete.add(int(match[1]))
    newest = max(saved, default=0)
    kept = {iteration for iteration in saved if iteration > newest - KEPT + 1}
    lost = sorted(kept - complete)
    if not error and tracked < newest:
        lost.append(newest)
    return Finding(
        phase=phase,
        tracked=tracked,
        saves=len(saved),
        lost=tuple(lost),
        half_written=tuple(half_written),
        error=error,
    )


def find_phase(place: Path) -> str:
    """Return what a save was about when it was cut off."""
    names = {entry.name for entry in place.iterdir()}
    iterations = [int(match[1]) for match in map(_ITERATION.fullmatch, names) if match]
    aside = [name for name in names if name.endswith(".replaced")]
    if aside:
        target = aside[0].removeprefix(".").removesuffix(".replaced")
        return _REPLACED if target in names else _ASIDE
    saving = [name for name in names if name.endswith(".saving")]
    if saving:
        return _phase_of_writing({entry.name for entry in (place / saving[0]).iterdir()})
    if any(name.endswith(".removing") for name in names):
        return _REMOVING
    if f".{TRACKER}.new" in names:
        return _TRACKER
    tracker = place / TRACKER
    tracked = int(tracker.read_text()) if tracker.exists() else 0
    return _PUBLISHED if max(iterations, default=0) > tracked else _BETWEEN


def _phase_of_writing(names: set[str]) -> str:
    """Return how far the files of a hidden directory are."""
    if "integrity.json" in names:
        return _MANIFEST
    if "metadata.json" in names:
        return _CONFIG
    if ".metadata" in names:
        return _METADATA
    return _SHARDS if any(name.endswith(".distcp") for name in names) else _MADE
