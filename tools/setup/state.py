"""Content hashes of the tree, and the record of the last set-up that was finished."""

import dataclasses
import hashlib
import json
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

STATE_FILE = "setup-state.json"
REQUIREMENTS = ("requirements.txt", "constraints.txt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The record inside the environment. An empty field is a step that has not been finished."""

    root: str = ""
    dependencies: str = ""
    megatron: str = ""
    unfinished: str = ""
    """The step under way. Still set at a start, it was interrupted."""
    before: str = ""
    """Fingerprint of site-packages when that step began."""


def load_state(environment: Path) -> State:
    """Read the record; one that is absent or unreadable counts as no step finished."""
    try:
        record = json.loads((environment / STATE_FILE).read_text(encoding="utf-8"))
        return State(**record)
    except (OSError, ValueError, TypeError):
        return State()


def save_state(environment: Path, state: State) -> None:
    """Write the record so that a reader sees the old one or the new one, never a part."""
    temporary = environment / (STATE_FILE + ".new")
    temporary.write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
    temporary.replace(environment / STATE_FILE)


def _hash_files(files: Iterable[Path], root: Path, *more: str) -> str:
    digest = hashlib.sha256()
    for text in more:
        digest.update(text.encode() + b"\0")
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def dependencies_digest(root: Path, interpreter: str) -> str:
    """Return the hash of the pinned requirements and of the interpreter they are for."""
    return _hash_files([root / name for name in REQUIREMENTS], root, interpreter)


def megatron_digest(root: Path) -> str:
    """Return the hash of everything that the patched package is built from.

    That is the sparse tree, the patch tool with its series, and the two tables of
    ``pyproject.toml`` that describe the build; the linters' settings beside them do not count.
    """
    sources = [
        file
        for folder in ("megatron", "tools/patch_series")
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    build = {table: project.get(table) for table in ("build-system", "project")}
    return _hash_files(sources, root, json.dumps(build, sort_keys=True))


def fingerprint(folder: Path) -> str:
    """Return a cheap hash of which packages lie in ``folder`` and when each was last touched."""
    digest = hashlib.sha256()
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name != "__pycache__":
            digest.update(f"{entry.name} {entry.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()
