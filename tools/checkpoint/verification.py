"""Check a checkpoint: every file is there, every key is complete, nothing overlaps, no byte changed.

Every item in the files carries a checksum of its own, which is compared in pieces of a few MiB; the
checkpoint may be larger than memory. ``--quick`` leaves the contents out and takes seconds.
"""

# ruff: noqa: T201 - what is printed is the answer
from __future__ import annotations

import itertools
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.coverage import object_problems, tensor_problems
from tools.checkpoint.errors import DamagedCheckpointError
from tools.checkpoint.index import Chunk, Index, Place, TensorEntry, read_index
from tools.checkpoint.payload import TensorHeader, check_item
from tools.checkpoint.place import MANIFEST
from tools.checkpoint.quiet import import_quietly
from tools.checkpoint.tables import in_bytes, plural, print_json, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong, and in what: a file or a key."""

    subject: str
    text: str

    def __str__(self) -> str:
        """Say both."""
        return f"{self.subject}: {self.text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", type=Path, help="iteration directory, or a folder with a tracker")
    parser.add_argument("--quick", action="store_true", help="leave out the contents of the files")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Check the checkpoint; return 0, or 1 if it is damaged."""
    index = read_index(options.path)
    checks = dict(verify(index, quick=options.quick))
    problems = [problem for found in checks.values() for problem in found]
    if options.json:
        print_json(_report(index, checks))
    else:
        _print(index, checks)
    return 1 if problems else 0


def verify(index: Index, *, quick: bool = False) -> Iterator[tuple[str, list[Problem]]]:
    """Yield each check's name and what it found."""
    files = list(file_problems(index))
    yield "files are whole", files
    yield "keys are complete", list(_key_problems(index))
    broken = {problem.subject for problem in files}
    rest = " (of the other files)" if broken else ""
    is_proven = False
    if (index.directory / MANIFEST).is_file():
        found = list(_manifest_problems(index, checksums=not quick))
        is_proven = not found
        others = [problem for problem in found if problem.subject not in broken]
        yield f"files match {MANIFEST}{rest}", others
    if not quick:
        # Where all files are what was written, their values need not be read once more.
        found = list(_content_problems(index, broken, values=not is_proven))
        yield f"contents match their checksums{rest}", found


def _manifest_problems(index: Index, *, checksums: bool) -> Iterator[Problem]:
    """Files that are not what the save wrote, by Megatron's own check before a load."""
    integrity = import_quietly("megatron.core.dist_checkpointing.integrity")
    for damage in integrity.find_damage(index.directory, checksums=checksums):
        yield Problem(subject=damage.file, text=damage.reason)


def file_problems(index: Index) -> Iterator[Problem]:
    """Yield files that are missing or too short, and items that share bytes."""
    by_file: dict[str, list[tuple[Place, str]]] = defaultdict(list)
    for key, place in index.places():
        if place is not None:
            by_file[place.file].append((place, key))
    for name, items in sorted(by_file.items()):
        path = index.directory / name
        if not path.is_file():
            yield Problem(subject=name, text=f"is missing, with {plural(len(items), 'item')}")
            continue
        size, end = path.stat().st_size, max(place.offset + place.length for place, _ in items)
        if size < end:
            yield Problem(subject=name, text=f"is cut off: {size:,} bytes of {end:,}")
        items.sort(key=lambda item: item[0].offset)
        for (first, key), (second, other) in itertools.pairwise(items):
            if first.offset + first.length > second.offset:
                yield Problem(subject=name, text=f"{key} and {other} share bytes")


def _key_problems(index: Index) -> Iterator[Problem]:
    for tensor in index.tensors.values():
        for text in tensor_problems(tensor):
            yield Problem(subject=tensor.key, text=text)
    shards = defaultdict(list)
    for entry in index.objects.values():
        shards[entry.name].append(entry)
    for name, entries in shards.items():
        for text in object_problems(name, entries):
            yield Problem(subject=name, text=text)
    for key in index.unlisted:
        yield Problem(subject=key, text="has bytes in a file, but is not described")


def _content_problems(index: Index, broken_files: set[str], *, values: bool) -> Iterator[Problem]:
    """Read every item once, on a few threads, in pieces; without ``values`` what describes it."""
    work: list[tuple[TensorEntry | None, Chunk | None, str, Place]] = []
    for tensor in index.tensors.values():
        work += [(tensor, c, tensor.key, c.place) for c in tensor.chunks if c.place is not None]
    work += [(None, None, o.key, o.place) for o in index.objects.values() if o.place is not None]
    work = [item for item in work if item[3].file not in broken_files]
    work.sort(key=lambda item: (item[3].file, item[3].offset))

    def check(item: tuple[TensorEntry | None, Chunk | None, str, Place]) -> str | None:
        tensor, chunk, _, place = item
        try:
            stored = check_item(index, place, values=values)
        except (ValueError, DamagedCheckpointError) as error:
            return str(error)
        if tensor is None or chunk is None:
            return None
        expected = TensorHeader(sizes=chunk.sizes, dtype=tensor.dtype)
        return None if stored == expected else f"holds {stored}, not {expected}"

    with ThreadPoolExecutor(_THREADS) as pool:
        for (_, _, key, place), text in zip(work, pool.map(check, work), strict=True):
            if text is not None:
                yield Problem(subject=place.file, text=f"{key} at byte {place.offset}: {text}")


def _report(index: Index, checks: dict[str, list[Problem]]) -> dict[str, Any]:
    return {
        "path": str(index.directory),
        "ok": not any(checks.values()),
        "checks": {name: not found for name, found in checks.items()},
        "problems": [
            {"check": name, "subject": problem.subject, "problem": problem.text}
            for name, found in checks.items()
            for problem in found
        ],
        "stale_files": index.stale_files,
    }


def _print(index: Index, checks: dict[str, list[Problem]]) -> None:
    size = sum(place.length for _, place in index.places() if place is not None)
    print(
        f"{index.directory}: {plural(len(index.tensors), 'tensor')} and "
        f"{plural(len(index.objects), 'object')} in {plural(len(index.files), 'file')}, "
        f"{in_bytes(size)}"
    )
    print_table(
        ("check", "result"),
        [
            (name, plural(len(found), "problem") if found else "ok")
            for name, found in checks.items()
        ],
    )
    for problem in (problem for found in checks.values() for problem in found):
        print(f"damaged: {problem}")
    named = {problem.subject for found in checks.values() for problem in found}
    for name in sorted(set(index.stale_files) - named):
        print(f"note: {name} holds nothing of this checkpoint (left by an older run)")
