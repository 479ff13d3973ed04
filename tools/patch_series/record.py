"""Write into each patch's file the fingerprints of what it replaces in a base."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.patch_series import check, syntax
from tools.patch_series.compose import compose
from tools.patch_series.records import PatchSeriesError
from tools.patch_series.series import Patch, Series
from tools.patch_series.upstream import Upstream


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What happened to one patch's file."""

    patch: str
    count: int
    changed: bool


def record(series: Series, upstream: Upstream, names: Sequence[str]) -> list[Recorded]:
    """Record fingerprints for the named patches (all where none is named) of a base."""
    unknown = [name for name in names if not _pick(series, name)]
    if unknown:
        raise PatchSeriesError(f"no such patch: {', '.join(unknown)}")
    chosen = [patch for name in names for patch in _pick(series, name)] or series.patches
    composed = compose(series, upstream)
    found: dict[str, dict[str, str]] = {patch.name: {} for patch in chosen}
    for target in check.targets(series, upstream, composed):
        if target.patch.name in found and target.theirs is not None:
            found[target.patch.name][target.key] = syntax.fingerprint(target.theirs)
    return [_write(patch, upstream.version, found[patch.name]) for patch in chosen]


def _pick(series: Series, name: str) -> list[Patch]:
    return [patch for patch in series.patches if name in {patch.name, patch.name[:4]}]


def _write(patch: Patch, base: str, table: dict[str, str]) -> Recorded:
    old = patch.source.read_text(encoding="utf-8")
    new = with_fingerprints(old, base, table)
    if new != old:
        patch.source.write_text(new, encoding="utf-8")
    return Recorded(patch=patch.name, count=len(table), changed=new != old)


def with_fingerprints(text: str, base: str, table: dict[str, str]) -> str:
    """Return a patch's TOML text with one fingerprint table replaced, added or removed."""
    header = f'[fingerprints."{base}"]'
    # A table runs from its header to the next one, or to the end of the file.
    pattern = rf"^{re.escape(header)}[ \t]*\n(?:(?!\[).*\n?)*"
    kept = re.sub(pattern, "", text, flags=re.MULTILINE).rstrip() + "\n"
    if not table:
        return kept
    lines = "".join(f'"{key}" = "{value}"\n' for key, value in sorted(table.items()))
    return f"{kept}\n{header}\n{lines}"
