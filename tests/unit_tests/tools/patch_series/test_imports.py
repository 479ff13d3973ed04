"""Tier 0: which imports of a sparse file reach upstream's file."""

import pytest

from tests.unit_tests.tools.patch_series.toy import grafted, refusal

pytestmark = pytest.mark.tier0

BEFORE = """\
'''Doc.'''

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from megatron.core import parallel_state

try:
    from extra import fast
except ImportError:
    fast = None

if TYPE_CHECKING:
    from megatron.core.config import Config


def f():
    return 1
"""
BODY = "\n\ndef f():\n    return {}\n"


@pytest.mark.parametrize(
    ('imported', 'used'),
    [
        ("from typing import TYPE_CHECKING", "TYPE_CHECKING"),
        ("from . import parallel_state", "parallel_state"),
        ("from extra import fast", "fast"),
        ("import os.path", "os.path"),
        ("import os", "os"),
        ("from megatron.core.utils import g", "g()"),
    ],
)
def test_an_import_that_is_there_is_not_added(imported: str, used: str) -> None:
    """Also where upstream writes it in another form, or where the name is the module's own."""
    before = BEFORE + "\n\ndef g():\n    pass\n"
    expected = before.replace("return 1", f"return {used}")
    assert grafted(before, imported + BODY.format(used)) == expected


@pytest.mark.parametrize(
    ('imported', 'used'),
    [
        ("from typing import List", "List"),
        ("import os.abc", "os.abc"),
        ("import numpy as np", "np"),
        ("from megatron.core.config import Config", "Config()"),
    ],
)
def test_a_missing_import_is_added_behind_the_others(imported: str, used: str) -> None:
    """A name that only type checkers see counts as missing."""
    expected = BEFORE.replace("return 1", f"return {used}").replace(
        "import parallel_state\n", f"import parallel_state\n{imported}\n"
    )
    assert grafted(BEFORE, imported + BODY.format(used)) == expected


def test_one_statement_is_taken_apart() -> None:
    """Only the missing names of a long import are added."""
    ours = "from typing import (\n    TYPE_CHECKING,\n    List,\n)\n" + BODY.format(
        "List, TYPE_CHECKING"
    )
    assert "from typing import List\n" in grafted(BEFORE, ours)


def test_a_file_without_imports_gets_them_behind_its_docstring() -> None:
    """The docstring stays the first statement."""
    before = "# Licence.\n\n'''Doc.'''\n\n\ndef f():\n    return 1\n"
    after = grafted(before, "import os\n" + BODY.format("os.sep"))
    assert after == before.replace("'''Doc.'''\n", "'''Doc.'''\nimport os\n").replace("1", "os.sep")


def test_type_checking_blocks_and_the_class_headers_imports_are_for_readers() -> None:
    """Neither reaches the result, and neither counts as unused."""
    before = "class A(Base):\n    def f(self):\n        return 1\n"
    ours = (
        "from typing import TYPE_CHECKING\n\nfrom megatron.core.base import Base\n\n"
        "if TYPE_CHECKING:\n    from other import Name\n\n\n"
        "class A(Base):\n    def f(self):\n        return 2\n"
    )
    assert grafted(before, ours) == before.replace("return 1", "return 2")


@pytest.mark.parametrize(
    ('imported', 'used', 'message'),
    [
        ("from other import fast", "fast", "binds `fast` from extra:fast already"),
        ("from other import later", "later", "would hide the definition of `later`"),
        ("from typing import *", "1", "name what you import"),
        ("from typing import List", "1", "is used by no definition"),
        ("from megatron.core.utils import absent", "absent", "upstream has no such name"),
    ],
)
def test_an_import_that_cannot_be_added_is_refused(imported: str, used: str, message: str) -> None:
    """Each refusal says what is in the way."""
    before = BEFORE + "\n\ndef later():\n    pass\n"
    assert message in refusal(before, imported + BODY.format(used))


def test_a_future_import_is_refused() -> None:
    """It would change every other definition of the file."""
    before = "def f():\n    return 1\n"
    ours = "from __future__ import annotations\n" + BODY.format("annotations")
    assert "not ours" in refusal(before, ours)
