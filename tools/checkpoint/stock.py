"""The common state of one module alone, as Megatron's own loader reads it.

Unlike the other files of this package, this one imports Megatron: the arguments in a common state
hold some of its classes, and they have to be written again as what they were.
"""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import torch

from tools.checkpoint.errors import DamagedCheckpointError
from tools.checkpoint.index import COMMON_STATE
from tools.checkpoint.naming import LANGUAGE, PARAM_GROUPS, Kind, carried
from tools.checkpoint.payload import pieces
from tools.checkpoint.quiet import import_quietly

if TYPE_CHECKING:
    from tools.checkpoint.contents import Contents
    from tools.checkpoint.index import ObjectEntry

_CLASSES = "megatron.core.safe_globals"
"""Registers the classes that Megatron allows in a checkpoint."""


def whole_optimizer(contents: Contents, module: str) -> str | None:
    """Say why a module's optimizer state cannot be what stock GPT keeps; ``None`` if it can."""
    if module != LANGUAGE:
        return "an encoder alone has no training of its own"
    if not contents.tensors(module, Kind.OPTIMIZER):
        return "the checkpoint has none of this module"
    frozen = [path for path in contents.arguments.get("freeze", ()) if _is_within(path, module)]
    if frozen:
        return f"parts were frozen (--freeze {frozen[0]}), which stock GPT does not know"
    return None


def common_state(contents: Contents, module: str, *, resumable: bool) -> dict[str, Any]:
    """Build the common state of a module alone.

    Args:
        contents: the whole checkpoint.
        module: whose state it becomes.
        resumable: with the state of the optimizer and the scheduler; without, Megatron is told
            through the arguments not to look for them, nor for random streams.
    """
    state = dict(_read_common(contents))
    state.pop("rerun_state_machine", None)
    state.pop("optimizer", None)
    arguments = copy.copy(state["args"])
    grid = contents.layout.get(module)
    if module == LANGUAGE:
        vars(arguments).pop("module_layout", None)
    else:
        arguments.module_layout = {module: {**(grid or {}), "offset": 0}}
    if grid is not None:
        arguments.world_size = grid["tp"] * grid["pp"] * grid["dp"] * grid["cp"]
    if resumable:
        state["optimizer"] = _optimizer(contents, module)
    else:
        state.pop("opt_param_scheduler", None)
        arguments.no_save_optim = arguments.no_save_rng = True
    return {**state, "args": arguments}


def _optimizer(contents: Contents, module: str) -> dict[Any, Any]:
    """Plain state of stock's optimizer: one dictionary, or one for each of several."""
    arguments = contents.arguments
    is_plain = not any(
        arguments.get(name) for name in ("use_distributed_optimizer", "bf16", "fp16")
    )
    parts: dict[int, dict[str, Any]] = {}
    for entry in contents.objects(module, Kind.OPTIMIZER):
        place = carried(entry.name)
        if place is None:
            continue
        number, what = place
        part, value = parts.setdefault(number, {}), _read(contents, entry)
        if what != PARAM_GROUPS:
            part[what] = value
            continue
        torch_state = _torch_state(value)
        part.update(torch_state if is_plain else {"optimizer": torch_state})
    return parts if len(parts) > 1 else parts.get(0, {})


def _torch_state(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What torch's optimizer says of itself, without its parameters."""
    steps = [group["common_step"] for group in groups if "common_step" in group]
    left_out = ("params", "common_step")
    bare = [{k: v for k, v in group.items() if k not in left_out} for group in groups]
    state = {"state": {"common_step": steps[0]}} if steps else {}
    return {**state, PARAM_GROUPS: bare}


def _is_within(path: str, module: str) -> bool:
    return path.partition(".")[0] == module


def _read_common(contents: Contents) -> dict[str, Any]:
    for entry in contents.index.objects.values():
        if entry.name == COMMON_STATE:
            return _read(contents, entry)
    import_quietly(_CLASSES)
    path = contents.index.directory / "common.pt"
    return torch.load(path, map_location="cpu", weights_only=True)


def _read(contents: Contents, entry: ObjectEntry) -> Any:  # noqa: ANN401 - any object
    """Read an object as Megatron does."""
    import_quietly(_CLASSES)
    assert entry.place is not None
    raw = io.BytesIO(b"".join(pieces(contents.index, entry.place)))
    try:
        (value,) = torch.load(raw, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises anything
        msg = (
            f"{contents.index.directory / entry.place.file}: {entry.key} cannot be read ({error})."
        )
        raise DamagedCheckpointError(msg) from error
    return value
