"""Graft definitions of a sparse file onto the upstream file of the same path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from tools.patch_series import imports, syntax
from tools.patch_series.records import Kind, Problem
from tools.patch_series.sparse import HEADER, Entry, Sparse
from tools.patch_series.splice import Edits, apply


@dataclass(frozen=True, kw_only=True)
class Result:
    """A file after a graft or a seam: the new tree, or what is in the way."""

    module: cst.Module
    problems: tuple[Problem, ...] = ()


class _Placer:
    """Collects the edits of one graft: replacements in place, new names beside siblings."""

    def __init__(self, module: cst.Module, sparse: Sparse) -> None:
        self.module = module
        self.sparse = sparse
        self.index = syntax.index(module)
        self.edits = Edits()
        self.placed: dict[str, list[cst.BaseStatement]] = {}
        self.problems: list[Problem] = []

    def complain(self, entry: Entry, message: str) -> None:
        where = f"{self.sparse.path}::{entry.path}"
        self.problems.append(Problem(kind=Kind.GRAFT, where=where, message=message))

    def put(self, entry: Entry) -> None:
        """Decide where one definition goes."""
        if entry.path.endswith(f".{HEADER}"):
            (definition,) = self.index[entry.path.removesuffix(f".{HEADER}")]
            assert isinstance(entry.node, cst.ClassDef)
            self.edits.edit(definition.node).header = entry.node
            return
        theirs = self.index.get(entry.path, [])
        if len(theirs) > 1:
            self.complain(
                entry,
                f"upstream defines it {len(theirs)} times, so the graft cannot know which one "
                "to replace; use a seam or a definition of another name",
            )
        elif theirs:
            self._replace(entry, theirs[0])
        else:
            self._add(entry)

    def _replace(self, entry: Entry, theirs: syntax.Definition) -> None:
        old = theirs.node
        is_line = isinstance(old, cst.SimpleStatementLine)
        if is_line and not syntax.is_plain_assignment(old):
            self.complain(entry, "upstream assigns it together with other names; use a seam")
            return
        kept = list(old.leading_lines)
        kept = kept[: len(kept) - len(syntax.attached_comments(old))]
        lines = [*kept, *syntax.attached_comments(entry.node)]
        self.edits.edit(old).replacement = entry.node.with_changes(leading_lines=lines)

    def _add(self, entry: Entry) -> None:
        owner = syntax.owner_of(entry.path)
        if owner and len(self.index.get(owner, [])) != 1:
            self.complain(entry, f"its class `{owner}` is not there")
            return
        target = self._neighbour(owner, entry.path)
        self.placed[entry.path] = target
        target.append(entry.node.with_changes(leading_lines=self._lines_above(entry)))

    def _neighbour(self, owner: str, path: str) -> list[cst.BaseStatement]:
        order = self.sparse.order[owner]
        position = order.index(path)
        for sibling in reversed(order[:position]):
            if sibling in self.placed:
                return self.placed[sibling]
            if sibling in self.index:
                return self.edits.edit(self.index[sibling][-1].holder).after
        for sibling in order[position + 1 :]:
            if sibling in self.index:
                return self.edits.edit(self.index[sibling][0].holder).before
        if owner:
            return self.edits.end(self.index[owner][0].node)
        last = self.module.body[-1] if self.module.body else None
        if last is not None and _is_main_guard(last):
            return self.edits.edit(last).before
        return self.edits.end(self.module)

    def _lines_above(self, entry: Entry) -> list[cst.EmptyLine]:
        comments = syntax.attached_comments(entry.node)
        written = [line for line in entry.node.leading_lines if line.comment is None]
        least = 0
        if not isinstance(entry.node, cst.SimpleStatementLine):
            least = 1 if syntax.owner_of(entry.path) else 2
        blank = cst.EmptyLine(indent=False)
        return [blank] * max(least, min(len(written), 2)) + comments


def _is_main_guard(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.If)
        and isinstance(statement.test, cst.Comparison)
        and isinstance(statement.test.left, cst.Name)
        and statement.test.left.value == "__name__"
    )


def add_imports(
    module: cst.Module, wanted: Sequence[imports.Import], path: str
) -> tuple[cst.Module, list[str]]:
    """Add the imports that a module lacks; return it with the conflicts that stood in the way."""
    have = imports.bound(module, path)
    missing = [item for item in wanted if imports.is_missing(item, have)]
    defined = set(syntax.index(module))
    conflicts = [text for item in missing if (text := imports.conflict(item, have, defined))]
    if not missing or conflicts:
        return module, conflicts
    place = imports.insertion_point(module)
    unique = dict.fromkeys(item.statement() for item in missing)
    new = [cst.parse_statement(f"{line}\n") for line in unique]
    body = [*module.body[:place], *new, *module.body[place:]]
    return module.with_changes(body=body), []


def graft(module: cst.Module, sparse: Sparse, names: Sequence[str]) -> Result:
    """Graft the named definitions of a sparse file; all of them, or none and the problems."""
    wanted = [entry for entry in sparse.entries if entry.path in set(names)]
    placer = _Placer(module, sparse)
    for entry in wanted:
        placer.put(entry)
    if placer.problems:
        return Result(module=module, problems=tuple(placer.problems))
    result = apply(module, placer.edits)
    needed = sparse.needed([entry.text for entry in wanted])
    result, conflicts = add_imports(result, needed, sparse.path)
    problems = [Problem(kind=Kind.GRAFT, where=sparse.path, message=text) for text in conflicts]
    return Result(module=module if problems else result, problems=tuple(problems))
