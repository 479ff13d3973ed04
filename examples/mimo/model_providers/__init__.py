"""Model families by name, one file each.

A provider says which stock flags it adds, what the language module and the encoders are made of and
which layouts it cannot serve. ``get_model_provider(name)`` imports the file of that name.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Protocol, cast

from examples.mimo.training.hetero.layout import LayoutError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training.models import ModelConfig

    from examples.mimo.training.hetero.layout import Layout


class ModelProvider(Protocol):
    """What a model family's file offers."""

    DEFAULT_ARGUMENTS: Sequence[str]
    """Stock flags with which the family makes a small model; the user's own come after them."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the family's own flags."""

    def check(self, args: argparse.Namespace, layout: Layout) -> None:
        """Refuse what this family cannot be split into (``LayoutError``); no torch needed."""

    def language_config(self, args: argparse.Namespace) -> ModelConfig:
        """Stock configuration of the language module."""

    def encoder_specs(
        self, args: argparse.Namespace, groups: Mapping[str, ProcessGroupCollection | None]
    ) -> dict[str, ModuleSpec]:
        """Modality submodule of every encoder; groups are ``None`` where not hosted."""

    def special_token_ids(self, args: argparse.Namespace, layout: Layout) -> dict[str, int]:
        """Placeholder token of each modality."""


def provider_names() -> list[str]:
    """Names of the model families that are there."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def get_model_provider(name: str) -> ModelProvider:
    """Import a model family by name.

    Raises:
        LayoutError: there is no such file.
    """
    if name not in provider_names():
        msg = f"--model-provider {name}: no such family; there are {', '.join(provider_names())}."
        raise LayoutError(msg)
    return cast("ModelProvider", importlib.import_module(f"{__name__}.{name}"))
