"""The record of every torch name that the CPU device replaces.

Nothing here knows CUDA or gloo: the sibling modules call :func:`redirect`, which replaces one
attribute and notes what it became and why, so that the printed table cannot drift from the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Redirect:
    """One replaced name: where it lives, what stands in for it and the reason."""

    name: str
    to: str
    why: str


_REDIRECTS: list[Redirect] = []


def _dotted(owner: Any) -> str:
    """Return the path of ``owner``, a module or a class."""
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def redirect(owner: Any, name: str, replacement: Any, *, to: str, why: str) -> None:
    """Replace ``owner.name`` and record it.

    Args:
        owner: Module or class that holds the name.
        name: Attribute to replace; may be absent (CPU builds of torch lack some).
        replacement: What callers get from now on.
        to: The stand-in, in words for the table.
        why: The reason, in words for the table.
    """
    setattr(owner, name, replacement)
    _REDIRECTS.append(Redirect(name=f"{_dotted(owner)}.{name}", to=to, why=why))


def redirects() -> tuple[Redirect, ...]:
    """Return all replacements made so far, in order; empty while the switch is off."""
    return tuple(_REDIRECTS)


def table() -> str:
    """Return the replacements as a Markdown table: one row per stand-in and reason."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry in _REDIRECTS:
        owner, _, name = entry.name.rpartition(".")
        rows.setdefault((entry.to, entry.why), {}).setdefault(owner, []).append(name)
    lines = ["| replaced | by | why |", "| --- | --- | --- |"]
    for (to, why), owners in rows.items():
        replaced = "; ".join(f"`{owner}`: {', '.join(names)}" for owner, names in owners.items())
        lines.append(f"| {replaced} | {to} | {why} |")
    return "\n".join(lines)
