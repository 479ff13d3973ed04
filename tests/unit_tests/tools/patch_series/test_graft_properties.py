"""Tier 0: what holds for the graft of any module, with modules made by hypothesis."""

import string

import libcst as cst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.tools.patch_series.toy import UTILS
from tools.patch_series import graft, sparse, syntax

pytestmark = pytest.mark.tier0


Tree = dict[str, object]  # A dictionary is a class, a tuple a function or an assignment.

NAMES = st.sampled_from([letter * 2 for letter in string.ascii_lowercase[:8]])
LEAVES = st.tuples(
    st.sampled_from(["function", "assignment", "decorated", "commented"]), st.integers(0, 9)
)
CLASSES = st.dictionaries(NAMES, LEAVES, min_size=1, max_size=5)
MODULES = st.dictionaries(NAMES, st.one_of(LEAVES, CLASSES), min_size=1, max_size=7)


def lines_of(name: str, value: object, indent: str = "") -> list[str]:
    """Write one definition."""
    if isinstance(value, dict):
        inner = [text for item in value.items() for text in lines_of(*item, indent=indent + "    ")]
        return [f"{indent}class {name}(Base):", *inner, ""]
    kind, number = value
    if kind == "assignment":
        return [f"{indent}{name}: int = {number}", ""]
    above = {"decorated": [f"{indent}@mark({number})"], "commented": [f"{indent}# Is {number}."]}
    body = [f"{indent}def {name}(x):", f"{indent}    return {number}  # {name}", ""]
    return [*above.get(kind, []), *body]


def text_of(tree: Tree) -> str:
    """Write a module with an odd layout, which has to survive."""
    lines = [text for item in tree.items() for text in lines_of(*item)]
    return "'''Doc.'''\nimport os\n\nprint( os )  # stays\n" + "\n".join(lines)


def sparse_text(tree: Tree) -> str:
    """Write a sparse file with the same definitions."""
    return "'''Ours.'''\n\n" + "\n".join(text for item in tree.items() for text in lines_of(*item))


def merged(theirs: Tree, ours: Tree) -> Tree:
    """Return what the graft means: ours win, classes are merged by member."""
    result = dict(theirs)
    for name, value in ours.items():
        both = isinstance(value, dict) and isinstance(theirs.get(name), dict)
        result[name] = merged(theirs[name], value) if both else value
    return result


def run(before: str, ours: str) -> graft.Result:
    """Graft a whole sparse file."""
    module = cst.parse_module(before)
    taken = sparse.read(UTILS, ours, module)
    if taken.problems:
        return graft.Result(module=module, problems=tuple(taken.problems))
    return graft.graft(module, taken, [entry.path for entry in taken.entries])


def definitions(code: str) -> dict[str, str]:
    """Map each dotted path of a module to its text, classes by their members."""
    module = cst.parse_module(code)
    return {
        path: syntax.text_of(module, found[0].node)
        for path, found in syntax.index(module).items()
        if not isinstance(found[0].node, cst.ClassDef)
    }


def clashes(theirs: Tree, ours: Tree) -> bool:
    """Tell whether a name is a class on one side only where ours is the class."""
    return any(
        isinstance(value, dict) and name in theirs and not isinstance(theirs[name], dict)
        for name, value in ours.items()
    )


@settings(deadline=None, max_examples=200)
@given(theirs=MODULES, ours=MODULES)
def test_the_graft_is_the_merge_of_both_modules(theirs: Tree, ours: Tree) -> None:
    """Ours replace and add, everything else keeps its text; a clash of kinds changes nothing."""
    before, file = text_of(theirs), sparse_text(ours)
    result = run(before, file)
    if clashes(theirs, ours):
        assert result.problems
        assert result.module.code == before
        return
    assert not result.problems
    assert definitions(result.module.code) == definitions(text_of(merged(theirs, ours)))
    assert "print( os )  # stays\n" in result.module.code


@settings(deadline=None, max_examples=100)
@given(theirs=MODULES, ours=MODULES)
def test_a_second_graft_changes_nothing(theirs: Tree, ours: Tree) -> None:
    """The graft is idempotent, byte for byte."""
    once = run(text_of(theirs), sparse_text(ours))
    if not once.problems:
        assert run(once.module.code, sparse_text(ours)).module.code == once.module.code


@settings(deadline=None, max_examples=100)
@given(theirs=MODULES, ours=MODULES)
def test_grafting_upstream_back_restores_every_text(theirs: Tree, ours: Tree) -> None:
    """Replaced definitions return letter for letter; only what was added is left over."""
    before = text_of(theirs)
    once = run(before, sparse_text(ours))
    same = all(
        isinstance(theirs[name], dict) == isinstance(ours[name], dict)
        for name in theirs.keys() & ours.keys()
    )
    if once.problems or not same:
        return
    back = run(once.module.code, sparse_text(theirs))
    assert not back.problems
    restored = definitions(back.module.code)
    assert {path: restored[path] for path in definitions(before)} == definitions(before)
    if definitions(text_of(merged(theirs, ours))).keys() == definitions(before).keys():
        assert back.module.code == before


@settings(deadline=None, max_examples=100)
@given(theirs=MODULES, ours=MODULES, data=st.data())
def test_the_claims_may_be_split_over_patches(
    theirs: Tree, ours: Tree, data: st.DataObject
) -> None:
    """Two patches, one after the other, give the definitions of one patch with both claims."""
    before, file = cst.parse_module(text_of(theirs)), sparse_text(ours)
    taken = sparse.read(UTILS, file, before)
    if taken.problems:
        return
    names = [entry.path for entry in taken.entries]
    first = data.draw(st.sets(st.sampled_from(names)))
    half = graft.graft(before, taken, [name for name in names if name in first]).module
    whole = graft.graft(half, taken, [name for name in names if name not in first]).module
    at_once = graft.graft(before, taken, names).module
    assert definitions(whole.code) == definitions(at_once.code)
