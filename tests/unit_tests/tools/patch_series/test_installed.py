"""Tier 0: the installed package against the tree, in a folder of its own."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit_tests.tools.patch_series.toy import UTILS, Toy
from tools.patch_series import installed, record, wheel

pytestmark = pytest.mark.tier0


@pytest.fixture
def site(
    repository: Toy, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder that holds the built package, before everything else on the path."""
    repository.write(UTILS, "'''Ours.'''\n\n\ndef half(number):\n    return 0.5 * number\n")
    repository.patch("0001-a", f"[[graft]]\nfile = '{UTILS}'\nnames = ['half']\n")
    record.record(repository.series(), repository.base(), [])
    folder = tmp_path_factory.mktemp("site")
    built = wheel.build(repository.series(), repository.root / "dist").wheel
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(folder), str(built)], check=True, timeout=120)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_an_equal_package_is_accepted_quickly(site: Path, repository: Toy) -> None:
    """By the stamp and RECORD alone, and by grafting anew."""
    start = time.process_time()
    verdict = installed.require_matching_install(repository.root)
    assert time.process_time() - start < 1
    assert verdict.matches
    assert verdict.place == str(site)
    assert installed.inspect(repository.root, regraft=True).matches


def test_a_change_of_the_tree_is_noticed(site: Path, repository: Toy) -> None:
    """The message names the command that mends it."""
    repository.write(UTILS, "'''Ours.'''\n\n\ndef half(number):\n    return 0.25 * number\n")
    with pytest.raises(SystemExit, match=r"(?s)changed since it was built.*make install") as stop:
        installed.require_matching_install(repository.root)
    assert str(site) not in str(stop.value)


def test_linter_settings_are_no_change(site: Path, repository: Toy) -> None:
    """Only what reaches the wheel counts."""
    project = repository.root / "pyproject.toml"
    project.write_text(project.read_text() + "\n[tool.ruff]\nline-length = 80\n")
    assert installed.inspect(repository.root).matches
    project.write_text(project.read_text().replace("A patched base", "Another summary"))
    assert not installed.inspect(repository.root).matches
    assert site.exists()


@pytest.mark.parametrize("path", [UTILS, "megatron/core/__init__.py"])
def test_a_file_edited_in_place_is_noticed(site: Path, repository: Toy, path: str) -> None:
    """Whether the series touches it or not."""
    (site / path).write_text("x = 1\n")
    assert installed.inspect(repository.root).differs == (f"{path} was edited in place",)
    (site / path).unlink()
    assert f"{path} is missing" in installed.inspect(repository.root).differs


def test_a_change_of_the_tool_is_answered_by_grafting_anew(site: Path, repository: Toy) -> None:
    """A tool that builds the same files is no difference."""
    repository.write("tools/patch_series/other.py", "")
    assert installed.inspect(repository.root).matches
    assert site.exists()


def test_a_package_of_another_origin_is_refused(site: Path, repository: Toy) -> None:
    """Such as the released wheel, which has no stamp."""
    (stamp,) = site.glob("*.dist-info/patch_series.json")
    stamp.unlink()
    verdict = installed.inspect(repository.root)
    assert verdict.differs == ("version 1.2.3+mimo.1 is not built by this repository",)


def test_a_package_that_is_shadowed_is_noticed(
    site: Path, repository: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be imported has to be what was compared."""
    other = tmp_path / "other"
    (other / "megatron/core").mkdir(parents=True)
    (other / "megatron/core/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    (difference,) = installed.inspect(repository.root).differs
    assert difference.startswith("`import megatron.core` would take ")
    assert str(site) in difference
