"""The one switch: :func:`enable`, and the questions that device-independent code asks."""

from __future__ import annotations

import os

import torch

_enabled = False


def enable() -> None:
    """Make this process run CUDA code on the CPU over gloo; a second call does nothing.

    Local: every process of a job calls it, before it makes process groups or tensors. Megatron
    may be imported already. On a host with GPUs they become invisible to this process.

    Raises:
        RuntimeError: When this process has used a GPU or made process groups before.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("the CPU device must be enabled before the process first uses a GPU")
    if torch.distributed.is_initialized() and torch.distributed.get_backend() != "gloo":
        raise RuntimeError(
            "the CPU device must be enabled before torch.distributed is initialized with "
            f"{torch.distributed.get_backend()}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron refuses tensor parallelism without it; on the CPU it has no effect.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _redirect_everything()
    _enabled = True


def _redirect_everything() -> None:
    """Apply every redirection, in an order that lets each use torch as it was before."""
    from .child_processes import redirect_child_processes
    from .compilation import redirect_compilation
    from .cuda_memory import redirect_cuda_memory
    from .cuda_queries import redirect_cuda_queries
    from .data_loading import redirect_data_loading
    from .placement import redirect_placement
    from .process_groups import redirect_process_groups
    from .random_streams import redirect_random
    from .streams import redirect_streams

    redirect_compilation()
    redirect_random()
    redirect_cuda_queries()
    redirect_cuda_memory()
    redirect_streams()
    redirect_process_groups()
    redirect_data_loading()
    redirect_child_processes()
    redirect_placement()


def is_enabled() -> bool:
    """Return whether this process runs CUDA code on the CPU."""
    return _enabled


def device() -> torch.device:
    """Return the device that this process computes on: the CPU or its current GPU."""
    if _enabled or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def backend() -> str:
    """Return the collective backend that goes with :func:`device`: gloo or nccl."""
    return "gloo" if device().type == "cpu" else "nccl"
