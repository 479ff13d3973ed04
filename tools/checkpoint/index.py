"""What a checkpoint says that it holds, and where: its ``.metadata`` in records of ours.

Only what ``.metadata`` lists is content. Other files in the directory, such as shards that an older
and larger run left behind, are :attr:`Index.stale_files`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.checkpoint import safe_pickle
from tools.checkpoint.errors import CheckpointError, DamagedCheckpointError
from tools.checkpoint.place import METADATA, iteration_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMON_STATE = "common_state"
_OBJECT = re.compile(r"(?P<name>.+)/shard_(?P<position>[\d.]+)_(?P<grid>[\d.]+)")
_WRITTEN = ".distcp"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of one item: a file of the checkpoint's directory and a range in it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One shard of a tensor: where it lies in the whole, and its bytes (``None``: nowhere)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of the checkpoint, whole."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    properties: Any
    """Torch's own record, for a checkpoint that is written from this one."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without what the files add."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One shard of an object that is no tensor; ``key`` is ``{name}/shard_{position}_{grid}``."""

    key: str
    name: str
    position: tuple[int, ...]
    grid: tuple[int, ...]
    place: Place | None


@dataclass(frozen=True, kw_only=True)
class Index:
    """All entries of one iteration."""

    directory: Path
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    backend: str
    unlisted: tuple[str, ...]
    """Keys that have bytes but are not described."""

    def places(self) -> Iterator[tuple[str, Place | None]]:
        """Key and bytes of every chunk and object, in the order of ``.metadata``."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield tensor.key, chunk.place
        for item in self.objects.values():
            yield item.key, item.place

    @property
    def files(self) -> list[str]:
        """Names of the files that hold content."""
        return sorted({place.file for _, place in self.places() if place is not None})

    @property
    def stale_files(self) -> list[str]:
        """Shard files in the directory that hold nothing of this checkpoint."""
        used = set(self.files)
        return sorted(p.name for p in self.directory.glob(f"*{_WRITTEN}") if p.name not in used)


def read_index(path: Path) -> Index:
    """Read what a checkpoint holds; ``path`` is an iteration or a root with a tracker.

    Raises:
        CheckpointError: there is none, or it has another format.
        DamagedCheckpointError: it cannot be read.
    """
    directory = iteration_directory(path)
    backend = _backend(directory)
    metadata = _read_metadata(directory / METADATA)
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): Place(
            file=str(info.relative_path), offset=info.offset, length=info.length
        )
        for index, info in metadata.storage_data.items()
    }
    if any(getattr(info, "transform_descriptors", None) for info in metadata.storage_data.values()):
        msg = f"{directory} holds compressed or encrypted shards; this tool reads plain ones."
        raise CheckpointError(msg)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            tensors[key] = _tensor(key, entry, places)
        else:
            objects[key] = _object(key, places.get((key, None)))
    known = tensors.keys() | objects.keys()
    unlisted = tuple(sorted({key for key, _ in places} - known))
    return Index(
        directory=directory, tensors=tensors, objects=objects, backend=backend, unlisted=unlisted
    )


def _read_metadata(path: Path) -> Any:  # noqa: ANN401 - torch's record, or an older Megatron's
    try:
        with path.open("rb") as file:
            metadata = safe_pickle.load(file)
        is_whole = None not in (metadata.state_dict_metadata, metadata.storage_data)
    except OSError:
        raise
    except Exception as error:  # a broken pickle raises anything
        msg = f"{path} cannot be read ({type(error).__name__}: {error})."
        raise DamagedCheckpointError(msg) from error
    if not is_whole:
        msg = f"{path} cannot be read (it lists nothing)."
        raise DamagedCheckpointError(msg)
    return metadata


def _backend(directory: Path) -> str:
    """Format and version from ``metadata.json``, which is written last."""
    path = directory / "metadata.json"
    if not path.is_file():
        msg = f"{path} is missing: the checkpoint was not written to its end."
        raise DamagedCheckpointError(msg)
    try:
        record = json.loads(path.read_text())
        backend = f"{record['sharded_backend']} {record['sharded_backend_version']}"
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path} cannot be read ({type(error).__name__}: {error})."
        raise DamagedCheckpointError(msg) from error
    if record["sharded_backend"] != "torch_dist":
        msg = f"{directory} has the format {backend!r}; this tool reads 'torch_dist'."
        raise CheckpointError(msg)
    return backend


def _tensor(key: str, entry: Any, places: dict[Any, Place]) -> TensorEntry:  # noqa: ANN401
    chunks = tuple(
        Chunk(
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            place=places.get((key, tuple(chunk.offsets))),
        )
        for chunk in entry.chunks
    )
    return TensorEntry(
        key=key,
        shape=tuple(entry.size),
        dtype=entry.properties.dtype,
        chunks=chunks,
        properties=entry.properties,
    )


def _object(key: str, place: Place | None) -> ObjectEntry:
    match = _OBJECT.fullmatch(key)
    if match is None:
        return ObjectEntry(key=key, name=key, position=(), grid=(), place=place)
    position, grid = (tuple(map(int, match[part].split("."))) for part in ("position", "grid"))
    return ObjectEntry(key=key, name=match["name"], position=position, grid=grid, place=place)
