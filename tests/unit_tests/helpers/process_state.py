"""Bring a test process into a known state, and back into it after each function that ran there."""

import os
import sys
import warnings
from collections.abc import Callable

# Set before torch is imported: one thread per process, since the ranks of a test share a few cores;
# no compilation, since a test's shapes are small and each is met once.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def quiet_environment() -> None:
    """Set the variables of `ENVIRONMENT` that the user has not set, and silence import warnings."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for module in ("megatron", "torch", "apex", "transformer_engine"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    # Megatron warns with stacklevels that point elsewhere, for each optional package that is
    # missing.
    warnings.filterwarnings(
        "ignore", message=r".*(?:not installed|not found|could not be imported).*"
    )


def enable_cpu_device() -> None:
    """Switch Megatron to CPU and gloo in this process, before it is imported in earnest."""
    from megatron.training.cpu_device import enable

    enable()


def reset_megatron() -> None:
    """Destroy every process group and Megatron global of this process; not a collective call.

    Only modules that were imported are touched, so it costs nothing where Megatron was not used.
    """
    _call("megatron.core.parallel_state", "destroy_model_parallel")
    _call("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator")
    _call("megatron.core.rerun_state_machine", "destroy_rerun_state_machine")
    _call("megatron.training.global_vars", "destroy_global_vars")
    tracker = _attribute("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker")
    if tracker is not None:
        tracker().reset()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _attribute(module: str, name: str) -> Callable[..., object] | None:
    return getattr(sys.modules.get(module), name, None)


def _call(module: str, name: str) -> None:
    function = _attribute(module, name)
    if function is not None:
        function()
