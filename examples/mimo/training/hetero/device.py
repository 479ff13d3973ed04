"""Choice of the device, before Megatron is imported in earnest."""

from __future__ import annotations

import os


def select_device(choice: str, argv: list[str]) -> list[str]:
    """Switch to CPU if asked for, or if no GPU is there, and return the stock flags it needs.

    Args:
        choice: ``cpu``, ``gpu`` or ``auto``.
        argv: the stock flags so far; the user's own win over the ones added.

    Raises:
        LayoutError: a GPU is asked for and there is none.
    """
    import torch

    from examples.mimo.training.hetero.layout import LayoutError
    from megatron.training import cpu_device

    present = torch.accelerator.is_available()
    if choice == "gpu" and not present:
        msg = "--device gpu: this machine has no GPU that torch can use; try --device cpu."
        raise LayoutError(msg)
    if choice == "gpu" or (choice == "auto" and present):
        return argv
    if choice == "auto" and os.environ.get("RANK", "0") == "0":
        print("no GPU here: running on CPU with gloo (--device cpu)")  # noqa: T201
    cpu_device.enable()
    return cpu_device.add_cpu_arguments(argv)
