"""Write a checkpoint of the format ``torch_dist`` from one process, item by item.

What is written lies in a directory beside the final one until it is complete and on the disk; then it
gets its name, and the tracker comes last.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.place import METADATA, TRACKER
from tools.checkpoint.quiet import import_quietly

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_FILE_BYTES = 4 * 2**30
"""A new file begins after so many bytes, so that ranks can read in parallel."""


class CheckpointWriter:
    """Takes chunks and objects in any order; see :func:`new_iteration`."""

    def __init__(self, directory: Path) -> None:
        """Write into an existing, empty directory."""
        self._directory = directory
        self._number = 0
        self._file: BinaryIO | None = None
        self._entries: dict[str, Any] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._checksums: dict[str, int] = {}

    def add_chunk(
        self,
        key: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        properties: dcp.TensorProperties,
        payload: Iterable[bytes],
    ) -> None:
        """Add a chunk of a tensor, as the bytes that ``torch.save`` made of it."""
        offset = torch.Size(offsets)
        entry = self._entries.setdefault(
            key, dcp.TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=[])
        )
        index = dcp.MetadataIndex(key, offset, len(entry.chunks))
        entry.chunks.append(dcp.ChunkStorageMetadata(offsets=offset, sizes=torch.Size(sizes)))
        self._places[index] = self._write(payload)

    def add_object(self, key: str, payload: Iterable[bytes]) -> None:
        """Add a shard of an object, as the bytes that ``torch.save`` made of it."""
        self._entries[key] = dcp.BytesStorageMetadata()
        self._places[dcp.MetadataIndex(key)] = self._write(payload)

    def finish(self, *, manifest: bool) -> None:
        """Write what the directory holds, and bring all of it to the disk."""
        self._close()
        metadata = dcp.Metadata(
            state_dict_metadata=self._entries,
            planner_data=None,
            storage_data=self._places,
            storage_meta=dcp.StorageMeta(),
        )
        _write_durably(self._directory / METADATA, pickle.dumps(metadata))
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        _write_durably(self._directory / "metadata.json", json.dumps(backend).encode())
        if manifest:
            self._write_manifest()
        _sync_directory(self._directory)

    def _write(self, payload: Iterable[bytes]) -> _StorageInfo:
        if self._file is None or self._file.tell() >= _FILE_BYTES:
            self._close()
            self._file = (self._directory / f"__0_{self._number}.distcp").open("wb")
            self._number += 1
        start, name = self._file.tell(), Path(self._file.name).name
        checksum = self._checksums.get(name, 0)
        for piece in payload:
            self._file.write(piece)
            checksum = zlib.crc32(piece, checksum)
        self._checksums[name] = checksum
        return _StorageInfo(name, start, self._file.tell() - start)

    def _write_manifest(self) -> None:
        """Write the file that tells every other file's size and checksum, as our saves do."""
        integrity = import_quietly("megatron.core.dist_checkpointing.integrity")
        taken = {
            name: integrity.FileDigest(
                name=name,
                size=(self._directory / name).stat().st_size,
                checksum=f"{checksum:08x}",
            )
            for name, checksum in self._checksums.items()
        }
        manifest = integrity.make_manifest(self._directory, taken)
        _write_durably(self._directory / integrity.MANIFEST, manifest.text().encode())

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def dumped(value: object) -> list[bytes]:
    """An object's bytes, in the list of shards that Megatron puts around it."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return [buffer.getvalue()]


@contextlib.contextmanager
def new_iteration(
    root: Path, iteration: int, *, manifest: bool = True
) -> Iterator[CheckpointWriter]:
    """Write ``root/iter_...`` and make it the one that the tracker names, if the block ends well.

    Args:
        root: folder of the tracker, made if it is not there.
        iteration: the number.
        manifest: write checksums of the files too, for which Megatron is imported.

    Raises:
        CheckpointError: there is such an iteration already.
    """
    final = root / f"iter_{iteration:07d}"
    if final.exists():
        msg = f"{final} exists already; give another --output."
        raise CheckpointError(msg)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{final.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        writer = CheckpointWriter(partial)
        yield writer
        writer.finish(manifest=manifest)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_directory(root)
    temporary = root / f".{TRACKER}.{os.getpid()}"
    _write_durably(temporary, str(iteration).encode())
    temporary.replace(root / TRACKER)
    _sync_directory(root)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
