"""Checkpoint metadata of a modality's children, also of plain torch modules."""

from abc import ABC

import torch.nn as nn

from megatron.core.transformer.utils import sharded_state_dict_default


class ModalitySubmodules(ABC, nn.Module):
    """Modality-specific submodules."""

    def sharded_state_dict(self, prefix='', sharded_offsets=(), metadata=None):
        """Build the sharded state of every encoder, decoder and projection.

        Each child is described with this modality's own tensor-parallel and data-parallel groups.
        A plain torch child, such as a tower from another library, cannot know them: without the
        tensor-parallel group every tensor rank would claim to write it.

        Returns:
            ShardedStateDict: keys ``{prefix}{container}.{child}...``.
        """
        groups = self.pg_collection
        tp_group = None
        if groups is not None:
            assert groups.dp_cp is not None, "the modality's pg_collection has no dp_cp group"
            metadata = {**(metadata or {}), 'dp_cp_group': groups.dp_cp}
            tp_group = groups.tp
        state = {}
        for container_name, container in self.named_children():
            for child_name, child in container.named_children():
                child_prefix = f'{prefix}{container_name}.{child_name}.'
                state |= sharded_state_dict_default(
                    child, child_prefix, sharded_offsets, metadata, tp_group=tp_group
                )
        return state
