"""Checkpoint metadata of a modality's children, also of plain torch modules."""

from abc import ABC

import torch.nn as nn

from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)


def _describe_child(module, prefix, sharded_offsets, metadata, tp_group):
    """Build the sharded state of a module whose children may or may not describe themselves.

    Not collective. Taken whole, a plain container of tensor-parallel layers would look as if every
    tensor rank held the same; so it is taken apart.
    """
    describes = [hasattr(inner, 'sharded_state_dict') for inner in module.modules()]
    if describes[0] or not any(describes):
        return sharded_state_dict_default(
            module, prefix, sharded_offsets, metadata, tp_group=tp_group
        )
    own = {}
    module._save_to_state_dict(own, '', keep_vars=True)
    state = make_sharded_tensors_for_checkpoint(
        own,
        prefix,
        sharded_offsets=sharded_offsets,
        tp_group=tp_group,
        dp_cp_group=(metadata or {}).get('dp_cp_group'),
    )
    for name, child in module.named_children():
        state |= _describe_child(child, f'{prefix}{name}.', sharded_offsets, metadata, tp_group)
    return state


class ModalitySubmodules(ABC, nn.Module):
    """Modality-specific submodules."""

    def sharded_state_dict(self, prefix='', sharded_offsets=(), metadata=None):
        """Build the sharded state of every encoder, decoder and projection.

        Each child is described with this modality's own tensor-parallel and data-parallel groups.
        A child that cannot know them, a plain torch tower or a Hugging Face wrapper, is told:
        without the tensor-parallel group every tensor rank would claim to write it.

        Returns:
            ShardedStateDict: keys ``{prefix}{container}.{child}...``.
        """
        groups = self.pg_collection
        tp_group = None
        if groups is not None:
            assert groups.dp_cp is not None, "the modality's pg_collection has no dp_cp group"
            tp_group = groups.tp
            metadata = {**(metadata or {}), 'dp_cp_group': groups.dp_cp, 'tp_group': tp_group}
        state = {}
        for container_name, container in self.named_children():
            for child_name, child in container.named_children():
                child_prefix = f'{prefix}{container_name}.{child_name}.'
                state |= _describe_child(child, child_prefix, sharded_offsets, metadata, tp_group)
        return state
