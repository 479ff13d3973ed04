"""A checkpoint's content by module: weights, optimizer, random streams, and the state of the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import DamagedCheckpointError
from tools.checkpoint.index import COMMON_STATE, Index, ObjectEntry, TensorEntry, read_index
from tools.checkpoint.naming import (
    LANGUAGE,
    RUN,
    Kind,
    Owner,
    bare_key,
    owner,
    wrapped_prefix,
)
from tools.checkpoint.payload import read_value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STOCK_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Parallel sizes of a stock checkpoint's arguments, by the keys of a module's grid."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The index of a checkpoint and its common state, seen by module."""

    index: Index
    common: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Contents:
        """Read the index and the common state of an iteration, or of a root with a tracker.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be read.
        """
        index = read_index(path)
        entry = next((e for e in index.objects.values() if e.name == COMMON_STATE), None)
        if entry is None:
            return cls(index=index, common=_old_common_state(index))
        common = read_value(index, entry.key, entry.place)
        if not isinstance(common, dict):
            msg = f"{index.directory}: {entry.key} is no dictionary but {type(common).__name__}."
            raise DamagedCheckpointError(msg)
        return cls(index=index, common=common)

    @property
    def arguments(self) -> dict[str, Any]:
        """The run's own arguments; empty where the checkpoint keeps none."""
        return vars(self.common["args"]) if "args" in self.common else {}

    @property
    def is_mimo(self) -> bool:
        """Whether the arguments or the keys speak of modules."""
        return self.arguments.get("module_layout") is not None

    @cached_property
    def layout(self) -> dict[str, dict[str, int]]:
        """Grid of each module; of a stock checkpoint the language module's. Empty: not known."""
        recorded = self.arguments.get("module_layout")
        if recorded is not None:
            return recorded
        arguments = self.arguments
        sizes = {
            key: arguments[name]
            for key, name in STOCK_SIZES.items()
            if arguments.get(name) is not None
        }
        has_encoders = any(module not in {LANGUAGE, RUN} for module, _ in self._owners.values())
        return {} if has_encoders or not sizes else {LANGUAGE: sizes}

    @cached_property
    def sole_module(self) -> str:
        """Module of the keys that name none."""
        recorded = self.arguments.get("module_layout")
        if recorded is not None and len(recorded) == 1:
            return next(iter(recorded))
        return LANGUAGE

    @cached_property
    def _owners(self) -> dict[str, tuple[str, Kind]]:
        keys = [*self.index.tensors, *self.index.objects]
        owners = {key: owner(key, self.sole_module) for key in keys}
        return {key: (found.module, found.kind) for key, found in owners.items()}

    def owner(self, key: str) -> Owner:
        """Module and kind of one key."""
        module, kind = self._owners[key]
        return Owner(module=module, kind=kind)

    def prefix(self, module: str) -> str | None:
        """Prefix of a module's weights, wrappers' parts included; ``None`` if it has no weights."""
        return wrapped_prefix(module, self.index.tensors, self.sole_module)

    def bare_keys(self, module: str) -> dict[str, str]:
        """Keys of a module, as if it were alone (stock GPT's), by the keys that they have here."""
        prefix = self.prefix(module) or ""
        owners = {key: self.owner(key) for key in self._owners}
        return {
            key: bare_key(key, own, prefix) for key, own in owners.items() if own.module == module
        }

    @property
    def modules(self) -> list[str]:
        """Names of the modules, in the order of the layout, then of the keys."""
        named = [module for module, _ in self._owners.values() if module != RUN]
        return list(dict.fromkeys([*self.layout, *named]))

    def tensors(self, module: str, kind: Kind) -> list[TensorEntry]:
        """Tensors of a module."""
        return [t for t in self.index.tensors.values() if self._owners[t.key] == (module, kind)]

    def objects(self, module: str, kind: Kind) -> list[ObjectEntry]:
        """Objects of a module."""
        return [o for o in self.index.objects.values() if self._owners[o.key] == (module, kind)]

    def value(self, entry: ObjectEntry) -> Any:  # noqa: ANN401 - any object
        """Read an object.

        Raises:
            DamagedCheckpointError: naming the key and the file.
        """
        return read_value(self.index, entry.key, entry.place)

    def optimizer_groups(self, module: str) -> Iterator[dict[str, Any]]:
        """Parameter groups of a module's optimizer; each once, however many ranks hold it."""
        held = [
            self.value(entry)
            for entry in self.objects(module, Kind.OPTIMIZER)
            if entry.name.endswith((".param_groups", "dp_group_idx_0.optimizer"))
        ]
        if not held and module == self.sole_module:
            held = [self.common.get("optimizer")]
        for value in held:
            yield from _groups(value)


def _groups(value: object) -> Iterator[dict[str, Any]]:
    """Parameter groups in an optimizer's plain state, wherever they are."""
    if isinstance(value, list):
        yield from (group for group in value if isinstance(group, dict))
    elif isinstance(value, dict):
        own = value.get("param_groups")
        if own is not None:
            step = value.get("state", {}).get("common_step")
            yield from (group if step is None else {"common_step": step, **group} for group in own)
        else:
            for part in value.values():
                if isinstance(part, dict):
                    yield from _groups(part)


def _old_common_state(index: Index) -> dict[str, Any]:
    """Common state of a checkpoint of before 0.19, a file of its own."""
    import torch

    from tools.checkpoint import safe_pickle

    path = index.directory / "common.pt"
    if not path.is_file():
        msg = f"{index.directory} has no {COMMON_STATE}: neither a key nor {path.name}."
        raise DamagedCheckpointError(msg)
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
    except Exception as error:
        msg = f"{path} cannot be read ({type(error).__name__}: {error})."
        raise DamagedCheckpointError(msg) from error
