"""The main job from its command line to its files, with real processes and two iterations."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.helpers import torchrun

pytestmark = pytest.mark.tier1

ROOT = Path(__file__).resolve().parents[4]
SECONDS = 400


def run_job(*arguments: str) -> tuple[int, str, str]:
    """Run the job; return exit code, output and errors. One that takes too long is ended."""
    if torchrun.is_active():
        pytest.skip("the job starts its own ranks; run it with plain pytest")
    with subprocess.Popen(
        [sys.executable, "-m", "examples.mimo.digits", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it ends its ranks and itself
            output, errors = process.communicate(timeout=60)
            pytest.fail(f"no end after {SECONDS} s\n{output}\n{errors}")
    return process.returncode, output, errors


def test_stop_resume_and_report(tmp_path: Path) -> None:
    """The job stops half way, resumes, evaluates, and leaves what it promises."""
    folder = tmp_path / "run"
    code, output, errors = run_job(
        *("--output", str(folder), "--device", "cpu", "--iterations", "2", "--evaluations", "1")
    )
    assert code == 0, (output, errors, [log.read_text() for log in folder.glob("logs/*")])
    lines = output.splitlines()
    assert lines[-1].startswith("held-out exact match: 0.")
    for sentence in (
        "starting, from iteration 0 to 1",
        "stopped half way, as planned, with a checkpoint of iteration 1",
        "the same command again, from iteration 1 to 2",
        "resumed from the checkpoint of iteration 1",
        "iteration 2/2: validation loss",
    ):
        assert any(sentence in line for line in lines), (sentence, output)
    assert len(lines) < 25, "one voice: what Megatron says belongs into the log"
    assert not errors
    results = json.loads((folder / "results.json").read_text())
    answers = json.loads((folder / "answers.json").read_text())
    assert results["resumed_from"] == [1]
    assert f"{results['exact_match']['2']['all']:.3f}" == lines[-1].split()[-1]
    assert (answers["iteration"], len(answers["answers"])) == (2, 900)
    assert (folder / "loss.png").stat().st_size > 10_000
    assert (folder / "examples.png").stat().st_size > 10_000
    assert list(folder.glob("tensorboard/events*"))
    assert sorted(path.name for path in (folder / "checkpoints").glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
    ]
    assert "arguments" in (folder / "logs" / "train-1.log").read_text()


def test_a_failure_says_why(tmp_path: Path) -> None:
    """A run that cannot go on quotes the exception of the rank that failed, and names the log."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "iter_0000001").mkdir(parents=True)
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("1")  # a checkpoint that is not there
    settings = {"iterations": 2, "evaluations": 1, "modules": ["vision", "language"]}
    (folder / "settings.json").write_text(json.dumps(settings | {"processes": 2}))
    code, output, errors = run_job("--resume", "--output", str(folder))
    assert code == 1, (output, errors)
    assert "CheckpointingException: cannot load iteration 1 " in errors
    assert "metadata.json: missing" in errors
    assert "ChildFailedError" not in errors
    assert errors.splitlines()[-1].startswith("The whole log: ")
