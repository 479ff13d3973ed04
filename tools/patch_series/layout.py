"""Where things are in the repository; imports nothing that a bare Python lacks."""

from __future__ import annotations

from pathlib import Path

SERIES = "tools/patch_series/series"
BASES = "tools/patch_series/bases.toml"
TREE = "megatron"
CACHE = ".cache/patch_series"


def tree_files(root: Path) -> list[Path]:
    """Return the files of the sparse fork in order, without caches and hidden files."""
    return sorted(
        path
        for path in (root / TREE).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
