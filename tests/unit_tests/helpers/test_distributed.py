"""Tier 1: the process harness, on functions that return, fail, hang and die.

Most of it is about processes that the harness starts, so under torchrun these tests are skipped;
the torchrun side is tested from here, by running torchrun on a small file of tests.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.helpers import torchrun
from tests.unit_tests.helpers.distributed import RankPool, run_ranks
from tests.unit_tests.helpers.rank_failures import RankFailedError, RanksTimedOutError

pytestmark = [
    pytest.mark.tier1,
    pytest.mark.skipif(torchrun.is_active(), reason="under torchrun the harness starts no process"),
]
ROOT = Path(__file__).resolve().parents[3]


def sum_of_ranks(scale: float) -> float:
    """Return the sum of all ranks, scaled, through a real all-reduce."""
    value = torch.tensor(float(dist.get_rank())) * scale
    dist.all_reduce(value)
    return value.item()


def rank_and_threads() -> tuple[int, int, str, str]:
    """Return this rank, torch's threads, and what the environment says about ranks."""
    return dist.get_rank(), torch.get_num_threads(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        raise KeyError(f"the reason on rank {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    """Sleep for ever on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        sleep_for_ever()
    dist.barrier()


def sleep_for_ever() -> None:
    """A name to look for in the stacks."""
    time.sleep(3600)


def leave_on(rank: int, code: int) -> None:
    """Leave one rank without a word; a negative code is a signal."""
    if dist.get_rank() == rank:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    dist.barrier()


def return_a_lock() -> object:
    """Return what no pickle can hold."""
    return threading.Lock()


def skip_everywhere() -> None:
    """Skip the test from inside of the ranks."""
    pytest.skip("the ranks say so")


def start_a_child_and_fail(file: Path) -> None:
    """Start a process of the rank's own, note its id, and fail."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    file.write_text(str(child.pid))
    raise ValueError("now what about the child")


def use_megatrons_globals() -> tuple[bool, int]:
    """Say whether Megatron's globals are unset, then set them."""
    from megatron.core import parallel_state

    fresh = not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(2)
    return fresh, os.getpid()


def is_gone(pid: int) -> bool:
    """Whether no process has this id, waiting a moment for it to end."""
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_returns_the_values_in_rank_order(tmp_path: Path) -> None:
    """Each rank's value comes back at its place, and each rank has one thread."""
    assert run_ranks(rank_and_threads, 3, tmp_path=tmp_path) == [
        (rank, 1, str(rank), "3") for rank in range(3)
    ]


def test_ranks_talk_to_each_other() -> None:
    """A collective works, also without a folder given."""
    assert run_ranks(sum_of_ranks, 2, 10.0) == [10.0, 10.0]


def test_the_childs_traceback_is_the_failure(tmp_path: Path) -> None:
    """The failing rank's traceback comes back, and the waiting rank is told as a consequence."""
    with pytest.raises(RankFailedError) as caught:
        run_ranks(fail_on, 2, 1, tmp_path=tmp_path)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("rank 1 of 2 failed: KeyError: 'the reason on rank 1'\n")
    assert re.search(
        r"rank 1 of 2 failed:.*in fail_on.*KeyError: 'the reason on rank 1'", text, re.DOTALL
    )
    assert text.splitlines()[-1].startswith("rank 0: ")


def test_the_first_failure_stops_the_rest(tmp_path: Path) -> None:
    """The ranks that wait for the failed one do not wait for the time-out."""
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="the reason on rank 0"):
        run_ranks(fail_on, 2, 0, tmp_path=tmp_path, timeout=600)
    assert time.monotonic() - start < 120


def test_a_hang_shows_the_stacks_of_all_busy_ranks(tmp_path: Path) -> None:
    """A time-out names the busy ranks and shows where each of them is."""
    with pytest.raises(RanksTimedOutError) as caught:
        run_ranks(hang_on, 2, 0, tmp_path=tmp_path, timeout=3)
    assert "after 3 s rank(s) 0, 1 were still busy" in str(caught.value)
    assert "sleep_for_ever" in caught.value.stacks[0]
    assert "barrier" in caught.value.stacks[1]


@pytest.mark.parametrize(
    ("code", "how"), [(7, "left with exit code 7"), (-signal.SIGKILL, "was killed by SIGKILL")]
)
def test_a_rank_that_dies_is_named(tmp_path: Path, code: int, how: str) -> None:
    """A rank that ends without a word is the failure, not the peer that lost it."""
    with pytest.raises(RankFailedError, match=f"rank 1 of 2 failed: .*{how} without a word"):
        run_ranks(leave_on, 2, 1, code, tmp_path=tmp_path)


def test_a_crash_shows_the_ranks_stacks(tmp_path: Path) -> None:
    """A fatal signal comes back with the stack it happened in."""
    with pytest.raises(RankFailedError, match=r"SIGSEGV(.|\n)*in leave_on"):
        run_ranks(leave_on, 2, 0, -signal.SIGSEGV, tmp_path=tmp_path)


def test_an_unpicklable_value_is_a_failure(tmp_path: Path) -> None:
    """A return value that cannot travel is told with its type."""
    with pytest.raises(RankFailedError, match="the return value, a lock, cannot be pickled"):
        run_ranks(return_a_lock, 1, tmp_path=tmp_path)


def test_a_local_function_is_refused(tmp_path: Path) -> None:
    """A function that no other process can import is refused before a process starts."""
    with pytest.raises(ValueError, match="give a module-level function"):
        run_ranks(lambda: None, 1, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(0, "gloo"), (2, "mpi")], ids=["no ranks", "unknown backend"]
)
def test_impossible_pools_are_refused(tmp_path: Path, world_size: int, backend: str) -> None:
    """A pool needs a rank and a backend that the harness knows."""
    with pytest.raises(ValueError, match=r"at least one rank|'gloo' or 'nccl'"):
        run_ranks(skip_everywhere, world_size, tmp_path=tmp_path, backend=backend)


def test_a_skip_in_the_ranks_skips_the_test(tmp_path: Path) -> None:
    """``pytest.skip`` in a rank reaches the test."""
    with pytest.raises(pytest.skip.Exception, match="the ranks say so"):
        run_ranks(skip_everywhere, 2, tmp_path=tmp_path)


def test_nothing_that_a_rank_started_is_left_over(tmp_path: Path) -> None:
    """A failed rank's own children are ended with it."""
    file = tmp_path / "child"
    with pytest.raises(RankFailedError, match="now what about the child"):
        run_ranks(start_a_child_and_fail, 1, file, tmp_path=tmp_path)
    assert is_gone(int(file.read_text()))


def test_a_pool_keeps_its_processes_and_clears_megatron(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """Two calls run in the same processes, and the second finds Megatron's globals unset."""
    first = rank_pool(2).run(use_megatrons_globals)
    second = rank_pool(2).run(use_megatrons_globals)
    assert [fresh for fresh, _ in first + second] == [True] * 4
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_a_pool_starts_anew_after_a_failure(rank_pool: Callable[[int], RankPool]) -> None:
    """After a failed call the old processes are gone and new ones serve."""
    before = [pid for _, pid in rank_pool(2).run(use_megatrons_globals)]
    with pytest.raises(RankFailedError):
        rank_pool(2).run(fail_on, 0)
    assert all(is_gone(pid) for pid in before)
    assert rank_pool(2).run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_ranks_leave_when_the_test_process_is_killed(tmp_path: Path) -> None:
    """Killing the process that started the ranks ends them too."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.unit_tests.helpers.distributed import RankPool\n"
        "from tests.unit_tests.helpers.test_distributed import use_megatrons_globals\n"
        "pool = RankPool(2, folder=Path(sys.argv[1]))\n"
        "print(*(pid for _, pid in pool.run(use_megatrons_globals)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def run_under_torchrun(folder: Path, body: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a file of tests with ``torchrun`` on some ranks of this machine."""
    file = folder / "test_inner.py"
    file.write_text(body)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [
        "--standalone",
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "tests.unit_tests.conftest",
        "-rs",
    ]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "--rootdir", str(folder), str(file)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


INNER = """
import pytest
from tests.unit_tests.helpers import torchrun
from tests.unit_tests.helpers.distributed import run_ranks
from tests.unit_tests.helpers.test_distributed import fail_on, hang_on, sum_of_ranks, use_megatrons_globals
pytestmark = pytest.mark.tier1
"""


def test_torchrun_uses_the_ranks_it_is_given(tmp_path: Path) -> None:
    """Under torchrun all ranks pass the same test, and too large a world is skipped in sight."""
    body = INNER + (
        "def test_sum(): assert run_ranks(sum_of_ranks, 2, 10.0) == [10.0, 10.0]\n"
        "def test_again(): assert all(fresh for fresh, _ in run_ranks(use_megatrons_globals, 2))\n"
        "def test_one(): assert run_ranks(sum_of_ranks, 1, 3.0) == [0.0]\n"
        "def test_path(tmp_path): assert torchrun.share(str(tmp_path)) == str(tmp_path)\n"
        "def test_too_many(): run_ranks(sum_of_ranks, 3, 1.0)\n"
    )
    finished = run_under_torchrun(tmp_path, body, 2)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    assert "4 passed, 1 skipped" in output
    assert "3 passed, 2 skipped" in output  # rank 1 has no part in the world of one
    assert "needs 3 ranks; torchrun gave 2" in output
    assert "needs only 1 ranks; this is rank 1" in output


def test_torchrun_ends_when_a_rank_fails(tmp_path: Path) -> None:
    """The failure is printed, the waiting rank shows its stacks, and nothing hangs."""
    body = INNER + "def test_fails(): run_ranks(fail_on, 2, 1)\n"
    finished = run_under_torchrun(tmp_path, body, 2)
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0
    assert "rank 1 failed:" in output
    assert "KeyError: 'the reason on rank 1'" in output


def test_torchrun_ends_when_a_rank_hangs(tmp_path: Path) -> None:
    """A time-out shows the stacks of the rank that hangs."""
    body = INNER + "def test_hangs(): run_ranks(hang_on, 2, 0, timeout=5)\n"
    finished = run_under_torchrun(tmp_path, body, 2)
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0
    assert "was still busy after 5 s; its stacks" in output
    assert "sleep_for_ever" in output
