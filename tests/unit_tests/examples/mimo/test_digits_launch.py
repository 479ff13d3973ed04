"""Starting, following and ending the training processes, and saying why they failed."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from examples.mimo.digits.failure import explain
from examples.mimo.digits.launch import LaunchError, launch
from examples.mimo.digits.log_lines import Saved

pytestmark = pytest.mark.tier0

BANNER = """\
E0102 03:04:05.678 7 torch/distributed/elastic/multiprocessing/api.py:880] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 900, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
examples.mimo.train_hetero FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2030-01-02_03:04:05
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 6)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2030-01-02_03:04:05
  host      : here
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 8)
============================================================
"""
TWO_RANKS = """\
some line
[rank2]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank2]:   File "step.py", line 7, in move
[rank0]:   File "schedules.py", line 9, in recv
[rank2]:     raise RuntimeError("the image is missing")
[rank0]:     connection()
[rank2]: RuntimeError: the image is missing
[rank0]: RuntimeError: Connection closed by peer
"""


def test_the_first_rank_to_fail_is_quoted() -> None:
    """Of interleaved tracebacks the root cause's is shown, not the consequences elsewhere."""
    text = explain(TWO_RANKS + BANNER.format(code=1))
    assert text.splitlines()[0] == "rank 2 failed:"
    assert text.splitlines()[-1] == "RuntimeError: the image is missing"
    assert "Connection closed" not in text
    assert "ChildFailedError" not in text


def test_a_traceback_without_a_rank_is_quoted() -> None:
    """Before the ranks are joined torch marks no line; the launcher's own report is passed over."""
    early = 'Traceback (most recent call last):\n  File "x.py", line 1\nImportError: no such name\n'
    text = explain(early + BANNER.format(code=1))
    assert text.splitlines()[-1] == "ImportError: no such name"


def test_a_usage_error_is_one_line() -> None:
    """What the training command answers to wrong flags is passed on as it is."""
    text = explain("noise\nerror: --seq-length 5 is too short.\n" + BANNER.format(code=2))
    assert text == "error: --seq-length 5 is too short."


def test_a_killed_rank_is_named() -> None:
    """A rank that left no word is named with its signal."""
    assert explain("noise\n" + BANNER.format(code=-9)) == "rank 2 was ended by SIGKILL."


def test_otherwise_the_last_lines() -> None:
    """Without any clue the end of the log is shown."""
    text = explain("\n".join(f"line {number}" for number in range(50)))
    assert text.splitlines()[-1] == "line 49"
    assert len(text.splitlines()) == 11


def script(tmp_path: Path, text: str) -> list[str]:
    """Command that runs a Python text."""
    path = tmp_path / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_events_come_as_they_are_said(tmp_path: Path) -> None:
    """Events are passed on, and everything is in the log."""
    line = "  successfully saved checkpoint from iteration 5 to x"
    events = []
    launch(script(tmp_path, f"print('a'); print({line!r})"), tmp_path / "log", events.append)
    assert events == [Saved(iteration=5)]
    assert (tmp_path / "log").read_text() == f"a\n{line}\n"


def test_a_failure_is_explained(tmp_path: Path) -> None:
    """A command that fails raises what it said last."""
    with pytest.raises(LaunchError, match=r"ZeroDivisionError: division by zero"):
        launch(script(tmp_path, "1 / 0"), tmp_path / "log", print)


FAMILY = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; \
signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"],
    start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_interrupt_ends_all_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves no process behind, not even one in another session that ignores SIGTERM."""
    monkeypatch.setattr("examples.mimo.digits.launch._GRACE_SECONDS", 1)
    log = tmp_path / "log"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and "ready" in log.read_text():
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(script(tmp_path, FAMILY), log, print)
    thread.join()
    words = log.read_text().split()
    pid = int(words[words.index("child") + 1])
    gone = not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert gone
