"""Which module a key belongs to, and as what.

A MIMO checkpoint names its modules in its keys; one that stock GPT wrote has the language module's
keys alone, without a prefix:

    language_model.decoder...            decoder...              weights of the language module
    modality_submodules.vision....                               weights of the module vision
    mimo.vision.optimizer...             optimizer...            optimizer
    vision.rng_state/shard_...           rng_state/shard_...     random streams
    vision.rng_state.dp_cp_1/shard_...                           those of further data-parallel ranks

Older checkpoints have ``module.`` after the module's prefix, once for each wrapper (data parallelism,
half precision) that the module had.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

LANGUAGE = "language"
LANGUAGE_PREFIX = "language_model."
ENCODER_PREFIX = "modality_submodules."
WRAPPER = "module."
RANDOM = "rng_state"
PARAM_GROUPS = "param_groups"
RUN = "run"
"""In the place of a module's name: what belongs to the run as a whole."""

_OPTIMIZER = re.compile(r"(?:mimo\.(?P<module>[^.]+)\.)?(?:chained_\d+\.)?optimizer\.(?P<rest>.*)")
_STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.[^.]+\.)(.*)")
_OLD_OPTIMIZER_OBJECT = re.compile(r"mimo\.(?P<module>[^.]+)\.")
_CARRIED = re.compile(
    r"(?:mimo\.[^.]+\.)?optimizer\.mimo\.[^.]+(?:\.(?P<number>\d+))?"
    r"\.(?P<what>param_groups|grad_scaler|param_state_sharding_type)"
)
_RANDOM = re.compile(rf"(?:(?P<module>[^.]+)\.)?{RANDOM}(?:\.dp_cp_(?P<rank>\d+))?(?:/.*)?")
_WHOLE_RUN = re.compile(r"(?:common_state|rerun_state_machine_state)(?:/.*)?")


class Kind(StrEnum):
    """What an entry is to its module."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    RANDOM = "random streams"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Module and kind of one key."""

    module: str
    kind: Kind


def owner(key: str, sole_module: str = LANGUAGE) -> Owner:
    """Tell whose a key is.

    Args:
        key: of a tensor, or of an object with or without its ``/shard_...``.
        sole_module: whose the keys without a prefix are.
    """
    if _WHOLE_RUN.fullmatch(key):
        return Owner(module=RUN, kind=Kind.OTHER)
    if match := _RANDOM.fullmatch(key):
        return Owner(module=match["module"] or sole_module, kind=Kind.RANDOM)
    if match := _OPTIMIZER.match(key):
        old = _OLD_OPTIMIZER_OBJECT.match(match["rest"])
        named = match["module"] or (old and old["module"]) or sole_module
        return Owner(module=named, kind=Kind.OPTIMIZER)
    return Owner(module=weights_module(key) or sole_module, kind=Kind.WEIGHTS)


def data_rank(name: str) -> int:
    """Place in its DPxCP group of the rank whose random streams a key keeps."""
    match = _RANDOM.fullmatch(name)
    return int((match and match["rank"]) or 0)


def weights_module(key: str) -> str | None:
    """Module in the prefix of a weight's key; ``None`` for a key without one."""
    if key.startswith(LANGUAGE_PREFIX):
        return LANGUAGE
    if key.startswith(ENCODER_PREFIX):
        return key.removeprefix(ENCODER_PREFIX).partition(".")[0]
    return None


def module_prefix(module: str) -> str:
    """Prefix of a module's weights in a MIMO checkpoint."""
    return LANGUAGE_PREFIX if module == LANGUAGE else f"{ENCODER_PREFIX}{module}."


def wrapped_prefix(module: str, keys: Iterable[str], sole_module: str = LANGUAGE) -> str | None:
    """Prefix of a module's weights in these keys, with the wrappers' parts if there are any.

    Returns:
        ``None`` where the keys hold no weights of the module; ``""`` where they have no prefix.
    """
    own = [
        key for key in keys if owner(key, sole_module) == Owner(module=module, kind=Kind.WEIGHTS)
    ]
    if not own:
        return None
    prefix = module_prefix(module)
    if not own[0].startswith(prefix):
        prefix = ""
    while all(key.startswith(prefix + WRAPPER) for key in own):
        prefix += WRAPPER
    return prefix


def carried(name: str) -> tuple[int, str] | None:
    """Tell whether a MIMO optimizer's object is what stock keeps in the common state.

    Returns:
        the optimizer's number among those of its module, and what it is; else ``None``.
    """
    match = _CARRIED.fullmatch(name)
    return None if match is None else (int(match["number"] or 0), match["what"])


def bare_key(key: str, own: Owner, prefix: str) -> str:
    """Key as it would be if the module were alone, which for the language module is stock GPT's.

    Args:
        key: of a tensor or an object.
        own: whose it is.
        prefix: of the module's weights, from :func:`wrapped_prefix`.
    """
    if own.kind is Kind.WEIGHTS:
        return key.removeprefix(prefix)
    if own.kind is Kind.RANDOM:
        return key.removeprefix(f"{own.module}.")
    if own.kind is Kind.OPTIMIZER:
        bare = key.removeprefix(f"mimo.{own.module}.")
        match = _STATE.fullmatch(bare)
        return bare if match is None else match[1] + match[2].removeprefix(prefix)
    return key
