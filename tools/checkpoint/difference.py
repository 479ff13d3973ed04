"""Compare two checkpoints: keys, shapes, types and values, also optimizer, common state and objects.

The two may be cut into shards differently. ``--module NAME`` compares one module as if it were alone,
so that a module of a MIMO checkpoint can be held against a stock GPT checkpoint.
"""

# ruff: noqa: T201 - what is printed is the answer
from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.comparison import object_differences, tensor_distance
from tools.checkpoint.contents import Contents
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.index import COMMON_STATE, ObjectEntry, TensorEntry
from tools.checkpoint.naming import Kind, Owner, carried
from tools.checkpoint.tables import in_dtype, plural, print_json, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    Entry = TensorEntry | ObjectEntry

_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that is not the same."""

    key: str
    what: str
    """only in A, only in B, shape, dtype, values or object."""
    text: str
    different: int | None = None
    largest: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", type=Path, metavar="A", help="iteration directory, or with a tracker")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("--module", metavar="NAME", help="one module, by the keys it has alone")
    parser.add_argument("--weights", action="store_true", help="weights only")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave out keys like common_state.args.*, repeatable",
    )
    parser.add_argument("--all", action="store_true", help="list every difference")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Compare; return 0 if all is equal, else 1."""
    a, b = Contents.read(options.a), Contents.read(options.b)
    pairs = _pairs(a, b, options.module, weights_only=options.weights)
    counts: dict[tuple[str, str], list[int]] = {}
    differences: list[Difference] = []
    for key, own, first, second in pairs:
        if _is_ignored(key, options.ignore):
            continue
        found = [
            difference
            for difference in _compare(key, a, first, b, second)
            if not _is_ignored(difference.key, options.ignore)
        ]
        differences += found
        count = counts.setdefault((own.module, str(own.kind)), [0, 0])
        count[bool(found)] += 1
    if options.module is not None and not options.weights:
        found = list(_compare_groups(a, b, options.module))
        differences += found
        counts.setdefault((options.module, str(Kind.OPTIMIZER)), [0, 0])[bool(found)] += 1
    if options.json:
        print_json(_report(a, b, counts, differences))
    else:
        _print(counts, differences, limit=None if options.all else _SHOWN)
    return 1 if differences else 0


def _pairs(
    a: Contents, b: Contents, module: str | None, *, weights_only: bool
) -> Iterator[tuple[str, Owner, Entry | None, Entry | None]]:
    """Entries of both checkpoints under their common keys; ``None`` where one has none."""
    for contents in (a, b):
        if module is not None and module not in contents.modules:
            known = ", ".join(contents.modules)
            msg = f"--module {module}: {contents.index.directory} has {known}."
            raise CheckpointError(msg)
    sides = [dict(_entries(contents, module)) for contents in (a, b)]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(key) for side in sides)
        owners = [c.owner(entry.key) for c, entry in ((a, first), (b, second)) if entry is not None]
        if not weights_only or owners[0].kind is Kind.WEIGHTS:
            yield key, owners[0], first, second


def _entries(contents: Contents, module: str | None) -> Iterator[tuple[str, Entry]]:
    index = contents.index
    entries: dict[str, Entry] = {**index.tensors, **index.objects}
    if module is None:
        yield from entries.items()
    else:
        for key, bare in contents.bare_keys(module).items():
            entry = entries[key]
            if isinstance(entry, TensorEntry) or carried(entry.name) is None:
                yield bare, entry


def _compare(
    key: str, a: Contents, first: Entry | None, b: Contents, second: Entry | None
) -> Iterator[Difference]:
    """Compare one key of both checkpoints."""
    if first is None or second is None:
        side = "A" if second is None else "B"
        yield Difference(key=key, what=f"only in {side}", text=f"only in {side}")
    elif isinstance(first, TensorEntry) and isinstance(second, TensorEntry):
        yield from _compare_tensors(key, a, first, b, second)
    elif isinstance(first, TensorEntry) or isinstance(second, TensorEntry):
        yield Difference(
            key=key, what="object", text="a tensor on one side, an object on the other"
        )
    else:
        label = COMMON_STATE if first.name == COMMON_STATE else key
        for path, text in object_differences(a.value(first), b.value(second), label):
            yield Difference(key=path, what="object", text=text)


def _compare_tensors(
    key: str, a: Contents, first: TensorEntry, b: Contents, second: TensorEntry
) -> Iterator[Difference]:
    if first.shape != second.shape:
        text = f"shapes {list(first.shape)} / {list(second.shape)}"
        yield Difference(key=key, what="shape", text=text)
        return
    if first.dtype != second.dtype:
        text = f"types {in_dtype(first.dtype)} / {in_dtype(second.dtype)}"
        yield Difference(key=key, what="dtype", text=text)
    distance = tensor_distance(a.index, first, b.index, second)
    if distance.different:
        yield Difference(
            key=key,
            what="values",
            text=f"{distance.different:,} of {first.count:,} values, at most "
            f"{distance.largest:.3g} apart",
            different=distance.different,
            largest=distance.largest,
        )


def _compare_groups(a: Contents, b: Contents, module: str) -> Iterator[Difference]:
    """Compare parameter groups, which a MIMO optimizer and stock's keep in different places."""
    groups = [
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in contents.optimizer_groups(module)
        ]
        for contents in (a, b)
    ]
    for path, text in object_differences(*groups, "optimizer.param_groups"):
        yield Difference(key=path, what="object", text=text)


def _is_ignored(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _report(
    a: Contents,
    b: Contents,
    counts: dict[tuple[str, str], list[int]],
    differences: list[Difference],
) -> dict[str, Any]:
    return {
        "a": str(a.index.directory),
        "b": str(b.index.directory),
        "equal": not differences,
        "keys": [
            {"module": module, "kind": kind, "equal": equal, "different": different}
            for (module, kind), (equal, different) in counts.items()
        ],
        "differences": [vars(difference) for difference in differences],
    }


def _print(
    counts: dict[tuple[str, str], list[int]], differences: list[Difference], limit: int | None
) -> None:
    print_table(
        ("module", "part", ">equal", ">different"),
        [(*whose, *numbers) for whose, numbers in sorted(counts.items())],
    )
    if differences:
        shown = differences[:limit]
        print()
        print_table(("key", "difference"), [(d.key, d.text) for d in shown])
        if len(shown) < len(differences):
            print(f"... and {len(differences) - len(shown)} more (--all)")
    total = sum(sum(numbers) for numbers in counts.values())
    print(
        f"\n{plural(len(differences), 'difference')} in {plural(total, 'key')}"
        if differences
        else f"\nequal, bit for bit: {plural(total, 'key')}"
    )
