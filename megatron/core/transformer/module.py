"""A module's own tensor-parallel group in checkpoint metadata."""

from typing import Any

import torch

from megatron.core.utils import get_tensor_model_parallel_group_if_none


def _own_tensor_parallel_group(
    module: torch.nn.Module, metadata: dict[str, Any] | None
) -> torch.distributed.ProcessGroup:
    """Return the tensor-parallel group of a module that has no ``tp_group`` attribute.

    A module that was built with a process group collection belongs to that collection's group,
    whatever groups the process has globally. One built without any, such as a Hugging Face
    wrapper, belongs to the ``tp_group`` of the metadata that its owner hands down; the global
    state is asked last.
    """
    own = getattr(getattr(module, 'pg_collection', None), 'tp', None)
    if own is None:
        own = (metadata or {}).get('tp_group')
    group = get_tensor_model_parallel_group_if_none(own)
    assert group is not None, (
        f"{type(module).__name__} has neither a tp_group nor a pg_collection, and there is no "
        "global tensor model parallel group"
    )
    return group
