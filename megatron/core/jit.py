import torch

from megatron.core.jit import noop_decorator


def enable_jit_fuser() -> None:
    """Compile fused functions where a GPU runs them; without one they stay as they are."""
    global jit_fuser
    jit_fuser = torch.compile if torch.cuda.is_available() else noop_decorator
