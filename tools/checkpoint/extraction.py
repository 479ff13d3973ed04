"""Write one module as a checkpoint of its own.

The language module becomes a checkpoint that stock Megatron loads as a GPT model, with its optimizer,
scheduler and random streams if they can be what stock keeps; an encoder becomes one that
``--load-module`` of a MIMO run takes, weights alone. Values are copied as they are, byte by byte.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.checkpoint.contents import Contents
from tools.checkpoint.errors import CheckpointError, DamagedCheckpointError
from tools.checkpoint.index import COMMON_STATE, Index, ObjectEntry, Place, TensorEntry
from tools.checkpoint.naming import LANGUAGE, Kind, carried
from tools.checkpoint.payload import pieces
from tools.checkpoint.stock import common_state, whole_optimizer
from tools.checkpoint.tables import in_bytes, plural, print_fields, print_json
from tools.checkpoint.writing import CheckpointWriter, dumped, new_iteration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Extract:
    """What was written."""

    path: str
    module: str
    iteration: int
    weights: int
    """Number of tensors."""
    bytes: int
    optimizer: str
    """``with it``, or why not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", type=Path, help="iteration directory, or a folder with a tracker")
    parser.add_argument("--module", metavar="NAME", required=True, help="module to take out")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", required=True, help="new folder, for --load"
    )
    parser.add_argument("--weights", action="store_true", help="leave the optimizer's state out")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Extract the module; return 0."""
    contents = Contents.read(options.path)
    done = extract(contents, options.module, options.output, weights_only=options.weights)
    if options.json:
        print_json(asdict(done))
        return 0
    print_fields(
        [
            ("written", done.path),
            ("module", f"{done.module}, iteration {done.iteration}"),
            ("weights", f"{plural(done.weights, 'tensor')}"),
            ("optimizer", done.optimizer),
            ("bytes", in_bytes(done.bytes)),
        ]
    )
    return 0


def extract(contents: Contents, module: str, output: Path, *, weights_only: bool) -> Extract:
    """Write a module's part of a checkpoint below ``output``.

    Raises:
        CheckpointError: the checkpoint has no such module, or ``output`` is taken.
        DamagedCheckpointError: the checkpoint cannot be read.
    """
    weights = contents.tensors(module, Kind.WEIGHTS)
    if not weights:
        known = ", ".join(name for name in contents.modules if contents.tensors(name, Kind.WEIGHTS))
        msg = f"--module {module}: {contents.index.directory} has the weights of {known}."
        raise CheckpointError(msg)
    if "args" not in contents.common:
        msg = f"{contents.index.directory} keeps no arguments, which Megatron needs to load it."
        raise CheckpointError(msg)
    why_not = "left out (--weights)" if weights_only else whole_optimizer(contents, module)
    state = common_state(contents, module, resumable=why_not is None)
    iteration = int(state.get("iteration", 0))
    kinds = {Kind.WEIGHTS} if why_not else {Kind.WEIGHTS, Kind.OPTIMIZER, Kind.RANDOM}
    with new_iteration(output, iteration) as writer:
        for entry, key in _entries(contents, module, kinds):
            _copy(contents.index, entry, key, writer)
        writer.add_object(f"{COMMON_STATE}/shard_0_1", dumped(state))
    target = output / f"iter_{iteration:07d}"
    return Extract(
        path=str(target),
        module=module,
        iteration=iteration,
        weights=len(weights),
        bytes=sum(path.stat().st_size for path in target.iterdir()),
        optimizer=f"not written: {why_not}" if why_not else _optimizer_in_words(contents),
    )


def _entries(
    contents: Contents, module: str, kinds: set[Kind]
) -> Iterator[tuple[TensorEntry | ObjectEntry, str]]:
    """Entries of a module with the keys that they get."""
    index = contents.index
    for key, bare in contents.bare_keys(module).items():
        entry = index.tensors.get(key) or index.objects[key]
        is_carried = isinstance(entry, ObjectEntry) and carried(entry.name) is not None
        if contents.owner(key).kind in kinds and not is_carried:
            yield entry, bare


def _copy(
    index: Index, entry: TensorEntry | ObjectEntry, key: str, writer: CheckpointWriter
) -> None:
    """Copy the bytes of one entry under another key."""
    if isinstance(entry, ObjectEntry):
        writer.add_object(key, pieces(index, _place(index, entry.key, entry.place)))
        return
    for chunk in entry.chunks:
        payload = pieces(index, _place(index, entry.key, chunk.place))
        writer.add_chunk(key, entry.shape, chunk.offsets, chunk.sizes, entry.properties, payload)


def _place(index: Index, key: str, place: Place | None) -> Place:
    if place is None:
        msg = f"{index.directory}: {key} is listed, but no file holds it."
        raise DamagedCheckpointError(msg)
    return place


def _optimizer_in_words(contents: Contents) -> str:
    metadata = contents.common.get("content_metadata") or {}
    if metadata.get("distrib_optim_sharding_type") != "dp_reshardable":
        return "with it, for any layout"
    grid = contents.layout.get(LANGUAGE, {})
    sizes = {"tp": 1, "pp": 1, **{key: grid[key] for key in ("tp", "pp", "ep") if key in grid}}
    shown = " ".join(f"{key} {size}" for key, size in sizes.items() if key != "ep" or size > 1)
    return f"with it, for {shown} (saved in buckets)"
