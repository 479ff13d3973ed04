"""What of a checkpoint a MIMO run under another layout can take, decided before anything is read.

Every rank holds the checkpoint's common state, its metadata file and its own description of what it
would load. What cannot be loaded is one sentence that names the module, the saved and the present
number and the flag that helps; it is shared, so that every rank raises it and none is left waiting.
"""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple, Union

from torch.distributed.checkpoint import FileSystemReader

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.verdict import first_problem
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.optimizer import SAVED_OPTIMIZERS
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.module_layout import Arguments, GridChange, compare_grids, has_modules

Sizes = Dict[str, Optional[Tuple[int, ...]]]

_FULLY = 'fully_reshardable'
_DEFAULT = 'dp_reshardable'
_FRESH = "pass --no-load-optim to start with a fresh optimizer"


class ReshardError(ValueError):
    """A checkpoint that this run's layout cannot load; the message is one sentence."""


def raise_on_every_rank(problem: Optional[str]) -> None:
    """Share what is wrong on any rank. Collective over the world: every rank calls it.

    Raises:
        ReshardError: on every rank alike, with the problem of the first rank that has one.
    """
    first = first_problem(problem)
    if first is not None:
        raise ReshardError(first)


def check_layout(
    args: Arguments,
    saved_args: Arguments,
    checkpoint: str,
    metadata: Optional[Dict[str, Any]],
    optimizer: Any,
    release: bool,
) -> None:
    """Refuse, on every rank, a checkpoint whose layout this run cannot load.

    Called by ``load_checkpoint`` once the common state is read. In a MIMO run collective over the
    world; does nothing in any other.

    Args:
        args: of the run.
        saved_args: of the run that wrote the checkpoint.
        checkpoint: folder of the iteration.
        metadata: content metadata of the checkpoint.
        optimizer: the MIMO optimizer of this rank, or ``None``.
        release: whether it is a release checkpoint, of which the model alone is loaded.

    Raises:
        ReshardError: naming module, numbers and flag.
    """
    if not has_modules(args):
        return
    problems = [*_module_problems(args, saved_args, checkpoint)]
    if optimizer is not None and not (release or args.finetune or args.no_load_optim):
        problems += _optimizer_problems(args, saved_args, checkpoint, metadata or {}, optimizer)
    raise_on_every_rank(next(iter(problems), None))


def check_stock_optimizer(
    args: Arguments,
    saved_model_parallel: Tuple[Any, ...],
    present_model_parallel: Tuple[Any, ...],
    metadata: Dict[str, Any],
    mismatch: str,
) -> None:
    """Refuse the optimizer state of a stock run if its format is tied to a (TP, PP) that changed.

    Not collective. A MIMO run has had its answer from :func:`check_layout`.

    Raises:
        RuntimeError: as upstream does, but naming the flag that helps.
    """
    kind = metadata['distrib_optim_sharding_type']
    if has_modules(args) or saved_model_parallel == present_model_parallel:
        return
    if kind not in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        raise RuntimeError(
            f"{mismatch}: the optimizer state was saved as {kind}, which is tied to TP and PP; "
            f"save the checkpoint again with --dist-ckpt-optim-fully-reshardable, or {_FRESH}."
        )


def optimizer_arguments(
    args: Arguments, checkpoint: str, metadata: Dict[str, Any]
) -> Dict[str, Any]:
    """Arguments with which ``load_checkpoint`` asks the optimizer what to load. Not collective.

    Tells a MIMO optimizer how many optimizers each module had: experts have one of their own only
    where expert parallelism is above 1. The metadata that is passed in stays as it is.
    """
    if has_modules(args) and _has_contents(checkpoint):
        metadata = {**metadata, SAVED_OPTIMIZERS: _saved_optimizers(set(_saved_sizes(checkpoint)))}
    return {'metadata': metadata, 'is_loading': True}


def check_contents(args: Arguments, checkpoint: str, sharded_state_dict: Dict[str, Any]) -> None:
    """Refuse, on every rank, a checkpoint that lacks what is asked for, or has it in another shape.

    Called by ``load_checkpoint`` once it is described what to load. In a MIMO run collective over
    the world; does nothing in any other.

    Args:
        args: of the run.
        checkpoint: folder of the iteration.
        sharded_state_dict: what this rank would load.

    Raises:
        ReshardError: naming module, key and both shapes.
    """
    if not has_modules(args) or not _has_contents(checkpoint):
        return
    saved = _saved_sizes(checkpoint)
    raise_on_every_rank(_contents_problem(Path(checkpoint), saved, sharded_state_dict))


def _module_problems(args: Arguments, saved_args: Arguments, checkpoint: str) -> Iterator[str]:
    """What the checkpoint's modules have against it, whatever is to be loaded of them."""
    changes = compare_grids(saved_args, args)
    saved = ", ".join(name for name, change in changes.items() if change.saved is not None)
    for name, change in changes.items():
        if change.saved is None:
            yield (
                f"--module {name}: {checkpoint} has no such module, it was saved with {saved}; "
                f"leave it out, or start anew with {_instead(checkpoint)}."
            )
        if change.present is None and not args.finetune:
            yield (
                f"module {name} of {checkpoint} has no --module here and would be "
                f"lost; add --module {name}:..., or pass --finetune to go on without it."
            )
    words = getattr(saved_args, 'vocab_size', None), getattr(args, 'vocab_size', None)
    if None not in words and words[0] != words[1]:
        yield f"module {MIMO_LANGUAGE_MODULE_KEY}: --vocab-size was {words[0]} and is {words[1]}."


def _optimizer_problems(
    args: Arguments,
    saved_args: Arguments,
    checkpoint: str,
    metadata: Dict[str, Any],
    optimizer: Any,
) -> Iterator[str]:
    """Why the optimizer state of this rank's modules cannot be loaded."""
    if getattr(saved_args, 'no_save_optim', False):
        yield f"{checkpoint} was saved with --no-save-optim; {_FRESH}."
        return
    for name, flag in (
        ('use_distributed_optimizer', '--use-distributed-optimizer'),
        ('optimizer', '--optimizer'),
        ('bf16', '--bf16'),
        ('fp16', '--fp16'),
    ):
        then, now = getattr(saved_args, name, None), getattr(args, name)
        if then != now and not (name.endswith('16') and args.use_distributed_optimizer):
            yield (
                f"{checkpoint} was saved {_given(flag, then)}, this run is {_given(flag, now)}; "
                f"{_FRESH}."
            )
            return
    if not args.use_distributed_optimizer:
        return
    kind = metadata.get('distrib_optim_sharding_type')
    if kind not in (_DEFAULT, _FULLY):
        yield (
            f"{checkpoint} holds its optimizer state as {kind}, a retired format; load and save it "
            f"with the release that wrote it and --dist-ckpt-optim-fully-reshardable, or {_FRESH}."
        )
    elif kind == _DEFAULT:
        for change in compare_grids(saved_args, args).values():
            if _trains(optimizer, change.module):
                yield from _default_format_problems(checkpoint, change, saved_args)


def _default_format_problems(
    checkpoint: str, change: GridChange, saved_args: Arguments
) -> Iterator[str]:
    """Changed sizes that the default format is tied to, as it keeps each rank's own buffers."""
    tied = ['tp', 'pp']
    if getattr(saved_args, 'num_experts', None):
        tied += ['ep', 'etp']
    changed = [size for size in tied if size in change.sizes]
    if changed:
        yield (
            f"--module {change.module}: {change.describe(*changed)} since {checkpoint} was saved, "
            "whose optimizer state is in the default format and follows a change of dp or cp "
            "alone; save it under its own layout with --dist-ckpt-optim-fully-reshardable, "
            f"or {_FRESH}."
        )


def _trains(optimizer: Any, module: str) -> bool:
    """Whether this rank has an optimizer of the module."""
    info = optimizer.module_infos.get(module)
    return info is not None and info.optimizer is not None


def _given(flag: str, value: Any) -> str:
    """Say how a flag was given: ``with --bf16``, ``without --bf16``, ``with --optimizer adam``."""
    if isinstance(value, bool) or value is None:
        return f"{'with' if value else 'without'} {flag}"
    return f"with {flag} {value}"


def _has_contents(checkpoint: str) -> bool:
    """Whether the checkpoint says what it contains; one in a node's memory has no such file."""
    return Path(checkpoint, '.metadata').exists()


def _saved_sizes(checkpoint: str) -> Sizes:
    """Shape of every tensor of a checkpoint by key, and ``None`` of every object."""
    file = Path(checkpoint, '.metadata').stat()
    return _read_sizes(checkpoint, (file.st_mtime_ns, file.st_size))


@lru_cache(maxsize=1)
def _read_sizes(checkpoint: str, _version: Tuple[int, int]) -> Sizes:
    """Read them once for all questions about one checkpoint; its metadata file can be large."""
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key: tuple(entry.size) if hasattr(entry, 'size') else None for key, entry in saved.items()
    }


def _saved_optimizers(keys: Set[str]) -> Dict[str, int]:
    """Count the optimizers of each module by the objects of their parameter groups."""
    found = (key.split('.param_groups')[0] for key in keys if '.param_groups/' in key)
    return Counter(key.split('optimizer.mimo.', 1)[-1].split('.')[0] for key in found)


def _contents_problem(
    checkpoint: Path, saved: Sizes, sharded_state_dict: Dict[str, Any]
) -> Optional[str]:
    """What is asked for and has another shape, else what is missing; the first by key."""
    wanted: Sizes = {}
    for entry in described_entries(sharded_state_dict):
        if isinstance(entry, ShardedObject):
            wanted[entry.unique_key] = None
        elif entry.allow_shape_mismatch:  # padding of the vocabulary follows TP
            wanted[entry.key] = saved.get(entry.key)
        else:
            wanted[entry.key] = tuple(entry.global_shape)
    for key, shape in sorted(wanted.items()):
        if shape is not None and saved.get(key, shape) != shape:
            return (
                f"module {_module_of(key)}: {key} is {saved[key]} in {checkpoint}, but {shape} in "
                "this run; the model's sizes must be those that were saved."
            )
    missing = sorted(key for key in wanted if key not in saved)
    return _missing(checkpoint, missing, saved) if missing else None


def described_entries(sharded_state_dict: Union[Dict[str, Any], List[Any]]) -> Iterator[Any]:
    """Every sharded tensor and object, those that factories make included. Not collective."""
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensorFactory):
            yield from nested_values([entry.build()])
        elif isinstance(entry, (ShardedTensor, ShardedObject)):
            yield entry


def _missing(checkpoint: Path, keys: List[str], saved: Sizes) -> str:
    """Say what is missing, and what helps against it."""
    first, module = keys[0], _module_of(keys[0])
    more = f" nor {len(keys) - 1} more" if len(keys) > 1 else ""
    if 'rng_state' in first:
        remedy = "pass --no-load-rng to go on with fresh random streams"
    elif first.startswith('mimo.'):
        remedy = f"the module did not train, or not as here, when it was saved; {_FRESH}"
    elif not any(_module_of(key) for key in saved):
        remedy = f"no MIMO run wrote it; start anew with {_instead(checkpoint)}"
    else:
        remedy = "the model must be the one that was saved"
    return f"module {module}: {checkpoint} has no {first}{more}; {remedy}."


def _instead(checkpoint: Union[str, Path]) -> str:
    """Flag that takes the language module's weights, and nothing else, from a checkpoint."""
    folder = Path(checkpoint).parent
    return f"--load-module {MIMO_LANGUAGE_MODULE_KEY}={folder} in place of --load"


def _module_of(key: str) -> str:
    """Module that a key belongs to, or nothing."""
    parts = key.split('.')
    if parts[0] == 'language_model':
        return MIMO_LANGUAGE_MODULE_KEY
    if parts[0] in ('modality_submodules', 'mimo') and len(parts) > 1:
        return parts[1]
    return parts[0] if 'rng_state' in key else ''
