"""``torch.compile``: switched off, for Megatron's fused functions are compiled for a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .redirect import redirect


def _not_compiled(model: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Return the function as it is; also as a decorator with arguments."""
    if model is None:
        return lambda function: function
    return model


def redirect_compilation() -> None:
    """Switch compilation off for this process and its children, also of decorated functions."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    why = "no kernel is generated for a device that is not there"
    redirect(torch, "compile", _not_compiled, to="the function itself", why=why)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
