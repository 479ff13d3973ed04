"""Module-level imports: what a file binds already, and what a graft must add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.helpers import get_full_name_for_node

from tools.patch_series import syntax


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: where it comes from and what it is called here."""

    module: str
    name: str = ""
    alias: str = ""

    @property
    def bound(self) -> str:
        """The name that the import binds in its module."""
        return self.alias or self.name or self.module.partition(".")[0]

    @property
    def source(self) -> str:
        """What is bound, in a form that can be compared."""
        if self.name:
            return f"{self.module}:{self.name}"
        return self.module if self.alias else self.module.partition(".")[0]

    def statement(self) -> str:
        """Return the import as a statement of its own."""
        tail = f" as {self.alias}" if self.alias else ""
        if self.name:
            return f"from {self.module} import {self.name}{tail}"
        return f"import {self.module}{tail}"


def module_name(path: str) -> str:
    """Return the dotted module name of a repository path such as `megatron/core/utils.py`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_name(path: str) -> str:
    """Return the dotted package that relative imports in the file start from."""
    name = module_name(path)
    return name if path.endswith("/__init__.py") else name.rpartition(".")[0]


def read(statement: cst.CSTNode, path: str) -> Iterator[Import]:
    """Yield the imports of one statement; a star import is named `*`."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    for small in statement.body:
        if isinstance(small, cst.Import):
            for alias in small.names:
                yield Import(module=_name(alias.name), alias=_alias(alias))
        elif isinstance(small, cst.ImportFrom):
            module = _absolute(small, path)
            if isinstance(small.names, cst.ImportStar):
                yield Import(module=module, name="*")
                continue
            for alias in small.names:
                yield Import(module=module, name=_name(alias.name), alias=_alias(alias))


def _name(node: cst.CSTNode) -> str:
    return get_full_name_for_node(node) or ""


def _alias(alias: cst.ImportAlias) -> str:
    return _name(alias.asname.name) if alias.asname else ""


def _absolute(node: cst.ImportFrom, path: str) -> str:
    written = _name(node.module) if node.module else ""
    if not node.relative:
        return written
    parts = package_name(path).split(".")
    kept = parts[: len(parts) - (len(node.relative) - 1)]
    return ".".join([*kept, written] if written else kept)


def bound(module: cst.Module, path: str) -> dict[str, set[str]]:
    """Map each name that module-level imports bind at run time to the places it comes from."""
    found: dict[str, set[str]] = {}
    for item in _module_level(module.body, path):
        found.setdefault(item.bound, set()).add(item.source)
        if not item.name and not item.alias:
            found[item.bound].add(item.module)
    return found


def _module_level(body: Sequence[cst.CSTNode], path: str) -> Iterator[Import]:
    for statement in body:
        yield from read(statement, path)
        if isinstance(statement, syntax.COMPOUND) and not is_type_checking(statement):
            for block in syntax.blocks_of(statement):
                yield from _module_level(block.body, path)


def is_type_checking(statement: cst.CSTNode) -> bool:
    """Tell whether a statement is an `if TYPE_CHECKING:` block."""
    return isinstance(statement, cst.If) and _name(statement.test).endswith("TYPE_CHECKING")


def is_missing(item: Import, have: dict[str, set[str]]) -> bool:
    """Tell whether an import has to be added to a module that binds `have`."""
    sources = have.get(item.bound, set())
    wanted = item.source if item.name or item.alias else item.module
    return wanted not in sources


def conflict(item: Import, have: dict[str, set[str]], defined: set[str]) -> str:
    """Say why an import cannot be added, or return an empty text."""
    others = have.get(item.bound, set())
    if others and item.source not in others and (item.name or item.alias):
        places = ", ".join(sorted(others))
        return f"`{item.statement()}`: the file binds `{item.bound}` from {places} already"
    if not others and item.bound in defined:
        return f"`{item.statement()}` would hide the definition of `{item.bound}` in that file"
    return ""


def insertion_point(module: cst.Module) -> int:
    """Return the index in the module's body where a new import belongs."""
    place = 0
    for position, statement in enumerate(module.body):
        if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
            break
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        first = statement.body[0] if statement.body else None
        is_import = isinstance(first, (cst.Import, cst.ImportFrom))
        is_docstring = position == 0 and module.get_docstring() is not None
        if is_import or is_docstring:
            place = position + 1
    return place
