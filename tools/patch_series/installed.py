"""Tell whether the installed megatron-core is the one that the tree in front of us builds.

It needs neither LibCST nor torch unless the tool itself changed, so that the tests can ask at
every start.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from tools.patch_series import digest

ROOT = Path(__file__).resolve().parents[2]
MEND = "make install"
_SHOWN = 5


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
        reasons = "".join(f"\n  - {text}" for text in self.differs[:_SHOWN])
        more = len(self.differs) - _SHOWN
        reasons += f"\n  - and {more} more" if more > 0 else ""
        return f"the installed megatron-core differs from the tree:{reasons}\nMend it: {MEND}"


def inspect(root: Path = ROOT, *, regraft: bool = False) -> Verdict:
    """Compare the installed distribution with the tree.

    The stamp tells what it was made from, and RECORD whether its files are still as built. Where
    the tool itself changed since, or on request, the tree is grafted anew and compared file by
    file, which takes seconds.
    """
    try:
        found = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return Verdict(version="", place="", differs=("megatron-core is not installed",))
    place = str(found.locate_file(""))
    text = found.read_text(digest.STAMP)
    if text is None:
        differs = [f"version {found.version} is not built by this repository"]
        return Verdict(version=found.version, place=place, differs=tuple(differs))
    stamp, record = json.loads(text), _record(found)
    if stamp["sources"] != digest.of_sources(root):
        differs = ["megatron/, the series or the project's metadata changed since it was built"]
    elif regraft or stamp["engine"] != digest.of_engine(root):
        differs = _regraft_differences(root, record)
    else:
        differs = []
    differs += _file_differences(found, record)
    differs += _import_differences(found)
    return Verdict(version=found.version, place=place, differs=tuple(differs))


def _record(found: importlib.metadata.Distribution) -> dict[str, str]:
    """Return the hashes that were recorded at the installation, by path."""
    rows = csv.reader((found.read_text("RECORD") or "").splitlines())
    return {path: value for path, value, _ in rows if value}


def _regraft_differences(root: Path, record: dict[str, str]) -> list[str]:
    from tools.patch_series import series, upstream, wheel

    files, problems = wheel.contents(series.load(root), upstream.open_base(root))
    if not files:
        return [f"the tree cannot be built: {problems[0].where}: {problems[0].message}"]
    built = {
        path: digest.record_hash(data)
        for path, data in files.items()
        if not path.endswith(("/RECORD", f"/{digest.STAMP}"))
    }
    return [
        f"{path} is not what the tree builds"
        for path, value in built.items()
        if record.get(path) != value
    ]


def _file_differences(found: importlib.metadata.Distribution, record: dict[str, str]) -> list[str]:
    differs = []
    for name, value in record.items():
        if not name.startswith("megatron/"):
            continue
        file = Path(str(found.locate_file(name)))
        if not file.is_file():
            differs.append(f"{name} is missing")
        elif digest.record_hash(file.read_bytes()) != value:
            differs.append(f"{name} was edited in place")
    if not differs and not record:
        differs.append("its RECORD is missing")
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
