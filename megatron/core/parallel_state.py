"""Memory buffer for runs that own their process groups."""

from megatron.core.utils import GlobalMemoryBuffer


def get_global_memory_buffer():
    """Return the process-wide scratch buffer, made on first use.

    The buffer depends on no process group, so a run that passes explicit groups and never calls
    ``initialize_model_parallel`` has one as well.
    """
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is None:
        _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
    return _GLOBAL_MEMORY_BUFFER
