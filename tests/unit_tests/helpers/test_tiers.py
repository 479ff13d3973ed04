"""Tier 0: the rules of the suite, on small suites that keep and break them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier0
ROOT = Path(__file__).resolve().parents[3]

ZERO = "@pytest.mark.tier0\ndef test_zero(): pass\n"
ONE = "@pytest.mark.tier1\ndef test_one(): pass\n"
ONE_SKIPPED = "@pytest.mark.tier1\ndef test_one(): pytest.skip('not today')\n"
TWO = "@pytest.mark.tier2(gpus=64)\ndef test_two(): pass\n"


def run_suite(
    folder: Path, body: str, *arguments: str, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a suite of one file under the rules of this one, with ``path`` before the packages."""
    (folder / "test_suite.py").write_text("import pytest\n" + body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "tests.unit_tests.conftest",
        "-rs",
    ]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_whole_run_of_both_tiers_passes(tmp_path: Path) -> None:
    """Tiers 0 and 1 run, tier 2 is skipped in sight, and the numbers are told."""
    finished = run_suite(tmp_path, ZERO + ONE + TWO)
    assert finished.returncode == 0, finished.stdout
    assert "tier 2 was not asked for; run it with: make test-gpu" in finished.stdout
    for line in ("tier 0: 1 ran, 0 skipped", "tier 1: 1 ran", "tier 2: 0 ran, 1 skipped"):
        assert line in finished.stdout


@pytest.mark.parametrize("body", [ZERO, ZERO + ONE_SKIPPED], ids=["no test", "all skipped"])
def test_a_tier_that_ran_no_test_fails_a_whole_run(tmp_path: Path, body: str) -> None:
    """A tier does not vanish in silence."""
    finished = run_suite(tmp_path, body)
    assert finished.returncode == 1
    assert "tier 1 ran no test: this run fails" in finished.stdout


@pytest.mark.parametrize("choice", [("-k", "zero"), ("test_suite.py",), ("--tier", "0")])
def test_a_choice_made_by_hand_may_leave_a_tier_out(tmp_path: Path, choice: tuple[str]) -> None:
    """Someone who picks tests gets those and no complaint."""
    finished = run_suite(tmp_path, ZERO + ONE_SKIPPED, *choice)
    assert finished.returncode == 0, finished.stdout


def test_a_test_has_to_name_its_tier(tmp_path: Path) -> None:
    """A test without a tier stops the run and is told what to write."""
    finished = run_suite(tmp_path, "def test_none(): pass\n")
    assert finished.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_none names 0 tiers instead of one" in finished.stdout + finished.stderr
    assert "pytestmark = pytest.mark.tier0" in finished.stdout + finished.stderr


def test_gpu_tests_say_what_is_missing(tmp_path: Path) -> None:
    """A tier 2 test that was asked for says how many GPUs it needs."""
    finished = run_suite(tmp_path, TWO, "--tier", "2", "test_suite.py")
    assert finished.returncode == 0, finished.stdout
    assert "needs 64 GPU(s); this machine has" in finished.stdout


def test_another_megatron_is_refused(tmp_path: Path) -> None:
    """A package that is not this tree's stops the run, with the command that mends it."""
    other = tmp_path / "other" / "megatron" / "core"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    finished = run_suite(tmp_path, ZERO + ONE, path=str(tmp_path / "other"))
    assert finished.returncode == 3
    assert "Mend it: make install" in finished.stdout + finished.stderr
    assert "passed" not in finished.stdout


def test_tiers_can_be_chosen_without_naming_a_folder() -> None:
    """``pytest --tier 2`` at the root, as ``make test-gpu`` calls it, knows the option."""
    command = [sys.executable, "-m", "pytest", "--tier", "2", "--help"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--tier={0,1,2}" in finished.stdout
