import pickle
import queue
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Callable

import torch
from torch import multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.integrity import FileDigest, HashingStream
from megatron.core.dist_checkpointing.staging import note_digests
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    WriteBucket,
    _disable_gc,
    _StorageWriterTransforms,
)
from megatron.core.dist_checkpointing.verdict import describe


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


def discard_write_results() -> None:
    """Empty this process's queue after a save that is given up; local."""
    while _results_queue is not None:
        try:
            _results_queue.get_nowait()
        except queue.Empty:
            return


def stage_for_sync(preload_fn: Callable[..., list[WriteBucket]]) -> list[WriteBucket]:
    """Bring a rank's data to the host for a save that training waits for, which needs no copy."""
    ours = getattr(preload_fn, 'func', None) is FileSystemWriterAsync.preload_tensors
    return preload_fn(snapshot=False) if ours else preload_fn()


def _root(error: BaseException) -> BaseException:
    """Return the system's error behind an error, if any: torch.save raises its own over it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def open_hashing(path: str, mode: str) -> HashingStream:
    """Open a shard for writing; its checksum is taken on the way."""
    return HashingStream(path, mode)


def stream_digest(stream: object) -> list[FileDigest]:
    """Return the digest of a written file, or nothing for a stream that takes none."""
    return [stream.digest()] if isinstance(stream, HashingStream) else []


class FileSystemWriterAsync(FileSystemWriter):
    """Writes one rank's part of a checkpoint."""

    @staticmethod
    def preload_tensors(
        write_buckets: list[WriteBucket], non_blocking: bool = True, snapshot: bool = True
    ) -> list[WriteBucket]:
        """Bring the tensors to the host, so that training can go on and change the originals.

        Local; in the training process or, for a persistent writer, in the writer's while the
        training process waits.

        Args:
            write_buckets (List): what goes into which file.
            non_blocking (bool): copy from the GPU without waiting for each tensor.
            snapshot (bool): copy tensors that are on the host already, too. Without it they are
                the ones that training changes in place, also across processes, since torch sends
                a CPU tensor to another process as shared memory.
        """

        def stage(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == 'cpu':
                return tensor.clone() if snapshot else tensor
            return tensor.to('cpu', non_blocking=non_blocking)

        staged = [
            (path, key, (objects, [(item, stage(tensor)) for item, tensor in tensors]))
            for path, key, (objects, tensors) in write_buckets
        ]
        if non_blocking:
            torch.cuda.synchronize()
        return staged

    @staticmethod
    @_disable_gc()
    def write_preloaded_data_multithread(
        transform_list: list[_StorageWriterTransforms],
        use_msc: bool,
        rank: int,
        write_buckets: list[WriteBucket],
        global_results_queue: mp.Queue,
    ) -> None:
        """Write each file on a thread of its own, and queue the results, or the failure.

        Local, in the training process or in a writer's. It never raises: a rank whose file cannot
        be written has to take part in what the ranks do next, and reports it there.

        Args:
            transform_list (list): extensions of torch's writer.
            use_msc (bool): write to object storage.
            rank (int): the rank whose part this is.
            write_buckets (List[WriteBucket]): what goes into which file.
            global_results_queue (mp.Queue): receives the results of all files by their number, or
                one exception that names the file.
        """
        del rank

        def write(number: int) -> list[WriteResult]:
            _, written = FileSystemWriterAsync.write_preloaded_data(
                transform_list,
                local_proc_idx=number,
                write_bucket=write_buckets[number],
                results_queue=None,
                count_queue=None,
                use_fsync=True,
                use_msc=use_msc,
            )
            if isinstance(written, Exception):
                raise written
            return written

        outcome: dict[int, list[WriteResult]] | Exception
        try:
            with ThreadPoolExecutor(max_workers=max(1, len(write_buckets))) as writers:
                outcome = dict(enumerate(writers.map(write, range(len(write_buckets)))))
        except Exception as error:  # noqa: BLE001 - it is raised on every rank, later
            outcome = CheckpointingException(describe(_root(error)))  # always fit for the queue
        global_results_queue.put(outcome)

    def finish(self, metadata: Metadata, results: list[list[WriteResult | FileDigest]]) -> None:
        """Write ``.metadata`` and keep the files' digests for the manifest; on the coordinator.

        Args:
            metadata (Metadata): what is saved.
            results (list): what each rank's writer returned.

        Raises:
            OSError: it cannot be written.
        """
        written = [[item for item in part if isinstance(item, WriteResult)] for part in results]
        note_digests(
            self.checkpoint_dir,
            [item for part in results for item in part if isinstance(item, FileDigest)],
        )
        if not self.use_msc:
            super().finish(metadata, written)
            return
        import multistorageclient as msc

        metadata.storage_data = {item.index: item.storage_data for part in written for item in part}
        metadata.storage_meta = self.storage_meta()
        with msc.open(f'{self.checkpoint_dir}/.metadata', 'wb') as file:
            pickle.dump(metadata, file)
