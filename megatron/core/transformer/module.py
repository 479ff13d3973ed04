"""A module's own tensor-parallel group in checkpoint metadata."""

import torch

from megatron.core import parallel_state


def _own_tensor_parallel_group(module: torch.nn.Module) -> torch.distributed.ProcessGroup:
    """Return the tensor-parallel group of a module that has no ``tp_group`` attribute.

    A module that was built with a process group collection belongs to that collection's group,
    whatever groups the process has globally; only one built without any asks the global state.
    """
    group = getattr(getattr(module, 'pg_collection', None), 'tp', None)
    return group if group is not None else parallel_state.get_tensor_model_parallel_group()
