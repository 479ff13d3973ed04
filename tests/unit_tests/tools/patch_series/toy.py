"""A made-up repository with a made-up base wheel in its cache, so that no network is needed."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from tools.patch_series import graft, series, sparse, upstream, wheel

BASE = "1.2.3"
INFO = f"megatron_core-{BASE}.dist-info"
UTILS = "megatron/core/utils.py"

UPSTREAM = {
    "megatron/core/__init__.py": "from megatron.core.package_info import __version__\n",
    "megatron/core/package_info.py": (
        "MAJOR = 1\nMINOR = 2\nPATCH = 3\n\n__version__ = f'{MAJOR}.{MINOR}.{PATCH}'\n"
    ),
    UTILS: (
        "import os\n\n\n"
        "def half(number):\n    return number / 2\n\n\n"
        "def twice(number):\n    return number * 2\n\n\n"
        "class Counter:\n    def __init__(self):\n        self.count = 0\n\n"
        "    def add(self, number):\n        self.count += number\n        return self.count\n"
    ),
    f"{INFO}/METADATA": (
        f"Metadata-Version: 2.4\nName: megatron-core\nVersion: {BASE}\nSummary: Base\n"
        "Requires-Dist: numpy\nProvides-Extra: dev\n\nA description.\n"
    ),
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: other (1)\nTag: cp312-cp312-linux_x86_64\n",
    f"{INFO}/top_level.txt": "megatron\n",
    f"{INFO}/RECORD": "",
}

PROJECT = """
[project]
name = "megatron-core"
description = "A patched base"

[project.optional-dependencies]
plot = ["matplotlib>=3", "pillow; python_version < '4'"]

[tool.patch_series]
dependencies = ["psutil>=5.9"]
"""


@dataclass(frozen=True)
class Toy:
    """A repository under a temporary folder."""

    root: Path

    def write(self, path: str, text: str) -> Path:
        """Write one file of the repository."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    def patch(self, name: str, body: str) -> Path:
        """Write one patch of the series, with the texts that every patch needs."""
        texts = "".join(f'{key} = "{key}"\n' for key in ("title", "why", "upstream", "drop_when"))
        return self.write(f"tools/patch_series/series/{name}.toml", texts + body)

    def series(self) -> series.Series:
        """Read the series as it is now."""
        return series.load(self.root)

    def base(self) -> upstream.Upstream:
        """Open the base wheel from the cache."""
        return upstream.open_base(self.root)


def make(root: Path, files: dict[str, str] | None = None) -> Toy:
    """Make a repository without patches on the made-up base (or on other upstream files)."""
    toy = Toy(root)
    toy.write("pyproject.toml", PROJECT)
    tag = upstream.current_tag()
    python, _, platform = tag.partition("-")
    name = f"megatron_core-{BASE}-{python}-{python}-{platform}.whl"
    packed = wheel.pack({path: text.encode() for path, text in (files or UPSTREAM).items()})
    cached = root / ".cache/patch_series" / name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(packed)
    pin = {"file": name, "sha256": hashlib.sha256(packed).hexdigest()}
    toy.write(
        "tools/patch_series/bases.toml",
        f'default = "{BASE}"\n["{BASE}"]\n"{tag}" = {{ file = {json.dumps(pin["file"])}, '
        f'sha256 = "{pin["sha256"]}" }}\n',
    )
    toy.write("tools/patch_series/__init__.py", "")
    (root / "tools/patch_series/series").mkdir()
    (root / "megatron").mkdir()
    return toy


def graft_all(before: str, ours: str, path: str = UTILS) -> graft.Result:
    """Graft everything that a sparse file defines onto an upstream text."""
    module = cst.parse_module(before)
    taken = sparse.read(path, ours, module)
    if taken.problems:
        return graft.Result(module=module, problems=tuple(taken.problems))
    return graft.graft(module, taken, [entry.path for entry in taken.entries])


def grafted(before: str, ours: str, path: str = UTILS) -> str:
    """Return the text after a graft that has to succeed."""
    result = graft_all(before, ours, path)
    assert not result.problems, result.problems
    return result.module.code


def refusal(before: str, ours: str, path: str = UTILS) -> str:
    """Return the only message of a graft that has to be refused, and that changed nothing."""
    result = graft_all(before, ours, path)
    assert result.module.code == before
    (problem,) = result.problems
    return problem.message
