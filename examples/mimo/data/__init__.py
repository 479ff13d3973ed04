"""Data sources by name, one file each.

A source offers ``datasets(args) -> DataSources``: training and held-out samples behind the
``MultimodalDataset`` interface of ``examples.mimo.data.lanes``, and the flags it adds.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from examples.mimo.training.hetero.layout import LayoutError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from examples.mimo.data.lanes import MultimodalDataset
    from examples.mimo.training.hetero.runtime import HeteroRuntime

_NAMES = ("digits", "mock")


@dataclass(frozen=True, kw_only=True)
class DataSources:
    """Samples of a run, and what to do at an evaluation beside the loss."""

    train: MultimodalDataset
    valid: MultimodalDataset
    answer_check: Callable[[HeteroRuntime], Callable[..., object]] | None = None
    """Makes the stock loop's ``non_loss_data_func``, run on every rank at each evaluation."""


class DataProvider(Protocol):
    """What a data source's file offers."""

    DEFAULT_ARGUMENTS: Sequence[str]
    """Stock flags that fit the data; the user's own come after them."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the source's own flags."""

    def datasets(self, args: argparse.Namespace) -> DataSources:
        """Open the source; called on every rank, not collective."""


def get_data_provider(name: str) -> DataProvider:
    """Import a data source by name.

    Raises:
        LayoutError: there is no such file.
    """
    if name not in _NAMES:
        msg = f"--data-provider {name}: no such source; there are {', '.join(_NAMES)}."
        raise LayoutError(msg)
    return cast("DataProvider", importlib.import_module(f"{__name__}.{name}"))
