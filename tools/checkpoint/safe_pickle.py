"""Pickles of a checkpoint, read without running code from them.

``.metadata`` and the objects of a checkpoint are pickles. Plain containers, numbers, tensors and
arrays come back as such; every other class comes back as an :class:`Opaque` with its name, so that
a checkpoint can be looked at without importing Megatron, and without trusting its author.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from typing import Any

import torch

_PLAIN = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("_io", "BytesIO"),
    ("_codecs", "encode"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}
_RECORDS = "torch.distributed.checkpoint.metadata"
"""Torch's own records of what a checkpoint holds, data only."""
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


@dataclass
class Opaque:
    """An instance of a class that is not imported here, an enumeration's member for example."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __setstate__(self, state: object) -> None:
        """Keep what the class would restore itself from; attributes stay readable."""
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})

    def append(self, item: object) -> None:
        """Take what a pickled list subclass would."""
        self.items.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        """Take what a pickled dictionary subclass would."""
        self.items.append((key, value))

    def __str__(self) -> str:
        """Name and arguments: ``AttnBackend(5)``."""
        return f"{self.name}({', '.join(map(repr, self.arguments))})"

    __hash__ = object.__hash__


class Unpickler(pickle.Unpickler):
    """Makes nothing but plain values, tensors, arrays and torch's records."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any class
        """Return the class if it is known to be harmless, else a maker of :class:`Opaque`."""
        # torch.save writes Python 2's names, as pickle's protocol 2 has it
        module, name = NAME_MAPPING.get((module, name), (module, name))
        module = IMPORT_MAPPING.get(module, module)
        if (module, name) in _PLAIN:
            return getattr(importlib.import_module(module), name)
        if module == _RECORDS:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type):
                return found
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, _TORCH_VALUES) or name.endswith("Storage"):
                return found
        if module == "torch.storage" and name.endswith("Storage"):
            return getattr(torch.storage, name)
        return _opaque_class(f"{module}.{name}")


def load(file: io.IOBase) -> Any:  # noqa: ANN401 - whatever was pickled
    """Read one pickle."""
    return Unpickler(file).load()


@functools.cache
def _opaque_class(name: str) -> type:
    """Subclass of :class:`Opaque` for one name; a pickle may call it or go through ``__new__``."""

    def make(cls: type, *arguments: object, **_: object) -> Opaque:
        made = object.__new__(cls)
        Opaque.__init__(made, name, arguments)
        return made

    def ignore(self: Opaque, *arguments: object, **_: object) -> None:
        del self, arguments

    return type("Opaque", (Opaque,), {"__new__": make, "__init__": ignore})
