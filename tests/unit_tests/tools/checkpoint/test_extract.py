"""One module becomes a checkpoint of its own."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit_tests.tools.checkpoint import made
from tools.checkpoint.__main__ import main
from tools.checkpoint.contents import Contents

pytestmark = pytest.mark.tier0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Root of a MIMO checkpoint in several chunks a tensor."""
    root = tmp_path / "saved"
    made.write(root, made.tensors(), made.objects(rerun_state_machine={}), pieces=(2, 2, 1))
    return root


def extract(source: Path, module: str, *options: str) -> Contents:
    """Extract a module with the command and read the result."""
    target = source.with_name(f"{source.name}-{module}")
    assert (
        main(["extract", str(source), "--module", module, "--output", str(target), *options]) == 0
    )
    return Contents.read(target)


def test_language(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """The language module gets the keys, the common state and the random streams of stock GPT."""
    alone = extract(checkpoint, "language")
    assert "optimizer  with it, for any layout" in capsys.readouterr().out
    assert set(alone.index.tensors) == {
        "decoder.layers.mlp.weight",
        "embedding.word_embeddings.weight",
        "optimizer.state.exp_avg.decoder.layers.mlp.weight",
        "optimizer.state.exp_avg.embedding.word_embeddings.weight",
    }
    assert set(alone.index.objects) == {
        "common_state/shard_0_1",
        "rng_state/shard_0.0_1.2",
        "rng_state/shard_0.1_1.2",
    }
    assert "module_layout" not in alone.arguments
    assert alone.arguments["world_size"] == 2
    assert "rerun_state_machine" not in alone.common
    (group,) = alone.common["optimizer"]["param_groups"]
    assert (group["step"], "params" in group) == (10, False)


def test_values_are_copied(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """Chunk by chunk, every byte of the values is the same; torch reads them."""
    from torch.distributed import checkpoint as dcp

    alone = extract(checkpoint, "language")
    assert main(["diff", str(checkpoint), str(alone.index.directory), "--module", "language"]) == 0
    assert main(["verify", str(alone.index.directory)]) == 0
    capsys.readouterr()
    key = "decoder.layers.mlp.weight"
    state = {key: torch.zeros(2, 8, 4)}
    reader = dcp.FileSystemReader(alone.index.directory)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state[key], made.tensors()[f"language_model.{key}"])


@pytest.mark.parametrize(
    ("module", "options", "changes", "reason"),
    [
        ("vision", (), {}, "an encoder alone has no training of its own"),
        ("language", ("--weights",), {}, "left out (--weights)"),
        ("language", (), {"freeze": ["language.decoder"]}, "parts were frozen"),
    ],
)
def test_weights_alone(
    module: str,
    options: tuple[str, ...],
    changes: dict,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Without optimizer the reason is said, and Megatron is told not to look for it."""
    others = made.objects(opt_param_scheduler={"max_lr": 1.0})
    vars(others["common_state/shard_0_1"]["args"]).update(changes)
    made.write(tmp_path / "saved", made.tensors(), others)
    alone = extract(tmp_path / "saved", module, "--json", *options)
    report = json.loads(capsys.readouterr().out)
    assert reason in report["optimizer"]
    assert list(alone.index.objects) == ["common_state/shard_0_1"]
    assert not any("optimizer" in key for key in alone.index.tensors)
    assert alone.arguments["no_save_optim"]
    assert alone.arguments["no_save_rng"]
    assert "opt_param_scheduler" not in alone.common
    assert alone.modules == [module]


def test_wrappers_in_the_keys(tmp_path: Path) -> None:
    """What wrappers added to the keys of an older checkpoint is gone."""
    values = {
        key.replace("vision.", "vision.module.module.", 1): value
        for key, value in made.tensors().items()
    }
    assert any("module.module" in key for key in values)
    made.write(tmp_path / "saved", values, made.objects())
    alone = extract(tmp_path / "saved", "vision")
    assert list(alone.index.tensors) == ["encoders.tower.weight"]
    assert alone.layout == {"vision": {**made.LAYOUT["vision"], "offset": 0}}


def test_nothing_is_overwritten(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """An output that is taken is refused, and a failed extraction leaves nothing behind."""
    alone = extract(checkpoint, "vision")
    root = alone.index.directory.parent
    again = ["extract", str(checkpoint), "--module", "vision", "--output", str(root)]
    assert main(again) == 2
    assert "exists already; give another --output" in capsys.readouterr().err
    shard = checkpoint / "iter_0000010" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:9000])
    new = root.with_name("new")
    arguments = ["extract", str(checkpoint), "--module", "vision", "--output", str(new)]
    assert main(arguments) == 1
    assert not new.exists() or not list(new.iterdir())


def test_module_that_is_not_there(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    """The modules that there are are named."""
    target = str(checkpoint.with_name("x"))
    assert main(["extract", str(checkpoint), "--module", "audio", "--output", target]) == 2
    assert "has the weights of vision, language" in capsys.readouterr().err
