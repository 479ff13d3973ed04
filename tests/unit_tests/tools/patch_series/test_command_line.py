"""Tier 0: the commands, their exit status and what they print."""

import pytest

from tests.unit_tests.tools.patch_series.toy import BASE, UPSTREAM, UTILS, Toy
from tools.patch_series.__main__ import main

pytestmark = pytest.mark.tier0


@pytest.fixture
def ready(repository: Toy) -> Toy:
    """A repository with one recorded patch."""
    repository.write(UTILS, "'''Ours.'''\n\n\ndef half(number):\n    return 0.5 * number\n")
    repository.patch("0001-a", f"[[graft]]\nfile = '{UTILS}'\nnames = ['half']\n")
    assert main(["record"], root=repository.root) == 0
    return repository


def test_check_is_silent_about_nothing_and_exits_with_0(
    ready: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says how many patches apply, and to what."""
    capsys.readouterr()
    assert main(["check"], root=ready.root) == 0
    assert capsys.readouterr().out == f"1 patches apply to megatron-core {BASE}\n"


def test_one_changed_character_upstream_fails_the_check(
    ready: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a folder; the three texts are on the screen."""
    other = ready.root / "other"
    for path, text in UPSTREAM.items():
        target = other / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("number / 2", "number / 3"))
    capsys.readouterr()
    assert main(["check", "--upstream", str(other)], root=ready.root) == 1
    shown = capsys.readouterr().out
    assert f"drift [0001-a] {UTILS}::half: upstream's text is not the one" in shown
    for line in ("return number / 2", "return 0.5 * number", "return number / 3"):
        assert line in shown
    assert shown.endswith(f"1 problem(s) with {other}\n")


def test_build_writes_the_wheel_or_nothing(ready: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """The path is the only line on standard output; what is wrong goes to standard error."""
    capsys.readouterr()
    output = ready.root / "out"
    assert main(["build", "--output", str(output)], root=ready.root) == 0
    assert capsys.readouterr().out == f"{next(output.iterdir())}\n"
    ready.write("megatron/core/stray.py", "")
    assert main(["build", "--output", str(ready.root / "none")], root=ready.root) == 1
    captured = capsys.readouterr()
    assert "megatron/core/stray.py: is claimed by no patch" in captured.err
    assert captured.out == ""
    assert not (ready.root / "none").exists()


def test_status_tells_people_the_state_of_each_patch(
    ready: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Applied first; after a change of the pinned base's fingerprint, stale."""
    assert main(["status"], root=ready.root) == 0
    shown = capsys.readouterr().out
    assert f"base       megatron-core {BASE}\n" in shown
    assert "patch      0001-a  applied: title (1 definition)\n" in shown
    assert "installed  the installed megatron-core differs from the tree" in shown
    assert "carried    1 of 2 grafted lines" in shown
    patch = ready.root / "tools/patch_series/series/0001-a.toml"
    patch.write_text(patch.read_text().replace('half" = "', 'half" = "0'))
    assert main(["status"], root=ready.root) == 0
    assert "0001-a  stale: title" in capsys.readouterr().out


def test_what_a_user_can_mend_is_one_sentence_without_traceback(
    ready: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2."""
    (ready.root / "neither").write_text("")
    for arguments, message in [
        (["record", "0009"], "no such patch: 0009"),
        (["check", "--upstream", str(ready.root / "absent")], "neither a wheel nor a folder"),
        (["check", "--upstream", str(ready.root / "neither")], "cannot be read as a wheel"),
    ]:
        capsys.readouterr()
        assert main(arguments, root=ready.root) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("patch_series: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_a_syntax_error_names_the_file_and_the_line(
    ready: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours or upstream's."""
    ready.write(UTILS, "def half(:\n")
    assert main(["check"], root=ready.root) == 2
    assert f"{UTILS} does not parse: line 1" in capsys.readouterr().err
