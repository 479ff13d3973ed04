"""Freezing parts of modules by dotted path (``--freeze vision.encoders``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.mimo.training.hetero.layout import Layout, LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

# Path of the parts of a modality submodule, as users name them.
_PARTS = {"encoder": "encoders", "projection": "input_projections"}


def check_frozen(layout: Layout, paths: Sequence[str]) -> None:
    """Refuse a ``--freeze`` path whose first part is no module of the layout.

    Raises:
        LayoutError: naming the path and the modules.
    """
    names = [grid.name for grid in layout.grids]
    for path in paths:
        if path.partition(".")[0] not in names:
            msg = f"--freeze {path}: no such module; the modules are {', '.join(names)}."
            raise LayoutError(msg)


def inner_path(path: str) -> str:
    """Submodule path inside its module that a user's path names; empty for the whole module."""
    rest = path.partition(".")[2]
    return _PARTS.get(rest, rest)


def freeze(modules: Mapping[str, nn.Module], paths: Sequence[str]) -> None:
    """Stop gradients of every parameter below the paths that this rank hosts.

    ``vision`` freezes a whole module, ``vision.encoder`` and ``vision.projection`` its parts, any
    other suffix is a submodule path such as ``language.decoder.layers.0``. Called on every rank
    before wrapping; paths of modules that live elsewhere are skipped.

    Raises:
        LayoutError: a hosted module has no such submodule.
    """
    for path in paths:
        name, _, rest = path.partition(".")
        module = modules.get(name)
        if module is None:
            continue
        try:
            target = module.get_submodule(inner_path(path))
        except AttributeError:
            children = ", ".join(child for child, _ in module.named_children())
            msg = f"--freeze {path}: module {name} has no part {rest!r}; its parts are {children}."
            raise LayoutError(msg) from None
        target.requires_grad_(requires_grad=False)
