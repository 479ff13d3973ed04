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
    """Return how a user writes ``owner``: a module's or a class's public path."""
    if isinstance(owner, type):
        module = owner.__module__.replace("torch._C", "torch")
        return f"{module}.{owner.__qualname__}"
    return owner.__name__


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
    """Return the replacements as text: consecutive names with one stand-in share a line."""
    lines: list[str] = []
    previous: tuple[str, str] | None = None
    for entry in _REDIRECTS:
        if (entry.to, entry.why) == previous:
            lines[-1] = f"{lines[-1]}, {entry.name.rsplit('.', 1)[-1]}"
        else:
            lines.append(f"{entry.name}")
            lines.append(f"    -> {entry.to}: {entry.why}")
            lines[-2], lines[-1] = lines[-1], lines[-2]
        previous = (entry.to, entry.why)
    return "\n".join(lines)
