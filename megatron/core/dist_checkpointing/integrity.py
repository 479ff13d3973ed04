"""What a complete checkpoint directory is, and whether one on disk still is that.

No process group is used here: a tool of one process calls these functions as they are, the ranks of
a run share the files between them (`verification.py`).

Every save writes a manifest, ``integrity.json``, last of all: size and checksum of every file. The
checksum is CRC-32, taken while the writers write, and zlib's runs near the speed of memory without
the GIL (6 GiB/s a core where SHA-256 makes 1.8, with its instructions). It is there to find damage,
not forgery: any flip of up to 32 neighbouring bits is found for certain, anything else but for one
chance in four billion. ``--verify-integrity`` writes SHA-256 instead, in the form that Megatron
without our patches reads and writes too. A directory of unpatched Megatron has no manifest: then
presence and length of every file are checked against what ``.metadata`` refers to.
"""

import hashlib
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException

MANIFEST = 'integrity.json'
METADATA = '.metadata'
COMMON_STATE_KEY = 'common_state/shard_0_1'
LEGACY_COMMON_STATE = 'common.pt'
DEFAULT_ALGORITHM = 'crc32'
_BLOCK = 1 << 22
_READERS = 4


class Checksum(Protocol):
    """What hashlib's objects offer, as far as we use it."""

    def update(self, data: Any, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


class Crc32:
    """CRC-32 in the form of hashlib's objects."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._value = 0

    def update(self, data: Any, /) -> None:
        """Take in the next bytes; long ones without the GIL."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum as eight hexadecimal digits."""
        return f'{self._value:08x}'


ALGORITHMS = {'crc32': Crc32, 'sha256': hashlib.sha256}


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Size and checksum of one file; the size is None in manifests of unpatched Megatron."""

    name: str
    size: int | None
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``integrity.json`` holds: every file of the checkpoint but itself."""

    algorithm: str
    files: Mapping[str, FileDigest]

    def text(self) -> str:
        """Return the file's text; ``files`` has the form that unpatched Megatron reads."""
        files = {name: self.files[name] for name in sorted(self.files)}
        record = {
            'algorithm': self.algorithm,
            'files': {name: digest.checksum for name, digest in files.items()},
            'sizes': {name: digest.size for name, digest in files.items()},
        }
        return json.dumps(record, indent=2)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong with a checkpoint, and in which file."""

    file: str
    reason: str

    def __str__(self) -> str:
        """Name the file first."""
        return f'{self.file}: {self.reason}'


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a look at the names, sizes and small files of a directory tells."""

    damage: tuple[Damage, ...]
    manifest: Manifest | None
    """None where nothing but presence and length can be verified."""


class HashingStream:
    """A new file that knows its checksum; it offers what writers of a checkpoint call."""

    def __init__(self, path: str | os.PathLike, mode: str = 'wb') -> None:
        """Open the file, anew."""
        self._path = os.fspath(path)
        self._file = open(path, mode)  # noqa: SIM115 - closed by close() and by the with statement
        self._checksum = Crc32()
        self._size = 0

    def write(self, data: Any) -> int:
        """Write, and count it into the checksum."""
        try:
            written = self._file.write(data)
        except OSError as error:
            raise _named(error, self._path) from error
        self._checksum.update(data)
        self._size += written
        return written

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._size

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        try:
            self._file.flush()
        except OSError as error:
            raise _named(error, self._path) from error

    def fileno(self) -> int:
        """Return the descriptor, for fsync: so nothing stays behind in the buffer."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def writable(self) -> bool:
        """Say that it is for writing."""
        return True

    def digest(self) -> FileDigest:
        """Return size and checksum of what was written."""
        return FileDigest(
            name=os.path.basename(self._path), size=self._size, checksum=self._checksum.hexdigest()
        )

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def digest_file(path: Path, name: str, algorithm: str = DEFAULT_ALGORITHM) -> FileDigest:
    """Read a file once and return its size and checksum.

    Raises:
        OSError: the file cannot be read.
    """
    checksum: Checksum = ALGORITHMS[algorithm]()
    size = 0
    with path.open('rb', buffering=0) as file:
        block = bytearray(_BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            checksum.update(view[:count])
            size += count
    return FileDigest(name=name, size=size, checksum=checksum.hexdigest())


def list_files(directory: Path) -> list[str]:
    """Return the names of all files under a directory but the manifest, relative to it, sorted."""
    found = [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
    ]
    return sorted(name for name in found if name != MANIFEST)


def make_manifest(
    directory: Path, known: Mapping[str, FileDigest], algorithm: str = DEFAULT_ALGORITHM
) -> Manifest:
    """Describe every file of a directory, reading those whose digest nobody took while writing.

    Args:
        directory: Where the files are.
        known: Digests (CRC-32) taken while writing; each is compared with the size on disk.
        algorithm: The checksums to note; with another one than CRC-32 every file is read.

    Raises:
        CheckpointingException: a written file is missing, or is not as long as it was written.
    """
    files = {}
    for name in sorted({*list_files(directory), *known}):
        path = directory / name
        if name in known:
            size = path.stat().st_size if path.exists() else None
            if size is None:
                raise CheckpointingException(
                    f'{path} was written but is not there; all ranks need the same file system'
                )
            if size != known[name].size:
                raise CheckpointingException(
                    f'{path} has {size} bytes, but {known[name].size} were written'
                )
        taken = name in known and algorithm == DEFAULT_ALGORITHM
        files[name] = known[name] if taken else digest_file(path, name, algorithm)
    return Manifest(algorithm=algorithm, files=files)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest, or None where there is none.

    Raises:
        CheckpointingException: it cannot be read as one, or uses an unknown checksum.
    """
    try:
        record = json.loads((directory / MANIFEST).read_text(encoding='utf-8'))
        sizes = record.get('sizes', {})
        files = {
            name: FileDigest(name=name, size=sizes.get(name), checksum=checksum)
            for name, checksum in record['files'].items()
        }
        manifest = Manifest(algorithm=record['algorithm'], files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointingException(f'not a readable manifest ({_short(error)})') from error
    if manifest.algorithm not in ALGORITHMS:
        known = ', '.join(ALGORITHMS)
        raise CheckpointingException(f'unknown checksum {manifest.algorithm!r}; known: {known}')
    return manifest


def check_structure(directory: Path) -> Structure:
    """Look at a checkpoint without reading its data: names, sizes, manifest, metadata.

    Returns:
        What is damaged, and the manifest, whose checksums `check_files` compares.
    """
    try:
        os.listdir(directory)
    except OSError as error:
        reason = 'does not exist' if isinstance(error, FileNotFoundError) else _unreadable(error)
        return Structure(damage=(Damage(file=directory.name, reason=reason),), manifest=None)
    found = _config_damage(directory)
    manifest = None
    try:
        manifest = read_manifest(directory)
    except CheckpointingException as error:
        found.append(Damage(file=MANIFEST, reason=str(error)))
    if manifest is not None:
        found += _manifest_damage(directory, manifest)
    found += _metadata_damage(directory, manifest)
    damage: dict[str, Damage] = {}
    for item in found:
        damage.setdefault(item.file, item)  # the first that is said of a file
    return Structure(damage=tuple(damage.values()), manifest=manifest)


def check_files(directory: Path, algorithm: str, digests: Iterable[FileDigest]) -> list[Damage]:
    """Read files and compare their checksums; a few at a time, as that needs no GIL."""
    check = partial(_file_damage, directory, algorithm)
    with ThreadPoolExecutor(_READERS) as readers:
        return [damage for damage in readers.map(check, digests) if damage is not None]


def find_damage(directory: Path, *, checksums: bool = True) -> list[Damage]:
    """Return all that is wrong with a checkpoint, in this one process; nothing means complete.

    Args:
        directory: An iteration's directory.
        checksums: Read every file, too, and compare its checksum with the manifest's.
    """
    structure = check_structure(directory)
    if structure.damage or structure.manifest is None or not checksums:
        return list(structure.damage)
    manifest = structure.manifest
    return check_files(directory, manifest.algorithm, manifest.files.values())


def _config_damage(directory: Path) -> list[Damage]:
    """Check ``metadata.json``."""
    try:
        record = json.loads((directory / CONFIG_FNAME).read_text(encoding='utf-8'))
        record['sharded_backend']
    except FileNotFoundError:
        return [Damage(file=CONFIG_FNAME, reason='missing, as in a save that was cut off')]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Damage(file=CONFIG_FNAME, reason=_unreadable(error))]
    return []


def _manifest_damage(directory: Path, manifest: Manifest) -> list[Damage]:
    """Compare names and sizes with the manifest."""
    damage = []
    for name, digest in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            damage.append(Damage(file=name, reason='missing'))
            continue
        except OSError as error:
            damage.append(Damage(file=name, reason=_unreadable(error)))
            continue
        if digest.size is not None and size != digest.size:
            damage.append(Damage(file=name, reason=f'{size} bytes, but {digest.size} were saved'))
    damage += [
        Damage(file=name, reason=f'not in {MANIFEST}: not of this save')
        for name in sorted(os.listdir(directory))
        if name not in manifest.files and is_checkpoint_file(name)
    ]
    return damage


def is_checkpoint_file(name: str) -> bool:
    """Say whether a name is one that a save of the checkpoint itself writes."""
    return name.endswith('.distcp') or name.startswith(METADATA) or name == LEGACY_COMMON_STATE


def _metadata_damage(directory: Path, manifest: Manifest | None) -> list[Damage]:
    """Check ``.metadata`` and that the files that it refers to are there, and long enough."""
    try:
        with (directory / METADATA).open('rb') as file:
            metadata = pickle.load(file)  # noqa: S301 - a load does the same, after this
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        keys = metadata.state_dict_metadata
    except FileNotFoundError:
        return [Damage(file=METADATA, reason='missing')]
    except Exception as error:  # noqa: BLE001 - unpickling damaged bytes raises all sorts
        return [Damage(file=METADATA, reason=_unreadable(error))]
    damage = []
    for name, end in ends.items():
        path = directory / name
        if not path.exists():
            damage.append(Damage(file=name, reason=f'missing, though {METADATA} refers to it'))
        elif path.stat().st_size < end:
            size = path.stat().st_size
            damage.append(Damage(file=name, reason=f'{size} bytes, but {METADATA} needs {end}'))
        elif manifest is not None and name not in manifest.files:
            damage.append(Damage(file=name, reason=f'not in {MANIFEST}, which is incomplete'))
    if COMMON_STATE_KEY not in keys and not (directory / LEGACY_COMMON_STATE).exists():
        damage.append(Damage(file=METADATA, reason='has no common state (arguments, iteration)'))
    return damage


def _file_damage(directory: Path, algorithm: str, expected: FileDigest) -> Damage | None:
    """Read one file and compare its checksum."""
    try:
        found = digest_file(directory / expected.name, expected.name, algorithm)
    except OSError as error:
        return Damage(file=expected.name, reason=_unreadable(error))
    if found.checksum != expected.checksum:
        reason = f'checksum {found.checksum[:16]}, but {expected.checksum[:16]} was saved'
        return Damage(file=expected.name, reason=reason)
    return None


def _named(error: OSError, path: str) -> OSError:
    """Return the same error with the file's name, which the system leaves out of writes."""
    return type(error)(error.errno, error.strerror, path)


def _unreadable(error: Exception) -> str:
    """Say why a file cannot be read."""
    return f'not readable ({_short(error)})'


def _short(error: Exception) -> str:
    """Say an exception in a few words."""
    text = error.strerror if isinstance(error, OSError) else ' '.join(str(error).split())
    return f'{type(error).__name__}: {text}'[:120] if text else type(error).__name__
