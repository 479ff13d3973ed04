"""Show what a checkpoint holds: modules, tensors, optimizer groups, random streams, layout.

Reads ``.metadata`` and the small objects only, however large the checkpoint is.
"""

# ruff: noqa: T201 - what is printed is the answer
from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.contents import Contents
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.naming import RUN, Kind, data_rank
from tools.checkpoint.tables import (
    in_bytes,
    in_dtype,
    in_shape,
    plural,
    print_fields,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    import argparse

    from tools.checkpoint.index import ObjectEntry, TensorEntry

_RANDOM_AXES = ("dp", "pp", "tp")
"""Coordinates of the objects that keep random states; the first is the rank in the DPxCP group."""
_TENSOR_COLUMNS = ("shape", "dtype", ">bytes", ">chunks", "chunk")
_SHOWN = 4
"""Names that are listed before the rest is only counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", type=Path, help="iteration directory, or a folder with a tracker")
    parser.add_argument("--module", metavar="NAME", help="this module alone")
    parser.add_argument("--all", action="store_true", help="list the optimizer's tensors, too")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Show the checkpoint; return 0."""
    contents = Contents.read(options.path)
    modules = contents.modules
    if options.module is not None:
        if options.module not in modules:
            msg = f"--module {options.module}: the checkpoint has {', '.join(modules)}."
            raise CheckpointError(msg)
        modules = [options.module]
    report = describe(contents, modules)
    if options.json:
        print_json(report)
    else:
        _print(report, everything=options.all)
    return 0


def describe(contents: Contents, modules: list[str]) -> dict[str, Any]:
    """Everything that is shown, in plain values."""
    arguments, index = contents.arguments, contents.index
    content_metadata = contents.common.get("content_metadata") or {}
    return {
        "path": str(index.directory),
        "iteration": contents.common.get("iteration"),
        "consumed_train_samples": arguments.get("consumed_train_samples"),
        "format": index.backend,
        "checkpoint_version": contents.common.get("checkpoint_version"),
        "megatron_version": contents.common.get("megatron_version"),
        "mimo": contents.is_mimo,
        "optimizer": {
            "distributed": arguments.get("use_distributed_optimizer"),
            "sharding_type": content_metadata.get("distrib_optim_sharding_type"),
        },
        "precision": next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32"),
        "files": len(index.files),
        "stale_files": index.stale_files,
        "modules": {name: _module(contents, name) for name in modules},
        "run": [_object(entry) for entry in contents.objects(RUN, Kind.OTHER)],
        "tensors": [
            _tensor(contents, entry)
            for name in modules
            for kind in Kind
            for entry in sorted(contents.tensors(name, kind), key=lambda tensor: tensor.key)
        ],
    }


def _module(contents: Contents, name: str) -> dict[str, Any]:
    weights = contents.tensors(name, Kind.WEIGHTS)
    state = contents.tensors(name, Kind.OPTIMIZER)
    objects = [entry for kind in Kind for entry in contents.objects(name, kind)]
    return {
        "layout": contents.layout.get(name),
        "weights": {
            "tensors": len(weights),
            "parameters": sum(entry.count for entry in weights),
            "bytes": sum(entry.nbytes for entry in weights),
        },
        "optimizer": {
            "tensors": len(state),
            "bytes": sum(entry.nbytes for entry in state),
            "groups": [_group(group) for group in contents.optimizer_groups(name)],
        },
        "random_streams": _random_streams(contents, name),
        "objects": {
            "count": len(objects),
            "bytes": sum(entry.place.length for entry in objects if entry.place is not None),
        },
    }


def _group(group: dict[str, Any]) -> dict[str, Any]:
    step = group.get("step", group.get("common_step"))
    names = ("lr", "max_lr", "min_lr", "weight_decay", "wd_mult", "lr_mult", "is_expert_parallel")
    shown = {name: group[name] for name in names if name in group}
    return {"step": None if step is None else int(step), **shown}


def _random_streams(contents: Contents, name: str) -> dict[str, Any]:
    """Which coordinates of a module have random states, and which streams each keeps."""
    entries = contents.objects(name, Kind.RANDOM)
    if not entries:
        return {"axes": [], "grid": [], "saved": [], "missing": [], "streams": []}
    saved = sorted(
        {(data_rank(e.name), *e.position) for e in entries if e.place is not None and e.position}
    )
    grid = (_data_ranks(contents, name, saved), *entries[0].grid)
    missing = [at for at in itertools.product(*map(range, grid)) if at not in set(saved)]
    return {
        "axes": list(_RANDOM_AXES),
        "grid": list(grid),
        "saved": saved,
        "missing": missing,
        "streams": _streams(contents.value(entries[0])),
    }


def _data_ranks(contents: Contents, name: str, saved: list[tuple[int, ...]]) -> int:
    """How many ranks at each (PP, TP) place keep streams; stock Megatron keeps those of the first."""
    metadata = contents.common.get("content_metadata") or {}
    grid = contents.layout.get(name)
    if metadata.get("random_streams") == "per_rank" and grid is not None:
        return grid.get("dp", 1) * grid.get("cp", 1)
    return 1 + max((at[0] for at in saved), default=0)


def _streams(value: Any) -> list[str]:  # noqa: ANN401 - what a checkpoint keeps
    """Names of the random streams in one saved state."""
    states = value if isinstance(value, list) else [value]
    first = states[0] if states and isinstance(states[0], dict) else {}
    tracker = first.get("rng_tracker_states") or {}
    own = [
        key.removesuffix("_rng_state").removesuffix("_state")
        for key in first
        if key != "rng_tracker_states"
    ]
    return [*own, *map(str, tracker)]


def _tensor(contents: Contents, entry: TensorEntry) -> dict[str, Any]:
    own = contents.owner(entry.key)
    return {
        "key": entry.key,
        "module": own.module,
        "kind": str(own.kind),
        "shape": list(entry.shape),
        "dtype": in_dtype(entry.dtype),
        "bytes": entry.nbytes,
        "chunks": len(entry.chunks),
        "largest_chunk": list(max((c.sizes for c in entry.chunks), key=math.prod, default=())),
    }


def _object(entry: ObjectEntry) -> dict[str, Any]:
    return {"key": entry.key, "bytes": entry.place.length if entry.place is not None else None}


def _print(report: dict[str, Any], *, everything: bool) -> None:
    print_fields(_headline(report))
    print()
    print_table(
        ("module", "saved under", ">parameters", ">weights", ">optimizer", "random streams"),
        [_module_row(name, module) for name, module in report["modules"].items()],
    )
    groups = [
        (name, number, group.get("step"), *map(_number, _rates(group)))
        for name, module in report["modules"].items()
        for number, group in enumerate(module["optimizer"]["groups"])
    ]
    if groups:
        print()
        print_table(
            ("optimizer of", ">group", ">step", ">lr", ">max lr", ">weight decay"),
            groups,
        )
    for (module, kind), tensors in itertools.groupby(report["tensors"], _module_and_kind):
        if everything or kind == Kind.WEIGHTS:
            print()
            _print_tensors(f"{kind} of {module}", list(tensors))
    if not everything and any(tensor["kind"] != Kind.WEIGHTS for tensor in report["tensors"]):
        print("\n--all lists the optimizer's tensors as well.")


def _module_and_kind(tensor: dict[str, Any]) -> tuple[str, str]:
    return tensor["module"], tensor["kind"]


def _headline(report: dict[str, Any]) -> list[tuple[str, object]]:
    samples = report["consumed_train_samples"]
    consumed = "" if samples is None else f", {samples:,} samples consumed"
    sharding = report["optimizer"]["sharding_type"]
    optimizer = "distributed" if report["optimizer"]["distributed"] else "not distributed"
    fields: list[tuple[str, object]] = [
        ("checkpoint", report["path"]),
        ("iteration", f"{report['iteration']}{consumed}"),
        ("format", f"{report['format']}, {plural(report['files'], 'file')}"),
        ("run", f"{report['precision']}, optimizer {optimizer}{f' ({sharding})' * bool(sharding)}"),
    ]
    if report["megatron_version"] is not None:
        fields.append(("Megatron", report["megatron_version"]))
    stale = report["stale_files"]
    if stale:
        names = ", ".join(stale[:_SHOWN]) + ", ..." * (len(stale) > _SHOWN)
        fields.append(("no content", f"{plural(len(stale), 'stale file')}: {names}"))
    return fields


def _module_row(name: str, module: dict[str, Any]) -> tuple[object, ...]:
    grid = module["layout"]
    layout = "not known" if grid is None else _in_grid(grid)
    return (
        name,
        layout,
        f"{module['weights']['parameters']:,}",
        in_bytes(module["weights"]["bytes"]),
        in_bytes(module["optimizer"]["bytes"]) if module["optimizer"]["tensors"] else "none",
        _in_streams(module["random_streams"]),
    )


def _in_grid(grid: dict[str, int]) -> str:
    """A module's grid in words; sizes of 1 are left out."""
    sizes = [f"{key} {grid[key]}" for key in ("tp", "pp", "dp", "cp", "ep") if grid.get(key, 1) > 1]
    if grid.get("etp", grid.get("tp")) != grid.get("tp"):
        sizes.append(f"etp {grid['etp']}")
    ranks = grid.get("tp", 1) * grid.get("pp", 1) * grid.get("dp", 1) * grid.get("cp", 1)
    first = grid.get("offset", 0)
    where = f"rank {first}" if ranks == 1 else f"ranks {first}-{first + ranks - 1}"
    return f"{' '.join(sizes)} on {where}" if sizes else where


def _in_streams(random: dict[str, Any]) -> str:
    if not random["grid"]:
        return "none"
    sizes = zip(random["axes"], random["grid"], strict=True)
    grid = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
    total = len(random["saved"]) + len(random["missing"])
    text = f"{len(random['saved'])} of {total}" + f" ({grid})" * bool(grid)
    if random["missing"]:
        text += f", missing {', '.join(map(str, random['missing'][:_SHOWN]))}"
    return text


def _rates(group: dict[str, Any]) -> tuple[Any, ...]:
    return group.get("lr"), group.get("max_lr"), group.get("weight_decay")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _print_tensors(heading: str, tensors: list[dict[str, Any]]) -> None:
    """Print tensors of one module and kind; what their keys begin with is in the heading."""
    keys = [tensor["key"].split(".")[:-1] for tensor in tensors]
    levels = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*keys, strict=False))
    prefix = "".join(f"{name}." for name, *_ in levels)
    print_table(
        (f"{heading}: {prefix}*" if prefix else heading, *_TENSOR_COLUMNS),
        [
            (
                tensor["key"].removeprefix(prefix),
                in_shape(tensor["shape"]),
                tensor["dtype"],
                in_bytes(tensor["bytes"]),
                tensor["chunks"],
                in_shape(tensor["largest_chunk"]) if tensor["chunks"] > 1 else "whole",
            )
            for tensor in tensors
        ],
    )
