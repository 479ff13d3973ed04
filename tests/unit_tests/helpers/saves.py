"""Small checkpoints through the real `dist_checkpointing.save` and `load`, inside a test's ranks.

Torch and Megatron are imported inside: the module is imported by the test's own process, too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def sharded_state(value: float, elements: int = 1000) -> dict[str, Any]:
    """Return a state that every rank holds a part of: a sharded tensor, an object, common state."""
    import torch
    import torch.distributed as dist

    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.full((elements,), value + rank / 10)
    return {
        'weight': ShardedTensor.from_rank_offsets('weight', weight, (0, rank, size)),
        'stream': ShardedObject('stream', {'value': value, 'rank': rank}, (size,), (rank,)),
        'iteration': value,
    }


def save_state(directory: Path, value: float, elements: int = 1000, **options: Any) -> Any:
    """Save `sharded_state`; collective over the world. Options are those of `save`."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.save(sharded_state(value, elements), str(directory), **options)


def load_state(directory: Path, elements: int = 1000) -> dict[str, Any]:
    """Load it, as plain values; collective over the world."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded_state(float('nan'), elements), str(directory))
    return {
        'weights': sorted(set(loaded['weight'].tolist())),
        'stream': loaded['stream'],
        'iteration': loaded['iteration'],
    }


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the type and text of what a call raises, or "" when it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller compares it
        kind = 'CheckpointingException' if _is_ours(error) else type(error).__name__
        return f'{kind}: {error}'
    return ''


def _is_ours(error: Exception) -> bool:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    return isinstance(error, CheckpointingException)
