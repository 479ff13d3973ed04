"""Whether two stored values are the same, bit for bit, and if not how far apart."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools.checkpoint.coverage import intersection
from tools.checkpoint.payload import read_value
from tools.checkpoint.safe_pickle import Opaque

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.checkpoint.index import Chunk, Index, TensorEntry

_BLOCK = 2**20
"""Values that are compared at once."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 60


@dataclass(kw_only=True)
class Distance:
    """How two tensors differ."""

    different: int = 0
    """Values with other bits (of tensors with two types: other values)."""
    largest: float = 0.0
    """Largest absolute difference; NaN where one side alone has one."""

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take two flat tensors of one size into account, in blocks."""
        for start in range(0, first.numel(), _BLOCK):
            a, b = first[start : start + _BLOCK], second[start : start + _BLOCK]
            apart = _bits(a) != _bits(b) if a.dtype == b.dtype else _wide(a) != _wide(b)
            count = int(apart.sum())
            if not count:
                continue
            self.different += count
            largest = float((_wide(a[apart]) - _wide(b[apart])).abs().max())
            is_nan = math.isnan(self.largest) or math.isnan(largest)
            self.largest = math.nan if is_nan else max(self.largest, largest)


def tensor_distance(a: Index, first: TensorEntry, b: Index, second: TensorEntry) -> Distance:
    """Compare two stored tensors of one shape, however each is cut into chunks.

    At most one chunk of each is in memory.

    Raises:
        DamagedCheckpointError: a chunk cannot be read.
    """
    distance = Distance()
    held: tuple[Chunk | None, torch.Tensor] = (None, torch.empty(0))
    others = sorted(second.chunks, key=lambda chunk: chunk.offsets)
    for chunk in sorted(first.chunks, key=lambda chunk: chunk.offsets):
        value = None
        for other in others:
            box = intersection(chunk, other)
            if box is None:
                continue
            if value is None:
                value = _chunk(a, first, chunk)
            if held[0] is not other:
                held = (None, torch.empty(0))
                held = (other, _chunk(b, second, other))
            distance.add(_part(value, chunk, box), _part(held[1], other, box))
        del value
    return distance


def _chunk(index: Index, tensor: TensorEntry, chunk: Chunk) -> torch.Tensor:
    return read_value(index, tensor.key, chunk.place).reshape(chunk.sizes)


def _part(value: torch.Tensor, chunk: Chunk, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    spans = tuple(
        slice(start - offset, end - offset)
        for (start, end), offset in zip(box, chunk.offsets, strict=True)
    )
    return value[spans].reshape(-1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def object_differences(first: Any, second: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401
    """Compare two plain values, arguments or states; yield the path and what differs there."""
    first, second = _plain(first), _plain(second)
    if type(first) is not type(second):
        yield path, f"{_in_words(first)} / {_in_words(second)}"
    elif isinstance(first, dict):
        yield from _dictionary_differences(first, second, path)
    elif isinstance(first, torch.Tensor):
        yield from _tensor_differences(first, second, path)
    elif isinstance(first, list | tuple) and not _is_flat((*first, *second)):
        if len(first) != len(second):
            yield path, f"{len(first)} / {len(second)} entries"
        for number, (a, b) in enumerate(zip(first, second, strict=False)):
            yield from object_differences(a, b, f"{path}.{number}")
    elif repr(first) != repr(second):
        yield path, f"{_in_words(first)} / {_in_words(second)}"


def _dictionary_differences(
    first: dict[Any, Any], second: dict[Any, Any], path: str
) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys([*first, *second]):
        inner = f"{path}.{key}"
        if key not in second:
            yield inner, "only in A"
        elif key not in first:
            yield inner, "only in B"
        else:
            yield from object_differences(first[key], second[key], inner)


def _is_flat(items: tuple[Any, ...]) -> bool:
    return all(isinstance(item, int | float | str) for item in items)


def _tensor_differences(
    first: torch.Tensor, second: torch.Tensor, path: str
) -> Iterator[tuple[str, str]]:
    if first.shape != second.shape:
        yield path, f"shapes {list(first.shape)} / {list(second.shape)}"
        return
    distance = Distance()
    distance.add(first.reshape(-1), second.reshape(-1))
    if first.dtype != second.dtype:
        yield path, f"types {first.dtype} / {second.dtype}"
    elif distance.different:
        yield path, f"{distance.different} values, at most {distance.largest:.3g} apart"


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a checkpoint keeps
    """Make values comparable that hold others."""
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy().view(f"i{value.dtype.itemsize}"))
    if isinstance(value, BytesIO):
        return value.getvalue()
    if isinstance(value, Opaque):
        return {"class": value.name, "arguments": value.arguments, "state": value.state}
    return value


def _in_words(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
