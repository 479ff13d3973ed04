"""Tier 0: each rule of the graft as a text before and a text after."""

import pytest

from tests.unit_tests.tools.patch_series.toy import grafted, refusal

pytestmark = pytest.mark.tier0

SHAPES = """\
# A licence.
'''Shapes.'''

import math


class Square(Shape):
    '''Four equal sides.'''

    sides: int = 4

    @property
    def area(self):
        return self.side**2

    @area.setter
    def area(self, value):
        self.side = math.sqrt(value)

    def grow(self, by):
        self.side += by  # in place


LIMIT = 10


def draw(shape):
    '''Draw it.'''
    return repr(shape)
"""


def test_a_method_replaces_the_method_of_the_same_path() -> None:
    """Nothing but the method changes, and the class's docstring in our file is not taken."""
    ours = """\
'''Squares shrink too.'''


class Square(Shape):
    '''For readers.'''

    def grow(self, by):
        self.side = max(0, self.side + by)
"""
    expected = SHAPES.replace(
        "        self.side += by  # in place\n", "        self.side = max(0, self.side + by)\n"
    )
    assert grafted(SHAPES, ours) == expected


def test_a_bare_class_line_leaves_the_header_alone() -> None:
    """Bases need not be repeated."""
    ours = "class Square:\n    def grow(self, by):\n        self.side *= by\n"
    expected = SHAPES.replace("self.side += by  # in place", "self.side *= by")
    assert grafted(SHAPES, ours) == expected


def test_a_written_header_replaces_the_header_as_an_entry_of_its_own() -> None:
    """Other bases and decorators are grafted under the name ``Square.<header>``."""
    ours = "@final\nclass Square(Shape, Named):\n    pass\n"
    expected = SHAPES.replace("class Square(Shape):", "@final\nclass Square(Shape, Named):")
    assert grafted(SHAPES, ours) == expected


def test_a_function_is_replaced_with_its_decorators() -> None:
    """Decorators belong to the definition."""
    ours = "@cache\ndef draw(shape):\n    return str(shape)\n"
    expected = SHAPES.replace(
        "def draw(shape):\n    '''Draw it.'''\n    return repr(shape)\n",
        "@cache\ndef draw(shape):\n    return str(shape)\n",
    )
    assert grafted(SHAPES, ours) == expected


def test_a_property_setter_has_a_path_of_its_own() -> None:
    """The getter of the same name stays."""
    ours = (
        "class Square:\n    @area.setter\n    def area(self, value):\n        self.side = value\n"
    )
    expected = SHAPES.replace("self.side = math.sqrt(value)", "self.side = value")
    assert grafted(SHAPES, ours) == expected


def test_an_assignment_and_a_field_are_replaced() -> None:
    """Assignments to one name are definitions, in a module and in a class."""
    ours = "class Square:\n    sides: int = 5\n\n\nLIMIT = 20\n"
    expected = SHAPES.replace("sides: int = 4", "sides: int = 5").replace(
        "LIMIT = 10", "LIMIT = 20"
    )
    assert grafted(SHAPES, ours) == expected


def test_a_new_method_follows_the_sibling_that_it_follows_in_our_file() -> None:
    """The sibling is replaced and the new one stands behind it."""
    ours = """\
class Square:
    sides: int = 4

    def corners(self):
        return self.sides
"""
    expected = SHAPES.replace(
        "    sides: int = 4\n",
        "    sides: int = 4\n\n    def corners(self):\n        return self.sides\n",
    )
    assert grafted(SHAPES, ours) == expected


def test_new_definitions_keep_their_order() -> None:
    """Two new functions behind the same sibling stand in the order of our file."""
    ours = "LIMIT = 10\n\n\ndef first():\n    pass\n\n\ndef second():\n    pass\n"
    expected = SHAPES.replace(
        "LIMIT = 10\n", "LIMIT = 10\n\n\ndef first():\n    pass\n\n\ndef second():\n    pass\n"
    )
    assert grafted(SHAPES, ours) == expected


def test_a_new_definition_follows_the_nearest_sibling() -> None:
    """Where two siblings precede it in our file, it stands behind the second."""
    ours = "def draw(shape):\n    return 1\n\n\nLIMIT = 20\n\n\ndef new():\n    pass\n"
    before = "LIMIT = 10\n\n\ndef other():\n    pass\n\n\ndef draw(shape):\n    return 0\n"
    assert grafted(before, ours) == (
        "LIMIT = 20\n\n\ndef new():\n    pass\n\n\ndef other():\n    pass\n\n\n"
        "def draw(shape):\n    return 1\n"
    )


def test_the_first_new_definition_stands_before_the_next_sibling() -> None:
    """A constant that a replaced function needs at its definition comes before it."""
    ours = "STYLE = 'plain'\n\n\ndef draw(shape, style=STYLE):\n    return style\n"
    expected = SHAPES.replace(
        "def draw(shape):\n    '''Draw it.'''\n    return repr(shape)\n",
        "def draw(shape, style=STYLE):\n    return style\n",
    ).replace("LIMIT = 10\n", "LIMIT = 10\nSTYLE = 'plain'\n")
    assert grafted(SHAPES, ours) == expected


def test_without_siblings_a_new_definition_goes_to_the_end() -> None:
    """At the end of its class, or of the module."""
    method = "    def name(self):\n        return 'square'\n"
    assert grafted(SHAPES, "class Square:\n" + method) == SHAPES.replace(
        "  # in place\n", "  # in place\n\n" + method
    )
    function = "def erase(shape):\n    '''Erase it.'''\n"
    assert grafted(SHAPES, function) == SHAPES + "\n\n" + function


def test_a_new_definition_stands_before_the_main_guard() -> None:
    """What a script runs at its end finds the new names."""
    guard = "\n\nif __name__ == '__main__':\n    draw(None)\n"
    function = "def erase(shape):\n    return None\n"
    assert grafted(SHAPES + guard, function) == SHAPES + "\n\n" + function + guard


@pytest.mark.parametrize("before", ["", "# A licence.\n", "'''Doc.'''\n"])
def test_a_file_that_defines_nothing_can_be_grafted_onto(before: str) -> None:
    """Such as the ``__init__.py`` of a package."""
    after = grafted(before, "import os\n\n\ndef f():\n    return os.sep\n")
    assert after.startswith(before)
    assert after.endswith("import os\n\n\ndef f():\n    return os.sep\n")


def test_a_new_class_is_taken_whole() -> None:
    """Docstring, decorators and all."""
    ours = "@dataclass\nclass Circle(Shape):\n    '''Round.'''\n\n    radius: float\n"
    assert grafted(SHAPES, ours) == SHAPES + "\n\n" + ours


def test_a_comment_above_a_definition_belongs_to_it() -> None:
    """Ours replaces upstream's; a comment that stands apart stays."""
    before = "# Section.\n\n# Old remark.\ndef f():\n    return 1\n"
    ours = "'''For readers.'''\n\n\n# New remark.\ndef f():\n    return 2\n"
    assert grafted("X = 0\n\n" + before, ours) == (
        "X = 0\n\n# Section.\n\n# New remark.\ndef f():\n    return 2\n"
    )


def test_a_definition_inside_if_or_try_is_replaced_where_it_stands() -> None:
    """The condition stays, and what is new is not put under it."""
    before = (
        "if HAVE:\n    class A:\n        def f(self):\n            return 1\n\nelse:\n    B = 1\n"
    )
    ours = "class A:\n    def f(self):\n        return 2\n\n\ndef new():\n    pass\n"
    assert grafted(before, ours) == (
        "if HAVE:\n    class A:\n        def f(self):\n            return 2\n\nelse:\n    B = 1\n"
        "\n\ndef new():\n    pass\n"
    )


def test_nested_classes_are_taken_apart_too() -> None:
    """Only the inner method changes."""
    before = "class A:\n    class B:\n        x = 1\n\n        def f(self):\n            return 1\n"
    ours = "class A:\n    class B:\n        def f(self):\n            return 2\n"
    assert grafted(before, ours) == before.replace("return 1", "return 2")


@pytest.mark.parametrize(
    ('before', 'ours', 'message'),
    [
        ("if A:\n    x = 1\nelse:\n    x = 2\n", "x = 3\n", "defines it 2 times"),
        ("a, x = 1, 2\n", "x: int = 1\na, x = 1, 1\n", "neither a definition"),
        ("x = y = 2\n", "x = 3\n", "together with other names"),
        ("x = 1\n", "print(x)\n", "`print(x)` is neither a definition"),
        ("x = 1\n", "if x:\n    y = 1\n", "use a seam"),
        ("x = 1\n", "x = 2\nx = 3\n", "defined twice in our file"),
        ("def A(): pass\n", "class A:\n    x = 1\n", "is a class here"),
        ("class A: pass\n", "class A:\n    x = 1\n", "on the header's line"),
        ("class A:\n    x = 1\n", "class A: x = 2\n", "needs an indented body"),
    ],
)
def test_what_cannot_be_grafted_is_refused(before: str, ours: str, message: str) -> None:
    """Each refusal is one sentence, and the module is as it was."""
    assert message in refusal(before, ours)
