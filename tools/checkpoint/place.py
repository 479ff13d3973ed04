"""From the path that a user gives to the directory of one iteration."""

from __future__ import annotations

import re
from pathlib import Path

from tools.checkpoint.errors import CheckpointError, DamagedCheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
MANIFEST = "integrity.json"
"""Sizes and checksums of all other files; our saves write it, stock Megatron's may."""
_ITERATION = re.compile(r"iter_\d{7,}")
_RELEASE = "release"


def iteration_directory(path: Path) -> Path:
    """Directory with the shards: ``path`` itself, or the iteration that its tracker file names.

    Raises:
        CheckpointError: there is no checkpoint of the format ``torch_dist``.
        DamagedCheckpointError: the tracker or the iteration that it names is broken.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        msg = f"{path} {what}."
        raise CheckpointError(msg)
    if (path / METADATA).is_file():
        return path
    tracker = path / TRACKER
    if tracker.is_file():
        return _tracked(path, tracker)
    if (path / "metadata.json").is_file() or any(path.glob("*.distcp")):
        msg = f"{path / METADATA} is missing: the checkpoint was not written to its end."
        raise DamagedCheckpointError(msg)
    if any(path.glob("mp_rank_*")):
        msg = f"{path} has the legacy format 'torch'; this tool reads 'torch_dist'."
        raise CheckpointError(msg)
    msg = f"{path} is no checkpoint: it has neither {METADATA} nor {TRACKER}{_others(path)}."
    raise CheckpointError(msg)


def iterations(root: Path) -> list[str]:
    """Names of the iteration directories below a checkpoint root, oldest first."""
    return sorted(p.name for p in root.iterdir() if p.is_dir() and _ITERATION.fullmatch(p.name))


def _tracked(root: Path, tracker: Path) -> Path:
    """Iteration directory that a tracker names."""
    text = tracker.read_text(errors="replace").strip()
    if text != _RELEASE and not text.isdecimal():
        what = f"says {text[:40]!r}, which is no iteration" if text else "is empty"
        msg = f"{tracker} {what}{_others(root)}."
        raise DamagedCheckpointError(msg)
    directory = root / (_RELEASE if text == _RELEASE else f"iter_{int(text):07d}")
    if not directory.is_dir():
        msg = f"{tracker} says {text}, but {directory} is missing{_others(root)}."
        raise DamagedCheckpointError(msg)
    if (directory / METADATA).is_file() or not any(directory.glob("mp_rank_*")):
        return iteration_directory(directory)
    msg = f"{directory} has the legacy format 'torch'; this tool reads 'torch_dist'."
    raise CheckpointError(msg)


def _others(root: Path) -> str:
    names = iterations(root)
    return f"; iterations there are {', '.join(names)}" if names else ""
