"""Alignment of parameter groups over the ranks of one model, not of the whole world."""

from typing import Any, List

import torch

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


def _gather_param_group_keys(model_chunks: List[MegatronModule], keys: List[Any]) -> List[Any]:
    """Gather the keys of the parameter groups from all ranks that share the model.

    Collective over the model's ranks: ``intra_dist_opt`` of its process group collection, or the
    world for a model without one. So a module that is built on its own ranks alone, or not built
    on some because it is frozen, does not leave other ranks waiting.
    """
    collection = getattr(unwrap_model(model_chunks[0]), 'pg_collection', None)
    group = getattr(collection, 'intra_dist_opt', None)
    gathered = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, keys, group=group)
    return gathered
