"""Run Megatron's CUDA code on the CPU over gloo.

``python -m megatron.training.cpu_device pretrain_gpt.py ...`` runs a stock script, alone or under
``torchrun``. In code, :func:`enable` is the one switch: importing this package changes nothing.
The module docstrings say what is redirected and why; ``python -m megatron.training.cpu_device
--list`` prints every replaced name with its stand-in.
"""

from .arguments import CPU_ARGUMENTS, CpuArgument, add_cpu_arguments
from .switch import backend, device, enable, is_enabled

__all__ = [
    "CPU_ARGUMENTS",
    "CpuArgument",
    "add_cpu_arguments",
    "backend",
    "device",
    "enable",
    "is_enabled",
]
