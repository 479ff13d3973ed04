from multiprocessing.process import BaseProcess
from queue import Empty

import torch

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCaller
from megatron.core.dist_checkpointing.verdict import shared_verdict


class AsyncRequest:
    """A save that is to be written."""

    def execute_sync(self) -> None:
        """Write this rank's part now, then finalize; collective over the world.

        Raises:
            CheckpointingException: the same text on every rank, when one of them failed.
        """
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            discard_write_results,
            stage_for_sync,
        )

        try:
            with shared_verdict('write the checkpoint'):
                async_fn_args = list(self.async_fn_args)
                if self.preload_fn is not None:
                    assert len(async_fn_args) == 3, "Expected 3 args to be passed to async function"
                    async_fn_args[1] = stage_for_sync(self.preload_fn)
                if self.async_fn is not None:
                    self.async_fn(*async_fn_args, **self.async_fn_kwargs)
        except BaseException:
            discard_write_results()  # or the next save would take them for its own
            raise
        for finalize_fn in self.finalize_fns:
            finalize_fn()


class PersistentAsyncCaller(AsyncCaller):
    """Sends saves to a writer process that stays; all methods are local to a rank."""

    def _living_process(self) -> BaseProcess:
        """Return the writer process, a new one where the last one was killed."""
        last = PersistentAsyncCaller._persistent_process
        if last is not None and not last.is_alive():
            self._forget_process()
        return PersistentAsyncCaller._get_process(torch.distributed.get_rank())

    def _await_preload(self) -> None:
        """Wait until the writer has copied the tensors, or is dead, which is reported later."""
        copies = self._persistent_preload_q
        with copies._cond:  # as JoinableQueue.join, which waits for a dead process, too
            while not copies._unfinished_tasks._semlock._is_zero() and self.process.is_alive():
                copies._cond.wait(0.5)

    def _completed_item(self) -> int:
        """Return the number of a save that the writer is done with; -1 where it died instead.

        Raises:
            Empty: the writer is busy.
        """
        try:
            return self._persistent_comp_q.get_nowait()
        except Empty:
            if self.process.is_alive():
                raise
        try:
            return self._persistent_comp_q.get(timeout=1)  # what it said last may be on its way
        except Empty:
            return -1

    @classmethod
    def _forget_process(cls) -> None:
        """Let the next save start a writer, and this process end without the last one."""
        for queue in (cls._persistent_queue, cls._persistent_preload_q, cls._persistent_comp_q):
            if queue is not None:
                queue.cancel_join_thread()
        cls._persistent_process = None
        cls._persistent_queue = cls._persistent_preload_q = cls._persistent_comp_q = None

    def close(self, abort: bool = False) -> None:
        """End the writer when it has written what it was sent, or at once.

        Args:
            abort: Kill it.
        """
        if not self.process:
            return
        if abort:
            self.process.kill()
        elif self.process.is_alive():
            self._persistent_queue.put('DONE')
        self.process.join()
        self.process = None
        self._forget_process()
