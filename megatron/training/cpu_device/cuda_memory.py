"""``torch.cuda`` memory reports, answered with this process's resident memory."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import torch

from .redirect import redirect

_STATISTICS = (
    "allocated_bytes.all",
    "active_bytes.all",
    "reserved_bytes.all",
    "requested_bytes.all",
    "inactive_split_bytes.all",
)
_COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


def _peak_resident(device: Any = None) -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    return max(peak, _resident_now() or 0)


def _resident_now() -> int | None:
    """Return the resident memory of this process in bytes where the system tells (Linux)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statistics:
            return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _resident(device: Any = None) -> int:
    """Return the resident memory of this process in bytes (its peak outside Linux)."""
    now = _resident_now()
    return _peak_resident() if now is None else now


def _statistics(device: Any = None) -> dict[str, int]:
    """Return the allocator statistics that Megatron logs, from resident memory."""
    values = dict.fromkeys(_COUNTERS, 0)
    for name in _STATISTICS:
        values[f"{name}.current"] = _resident()
        values[f"{name}.peak"] = _peak_resident()
        values[f"{name}.allocated"] = values[f"{name}.freed"] = 0
    for name in ("allocation.all", "active.all", "segment.all"):
        for column in ("current", "peak", "allocated", "freed"):
            values[f"{name}.{column}"] = 0
    return values


def _free_and_total(device: Any = None) -> tuple[int, int]:
    """Return free and total memory of the host in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return free, total


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and do nothing."""


def redirect_cuda_memory() -> None:
    """Redirect memory reports in ``torch.cuda`` and in ``torch.cuda.memory``."""
    why = "Megatron's memory report then shows what the process uses"
    for owner in (torch.cuda, torch.cuda.memory):
        for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
            redirect(owner, name, _resident, to="resident memory", why=why)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            redirect(owner, name, _peak_resident, to="peak resident memory", why=why)
        redirect(owner, "memory_stats", _statistics, to="resident memory", why=why)
        redirect(owner, "mem_get_info", _free_and_total, to="the host's memory", why=why)
        for name in (
            "empty_cache",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
            "reset_accumulated_memory_stats",
            "set_per_process_memory_fraction",
        ):
            redirect(owner, name, _nothing, to="nothing", why="the CPU allocator keeps no cache")
    for name in ("_record_memory_history", "_dump_snapshot"):
        redirect(
            torch.cuda.memory, name, _nothing, to="nothing", why="there is no allocator history"
        )
