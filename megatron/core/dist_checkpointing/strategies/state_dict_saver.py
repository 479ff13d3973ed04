from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import _is_wrapped_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron.core.dist_checkpointing.verdict import raise_everywhere, shared_verdict

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def save_state_dict_async_finalize(
    storage_writer: 'FileSystemWriterAsync', global_metadata: Metadata, dist_wrapper: _DistWrapper
) -> None:
    """Collect what the writers of all ranks wrote, and write ``.metadata``.

    Collective over the group of ``dist_wrapper``, after the writers have ended.

    Args:
        storage_writer (FileSystemWriterAsync): this rank's writer.
        global_metadata (Metadata): what is saved; the coordinator's counts.
        dist_wrapper (_DistWrapper): the ranks, and which of them writes ``.metadata``.

    Raises:
        CheckpointingException: the same text on every rank, naming the file that was not written.
    """
    doing = f'write checkpoint {storage_writer.checkpoint_dir}'
    results = storage_writer.retrieve_write_results()
    failure = results[0] if _is_wrapped_exception(results) else None
    raise_everywhere(failure, doing, dist_wrapper.group)
    all_results = dist_wrapper.gather_object(results)
    with shared_verdict(doing, dist_wrapper.group):
        if dist_wrapper.is_coordinator:
            assert global_metadata is not None
            storage_writer.finish(global_metadata, all_results)
