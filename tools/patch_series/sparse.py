"""Read one file of the sparse fork: which definitions it grafts and which imports they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from tools.patch_series import imports, syntax
from tools.patch_series.records import Kind, Problem

HEADER = "<header>"
"""Last part of the path that names a class's decorators, bases and keywords."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One definition of the sparse file, which a patch has to claim by its path."""

    path: str
    node: cst.BaseStatement
    text: str


@dataclass(kw_only=True)
class Sparse:
    """A sparse file, taken apart."""

    path: str
    module: cst.Module
    entries: list[Entry] = field(default_factory=list)
    order: dict[str, list[str]] = field(default_factory=dict)
    """For each owner ('' is the module) the paths in the order of our file."""
    imports: list[imports.Import] = field(default_factory=list)
    own: list[imports.Import] = field(default_factory=list)
    for_readers: list[str] = field(default_factory=list)
    """What needs an import in our file and is not grafted: class headers, TYPE_CHECKING."""
    problems: list[Problem] = field(default_factory=list)

    def complain(self, message: str, path: str = "") -> None:
        """Record a problem with this file or with one definition in it."""
        where = f"{self.path}::{path}" if path else self.path
        self.problems.append(Problem(kind=Kind.GRAFT, where=where, message=message))

    def needed(self, texts: Sequence[str]) -> list[imports.Import]:
        """Return the imports whose name occurs in any of the texts."""
        words = {word for text in texts for word in re.findall(r"\w+", text)}
        return [item for item in self.imports if item.bound in words]


def header_text(module: cst.Module, node: cst.ClassDef) -> str:
    """Return a class's decorators, name, bases and keywords as the text of an empty class."""
    empty = cst.SimpleStatementSuite(body=[cst.Pass()])
    return module.code_for_node(node.with_changes(leading_lines=[], body=empty)).strip() + "\n"


def read(path: str, source: str | bytes, upstream: cst.Module) -> Sparse:
    """Take a sparse file apart against the upstream file of the same path."""
    sparse = Sparse(path=path, module=syntax.parse(source, path))
    index = syntax.index(upstream)
    _read_body(sparse, sparse.module.body, "", index, upstream)
    seen: set[str] = set()
    for entry in sparse.entries:
        if entry.path in seen:
            sparse.complain("is defined twice in our file", entry.path)
        seen.add(entry.path)
    _check_imports(sparse, upstream, index)
    return sparse


def _read_body(
    sparse: Sparse,
    body: Sequence[cst.CSTNode],
    owner: str,
    index: dict[str, list[syntax.Definition]],
    upstream: cst.Module,
) -> None:
    for position, statement in enumerate(body):
        if position == 0 and _is_docstring(statement):
            continue
        if not owner and imports.is_type_checking(statement):
            sparse.for_readers.append("TYPE_CHECKING")
            continue
        if _is_filler(statement):
            continue
        found = list(imports.read(statement, sparse.path))
        if found and not owner:
            _take_imports(sparse, found)
            continue
        _take_definition(sparse, statement, owner, index, upstream)


def _take_definition(
    sparse: Sparse,
    statement: cst.CSTNode,
    owner: str,
    index: dict[str, list[syntax.Definition]],
    upstream: cst.Module,
) -> None:
    names = syntax.names_of(statement)
    simple = isinstance(statement, cst.SimpleStatementLine)
    if not names or (simple and not syntax.is_plain_assignment(statement)):
        first = sparse.module.code_for_node(statement).strip().splitlines()[0]
        sparse.complain(
            f"`{first}` is neither a definition nor an import nor an assignment to one name; "
            "use a seam, or put it into a file of our own",
            owner,
        )
        return
    path = f"{owner}.{names[0]}" if owner else names[0]
    sparse.order.setdefault(owner, []).append(path)
    theirs = index.get(path, [])
    if isinstance(statement, cst.ClassDef) and theirs:
        if len(theirs) == 1 and isinstance(theirs[0].node, cst.ClassDef):
            _take_class(sparse, statement, theirs[0].node, path, index, upstream)
        else:
            sparse.complain(f"is a class here, but upstream has {_describe(theirs)}", path)
        return
    assert isinstance(statement, cst.BaseStatement)
    text = syntax.text_of(sparse.module, statement)
    sparse.entries.append(Entry(path=path, node=statement, text=text))


def _take_class(
    sparse: Sparse,
    ours: cst.ClassDef,
    theirs: cst.ClassDef,
    path: str,
    index: dict[str, list[syntax.Definition]],
    upstream: cst.Module,
) -> None:
    header = header_text(sparse.module, ours)
    sparse.for_readers.append(header)
    written = bool(ours.decorators or ours.bases or ours.keywords)
    if written and not syntax.same_code(header, header_text(upstream, theirs)):
        sparse.entries.append(Entry(path=f"{path}.{HEADER}", node=ours, text=header))
    if not isinstance(ours.body, cst.IndentedBlock):
        sparse.complain("needs an indented body", path)
        return
    if not isinstance(theirs.body, cst.IndentedBlock):
        sparse.complain("has its body on the header's line upstream; nothing can be added", path)
        return
    _read_body(sparse, ours.body.body, path, index, upstream)


def _describe(definitions: list[syntax.Definition]) -> str:
    if len(definitions) > 1:
        return f"{len(definitions)} definitions of that name"
    return "something else of that name"


def _is_docstring(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    small = statement.body[0]
    return isinstance(small, cst.Expr) and isinstance(
        small.value, (cst.SimpleString, cst.ConcatenatedString)
    )


def _is_filler(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return all(
        isinstance(small, cst.Pass)
        or (isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis))
        for small in statement.body
    )


def _take_imports(sparse: Sparse, found: list[imports.Import]) -> None:
    own = imports.module_name(sparse.path)
    for item in found:
        if item.module == own:
            sparse.own.append(item)
        elif item.name == "*":
            sparse.complain(f"`{item.statement()}`: name what you import")
        else:
            sparse.imports.append(item)


def _check_imports(
    sparse: Sparse, upstream: cst.Module, index: dict[str, list[syntax.Definition]]
) -> None:
    have = imports.bound(upstream, sparse.path)
    ours = {path for paths in sparse.order.values() for path in paths}
    for item in sparse.own:
        if item.name and item.name not in have and item.name not in index and item.name not in ours:
            sparse.complain(f"imports `{item.name}` from itself, but upstream has no such name")
    texts = [entry.text for entry in sparse.entries]
    grafted = sparse.needed(texts)
    read = sparse.needed([*texts, *sparse.for_readers])
    for item in sparse.imports:
        if item not in read:
            sparse.complain(f"`{item.statement()}` is used by no definition in this file")
        if item not in grafted or not imports.is_missing(item, have):
            continue
        message = imports.conflict(item, have, set(index))
        if item.module == "__future__":
            message = "`from __future__` would change definitions that are not ours"
        if message:
            sparse.complain(message)
