"""Pieces that vision model families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.vit_layer_specs import (
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


class HeteroVisionSubmodules(VisionModalitySubmodules):
    """Vision modality submodules with the ``config`` that Megatron's wrappers read."""

    def __init__(self, *, config: TransformerConfig, **kwargs: object) -> None:
        """Keep the tower's configuration; the rest goes to Megatron's class."""
        super().__init__(**kwargs)
        self.config = config


def vit_layer_spec(*, use_te: bool) -> ModuleSpec:
    """Transformer layer of a vision tower, with or without Transformer Engine."""
    if use_te:
        return get_vit_layer_with_transformer_engine_spec()
    return get_vit_layer_with_local_spec()


def vit_norm(*, use_te: bool) -> type:
    """Layer norm in front of a vision tower's first layer."""
    if not use_te:
        return WrappedTorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def mlp_submodules(*, use_te: bool) -> MLPSubmodules:
    """Tensor-parallel linear layers of a projection, with or without Transformer Engine."""
    if not use_te:
        return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TERowParallelLinear,
    )

    return MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
