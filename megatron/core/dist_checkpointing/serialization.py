from typing import Callable

import torch

from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.integrity import DEFAULT_ALGORITHM
from megatron.core.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
)
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY
from megatron.core.dist_checkpointing.staging import Staging, give_up, open_staging, publish
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from megatron.core.dist_checkpointing.verdict import call_everywhere, shared_verdict


def load_shards[T](
    read: Callable[[], T],
    checkpoint_dir: str,
    *,
    shared: bool,
    group: torch.distributed.ProcessGroup | None,
) -> T:
    """Return what this rank's ``read`` loads; where the ranks load together they share the outcome.

    Args:
        read: loads this rank's shards.
        checkpoint_dir: for the message.
        shared: the ranks of ``group`` all call it; else it is this rank's own affair.
        group: the ranks that load together; the world when it is None.

    Raises:
        CheckpointingException: a rank could not load, with the same text on every rank.
    """
    return call_everywhere(f'load checkpoint {checkpoint_dir}', read, group) if shared else read()


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: TorchDistSaveShardedStrategy = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
    content_metadata: dict | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
) -> AsyncRequest | None:
    """Save a state dict so that its directory is complete or does not exist.

    Collective over the world: every rank calls it with its own part. All ranks write into a hidden
    directory beside ``checkpoint_dir``; when all of it is on disk, with a manifest of sizes and
    checksums, it is renamed. An older checkpoint of the same name is there until then. With
    ``async_sharded_save`` this call copies and plans, the caller schedules the writing, and the
    rename is the last of the request's finalize functions, which every rank runs.

    Args:
        sharded_state_dict (ShardedStateDict): this rank's ShardedTensors and ShardedObjects; what
            is neither is common state and saved as rank 0 has it. The dict itself stays as it is.
        checkpoint_dir (str): the name of the checkpoint. It need not exist.
        sharded_strategy: how shards are written; `TorchDistSaveShardedStrategy` by default.
        validate_access_integrity (bool): refuse shards that are covered twice or not at all.
        async_sharded_save (bool): return a request instead of writing now.
        preprocess_common_before_consistancy_check: gives what of the common state is compared
            between the ranks; it must not modify it.
        content_metadata (dict): what the checkpoint contains, for those who load it.
        async_strategy (str): "mcore", or "nvrx", which needs nvidia-resiliency-ext.
        verify_integrity (bool): note SHA-256 in the manifest, which takes reading all files once
            more on rank 0, instead of the CRC-32 that the writers take.

    Returns:
        AsyncRequest: with ``async_sharded_save``, for the caller to schedule on every rank.

    Raises:
        CheckpointingException: the same text on every rank, naming the file where there is one. The
            state is untouched and what was there under ``checkpoint_dir`` still is.
    """
    from .strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    known = (TorchDistSaveShardedStrategy, FullyParallelSaveStrategyWrapper)
    strategy = sharded_strategy if isinstance(sharded_strategy, known) else known[0]()
    if content_metadata is not None:
        sharded_state_dict = {**sharded_state_dict, _CONTENT_METADATA_KEY: content_metadata}
    sharded_part, common_state = save_preprocess(
        sharded_state_dict, validate_access_integrity, preprocess_common_before_consistancy_check
    )
    sharded_part['common_state'] = ShardedObject(
        key='common_state',
        data=common_state,
        global_shape=(1,),
        global_offset=(0,),
        replica_id=torch.distributed.get_rank(),
    )
    staging = open_staging(checkpoint_dir)
    config = CheckpointingConfig(strategy.backend, strategy.version)
    try:
        with shared_verdict(f'save checkpoint {checkpoint_dir}'):
            how = async_strategy if async_sharded_save else 'mcore'
            request = strategy.async_save(sharded_part, staging.directory, how)
        finalize = _finalizer(staging, request.finalize_fns.copy(), config, verify_integrity)
        request.finalize_fns[:] = [finalize]
        if async_sharded_save:
            return request
        request.execute_sync()
    except BaseException:
        give_up(staging)
        raise
    return None


def _finalizer(
    staging: Staging,
    written: list[Callable[[], None]],
    config: CheckpointingConfig,
    verify_integrity: bool,
) -> Callable[[], None]:
    """Return the function that every rank calls when all have written: it publishes, or gives up.

    Args:
        staging: the save.
        written: the strategy's own finalize functions, which write ``.metadata``.
        config: the format.
        verify_integrity: note SHA-256.
    """

    def finalize() -> None:
        try:
            for function in written:
                function()
            publish(staging, config, 'sha256' if verify_integrity else DEFAULT_ALGORITHM)
        except BaseException:
            give_up(staging)
            raise
        if staging.target is None and verify_integrity:
            with shared_verdict(f'write the manifest of {staging.directory}'):
                if torch.distributed.get_rank() == 0:
                    save_integrity_manifest(staging.directory)

    return finalize
