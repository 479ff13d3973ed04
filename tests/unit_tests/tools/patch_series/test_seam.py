"""Tier 0: seams as a text before and a text after."""

import libcst as cst
import pytest

from tests.unit_tests.tools.patch_series.toy import UTILS
from tools.patch_series import seam
from tools.patch_series.seam import Action, Seam

pytestmark = pytest.mark.tier0

LOOP = """\
import os


def train(model, data):
    '''Train.'''
    if model is None:
        # Nothing to do.
        return None

    # Every batch.
    for batch in data:
        loss = model(
            batch,
            scale=2,
        )
        loss = model(batch)
    def report():
        log(loss)
    report()
    return loss


if os.environ.get('FAST'):
    SPEED = 2
    LIMIT = 3
"""


def sew(anchor: str, code: str, action: Action = Action.REPLACE, **more: object) -> str:
    """Sew one seam into the loop; return the new text, or the message that refuses it."""
    fields = {'file': UTILS, 'where': 'train', **more}
    item = Seam(action=action, anchor=anchor, code=code, **fields)
    result = seam.sew(cst.parse_module(LOOP), item)
    if result.problems:
        assert result.module.code == LOOP
        return result.problems[0].message
    return result.module.code


def test_a_statement_is_replaced_in_place() -> None:
    """Comments above it stay."""
    text = "    for batch in data:"
    after = sew("for batch in data:", "loss = run(model, data)")
    head, _, tail = LOOP.partition(text)
    assert after == head + "    loss = run(model, data)\n" + tail[tail.index("    def report") :]


def test_a_call_is_put_before_and_after() -> None:
    """The statement itself is untouched."""
    before = sew("return loss", "note(loss)", Action.BEFORE)
    assert before == LOOP.replace("    return loss\n", "    note(loss)\n    return loss\n")
    after = sew("if model is None:", "note(model)", Action.AFTER)
    assert after == LOOP.replace("return None\n", "return None\n    note(model)\n")


def test_more_lines_make_an_anchor_unique() -> None:
    """The first line alone may start other statements too."""
    after = sew("loss = model(\n  batch,", "loss = run(batch)")
    assert after == LOOP.replace(
        "loss = model(\n            batch,\n            scale=2,\n        )", "loss = run(batch)"
    )


def test_statements_of_nested_functions_can_be_named() -> None:
    """By the path of the outer function, which alone has one."""
    assert sew("log(loss)", "note(loss)") == LOOP.replace("log(loss)", "note(loss)")


def test_the_module_level_has_a_name() -> None:
    """Statements inside functions are not searched then."""
    after = sew("if os.environ.get('FAST'):", "SPEED = 1", where=seam.MODULE)
    assert after == LOOP[: LOOP.index("if os.environ")] + "SPEED = 1\n"
    assert "matches 0 statements" in sew("return loss", "pass", where=seam.MODULE)


def test_imports_of_a_seam_are_added_if_missing() -> None:
    """The same rules as for a graft."""
    after = sew("log(loss)", "ours.note(loss)", imports=("from megatron.core import ours",))
    assert after.startswith("import os\nfrom megatron.core import ours\n")
    assert after.count("import") == LOOP.count("import") + 1


@pytest.mark.parametrize(
    ('anchor', 'code', 'where', 'message'),
    [
        ("return", "pass", "train", "the anchor `return` matches 0 statements of `train`, not 1"),
        ("loss = model(batch", "pass", "train", "matches 0 statements"),
        ("return loss", "pass", "absent", "upstream has 0 definitions of `absent`"),
        ("return loss", "pass", "LIMIT", "`LIMIT` is not a function"),
        ("return loss", "a = 1\nb = 2", "train", "must be one statement, not 2"),
        ("return loss", "return (", "train", "does not parse"),
    ],
)
def test_a_seam_that_does_not_fit_is_refused(
    anchor: str, code: str, where: str, message: str
) -> None:
    """An anchor names whole lines and exactly one statement; its code is one statement."""
    assert message in sew(anchor, code, where=where)


def test_an_anchor_that_matches_twice_is_refused() -> None:
    """No statement is chosen by its position."""
    twice = cst.parse_module("def f():\n    go()\n    go()\n")
    item = Seam(file=UTILS, where="f", action=Action.REPLACE, anchor="go()", code="stop()")
    assert "matches 2 statements" in seam.sew(twice, item).problems[0].message
