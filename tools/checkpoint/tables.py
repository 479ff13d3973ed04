"""Tables and numbers for people."""

# ruff: noqa: T201 - what is printed is the answer
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KIBI = 1024
_GAP = "  "
_RIGHT = ">"


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "") -> None:
    """Print :func:`table_lines`."""
    for line in table_lines(headers, rows):
        print((indent + line).rstrip())


def table_lines(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as they need to be, right-aligned where the header starts with ``>``."""
    right = [header.startswith(_RIGHT) for header in headers]
    cells = [[header.removeprefix(_RIGHT) for header in headers]]
    cells += [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names and values below each other."""
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name.ljust(width)}{_GAP}{value}")


def print_json(report: dict[str, Any]) -> None:
    """Print a report for scripts."""
    print(json.dumps(report, indent=1, default=str))


def in_bytes(count: int) -> str:
    """A size as people say it: ``5.3 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _KIBI:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIBI
    return f"{size:.1f} TiB"


def in_shape(shape: Sequence[int]) -> str:
    """Sizes of a tensor: ``2 x 96 x 64``."""
    return " x ".join(map(str, shape)) or "scalar"


def in_dtype(dtype: object) -> str:
    """Type of a tensor without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 file``, ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
