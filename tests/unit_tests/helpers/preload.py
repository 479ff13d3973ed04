"""Imported once by the server that forks the CPU ranks, so that no rank imports torch itself.

The server runs no computation and creates no process group: a fork of it is as good as a new
process.
"""

import importlib

from tests.unit_tests.helpers.process_state import enable_cpu_device, quiet_environment

quiet_environment()
enable_cpu_device()

for name in (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.mimo",
    "megatron.core.optimizer",
    "megatron.training.training",
):
    importlib.import_module(name)
