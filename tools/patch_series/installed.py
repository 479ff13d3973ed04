"""Tell whether the installed megatron-core is the one that the tree in front of us builds.

It needs neither LibCST nor torch, so that the tests can ask at every start.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from tools.patch_series import digest

ROOT = Path(__file__).resolve().parents[2]
MEND = "make install"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is installed in this interpreter, and how it differs from the tree."""

    version: str
    place: str
    differs: tuple[str, ...]
    """One sentence per difference; empty where the installed package equals the tree."""

    @property
    def matches(self) -> bool:
        """Whether tests of the tree mean anything with this package."""
        return not self.differs

    def message(self) -> str:
        """Return the verdict as a text for people."""
        if self.matches:
            return f"megatron-core {self.version} in {self.place} equals the tree"
        reasons = "".join(f"\n  - {text}" for text in self.differs)
        return f"the installed megatron-core differs from the tree:{reasons}\nMend it: {MEND}"


def inspect(root: Path = ROOT) -> Verdict:
    """Compare the installed distribution with the tree: its stamp, and its files by RECORD."""
    try:
        found = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return Verdict(version="", place="", differs=("megatron-core is not installed",))
    place = str(found.locate_file(""))
    text = found.read_text(digest.STAMP)
    if text is None:
        differs = [f"version {found.version} is not built by this repository"]
        return Verdict(version=found.version, place=place, differs=tuple(differs))
    stamp = json.loads(text)
    differs = _stamp_differences(root, stamp)
    differs += _file_differences(found, stamp["files"])
    differs += _import_differences(found)
    return Verdict(version=found.version, place=place, differs=tuple(differs))


def _stamp_differences(root: Path, stamp: dict[str, str]) -> list[str]:
    if stamp["sources"] != digest.of_sources(root):
        return ["megatron/, the series or pyproject.toml changed since it was built"]
    if stamp["engine"] != digest.of_engine(root):
        return ["tools/patch_series changed since it was built"]
    return []


def _file_differences(found: importlib.metadata.Distribution, files: list[str]) -> list[str]:
    recorded = {str(path): path for path in found.files or ()}
    differs = []
    for name in files:
        path = recorded.get(name)
        file = Path(str(found.locate_file(name)))
        if path is None or path.hash is None:
            differs.append(f"{name} is not in its RECORD")
        elif not file.is_file():
            differs.append(f"{name} is missing")
        elif digest.record_hash(file.read_bytes()) != f"{path.hash.mode}={path.hash.value}":
            differs.append(f"{name} was edited in place")
    return differs


def _import_differences(found: importlib.metadata.Distribution) -> list[str]:
    expected = Path(str(found.locate_file("megatron/core/__init__.py")))
    spec = importlib.util.find_spec("megatron.core")
    origin = spec.origin if spec else None
    if origin is None or Path(origin).resolve() != expected.resolve():
        return [f"`import megatron.core` would take {origin}, not {expected}"]
    return []


def require_matching_install(root: Path = ROOT) -> Verdict:
    """Return the verdict, or stop with the differences and the command that mends them."""
    verdict = inspect(root)
    if not verdict.matches:
        raise SystemExit(verdict.message())
    return verdict
