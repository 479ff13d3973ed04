"""Import a module of Megatron without what it says meanwhile about packages that are not there."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """Import a module; takes seconds the first time."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logging.disable(level)
