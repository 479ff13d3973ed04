"""Put the whole series onto an upstream tree, in memory: every problem, or every changed file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import libcst as cst

from tools.patch_series import graft, seam, sparse, syntax
from tools.patch_series.records import Kind, Problem
from tools.patch_series.series import Patch, Series
from tools.patch_series.upstream import Upstream

VERSION_MARK = "@VERSION@"
"""Stands for the distribution's version in the code of a seam."""
SHADOWING = ("megatron/core/__init__.py", "megatron/training/__init__.py")
"""A sparse file of this path would hide the installed package when run from the repository."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """The outcome: the changed and added files of the patched tree, and every problem."""

    changed: dict[str, bytes]
    sparse: dict[str, sparse.Sparse]
    problems: tuple[Problem, ...]


def compose(series: Series, upstream: Upstream) -> Composed:
    """Apply the patches in order to an upstream tree."""
    tree = series.tree()
    patches = series.patches
    version = series.version(upstream.version)
    read, problems = _read_sparse(tree, upstream)
    changed: dict[str, bytes] = {}
    for patch in patches:
        changed |= {path: data for path, data in tree.items() if patch.takes(path)}
    for path in _touched(patches):
        source = upstream.text(path)
        if source is None:
            message = "upstream has no such file; claim the whole file under `files`"
            problems.append(Problem(kind=Kind.CLAIM, where=path, message=message))
            continue
        module = syntax.parse(source, f"{upstream.label}: {path}")
        for patch in patches:
            module, found = _apply(patch, path, module, read.get(path), version)
            problems.extend(replace(problem, patch=patch.name) for problem in found)
        changed[path] = module.bytes
    return Composed(changed=changed, sparse=read, problems=tuple(problems))


def _touched(patches: tuple[Patch, ...]) -> list[str]:
    grafts = {graft.file for patch in patches for graft in patch.grafts}
    return sorted(grafts | {seam.file for patch in patches for seam in patch.seams})


def _read_sparse(
    tree: dict[str, bytes], upstream: Upstream
) -> tuple[dict[str, sparse.Sparse], list[Problem]]:
    read: dict[str, sparse.Sparse] = {}
    problems: list[Problem] = []
    for path, data in tree.items():
        theirs = upstream.text(path)
        if theirs is None or not path.endswith(".py"):
            continue
        if path in SHADOWING:
            message = "would hide the installed package; change that file by a seam alone"
            problems.append(Problem(kind=Kind.GRAFT, where=path, message=message))
        module = syntax.parse(theirs, f"{upstream.label}: {path}")
        read[path] = sparse.read(path, data, module)
        problems.extend(read[path].problems)
    return read, problems


def _apply(
    patch: Patch, path: str, module: cst.Module, ours: sparse.Sparse | None, version: str
) -> tuple[cst.Module, list[Problem]]:
    problems: list[Problem] = []
    names = patch.names_in(path)
    if names and ours is not None:
        result = graft.graft(module, ours, names)
        module = result.module
        problems.extend(result.problems)
    for _, item in patch.seams_in(path):
        result = seam.sew(module, replace(item, code=item.code.replace(VERSION_MARK, version)))
        module = result.module
        problems.extend(result.problems)
    return module, problems
