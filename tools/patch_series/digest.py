"""Digests of what a wheel is made from, quick enough to compare at every start of the tests."""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tools.patch_series.layout import BASES, SERIES, tree_files

STAMP = "patch_series.json"
"""File in the wheel's dist-info folder that tells what the wheel was made from."""


def digest_of(root: Path, paths: Iterable[Path]) -> str:
    """Return one digest over the names and bytes of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def of_sources(root: Path) -> str:
    """Return the digest of the sparse fork, the series, the bases and the project's metadata."""
    files = [*tree_files(root), *(root / SERIES).glob("*.toml"), root / BASES]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    ours = [project["project"], project.get("tool", {}).get("patch_series", {})]
    metadata = json.dumps(ours, sort_keys=True)
    return hashlib.sha256(f"{digest_of(root, files)}\n{metadata}".encode()).hexdigest()


def of_engine(root: Path) -> str:
    """Return the digest of the tool's own code."""
    return digest_of(root, (root / "tools/patch_series").glob("*.py"))


def record_hash(data: bytes) -> str:
    """Return a file's hash in the form that a wheel's RECORD uses."""
    raw = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def stamp(root: Path, base: str, patches: Iterable[str]) -> bytes:
    """Return the stamp of a wheel as JSON."""
    content = {
        "base": base,
        "sources": of_sources(root),
        "engine": of_engine(root),
        "patches": list(patches),
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
