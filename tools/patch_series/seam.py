"""Replace one statement inside an upstream function, or put one call before or after it."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from tools.patch_series import graft, imports, syntax
from tools.patch_series.records import Kind, Problem
from tools.patch_series.splice import Edits, apply

MODULE = "<module>"
"""The `where` of a seam at module level."""


class Action(enum.Enum):
    """What a seam does at its anchor."""

    REPLACE = "replace"
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One seam of a patch."""

    file: str
    where: str
    action: Action
    anchor: str
    """First line or lines of the upstream statement, enough to make it unique."""
    code: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """The one statement that a seam's anchor names."""

    statement: cst.BaseStatement
    text: str
    functions: tuple[cst.FunctionDef, ...]


def locate(module: cst.Module, seam: Seam) -> Site | str:
    """Find the statement of a seam, or say in a sentence why there is not exactly one."""
    sites = _sites(module, seam)
    if isinstance(sites, str):
        return sites
    anchor = _lines(seam.anchor)
    sites = [site for site in sites if _lines(site.text)[: len(anchor)] == anchor]
    if len(sites) != 1:
        return f"the anchor `{anchor[0]}` matches {len(sites)} statements of `{seam.where}`, not 1"
    return sites[0]


def nearest(module: cst.Module, seam: Seam) -> str:
    """Return the statement that looks most like a seam's anchor, for a person to read."""
    sites = _sites(module, seam)
    if isinstance(sites, str) or not sites:
        return "(nothing)\n"
    anchor = _lines(seam.anchor)

    def likeness(site: Site) -> float:
        lines = _lines(site.text)[: len(anchor)]
        return difflib.SequenceMatcher(None, "\n".join(anchor), "\n".join(lines)).ratio()

    return max(sites, key=likeness).text


def has_code(module: cst.Module, seam: Seam) -> bool:
    """Tell whether the function holds a statement equal to the seam's own code."""
    sites, new = _sites(module, seam), statement_of(seam)
    if isinstance(sites, str) or isinstance(new, str):
        return False
    alike = [site.text for site in sites if type(site.statement) is type(new)]
    return any(syntax.same_code(text, seam.code) for text in alike)


def _sites(module: cst.Module, seam: Seam) -> list[Site] | str:
    body: Sequence[cst.CSTNode] = module.body
    outer: tuple[cst.FunctionDef, ...] = ()
    if seam.where != MODULE:
        found = syntax.index(module).get(seam.where, [])
        if len(found) != 1:
            return f"upstream has {len(found)} definitions of `{seam.where}`"
        node = found[0].node
        if not isinstance(node, cst.FunctionDef):
            return f"`{seam.where}` is not a function"
        body, outer = node.body.body, (node,)
    return [
        Site(
            statement=statement,
            text=syntax.statement_text(module, statement),
            functions=functions,
        )
        for statement, functions in _statements(body, outer, enter=seam.where != MODULE)
    ]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _statements(
    body: Sequence[cst.CSTNode], functions: tuple[cst.FunctionDef, ...], *, enter: bool
) -> Iterator[tuple[cst.BaseStatement, tuple[cst.FunctionDef, ...]]]:
    for statement in body:
        if not isinstance(statement, cst.BaseStatement):
            continue
        yield statement, functions
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) and not enter:
            continue
        is_function = isinstance(statement, cst.FunctionDef)
        inside = (*functions, statement) if is_function else functions
        for block in syntax.blocks_of(statement):
            if isinstance(block, cst.IndentedBlock):
                yield from _statements(block.body, inside, enter=enter)


def _problem(seam: Seam, message: str) -> Problem:
    return Problem(kind=Kind.SEAM, where=f"{seam.file}::{seam.where}", message=message)


def statement_of(seam: Seam) -> cst.BaseStatement | str:
    """Parse a seam's own code, or say in a sentence what is wrong with it."""
    try:
        body = cst.parse_module(seam.code.strip() + "\n").body
    except cst.ParserSyntaxError:
        return f"its code does not parse on its own: `{seam.code.strip()}`"
    if len(body) != 1:
        return f"its code must be one statement, not {len(body)}; put the logic in a helper"
    return body[0]


def sew(module: cst.Module, seam: Seam) -> graft.Result:
    """Carry out one seam on a module, or return the module with the problems in the way."""
    site = locate(module, seam)
    if isinstance(site, str):
        return graft.Result(module=module, problems=(_problem(seam, site),))
    new = statement_of(seam)
    if isinstance(new, str):
        return graft.Result(module=module, problems=(_problem(seam, new),))
    edits = Edits(opened={id(function) for function in site.functions})
    edit = edits.edit(site.statement)
    if seam.action is Action.REPLACE:
        edit.replacement = new.with_changes(leading_lines=site.statement.leading_lines)
    elif seam.action is Action.BEFORE:
        edit.before.append(new)
    else:
        edit.after.append(new)
    result, conflicts = graft.add_imports(apply(module, edits), _imports(seam), seam.file)
    problems = tuple(_problem(seam, text) for text in conflicts)
    return graft.Result(module=module if problems else result, problems=problems)


def _imports(seam: Seam) -> list[imports.Import]:
    found: list[imports.Import] = []
    for line in seam.imports:
        found.extend(imports.read(cst.parse_statement(line.strip() + "\n"), seam.file))
    return found
