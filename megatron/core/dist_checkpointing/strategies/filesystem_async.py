import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from torch import multiprocessing as mp

from megatron.core.dist_checkpointing.strategies.filesystem_async import _disable_gc


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the training script from processes started inside, which would import it again."""
    script = sys.modules['__main__']
    sys.modules['__main__'] = types.ModuleType('__main__')
    try:
        yield
    finally:
        sys.modules['__main__'] = script


@_disable_gc()
def get_write_results_queue(mp_mode: str = 'spawn') -> mp.Queue:
    """Return this process's queue for the results of writing, kept by a process of its own.

    Local; the first call starts that process, later calls return the same queue. It needs nothing
    of the training script, whose import costs every rank many seconds of the first save.

    Args:
        mp_mode (str): How the process is started.

    Returns:
        mp.Queue: Queue for collecting write results.
    """
    global _results_queue
    if _results_queue is None:
        with _without_main_module():
            _results_queue = mp.get_context(mp_mode).Manager().Queue()
    return _results_queue
