"""Tier 0: what the set-up records, what it says, and how it finds a Python."""

import dataclasses
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.setup.commands import explain, run_quietly
from tools.setup.environment import Environment
from tools.setup.lock import normal_name
from tools.setup.report import SetupError, step
from tools.setup.state import (
    State,
    dependencies_digest,
    fingerprint,
    load_state,
    megatron_digest,
    save_state,
)

pytestmark = pytest.mark.tier0
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A made-up checkout with everything that the digests read."""
    for name, text in {
        "requirements.txt": "torch==1.0\n",
        "constraints.txt": "numpy==1.0\n",
        "pyproject.toml": '[project]\nname = "x"\n\n[tool.ruff]\nline-length = 100\n',
        "megatron/core/a.py": "a = 1\n",
        "tools/patch_series/series/0001-a.toml": 'title = "a"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def make_program(path: Path, text: str) -> None:
    """Write an executable shell script."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up's shell part with nothing but ``folder`` and a few tools on the PATH."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "dirname").symlink_to(shutil.which("dirname") or "")
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools/setup/setup.sh"), "--help"],
        env={"PATH": f"{folder}:{tools}", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_record_survives_and_a_broken_one_counts_as_nothing_done(tmp_path: Path) -> None:
    """What was saved is read back; a record that is absent, cut off or odd counts as empty."""
    state = State(root="r", dependencies="d", unfinished="megatron", before="b")
    assert load_state(tmp_path) == State()
    save_state(tmp_path, state)
    assert load_state(tmp_path) == state
    file = next(tmp_path.iterdir())
    for broken in (file.read_text()[:-9], "[]", '{"unknown": 1}'):
        file.write_text(broken)
        assert load_state(tmp_path) == State()


@pytest.mark.parametrize("name", ["requirements.txt", "constraints.txt"])
def test_dependencies_are_known_by_the_pins_and_the_interpreter(checkout: Path, name: str) -> None:
    """A changed pin or another interpreter asks for an install, a touched file does not."""
    before = dependencies_digest(checkout, "3.12.1")
    os.utime(checkout / name, (1, 1))
    assert dependencies_digest(checkout, "3.12.1") == before
    assert dependencies_digest(checkout, "3.13.0") != before
    (checkout / name).write_text("other==1.0\n")
    assert dependencies_digest(checkout, "3.12.1") != before


def test_megatron_is_known_by_what_it_is_built_from(checkout: Path) -> None:
    """The sparse tree, the series and the build tables count; caches and linter settings do not."""
    before = megatron_digest(checkout)
    (checkout / "megatron/core/__pycache__").mkdir()
    (checkout / "megatron/core/__pycache__/a.pyc").write_text("x")
    pyproject = checkout / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("100", "99"))
    assert megatron_digest(checkout) == before
    for change in ("megatron/core/a.py", "tools/patch_series/series/0001-a.toml", "megatron/b.py"):
        (checkout / change).write_text("changed = 1\n")
        assert megatron_digest(checkout) != before
        before = megatron_digest(checkout)
    pyproject.write_text(pyproject.read_text().replace('"x"', '"y"'))
    assert megatron_digest(checkout) != before


def test_a_fingerprint_sees_a_package_touched(tmp_path: Path) -> None:
    """A package that comes, goes or is written to changes it; importing one does not."""
    (tmp_path / "torch").mkdir()
    before = fingerprint(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    assert fingerprint(tmp_path) == before
    time.sleep(0.01)
    (tmp_path / "torch" / "half.py").write_text("")
    assert fingerprint(tmp_path) != before


def test_a_cut_off_install_is_thrown_away(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages touched since the step began: anew. Not touched: the environment is kept."""
    monkeypatch.chdir(checkout)
    environment = Environment(checkout)
    environment._sound_state()
    site = environment.site_packages()
    began = State(root=str(checkout), unfinished="dependencies", before=fingerprint(site))
    save_state(environment.folder, began)
    assert environment._sound_state() == State(root=str(checkout))
    assert "anew" not in capsys.readouterr().out

    (site / "half_a_package").mkdir()
    assert environment._sound_state() == State(root=str(checkout))
    assert not (site / "half_a_package").exists()
    assert "the last set-up was cut off, so create .venv anew" in capsys.readouterr().out


def test_a_cut_off_megatron_is_removed_and_the_rest_kept(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what megatron-core may have left half done goes."""
    monkeypatch.chdir(checkout)
    environment = Environment(checkout)
    state = dataclasses.replace(environment._sound_state(), dependencies="d", unfinished="megatron")
    site = environment.site_packages()
    for name in (
        "megatron/core",
        "megatron_core-1.dist-info",
        "~egatron_core-1.dist-info",
        "torch",
    ):
        (site / name).mkdir(parents=True)
    save_state(environment.folder, state)
    assert environment._sound_state() == dataclasses.replace(state, unfinished="")
    assert [entry.name for entry in site.glob("*") if "egatron" in entry.name] == []
    assert (site / "torch").exists()


@pytest.mark.parametrize("kind", ["a file", "a link", "a folder of something else"])
def test_nothing_of_the_users_is_deleted(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A ``.venv`` that is no environment stops the set-up and stays."""
    monkeypatch.chdir(checkout)
    target = checkout / ".venv"
    if kind == "a file":
        target.write_text("mine")
    elif kind == "a link":
        target.symlink_to(checkout / "megatron")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("mine")
    with pytest.raises(SetupError, match="move it away and run the same command again"):
        Environment(checkout)._sound_state()
    assert target.exists()
    assert (checkout / "megatron/core/a.py").exists()


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("NewConnectionError('x'): Failed to establish", "the package index cannot be reached"),
        (
            "ERROR: Could not find a version (from versions: none)",
            "package index cannot be reached",
        ),
        (
            "ERROR: No matching distribution found for torch==9\n",
            "no package index within reach has 'torch==9'",
        ),
        ("error: command 'gcc' failed: No such file or directory", "a C compiler is missing"),
        ("error: command '/usr/bin/g++' failed with exit code 1", "a C compiler is missing"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("first\nERROR: something new\nlast", "it said: ERROR: something new"),
        ("", "it said: nothing"),
    ],
)
def test_a_failure_becomes_advice(output: str, advice: str) -> None:
    """The failures that people meet are explained, the others quoted."""
    assert advice in explain(output)


def test_a_failed_command_is_one_sentence_with_its_log(tmp_path: Path) -> None:
    """The sentence names what failed, why, and where the whole output is."""
    log = tmp_path / "logs" / "step.log"
    command = [sys.executable, "-c", "print('Errno 28'); raise SystemExit(1)"]
    with pytest.raises(SetupError) as caught:
        run_quietly(command, log=log, title="do it")
    message = str(caught.value)
    assert message.startswith("cannot do it: the disk is full")
    assert str(log) in message
    assert "\n" not in message
    assert log.read_text() == "Errno 28\n"


def test_a_step_is_one_line_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Also when it stops."""
    with step("work"):
        pass
    with pytest.raises(SetupError), step("fail"):
        raise SetupError("why")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("set-up: work ... ")
    assert first.endswith(" s")
    assert "stopped after" in second


def test_names_are_compared_as_pip_does() -> None:
    """Case and separators do not count."""
    assert normal_name("Typing_Extensions==4.1") == normal_name("typing-extensions==9")


def test_without_a_python_it_says_what_to_install(tmp_path: Path) -> None:
    """An old Python alone gives one sentence and exit status 2."""
    make_program(tmp_path / "python3", "exit 1\n")
    finished = run_setup(tmp_path)
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert "no Python 3.12 or 3.13" in finished.stderr
    assert "pyenv install 3.12" in finished.stderr
    assert finished.stdout == ""


def test_a_named_python_that_does_not_do_is_refused(tmp_path: Path) -> None:
    """``SETUP_PYTHON`` is not passed over in silence."""
    finished = run_setup(tmp_path, SETUP_PYTHON="/bin/false")
    assert finished.returncode == 2
    assert "SETUP_PYTHON is '/bin/false'" in finished.stderr


@pytest.mark.parametrize("where", ["on the PATH", "under pyenv", "through uv"])
def test_finds_a_python(tmp_path: Path, where: str) -> None:
    """An old ``python3`` and a shim that fails are passed over for a Python that does."""
    make_program(tmp_path / "python3", "exit 1\n")
    make_program(tmp_path / "python3.12", "echo 'pyenv: command not found' >&2; exit 127\n")
    if where == "on the PATH":
        (tmp_path / "python3.13").symlink_to(sys.executable)
    elif where == "under pyenv":
        (tmp_path / ".pyenv/versions/3.12.9/bin").mkdir(parents=True)
        (tmp_path / ".pyenv/versions/3.12.9/bin/python3").symlink_to(sys.executable)
    else:
        make_program(tmp_path / "uv", f'[ "$2" = find ] && echo "{sys.executable}"\n')
    finished = run_setup(tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "usage: tools/setup" in finished.stdout
