"""Where tensors are put: every way of asking for a CUDA device gives the CPU.

Factory functions and ``Tensor`` methods are wrapped one by one. A ``TorchFunctionMode`` would be
shorter, but it costs every operator of the step and does not reach other threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _device as device_contexts

from .redirect import redirect

_CPU = torch.device("cpu")

_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_quantized empty_strided eye full full_like hamming_window hann_window kaiser_window "
    "linspace logspace normal ones ones_like rand rand_like randint randint_like randn randn_like "
    "randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor "
    "sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros "
    "zeros_like"
).split()
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_TYPES = "Byte Char Short Int Long Half BFloat16 Float Double Bool".split()


def to_cpu(device: Any) -> Any:
    """Return the CPU for any way to write a CUDA device, and anything else unchanged."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``: its ``device`` keyword means the CPU, its memory is not pinned."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        """Call the wrapped function with the device mapped."""
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return placed


def _first_argument_on_cpu(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a method whose first argument, called ``name`` as a keyword, may be a device."""

    @functools.wraps(function)
    def placed(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped method with the device mapped."""
        if args:
            return function(self, to_cpu(args[0]), *args[1:], **kwargs)
        if name in kwargs:
            kwargs[name] = to_cpu(kwargs[name])
        return function(self, **kwargs)

    return placed


def _tensor_cuda(
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Return the tensor itself, as ``.cuda()`` does for a tensor on the device."""
    if memory_format is torch.preserve_format:
        return tensor
    return tensor.contiguous(memory_format=memory_format)


def _tensor_itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor: host memory is not pinned."""
    return tensor


def _not_pinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Say that memory is not pinned."""
    return False


def _type_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: it names the CUDA type and accepts one."""

    @functools.wraps(function)
    def typed(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the type's CUDA name without arguments, the converted tensor with."""
        if dtype is None:
            return function(tensor).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return function(tensor, dtype, *args, **kwargs)

    return typed


def _load_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.load``: what a file holds for a CUDA device is loaded to the CPU."""

    @functools.wraps(function)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load with every CUDA location mapped."""
        if map_location is None:
            map_location = _CPU
        elif isinstance(map_location, dict):
            map_location = {k: to_cpu(v) for k, v in map_location.items()}
        return function(f, to_cpu(map_location), *args, **kwargs)

    return load


class _GeneratorType(type(torch.Generator)):
    """Makes ``torch.Generator(device="cuda")`` a CPU generator; instances stay torch's own."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        """Construct a CPU generator."""
        return torch._C.Generator(device=to_cpu(device))

    def __instancecheck__(cls, instance: Any) -> bool:
        """Recognise torch's generators."""
        return isinstance(instance, torch._C.Generator)


def _redirect_all(owner: Any, names: Iterable[str], wrap: Callable[..., Any], why: str) -> None:
    """Wrap each of ``names`` that this torch has."""
    for name in names:
        if hasattr(owner, name):
            redirect(owner, name, wrap(getattr(owner, name)), to="the same on the CPU", why=why)


def redirect_placement() -> None:
    """Redirect factories, tensor methods, type names, loading and device contexts."""
    # `with torch.device("meta")` finds factories in a set that must hold torch's own functions.
    device_contexts._device_constructors()
    why = 'device="cuda", an index or a device object means the CPU'
    _redirect_all(torch, _FACTORIES, _on_cpu, why)
    _redirect_all(torch.Tensor, _METHODS, _on_cpu, why)
    for owner, name, keyword in (
        (torch.Tensor, "to", "device"),
        (torch.amp.autocast_mode.autocast, "__init__", "device_type"),
        (device_contexts.DeviceContext, "__init__", "device"),
    ):
        wrapped = _first_argument_on_cpu(getattr(owner, name), keyword)
        redirect(owner, name, wrapped, to="the same on the CPU", why=why)
    redirect(torch.Tensor, "cuda", _tensor_cuda, to="the tensor itself", why=why)
    why = "memory is not pinned"
    redirect(torch.Tensor, "pin_memory", _tensor_itself, to="the tensor itself", why=why)
    redirect(torch.Tensor, "is_pinned", _not_pinned, to="False", why=why)
    why = "mixed precision optimizers tell parameters apart by type name"
    redirect(torch.Tensor, "type", _type_function(torch.Tensor.type), to="CUDA names", why=why)
    for name in _TYPES:
        cpu_type = getattr(torch, f"{name}Tensor")
        redirect(torch.cuda, f"{name}Tensor", cpu_type, to="torch's CPU type", why=why)
    for owner in (torch, torch.serialization):
        why = "tensors saved on a GPU are loaded to the CPU"
        redirect(owner, "load", _load_function(owner.load), to="map_location CPU", why=why)
    generator = _GeneratorType("Generator", (torch._C.Generator,), {})
    redirect(torch, "Generator", generator, to="a CPU generator", why='Generator(device="cuda")')
