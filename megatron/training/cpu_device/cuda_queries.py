"""``torch.cuda`` questions about devices, answered for one CPU "device" per local process."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .redirect import redirect

_COMPUTE_CAPABILITY = (8, 0)
"""What a script's architecture checks see: the first generation with bf16."""

_current_index = 0


def _device_count() -> int:
    """Return how many processes share this host: each gets a "device" of its own."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(int(local), _current_index + 1)


def _current_device() -> int:
    """Return the index given to the last ``torch.cuda.set_device``."""
    return _current_index


def _set_device(device: int | str | torch.device) -> None:
    """Remember the index; computing happens on the CPU whatever it is."""
    global _current_index
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _current_index = index


def _physical_memory() -> int:
    """Return the host's memory in bytes, or 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the fields of a device's properties that scripts read, for this host."""
    major, minor = _COMPUTE_CAPABILITY
    return SimpleNamespace(
        name="cpu",
        major=major,
        minor=minor,
        total_memory=_physical_memory(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        uuid="cpu",
    )


def _answer(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments that always answers ``value``."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        """Answer the same whatever is asked."""
        return value

    return answer


def redirect_cuda_queries() -> None:
    """Redirect the device questions of ``torch.cuda``, NVTX and the CUDA runtime handle."""
    cuda = torch.cuda
    why = "GPU code paths are taken, and their device is the CPU"
    for name in ("is_available", "is_initialized"):
        redirect(cuda, name, _answer(True), to="True", why=why)
    redirect(cuda, "_initialized", True, to="True", why="torch.utils.checkpoint reads the flag")
    for name in ("init", "synchronize", "ipc_collect", "_sleep"):
        redirect(cuda, name, _answer(None), to="nothing", why="CPU operators have already run")
    why = "one device per process of this host (LOCAL_WORLD_SIZE)"
    for owner in (cuda, cuda.random):
        redirect(owner, "device_count", _device_count, to="local world size", why=why)
        redirect(owner, "current_device", _current_device, to="the index last set", why=why)
    redirect(cuda, "set_device", _set_device, to="remember the index", why=why)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        redirect(cuda, name, _answer(-1), to="nothing", why="`with torch.cuda.device(i)` is empty")
    why = "scripts check for bf16 and size kernels by these"
    redirect(cuda, "get_device_properties", _get_device_properties, to="this host's", why=why)
    redirect(cuda, "get_device_capability", _answer(_COMPUTE_CAPABILITY), to="(8, 0)", why=why)
    redirect(cuda, "get_device_name", _answer("cpu"), to="'cpu'", why=why)
    redirect(cuda, "is_bf16_supported", _answer(True), to="True", why=why)
    redirect(cuda, "can_device_access_peer", _answer(True), to="True", why=why)
    for name in ("utilization", "temperature", "power_draw", "clock_rate"):
        redirect(cuda, name, _answer(0), to="0", why="there is no GPU sensor to read")
    _redirect_profiling()
    _redirect_accelerator()


def _redirect_profiling() -> None:
    """Make profiler marks and runtime calls silent."""
    marks = SimpleNamespace(
        rangePushA=_answer(0),
        rangePop=_answer(0),
        rangeStartA=_answer(0),
        rangeEnd=_answer(None),
        markA=_answer(None),
    )
    redirect(torch.cuda.nvtx, "_nvtx", marks, to="nothing", why="range marks are for GPU profilers")
    runtime = SimpleNamespace(cudaProfilerStart=_answer(0), cudaProfilerStop=_answer(0))
    redirect(torch.cuda, "cudart", _answer(runtime), to="profiler start/stop only", why="--profile")
    redirect(torch.cuda, "check_error", _answer(None), to="nothing", why="--profile")
    for owner in (torch.cuda, torch.cuda.graphs):
        redirect(
            owner,
            "is_current_stream_capturing",
            _answer(False),
            to="False",
            why="there are no CUDA graphs",
        )


def _redirect_accelerator() -> None:
    """Let ``torch.accelerator`` say that this process has none, also where a GPU exists."""
    why = "generic torch code then takes its CPU path"
    redirect(torch.accelerator, "is_available", _answer(False), to="False", why=why)
    redirect(torch.accelerator, "current_accelerator", _answer(None), to="None", why=why)
    redirect(torch.accelerator, "device_count", _answer(0), to="0", why=why)
    redirect(torch.accelerator, "synchronize", _answer(None), to="nothing", why=why)
