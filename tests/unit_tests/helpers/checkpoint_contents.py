"""What a checkpoint holds, key by key, as digests that one process reads without Megatron."""

import hashlib
import io
from pathlib import Path
from typing import Any

COMMON = "common_state"
# Arguments that say where a run's files are and where it started, not what it computes.
_STARTED = ("save", "load", "ckpt_step", "iteration", "num_floating_point_operations_so_far")


def checkpoint_contents(folder: Path) -> dict[str, str]:
    """Digest of every tensor, object and common value of one iteration's folder.

    Reads the whole of it into memory; for small checkpoints.

    Returns:
        By key: a tensor's name, an object's name with its place, or ``common_state`` and the name
        of a common value, each of the run's arguments being one.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: (
            torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else io.BytesIO()
        )
        for key, entry in entries.items()
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    found = {}
    for key, value in state.items():
        if key.startswith(COMMON):
            (common,) = _object(value)
            arguments = vars(common.pop('args'))
            common |= {f"args.{k}": v for k, v in arguments.items() if k not in _STARTED}
            found |= {f"{COMMON}.{name}": _digest(item) for name, item in common.items()}
        else:
            found[key] = _digest(value)
    return found


def _object(stored: io.BytesIO) -> Any:
    """Unpickle an object, which is stored as the file of a pickled file."""
    import torch

    value = stored
    while isinstance(value, io.BytesIO):
        value.seek(0)
        value = torch.load(value, weights_only=False)
    return value


def _digest(value: Any) -> str:
    if isinstance(value, io.BytesIO):
        value = _object(value)
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Turn a value into one whose text tells every bit of it."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return (str(value.dtype), tuple(value.shape), _plain(data))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, dict):
        return [(repr(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    return value.hex() if isinstance(value, float) else value
