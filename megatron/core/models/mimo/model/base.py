"""Modules without trainable parameters stay outside data parallelism."""

from megatron.core.transformer import MegatronModule


class MimoModel(MegatronModule):
    """Multimodal model."""

    def zero_grad_buffer(self):
        """Zero the gradient buffers of this rank's data-parallel modules.

        A module whose parameters are all frozen is not wrapped and has no buffer.
        """
        for module in self._active_ddp_modules():
            module.zero_grad_buffer()
