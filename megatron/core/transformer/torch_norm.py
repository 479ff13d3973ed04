import torch

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import LayerNormInterface


class WrappedTorchNorm:
    """Builds torch's own LayerNorm or RMSNorm from a transformer config."""

    def __new__(
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> LayerNormInterface:
        """Return the norm that ``config`` names; ``normalization`` and the flags are ignored.

        Under sequence parallelism each rank normalises its part of the sequence, so the weights
        are marked: their gradients are summed over the tensor-parallel group after the backward.

        Raises:
            ValueError: When the config asks for what torch's norms lack.
        """
        for name in (
            'layernorm_zero_centered_gamma',
            'persist_layer_norm',
            'memory_efficient_layer_norm',
        ):
            if getattr(config, name):
                raise ValueError(f"{name} is set, but torch's norms do not support it")
        if config.normalization not in ('LayerNorm', 'RMSNorm'):
            raise ValueError(f"normalization {config.normalization} has no norm in torch")
        norm = getattr(torch.nn, config.normalization)(normalized_shape=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
