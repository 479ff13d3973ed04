"""Definitions of one module: their dotted paths, their text and their fingerprints."""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from tools.patch_series.records import PatchSeriesError

COMPOUND = (cst.If, cst.Else, cst.Try, cst.TryStar, cst.With, cst.For, cst.While)
"""Statements that hold definitions without giving them another dotted path."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A function, class or assignment that has a dotted path inside its module."""

    path: str
    node: cst.BaseStatement
    holder: cst.BaseStatement
    """The statement of the owner's own body that contains the node (often the node itself)."""


def parse(source: bytes | str, label: str) -> cst.Module:
    """Parse a module, or say in one sentence why it cannot be parsed."""
    try:
        return _parse(source)
    except cst.ParserSyntaxError as error:
        line = f"line {error.raw_line}, column {error.raw_column}"
        raise PatchSeriesError(f"{label} does not parse: {line}: {error.message}") from error


@functools.lru_cache(maxsize=16)  # A tree takes 250 times the memory of its text.
def _parse(source: bytes | str) -> cst.Module:
    return cst.parse_module(source)


def owner_of(path: str) -> str:
    """Return the dotted path of the class that holds a definition, '' for the module."""
    base, _, last = path.rpartition(".")
    return owner_of(base) if last in {"setter", "deleter"} and base else base


def index(module: cst.Module) -> dict[str, list[Definition]]:
    """Map each dotted path of a module to its definitions; more than one means ambiguous."""
    found: dict[str, list[Definition]] = {}
    for definition in _walk(module.body, "", None):
        found.setdefault(definition.path, []).append(definition)
    return found


def _walk(
    body: Sequence[cst.CSTNode], owner: str, holder: cst.BaseStatement | None
) -> Iterator[Definition]:
    for statement in body:
        outer = holder or statement
        if not isinstance(outer, cst.BaseStatement):
            continue
        for name in names_of(statement):
            path = f"{owner}.{name}" if owner else name
            yield Definition(path=path, node=statement, holder=outer)
        if isinstance(statement, cst.ClassDef):
            inner = f"{owner}.{statement.name.value}" if owner else statement.name.value
            yield from _walk(statement.body.body, inner, None)
        elif isinstance(statement, COMPOUND):
            for block in blocks_of(statement):
                yield from _walk(block.body, owner, outer)


def names_of(statement: cst.CSTNode) -> tuple[str, ...]:
    """Return the names that a statement defines; a property's setter is `name.setter`."""
    if isinstance(statement, cst.ClassDef):
        return (statement.name.value,)
    if isinstance(statement, cst.FunctionDef):
        return (statement.name.value + _accessor(statement),)
    if isinstance(statement, cst.SimpleStatementLine):
        return tuple(_assigned(statement.body))
    return ()


def _accessor(function: cst.FunctionDef) -> str:
    for decorator in function.decorators:
        node = decorator.decorator
        if (
            isinstance(node, cst.Attribute)
            and isinstance(node.value, cst.Name)
            and node.value.value == function.name.value
            and node.attr.value in {"setter", "deleter"}
        ):
            return f".{node.attr.value}"
    return ""


def _assigned(body: Iterable[cst.BaseSmallStatement]) -> Iterator[str]:
    for small in body:
        if isinstance(small, cst.AnnAssign):
            targets: list[cst.BaseExpression] = [small.target]
        elif isinstance(small, cst.Assign):
            targets = [target.target for target in small.targets]
        else:
            continue
        for target in targets:
            if isinstance(target, cst.Name):
                yield target.value


def is_plain_assignment(statement: cst.CSTNode) -> bool:
    """Tell whether a line is one assignment to one name, which a graft may replace."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    small = statement.body[0]
    if isinstance(small, cst.AnnAssign):
        return isinstance(small.target, cst.Name)
    return (
        isinstance(small, cst.Assign)
        and len(small.targets) == 1
        and isinstance(small.targets[0].target, cst.Name)
    )


def blocks_of(statement: cst.CSTNode) -> Iterator[cst.BaseSuite]:
    """Yield every suite of a compound statement, `elif` and `except` branches included."""
    body = getattr(statement, "body", None)
    if isinstance(body, cst.BaseSuite):
        yield body
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, ()):
            yield part.body
    for name in ("orelse", "finalbody"):
        part = getattr(statement, name, None)
        if part is not None:
            yield from blocks_of(part)


def attached_comments(node: cst.BaseStatement) -> list[cst.EmptyLine]:
    """Return the comment lines directly above a definition, which belong to it."""
    comments: list[cst.EmptyLine] = []
    for line in reversed(getattr(node, "leading_lines", ())):
        if line.comment is None:
            break
        comments.insert(0, line)
    return comments


def text_of(module: cst.Module, node: cst.BaseStatement) -> str:
    """Return a definition's own text, attached comments included, indented from column 0."""
    bare = node.with_changes(leading_lines=attached_comments(node))
    return module.code_for_node(bare).rstrip() + "\n"


def statement_text(module: cst.Module, node: cst.BaseStatement) -> str:
    """Return a statement's text without anything above it, indented from column 0."""
    return module.code_for_node(node.with_changes(leading_lines=[])).rstrip() + "\n"


def fingerprint(text: str) -> str:
    """Return the fingerprint of a definition's or statement's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def same_code(one: str, other: str) -> bool:
    """Tell whether two texts are the same code, whatever their formatting and comments."""
    try:
        trees = [ast.dump(ast.parse(textwrap.dedent(text))) for text in (one, other)]
    except SyntaxError:
        return one == other
    return trees[0] == trees[1]
