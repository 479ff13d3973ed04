from collections import defaultdict

from megatron.core.dist_checkpointing.core import (
    CheckpointingException,
    check_is_distributed_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import CommonStateDict, ShardedObject
from megatron.core.dist_checkpointing.staging import is_in_flight
from megatron.core.dist_checkpointing.validation import (
    _GlobalMetadata,
    _validate_common_state_dict,
    _validate_objects_for_key,
    _validate_sharding_for_key,
)
from megatron.core.dist_checkpointing.verification import refuse_damaged
from megatron.core.msc_utils import maybe_msc


def verify_checkpoint(checkpoint_dir: str) -> None:
    """Refuse what is no distributed checkpoint; local, on any rank.

    Raises:
        CheckpointingException: the directory does not exist, is none of a distributed checkpoint,
            or is being written by a save of this process that is not finalized yet.
    """
    if not maybe_msc.path_isdir(str(checkpoint_dir), strict=False):
        if is_in_flight(checkpoint_dir):
            raise CheckpointingException(
                f'{checkpoint_dir} is still being saved; finalize the async save before the load'
            )
        raise CheckpointingException(f'Checkpoint directory {checkpoint_dir} does not exist')

    if not check_is_distributed_checkpoint(checkpoint_dir):
        raise CheckpointingException(f'{checkpoint_dir} is not a distributed checkpoint')


def validate_sharding_integrity(
    global_metadata: _GlobalMetadata, common_state_dict: CommonStateDict | None = None
) -> None:
    """Check that the main replicas of all ranks cover every tensor and object, each exactly once.

    Every rank that holds ``global_metadata`` calls it, and judges for itself: all of them hold the
    same, so all of them come to the same verdict. It is collective over the world (one broadcast
    from rank 0) only where ``common_state_dict`` is given.

    Args:
        global_metadata (_GlobalMetadata): what each rank saves or loads, without data.
        common_state_dict (CommonStateDict): compared with rank 0's; a difference is logged.

    Raises:
        CheckpointingException: with every key that is covered twice or not wholly; on every rank.
    """
    if common_state_dict is not None:
        _validate_common_state_dict(common_state_dict)

    by_key = defaultdict(list)
    for rank, shardings in enumerate(global_metadata):
        for sharding in shardings:
            by_key[sharding.key].append((rank, sharding))
    errors = []
    for shardings in by_key.values():
        is_object = isinstance(shardings[0][1], ShardedObject)
        validate = _validate_objects_for_key if is_object else _validate_sharding_for_key
        errors.extend(validate(shardings))
    if errors:
        text = '\n'.join(str(error) for error in errors)
        raise CheckpointingException(f'Invalid sharding pattern validation. Errors: {text}')


def verify_integrity_manifest(checkpoint_dir: str) -> None:
    """Compare every file with the manifest, all ranks together; collective over the world.

    Raises:
        CheckpointingException: there is no manifest, or a file is damaged; the same text on every
            rank.
    """
    refuse_damaged(checkpoint_dir, needs_manifest=True)
