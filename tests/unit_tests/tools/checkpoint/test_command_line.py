"""The commands on made-up checkpoints: what they print, and their exit codes."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit_tests.tools.checkpoint import made
from tools.checkpoint.__main__ import main
from tools.checkpoint.contents import Contents
from tools.checkpoint.index import read_index

pytestmark = pytest.mark.tier0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Root of a checkpoint in four chunks a tensor."""
    root = tmp_path / "saved"
    made.write(root, made.tensors(), made.objects(), pieces=(2, 2, 1))
    return root


def test_torch_reads_what_is_written(checkpoint: Path) -> None:
    """Torch's own reader finds every value of a checkpoint that this package writes."""
    from torch.distributed import checkpoint as dcp

    expected = made.tensors()
    state = {key: torch.full_like(value, -1) for key, value in expected.items()}
    directory = checkpoint / "iter_0000010"
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """Modules, layout, sizes, optimizer groups and random streams are shown."""
    assert main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "iteration   10, 80 samples consumed" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["vision", "rank", "0", "24", "96", "B", "96", "B", "1", "of", "1"] in [
        row[:11] for row in rows
    ]
    assert ["language", "tp", "2", "on", "ranks", "1-2", "128"] in [row[:7] for row in rows]
    assert ["language", "0", "10", "0.5", "1", "0.01"] in rows
    assert ["decoder.layers.mlp.weight", "2", "x", "8", "x", "4"] in [row[:6] for row in rows]
    assert "exp_avg" not in shown


def test_inspect_for_scripts(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """The report for scripts has all tensors and tells which random states are missing."""
    others = made.objects()
    del others["language.rng_state/shard_0.1_1.2"]
    made.write(checkpoint, made.tensors(), others, iteration=11)
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["modules"]["language"]["random_streams"]["missing"] == [[0, 0, 1]]
    assert {tensor["key"]: tensor["shape"] for tensor in report["tensors"]} == {
        key: list(value.shape) for key, value in made.tensors().items()
    }


def test_stale_files_are_no_content(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """A shard that an older run left behind is named, but counts for nothing."""
    assert main(["inspect", str(checkpoint)]) == 0
    before = capsys.readouterr().out
    directory = checkpoint / "iter_0000010"
    (directory / "__9_0.distcp").write_bytes((directory / "__0_0.distcp").read_bytes())
    assert main(["inspect", str(checkpoint)]) == 0
    stale = "no content  1 stale file: __9_0.distcp\n"
    assert capsys.readouterr().out.replace(stale, "") == before
    assert main(["verify", str(checkpoint)]) == 0
    assert "__9_0.distcp holds nothing of this checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "{root}/nowhere"], 2, "nowhere does not exist"),
        (["inspect", "{root}"], 2, "it has neither .metadata nor latest_checkpointed_iteration"),
        (["inspect", "{saved}", "--module", "audio"], 2, "the checkpoint has vision, language"),
        (["diff", "{saved}", "{saved}", "--module", "x"], 2, "has vision, language"),
    ],
)
def test_wrong_calls(
    arguments: list[str], code: int, message: str, checkpoint: Path, capsys: pytest.CaptureFixture
) -> None:
    """A wrong call is answered in one line."""
    words = [word.format(root=checkpoint.parent, saved=checkpoint) for word in arguments]
    assert main(words) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_starts_without_megatron() -> None:
    """No command of those that only read imports Megatron, which takes seconds and warns."""
    script = (
        "import sys, tools.checkpoint.inspection, tools.checkpoint.verification, "
        "tools.checkpoint.difference; "
        "print([name for name in sys.modules if name.startswith('megatron')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_pickle_runs_nothing(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """A .metadata that would run code when it is unpickled is damage, and its code is not run."""
    directory = checkpoint / "iter_0000010"

    class Evil:
        """Writes a file when it is unpickled."""

        def __reduce__(self) -> tuple:
            return (Path.write_text, (directory / "ran", "x"))

    (directory / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert main(["inspect", str(checkpoint)]) == 1
    assert ".metadata cannot be read" in capsys.readouterr().err
    assert not (directory / "ran").exists()


def test_the_common_state_may_hold_any_class(checkpoint: Path) -> None:
    """An object of a class that is not known here comes back by its name."""
    others = made.objects(mode=RuntimeWarning("low"), names={"a"})
    directory = made.write(checkpoint, made.tensors(), others, iteration=12)
    common = Contents.read(directory).common
    assert str(common["mode"]) == "builtins.RuntimeWarning('low')"
    assert common["names"] == {"a"}
    assert read_index(checkpoint).directory == directory
