"""Bytes of a checkpoint's items: chunks, objects, and their checksums.

Every item is what ``torch.save`` writes, a zip archive with a CRC-32 of each part. Reading takes
memory for one chunk; checking takes memory for a piece.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import torch

from tools.checkpoint import safe_pickle
from tools.checkpoint.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.checkpoint.index import Index, Place

PIECE = 4 * 2**20
"""Bytes that are read at once where an item is only checked or copied."""


class Slice(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, path: Path, place: Place) -> None:
        """Open the file.

        Raises:
            DamagedCheckpointError: it is missing or ends before the range does.
        """
        super().__init__()
        self._start, self._length, self._position = place.offset, place.length, 0
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            msg = f"{path} is missing."
            raise DamagedCheckpointError(msg) from None
        size = self._file.seek(0, io.SEEK_END)
        if size < place.offset + place.length:
            self._file.close()
            msg = f"{path} is cut off: it has {size} bytes, {place.offset + place.length} are read."
            raise DamagedCheckpointError(msg)

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(wanted) or 0
        self._position += count
        return count

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_place(index: Index, place: Place) -> Slice:
    """Open the bytes of one item."""
    return Slice(index.directory / place.file, place)


def pieces(index: Index, place: Place) -> Iterator[bytes]:
    """Bytes of one item, piece by piece."""
    with open_place(index, place) as file:
        while piece := file.read(PIECE):
            yield piece


def read_value(index: Index, key: str, place: Place | None) -> Any:  # noqa: ANN401 - any object
    """Read one chunk or object into memory; an object comes without the list around it.

    Raises:
        DamagedCheckpointError: naming the key and the file.
    """
    if place is None:
        msg = f"{index.directory}: {key} is listed, but no file holds it."
        raise DamagedCheckpointError(msg)
    try:
        with open_place(index, place) as file:
            value = torch.load(
                io.BufferedReader(file, PIECE),
                map_location="cpu",
                weights_only=False,
                pickle_module=safe_pickle,
            )
    except DamagedCheckpointError:
        raise
    except Exception as error:
        msg = f"{index.directory / place.file}: {key} cannot be read ({_short(error)})."
        raise DamagedCheckpointError(msg) from error
    is_wrapped = isinstance(value, list) and len(value) == 1 and key not in index.tensors
    return value[0] if is_wrapped else value


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Shape and type of a stored tensor, read without its values."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


def check_item(index: Index, place: Place, *, values: bool = True) -> Any:  # noqa: ANN401
    """Compare every byte of an item with the checksums inside it, in little memory.

    Args:
        index: of the checkpoint.
        place: of the item.
        values: read all of it; without, only what describes it.

    Returns:
        what the item holds, with a :class:`TensorHeader` in the place of each tensor.

    Raises:
        ValueError: what is wrong, without the file's name.
        DamagedCheckpointError: the file is missing or too short.
    """
    try:
        with open_place(index, place) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist() if values else ():
                with archive.open(member) as part:
                    while part.read(PIECE):
                        pass
            (pickled,) = (m for m in archive.infolist() if m.filename.endswith("/data.pkl"))
            with archive.open(pickled) as part:
                return _HeaderUnpickler(io.BytesIO(part.read())).load()
    except DamagedCheckpointError:
        raise
    except Exception as error:  # a broken zip or pickle raises anything
        raise ValueError(_short(error)) from error


_STORAGE_TYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _HeaderUnpickler(safe_pickle.Unpickler):
    """Leaves the values of tensors where they are."""

    @override
    def persistent_load(self, pid: Any) -> Any:
        return pid

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return _tensor_header
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *_: data
        if name.endswith("Storage"):
            return _STORAGE_TYPES.get(name)
        return super().find_class(module, name)


def _tensor_header(
    storage: tuple[Any, ...], offset: int, sizes: tuple[int, ...], *rest: object
) -> TensorHeader:
    """Stand in for torch's functions of one name; the newest of them takes the type as well."""
    del offset
    named = [value for value in rest if isinstance(value, torch.dtype)]
    return TensorHeader(sizes=tuple(sizes), dtype=(named or [storage[1]])[0])


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
