"""Which module starts from which checkpoint (``--load-module language=PATH``): the options alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.mimo.training.hetero.freeze import inner_path
from examples.mimo.training.hetero.layout import Layout, LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAG, _ALLOW = "--load-module", "--load-module-allow-missing"


@dataclass(frozen=True, kw_only=True)
class ModuleSource:
    """A module and the checkpoint whose weights it starts with."""

    module: str
    path: Path
    may_miss: tuple[str, ...] = ()
    """Paths inside the module whose weights the checkpoint need not have; an empty one is all."""

    def allows(self, key: str) -> bool:
        """Tell whether a weight, by its key inside the module, may be missing."""
        return any(not path or f"{key}.".startswith(f"{path}.") for path in self.may_miss)

    def __str__(self) -> str:
        """The option that asked for it."""
        return f"{_FLAG} {self.module}={self.path}"


def module_sources(
    layout: Layout, options: Sequence[str], may_miss: Sequence[str]
) -> tuple[ModuleSource, ...]:
    """Read the options, in their order.

    Raises:
        LayoutError: naming the option and the modules.
    """
    names = [grid.name for grid in layout.grids]
    paths: dict[str, Path] = {}
    for option in options:
        name, _, path = option.partition("=")
        if not path:
            msg = f"{_FLAG} {option}: write NAME=PATH, as {names[-1]}=runs/gpt."
            raise LayoutError(msg)
        if name not in names:
            msg = f"{_FLAG} {option}: no such module; the modules are {', '.join(names)}."
            raise LayoutError(msg)
        if name in paths:
            msg = f"{_FLAG} {option}: {name} already starts from {paths[name]}."
            raise LayoutError(msg)
        paths[name] = Path(path)
    for path in may_miss:
        if path.partition(".")[0] not in paths:
            msg = f"{_ALLOW} {path}: no {_FLAG} loads this module."
            raise LayoutError(msg)
    return tuple(
        ModuleSource(
            module=name,
            path=path,
            may_miss=tuple(inner_path(part) for part in may_miss if part.partition(".")[0] == name),
        )
        for name, path in paths.items()
    )
