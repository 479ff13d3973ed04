"""Choice of the device and of the layer implementation, before Megatron is imported in earnest."""

from __future__ import annotations

import importlib.util
import os
import sys


def select_device(choice: str, argv: list[str]) -> list[str]:
    """Switch to CPU if asked for, or if no GPU is there, and return the stock flags it needs.

    Without Transformer Engine a GPU run gets the flags of Megatron's local layers. Whatever is
    chosen for the user is said in one line by rank 0.

    Args:
        choice: ``cpu``, ``auto``, or a GPU as ``gpu`` or by torch's name for this accelerator.
        argv: the stock flags so far; the user's own win over the ones added.

    Raises:
        LayoutError: a GPU is asked for and there is none, or the device is unknown.
    """
    import torch
    from megatron.training import cpu_device

    from examples.mimo.training.hetero.layout import LayoutError

    accelerator = torch.accelerator.current_accelerator()  # also where none is present
    gpu_names = ("gpu", accelerator.type if accelerator is not None else "gpu")
    if choice not in ("auto", "cpu", *gpu_names):
        msg = f"--device {choice}: no such device; there are auto, cpu and gpu."
        raise LayoutError(msg)
    present = torch.accelerator.is_available() and not cpu_device.is_enabled()
    if choice in gpu_names and not present:
        msg = f"--device {choice}: this machine has no GPU that torch can use; try --device cpu."
        raise LayoutError(msg)
    if choice in gpu_names or (choice == "auto" and present):
        return _add_local_layers(argv)
    if choice == "auto":
        _announce("no GPU here: running on CPU with gloo (--device cpu)")
    cpu_device.enable()
    return cpu_device.add_cpu_arguments(argv)


def _add_local_layers(argv: list[str]) -> list[str]:
    """Choose Megatron's local layers where Transformer Engine is missing and nothing is said."""
    from megatron.training import cpu_device

    chosen = "--transformer-impl" in argv
    if chosen or importlib.util.find_spec("transformer_engine") is not None:
        return argv
    _announce(
        "no Transformer Engine here: using Megatron's local layers (--transformer-impl local)"
    )
    wanted = [a for a in cpu_device.CPU_ARGUMENTS if a.flag != "--distributed-backend"]
    return [*argv, *(word for a in wanted if a.flag not in argv for word in a.tokens)]


def _announce(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)  # noqa: T201 - one line for the user
