"""Tier 0: the rules of this repository, each on a file that breaks it and one that does not."""

from collections.abc import Callable, Iterator

import pytest

from tools.setup.house_rules import (
    MAX_FUNCTION_LINES,
    MAX_LINES,
    RULES,
    Finding,
    Source,
    devices_are_passed_in,
    files_and_functions_are_short,
    groups_are_passed_in,
    no_machine_in_the_tree,
)

pytestmark = pytest.mark.tier0
Rule = Callable[[Source], Iterator[Finding]]
HOME = "/" + "home/somebody/data"
MODEL = "examples/mimo/training/hetero/step.py"
SHIM = "megatron/training/cpu_device/switch.py"

BREAKING = [
    (no_machine_in_the_tree, "README.md", f"Put the data into {HOME}.", 1),
    (no_machine_in_the_tree, "tools/a.py", f'\nDATA = "{HOME}"\n', 2),
    (no_machine_in_the_tree, "a.py", "# Copyright NVIDIA " + "CORPORATION", 1),
    (no_machine_in_the_tree, "a.toml", "index = 'https://pypi" + ".org/simple'", 1),
    (files_and_functions_are_short, "a.py", "x = 1\n" * (MAX_LINES + 1), MAX_LINES + 1),
    (files_and_functions_are_short, "a.py", "\ndef f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 2),
    (devices_are_passed_in, MODEL, '\nt.to("cuda")\n', 2),
    (devices_are_passed_in, "megatron/core/models/mimo/optimizer.py", "t.to(device='cuda:1')", 1),
    (groups_are_passed_in, MODEL, "from megatron.core import parallel_state", 1),
    (groups_are_passed_in, MODEL, "import megatron.core.parallel_state as ps", 1),
    (groups_are_passed_in, MODEL, "from megatron.core.parallel_state import get_x", 1),
    (groups_are_passed_in, MODEL, "from megatron.core import mpu", 1),
    (groups_are_passed_in, MODEL, "\n\nmegatron.core.parallel_state.get_x()", 3),
]

KEEPING = [
    (no_machine_in_the_tree, "a.md", "a/home/b, ~/work, https://example.com/mnt/x and /dev/null"),
    (files_and_functions_are_short, "a.py", "x = 1\n" * MAX_LINES),
    (files_and_functions_are_short, "README.md", "text\n" * (MAX_LINES + 1)),
    (
        files_and_functions_are_short,
        "a.py",
        "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1),
    ),
    (devices_are_passed_in, SHIM, 't.to("cuda")'),
    (devices_are_passed_in, "tests/unit_tests/a.py", 't.to("cuda")'),
    (devices_are_passed_in, MODEL, '"""Runs on cuda too."""\nkind = "cuda graphs"'),
    (groups_are_passed_in, "tests/unit_tests/a.py", "from megatron.core import parallel_state"),
    (groups_are_passed_in, MODEL, '"""Without parallel_state."""'),
    (groups_are_passed_in, MODEL, "this does not parse, the linters say so: parallel_state"),
]


@pytest.mark.parametrize(("rule", "path", "text", "line"), BREAKING)
def test_finds_what_breaks_a_rule(rule: Rule, path: str, text: str, line: int) -> None:
    """The place that breaks the rule is found, at its line."""
    found = list(rule(Source(path=path, text=text)))
    assert (path, line) in [(finding.path, finding.line) for finding in found]


@pytest.mark.parametrize(("rule", "path", "text"), KEEPING)
def test_leaves_the_rest_alone(rule: Rule, path: str, text: str) -> None:
    """What looks alike and keeps the rule is no finding."""
    assert list(rule(Source(path=path, text=text))) == []


def test_every_rule_is_tried_and_finds_something() -> None:
    """No rule is without an example that breaks it."""
    assert {rule for rule, *_ in BREAKING} == set(RULES) == {rule for rule, *_ in KEEPING}


def test_a_finding_reads_like_a_linters() -> None:
    """Editors can jump to it."""
    assert str(Finding(path="a.py", line=3, message="why")) == "a.py:3: why"
