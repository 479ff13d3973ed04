"""The series: one TOML file per patch, in order, and the files of the sparse fork."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.patch_series.layout import SERIES, tree_files
from tools.patch_series.records import PatchSeriesError
from tools.patch_series.seam import Action, Seam

_TEXTS = ("title", "why", "upstream", "drop_when")
_KEYS = {*_TEXTS, "files", "graft", "seam", "fingerprints"}
_NAME = re.compile(r"^(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.toml$")


@dataclass(frozen=True, kw_only=True)
class Graft:
    """The definitions of one sparse file that a patch claims."""

    file: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch of the series, as its TOML file tells it."""

    name: str
    source: Path
    title: str
    why: str
    upstream: str
    drop_when: str
    files: tuple[str, ...]
    grafts: tuple[Graft, ...]
    seams: tuple[Seam, ...]
    fingerprints: dict[str, dict[str, str]]

    def takes(self, path: str) -> bool:
        """Tell whether this patch claims a whole file, by its path or by a folder's."""
        return any(
            path == claim or (claim.endswith("/") and path.startswith(claim))
            for claim in self.files
        )

    def names_in(self, path: str) -> tuple[str, ...]:
        """Return the definitions of a sparse file that this patch claims."""
        return tuple(name for graft in self.grafts if graft.file == path for name in graft.names)

    def seams_in(self, path: str) -> Iterator[tuple[str, Seam]]:
        """Yield this patch's seams in a file, each with its fingerprint key."""
        for number, seam in enumerate(self.seams, start=1):
            if seam.file == path:
                yield seam_key(seam, number), seam


@dataclass(frozen=True, kw_only=True)
class Series:
    """All patches in order, and the repository they belong to."""

    root: Path
    patches: tuple[Patch, ...]

    def version(self, base: str) -> str:
        """Return the version of the distribution built on a base: N counts the patches."""
        return f"{base}+mimo.{len(self.patches)}"

    def tree(self) -> dict[str, bytes]:
        """Return the sparse fork: every file under `megatron/`, by its path."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in tree_files(self.root)
        }


def definition_key(file: str, name: str) -> str:
    """Return the fingerprint key of a replaced definition."""
    return f"{file}::{name}"


def seam_key(seam: Seam, number: int) -> str:
    """Return the fingerprint key of a seam's statement; seams are numbered within their patch."""
    return f"{seam.file}::{seam.where}#{number}"


def load(root: Path) -> Series:
    """Read the whole series of a repository."""
    sources = sorted((root / SERIES).glob("*.toml"))
    patches = tuple(_load_patch(source) for source in sources)
    numbers = [patch.name[:4] for patch in patches]
    for number in numbers:
        if numbers.count(number) > 1:
            raise PatchSeriesError(f"{SERIES}: two patches have the number {number}")
    return Series(root=root, patches=patches)


def _load_patch(source: Path) -> Patch:
    if not _NAME.match(source.name):
        raise PatchSeriesError(f"{source.name}: name a patch NNNN-some-slug.toml")
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PatchSeriesError(f"{source.name}: {error}") from error
    _only(source, raw, _KEYS, "the patch")
    for key in _TEXTS:
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise PatchSeriesError(f"{source.name}: `{key}` must say something")
    patch = Patch(
        name=source.stem,
        source=source,
        files=tuple(raw.get("files", ())),
        grafts=tuple(_graft(source, item) for item in raw.get("graft", ())),
        seams=tuple(_seam(source, item) for item in raw.get("seam", ())),
        fingerprints=raw.get("fingerprints", {}),
        **{key: raw[key].strip() for key in _TEXTS},
    )
    if not (patch.files or patch.grafts or patch.seams):
        raise PatchSeriesError(f"{source.name}: has neither files nor a graft nor a seam")
    return patch


def _only(source: Path, table: dict[str, Any], known: set[str], what: str) -> None:
    strange = sorted(set(table) - known)
    if strange:
        raise PatchSeriesError(f"{source.name}: {what} has unknown keys: {', '.join(strange)}")


def _graft(source: Path, table: dict[str, Any]) -> Graft:
    _only(source, table, {"file", "names"}, "a graft")
    if not table.get("file") or not table.get("names"):
        raise PatchSeriesError(f"{source.name}: a graft needs `file` and `names`")
    return Graft(file=table["file"], names=tuple(table["names"]))


def _seam(source: Path, table: dict[str, Any]) -> Seam:
    actions = [action for action in Action if action.value in table]
    known = {"file", "where", "code", "imports", *(action.value for action in Action)}
    _only(source, table, known, "a seam")
    if len(actions) != 1:
        raise PatchSeriesError(f"{source.name}: a seam has one of replace, before, after")
    for key in ("file", "where", "code", actions[0].value):
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise PatchSeriesError(f"{source.name}: a seam needs `{key}`")
    return Seam(
        file=table["file"],
        where=table["where"],
        action=actions[0],
        anchor=table[actions[0].value],
        code=table["code"],
        imports=tuple(table.get("imports", ())),
    )
