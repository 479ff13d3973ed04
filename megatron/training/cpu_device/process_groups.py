"""Process groups over gloo, and the few collectives that gloo lacks.

A backend is chosen where a group is made; collectives are mended at ``ProcessGroup``, below
``torch.distributed``'s functions, so functions that Megatron imported by name earlier follow too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from .placement import to_cpu
from .redirect import redirect

_GPU_BACKENDS = ("nccl", "ucc", "undefined")


def to_gloo(backend: str | None) -> str | None:
    """Return gloo for a backend that needs GPUs (also as one part of a pair), else unchanged."""
    if backend is not None and any(name in str(backend).lower() for name in _GPU_BACKENDS):
        return "gloo"
    return backend


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes groups: gloo for NCCL, options for NCCL dropped."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        """Make the group over gloo; collective as the wrapped function is."""
        args = tuple(to_gloo(a) if isinstance(a, str) else a for a in args)
        if "backend" in kwargs:
            kwargs["backend"] = to_gloo(kwargs["backend"])
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return function(*args, **kwargs)

    return make


def _init_process_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_process_group``: gloo also where the backend is left to torch."""
    over_gloo = _over_gloo(function)

    @functools.wraps(function)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Initialise over gloo; every rank of the job calls this."""
        over_gloo("gloo" if backend is None else str(backend), *args, **kwargs)

    return init


def _redirect_group_makers() -> None:
    """Redirect the functions that make process groups and device meshes."""
    why = "NCCL needs GPUs; NCCL options and device_id are dropped"
    init = _init_process_group(distributed_c10d.init_process_group)
    makers = {"init_process_group": init}
    for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        makers[name] = _over_gloo(getattr(distributed_c10d, name))
    for owner in (dist, distributed_c10d):
        for name, maker in makers.items():
            redirect(owner, name, maker, to="the same over gloo", why=why)
    why = "a mesh of CUDA devices is a mesh of CPU processes"
    for owner in (dist, device_mesh):
        mesh = _mesh_function(owner.init_device_mesh)
        redirect(owner, "init_device_mesh", mesh, to="a CPU mesh", why=why)


def _mesh_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_device_mesh``: the device type is the CPU's."""

    @functools.wraps(function)
    def init(device_type: str, *args: Any, **kwargs: Any) -> Any:
        """Make the mesh; every rank of the mesh calls this."""
        return function(str(to_cpu(device_type)), *args, **kwargs)

    return init


def redirect_process_groups() -> None:
    """Redirect how groups are made and mend what gloo lacks."""
    from .gloo import redirect_gloo_gaps

    _redirect_group_makers()
    redirect_gloo_gaps()
