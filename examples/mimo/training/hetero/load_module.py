"""Start a module with the weights of another checkpoint (``--load-module NAME=PATH``).

The checkpoint is read through ``megatron.core.dist_checkpointing``, so that it may have been saved at
any tensor- and pipeline-parallel size. Weights alone are taken. This happens after the modules are
wrapped and before the optimizer is built, whose main parameters are then copies of what was loaded;
optimizer, schedule and random streams start anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.dist_checkpointing.verdict import first_problem, gather_everywhere
from megatron.core.dist_checkpointing.verification import refuse_damaged
from megatron.training.checkpointing import checkpoint_exists
from megatron.training.module_reshard import described_entries

from examples.mimo.training.hetero.layout import LayoutError
from tools.checkpoint.contents import Contents
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.naming import Kind, module_prefix

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from examples.mimo.training.hetero.model import HeteroMimoModel
    from examples.mimo.training.hetero.module_sources import ModuleSource

_EXTRA_STATE = "_extra_state"
"""What a layer keeps besides weights; a checkpoint of other layers has none, or has more."""
_SHOWN = 40


class ModuleLoadError(LayoutError):
    """A module cannot start from the checkpoint that it was given."""


@dataclass(kw_only=True)
class Findings:
    """What the ranks of a module found in a checkpoint, by the keys inside the module."""

    found: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    """Missing, but allowed to be."""
    resized: dict[str, str] = field(default_factory=dict)
    """Embeddings with more or fewer rows: the two sizes in words."""
    mismatched: dict[str, str] = field(default_factory=dict)
    """Weights of another shape: the two shapes in words."""

    def add(self, other: Findings) -> None:
        """Take in what another rank found."""
        self.found |= other.found
        self.missing |= other.missing
        self.skipped |= other.skipped
        self.resized |= other.resized
        self.mismatched |= other.mismatched


class ModuleLoader:
    """Hook that loads the modules into the wrapped model, before the optimizer is built."""

    def __init__(self, sources: Sequence[ModuleSource], args: argparse.Namespace) -> None:
        """Keep what to load, in the order of the options."""
        self._sources = tuple(sources)
        self._args = args

    def __call__(self, models: list[HeteroMimoModel]) -> list[HeteroMimoModel]:
        """Load every module that was asked for.

        Collective over the world: every rank calls it, also those without the module, and loads
        the same checkpoints in the same order.

        Raises:
            ModuleLoadError: on every rank, with the same text.
        """
        if not self._sources:
            return models
        resumed = gather_everywhere(self._resumed_from())[0]
        if resumed is not None:
            _say(f"--load-module has no effect: weights come from the checkpoint in {resumed}")
            return models
        (model,) = models
        for source in self._sources:
            _load(source, model)
        return models

    def _resumed_from(self) -> str | None:
        """Folder of a checkpoint that the stock loop is going to load, as rank 0 sees it."""
        for folder in (self._args.load, self._args.pretrained_checkpoint):
            if folder is not None and checkpoint_exists(folder):
                return str(folder)
        return None


def _load(source: ModuleSource, model: HeteroMimoModel) -> None:
    """Load one module. Collective over the world; what is wrong is wrong on every rank."""
    contents = _open(source)
    prefix = contents.prefix(source.module)
    if prefix is None:
        known = ", ".join(name for name in contents.modules if contents.tensors(name, Kind.WEIGHTS))
        msg = f"{source}: the checkpoint has no weights of {source.module}; it has {known}."
        raise ModuleLoadError(msg)
    state = _wanted(source.module, prefix, model, contents)
    findings = Findings()
    for other in gather_everywhere(_compare(state, prefix, source, contents)):
        findings.add(other)
    _refuse(source, findings)
    directory = str(contents.index.directory)
    # The shards are those that the model saves; whether each is read once says nothing here.
    loaded = dist_checkpointing.load(state, directory, validate_access_integrity=False)
    own = {key: loaded[key] for key in state}
    keys = model.load_state_dict(own, strict=False)
    assert not keys.unexpected_keys, keys.unexpected_keys
    _report(source, contents, prefix, findings)


def _open(source: ModuleSource) -> Contents:
    """Read what the checkpoint holds, on every rank.

    Raises:
        ModuleLoadError: on every rank, if one of them cannot.
    """
    contents, problem = None, None
    try:
        contents = Contents.read(source.path)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    problem = first_problem(problem)
    if problem is not None:
        msg = f"{source}: {problem}"
        raise ModuleLoadError(msg)
    assert contents is not None
    try:
        refuse_damaged(contents.index.directory)
    except CheckpointingException as error:  # the same one on every rank
        msg = f"{source}: {error}"
        raise ModuleLoadError(msg) from error
    return contents


def _wanted(module: str, prefix: str, model: HeteroMimoModel, contents: Contents) -> dict[str, Any]:
    """Describe this rank's part of the module under the keys of the checkpoint. Not collective."""
    metadata = {
        **(contents.common.get("content_metadata") or {}),
        "dp_cp_group": model.pg_collection.dp_cp,
    }
    own = module_prefix(module)
    everything = model.sharded_state_dict(metadata=metadata)
    state = {key: part for key, part in everything.items() if _key(part).startswith(own)}
    apply_prefix_mapping(state, {own: prefix})
    return state


def _key(part: ShardedTensor | ShardedObject | ShardedTensorFactory) -> str:
    return part.key


def _compare(
    state: dict[str, Any], prefix: str, source: ModuleSource, contents: Contents
) -> Findings:
    """Hold what this rank wants against what there is; drop from ``state`` what is not to be read."""
    findings = Findings()
    objects = {entry.name for entry in contents.index.objects.values()}
    for name, part in list(state.items()):
        key = part.key.removeprefix(prefix)
        if isinstance(part, ShardedObject):
            if part.key not in objects:
                del state[name]
                if _EXTRA_STATE not in key and not source.allows(key):
                    findings.missing.add(key)
            continue
        tensors = list(described_entries([part]))  # a factory stands for those that it makes
        absent = [t.key for t in tensors if t.key not in contents.index.tensors]
        if absent and source.allows(key):
            findings.skipped.add(key)
            del state[name]
        elif absent:
            findings.missing.update(wanted.removeprefix(prefix) for wanted in absent)
        else:
            for tensor in tensors:
                _compare_shape(tensor, tensor.key.removeprefix(prefix), contents, findings)
    return findings


def _compare_shape(tensor: ShardedTensor, key: str, contents: Contents, findings: Findings) -> None:
    saved, wanted = contents.index.tensors[tensor.key].shape, tuple(tensor.global_shape)
    findings.found.add(key)
    if saved == wanted:
        return
    if tensor.allow_shape_mismatch and saved[1:] == wanted[1:]:
        findings.resized[key] = f"{key}: {saved[0]} rows in the checkpoint, {wanted[0]} here"
    else:
        findings.mismatched[key] = f"{key} is {list(saved)} there, {list(wanted)} here"


def _refuse(source: ModuleSource, findings: Findings) -> None:
    """Raise the same error on every rank if something does not fit."""
    if findings.mismatched:
        wrong = "; ".join(findings.mismatched[key] for key in sorted(findings.mismatched))
        msg = f"{source}: the model has other sizes than the checkpoint: {wrong}."
        raise ModuleLoadError(msg)
    if findings.missing:
        keys = ", ".join(sorted(findings.missing))
        msg = (
            f"{source}: the checkpoint lacks {keys}; --load-module-allow-missing "
            f"{source.module}.PART lets a part start without."
        )
        raise ModuleLoadError(msg)


def _report(source: ModuleSource, contents: Contents, prefix: str, findings: Findings) -> None:
    """Say on rank 0 what was found, and list what was not."""
    weights = contents.tensors(source.module, Kind.WEIGHTS)
    unused = sorted({tensor.key.removeprefix(prefix) for tensor in weights} - findings.found)
    iteration = contents.common.get("iteration")
    lines = [
        f"{source} (iteration {iteration})",
        _listed("found", findings.found),
        _listed("missing, left as initialized", findings.skipped),
        _listed("in the checkpoint, but not in the model", unused),
        *(f"  {text}: rows beyond the checkpoint's are zero" for text in findings.resized.values()),
    ]
    _say("\n".join(lines))


def _listed(title: str, keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return f"  {title}: {len(names)}" + "".join(
        f"\n    {name}" for name in (*names[:_SHOWN], *more)
    )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)  # noqa: T201 - the run's log
