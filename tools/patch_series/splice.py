"""Put edits into a syntax tree in one pass; everything that is not edited stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from tools.patch_series import syntax

_CONTAINERS = (
    cst.Module,
    cst.ClassDef,
    cst.IndentedBlock,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.Finally,
    cst.Match,
    cst.MatchCase,
    *syntax.COMPOUND,
)


@dataclass(kw_only=True)
class Edit:
    """What happens at one statement of the old tree."""

    before: list[cst.BaseStatement] = field(default_factory=list)
    after: list[cst.BaseStatement] = field(default_factory=list)
    replacement: cst.BaseStatement | None = None
    header: cst.ClassDef | None = None
    """Takes over decorators, bases and keywords of a class, not its body."""


@dataclass(kw_only=True)
class Edits:
    """All edits of one pass, keyed by the identity of the statement they concern."""

    at: dict[int, Edit] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    """Functions whose bodies hold an edited statement."""
    ends: dict[int, list[cst.BaseStatement]] = field(default_factory=dict)
    """Statements to add at the end of a class's or the module's body."""
    seen: set[int] = field(default_factory=set)

    def edit(self, node: cst.CSTNode) -> Edit:
        """Return the edit of one statement, a new one at first."""
        return self.at.setdefault(id(node), Edit())

    def end(self, owner: cst.CSTNode) -> list[cst.BaseStatement]:
        """Return the list of statements to add at the end of an owner's body."""
        return self.ends.setdefault(id(owner), [])


class _Splicer(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits = edits

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return id(node) in self.edits.opened
        return isinstance(node, _CONTAINERS)

    def on_leave(
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        end = self.edits.ends.get(id(original_node))
        if end:
            self.edits.seen.add(id(original_node))
            updated_node = _extended(updated_node, end)
        edit = self.edits.at.get(id(original_node))
        if edit is None:
            return updated_node
        self.edits.seen.add(id(original_node))
        if edit.header is not None:
            updated_node = _with_header(updated_node, edit.header)
        if edit.replacement is not None:
            updated_node = edit.replacement
        return cst.FlattenSentinel([*edit.before, updated_node, *edit.after])


def _extended(owner: cst.CSTNode, end: Sequence[cst.BaseStatement]) -> cst.CSTNode:
    if isinstance(owner, cst.Module):
        return owner.with_changes(body=[*owner.body, *end], has_trailing_newline=True)
    assert isinstance(owner, cst.ClassDef)
    return owner.with_changes(body=owner.body.with_changes(body=[*owner.body.body, *end]))


def _with_header(node: cst.CSTNode, header: cst.ClassDef) -> cst.CSTNode:
    kept = ("decorators", "bases", "keywords", "lpar", "rpar", "type_parameters")
    names = (*kept, "whitespace_before_colon", "lines_after_decorators")
    return node.with_changes(**{name: getattr(header, name) for name in names})


def apply(module: cst.Module, edits: Edits) -> cst.Module:
    """Return the module with all edits made; an edit that finds no place is our own bug."""
    result = module.visit(_Splicer(edits))
    lost = (set(edits.at) | set(edits.ends)) - edits.seen
    assert not lost, f"{len(lost)} edit(s) found no place in the tree"
    assert isinstance(result, cst.Module)
    return result
