"""The command as a user runs it: the plan of a dry run, and one sentence for what is wrong."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier0

ROOT = Path(__file__).resolve().parents[4]
MODULES = ("--module", "vision:tp=1,dp=2", "--module", "language:tp=2,pp=3")
PLAN = ("--dry-run", "--world-size", "8", *MODULES)

# Runs the command with its arguments and tells on its last line which processes it started.
WATCHED = """
import runpy, sys
EVENTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen",
          "_posixsubprocess.fork_exec", "socket.bind", "socket.connect")
seen = []
sys.addaudithook(lambda event, details: seen.append(event) if event in EVENTS else None)
try:
    runpy.run_module("examples.mimo.train_hetero", run_name="__main__", alter_sys=True)
finally:
    print("started:", seen)
"""
# Runs the command once for each list of arguments and prints exit code and output as JSON.
REPEATED = """
import contextlib, io, json, sys
from examples.mimo import train_hetero
answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["train_hetero", *arguments]
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            train_hetero.main()
            code = 0
        except SystemExit as end:
            code = end.code
    answers.append([code, output.getvalue(), error.getvalue()])
json.dump(answers, sys.stdout)
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python from the repository's root as a process that no launcher started."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope='module')
def plan() -> subprocess.CompletedProcess[str]:
    """A dry run for eight ranks, watched for the processes that it starts."""
    return python("-c", WATCHED, *PLAN)


def test_plan_succeeds(plan: subprocess.CompletedProcess[str]) -> None:
    """A dry run of a good layout exits with 0 and complains about nothing."""
    assert plan.returncode == 0, plan.stderr
    assert plan.stderr == ""


def test_plan_starts_nothing(plan: subprocess.CompletedProcess[str]) -> None:
    """A dry run starts no process and opens no connection."""
    assert plan.stdout.splitlines()[-1] == "started: []"


def rows(table: str) -> list[dict[str, str]]:
    """Rows of the printed table by its header."""
    lines = iter(table.splitlines())
    header = next(line for line in lines if line.lstrip().startswith("rank ")).split()
    found = []
    for line in lines:
        if not line.strip():
            break
        found.append(dict(zip(header, line.split(), strict=False)))
    return found


def test_plan_shows_every_rank(plan: subprocess.CompletedProcess[str]) -> None:
    """The table has one row per rank with its module and coordinates."""
    table = rows(plan.stdout)
    assert [row["rank"] for row in table] == [str(rank) for rank in range(8)]
    assert [row["module"] for row in table] == ["vision"] * 2 + ["language"] * 6
    assert [(row["tp"], row["pp"], row["dp"]) for row in table] == [
        *(("0", "0", "0"), ("0", "0", "1")),
        *((str(tp), str(stage), "0") for stage in range(3) for tp in range(2)),
    ]


def test_plan_counts_parameters(plan: subprocess.CompletedProcess[str]) -> None:
    """Replicas and tensor ranks hold equally much, stages with an embedding more than others."""
    sizes = [int(row["parameters"].replace(",", "")) for row in rows(plan.stdout)]
    assert sizes[0] == sizes[1] > 0
    assert sizes[2::2] == sizes[3::2]
    assert sizes[4] < min(sizes[2], sizes[6])


def test_plan_says_what_it_checked(plan: subprocess.CompletedProcess[str]) -> None:
    """The plan lists the rules that the layout passed, with its numbers."""
    lines = [line.strip() for line in plan.stdout.splitlines()]
    assert "8 ranks, disjoint modules" in lines
    assert "ok  every one of 8 ranks hosts a module: vision 0-1, language 2-7" in lines
    assert "ok  bridge vision dp 2 -> language dp 1: fan-in of 2" in lines
    assert "ok  seed 1234, offsets: vision +100000, language +0" in lines


WRONG_LAYOUTS = {
    "no module": ((), "--module is missing"),
    "no language": (("--module", "vision"), "--module language:... is missing"),
    "too many ranks": (MODULES, "--module options need 8 ranks"),
    "too few ranks": (("--module", "vision", "--module", "language:tp=2"), "rank 3 of 4 hosts"),
    "unknown key": (("--module", "language:size=4"), "unknown key 'size'"),
    "no number": (("--module", "language:tp=two"), "--module language:tp=two is not a whole"),
    "zero": (("--module", "language:dp=0"), "--module language:dp=0 must be at least 1"),
    "unequal dp": (
        ("--world-size", "5", "--module", "vision:dp=2", "--module", "language:dp=3"),
        "vision:dp=2 and language:dp=3: one must be a multiple",
    ),
    "experts": (("--module", "language:tp=2,ep=4"), "etp*ep = 2*4 must divide tp*cp*dp = 2*1*2"),
    "colocated pipeline": (
        ("--module", "vision:colocated", "--module", "language:pp=2"),
        "--module language:pp=2 must be 1 in a colocated layout",
    ),
    "stock size": (
        ("--module", "language:tp=2", "--tensor-model-parallel-size", "4"),
        "--tensor-model-parallel-size 4 contradicts --module language:tp=2",
    ),
    "freeze": (("--module", "language", "--freeze", "vision"), "--freeze vision: no such module"),
}


def assert_refused(code: int, output: str, error: str, sentence: str) -> None:
    """Check for exit code 2, no output, and one line that says what is wrong."""
    assert code == 2, error
    assert output == ""
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


@pytest.mark.parametrize("case", WRONG_LAYOUTS)
def test_wrong_layout(case: str) -> None:
    """A wrong layout ends with exit code 2 and one line, before torch is imported."""
    arguments, sentence = WRONG_LAYOUTS[case]
    command = ("-m", "examples.mimo.train_hetero", "--dry-run", "--world-size", "4", *arguments)
    finished = python("-X", "importtime", *command)
    lines = finished.stderr.splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    error = "\n".join(line for line in lines if line not in imports)
    assert_refused(finished.returncode, finished.stdout, error, sentence)
    modules = {line.rpartition("|")[2].strip() for line in imports}
    assert "examples.mimo.training.hetero.layout" in modules
    assert not modules & {"torch", "numpy", "megatron.core"}


def test_one_rank_speaks_for_all() -> None:
    """Under a launcher the line is printed by rank 0 alone; every rank exits with 2."""
    command = ("-m", "examples.mimo.train_hetero", *MODULES)
    first = python(*command, RANK="0", WORLD_SIZE="4")
    assert_refused(first.returncode, first.stdout, first.stderr, "need 8 ranks")
    second = python(*command, RANK="1", WORLD_SIZE="4")
    assert (second.returncode, second.stdout, second.stderr) == (2, "", "")


FOUR = ("--dry-run", "--world-size", "4", "--module", "vision:dp=2", "--module", "language:tp=2")
LATER_ERRORS: Mapping[Sequence[str], str] = {
    ("--num-attention-heads", "7"): "--num-attention-heads 7 cannot be split evenly",
    ("--global-batch-size", "3"): "--global-batch-size 3 is not a multiple",
    ("--micro-batch-size", "1"): "--micro-batch-size 1 times language dp 1 = 1 samples",
    ("--image-patch-size", "0"): "--image-size 8 is not a multiple of --image-patch-size 0",
    ("--seq-length", "8"): "--seq-length 8 leaves no text behind the 16 tokens",
    ("--model-provider", "gpt"): "--model-provider gpt: no such family",
    ("--data-provider", "noise"): "--data-provider noise: no such source",
    ("--freeze", "language.head"): "--freeze language.head: module language has no part 'head'",
    ("--train-samples", "8"): "Megatron refuses these flags: expected iteration-based training",
    ("--global-batch-size", "0"): "refuses these flags: this does not hold: args.global_batch_size",
    ("--num-experts", "4"): "Megatron refuses these flags: Bias in Moe",
}


def test_errors_found_with_megatron() -> None:
    """What only Megatron or the model can tell is refused in the same way."""
    calls = [[*FOUR, *arguments] for arguments in LATER_ERRORS]
    finished = python("-c", REPEATED, json.dumps([*calls, list(FOUR)]))
    assert finished.returncode == 0, finished.stderr
    *answers, good = json.loads(finished.stdout)
    for answer, sentence in zip(answers, LATER_ERRORS.values(), strict=True):
        assert_refused(*answer, sentence)
    assert good[0] == 0
    assert len(rows(good[1])) == 4


def test_plan_into_a_closed_pipe() -> None:
    """A reader that has seen enough, such as `head`, ends the command without a traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "examples.mimo.train_hetero", *PLAN],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGPIPE


def test_help_tells_all_flags() -> None:
    """The help of Megatron's flags and ours is printed, with what a reshardable optimizer costs."""
    answer = python("-m", "examples.mimo.train_hetero", "--module", "language", "--help")
    assert answer.returncode == 0, answer.stderr
    text = " ".join(answer.stdout.split())
    _, _, reshardable = text.partition("--dist-ckpt-optim-fully-reshardable save")
    assert "gathers at save time and can run out of memory on GPUs under 80 GB" in reshardable[:400]
    assert "--no-load-scheduler load the optimizer, but start the schedule" in text
    assert "(e.g. 1.10 = 10%)" in text
