"""Differences are found bit by bit, whatever the shards."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.unit_tests.tools.checkpoint import made
from tools.checkpoint.__main__ import main

pytestmark = pytest.mark.tier0

KEY = "language_model.decoder.layers.mlp.weight"


def differences(
    capsys: pytest.CaptureFixture, first: Path, second: Path, *options: str
) -> dict[str, dict]:
    """What differs, by key; the exit code agrees with it."""
    code = main(["diff", str(first), str(second), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is (code == 0) is (not report["differences"])
    return {difference["key"]: difference for difference in report["differences"]}


@pytest.mark.parametrize("pieces", [(1, 1, 1), (2, 3, 2), (1, 4, 1), (2, 8, 4)])
def test_equal_in_other_shards(
    pieces: Sequence[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Two checkpoints with the same values are equal, however each is cut."""
    a = made.write(tmp_path / "a", made.tensors(), made.objects(), pieces=(2, 2, 1))
    b = made.write(tmp_path / "b", made.tensors(), made.objects(), pieces=pieces)
    assert main(["diff", str(a), str(b)]) == 0
    assert "equal, bit for bit: 12 keys" in capsys.readouterr().out


def test_values(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The number of different values and the largest difference are those of the whole tensor."""
    values = made.tensors()
    a = made.write(tmp_path / "a", values, made.objects(), pieces=(2, 2, 1))
    values[KEY][1, 7, 3] += 8
    values[KEY][0, 0, 0] -= 2
    b = made.write(tmp_path / "b", values, made.objects(), pieces=(1, 3, 2))
    (found,) = differences(capsys, a, b).values()
    assert (found["key"], found["different"], found["largest"]) == (KEY, 2, 8.0)


def test_bits_that_compare_equal(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The two zeros differ; a NaN equals itself."""
    values = {KEY: torch.tensor([0.0, float("nan"), 1.0])}
    a = made.write(tmp_path / "a", values, made.objects())
    assert not differences(capsys, a, a)
    values[KEY][0] = -0.0
    b = made.write(tmp_path / "b", values, made.objects())
    assert differences(capsys, a, b)[KEY]["different"] == 1
    values[KEY][2] = float("nan")
    c = made.write(tmp_path / "c", values, made.objects())
    assert main(["diff", str(b), str(c)]) == 1
    assert "1 of 3 values, at most nan apart" in capsys.readouterr().out


def test_keys_shapes_and_types(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Keys of one side, other shapes and other types are told apart."""
    values = made.tensors()
    a = made.write(tmp_path / "a", values, made.objects())
    tower = "modality_submodules.vision.encoders.tower.weight"
    words = "language_model.embedding.word_embeddings.weight"
    b_values = {
        **values,
        KEY: values[KEY].bfloat16(),
        tower: values[tower].reshape(4, 6),
        "extra": torch.ones(2),
    }
    del b_values[words]
    b = made.write(tmp_path / "b", b_values, made.objects())
    found = differences(capsys, a, b)
    assert {key: difference["what"] for key, difference in found.items()} == {
        KEY: "dtype",
        tower: "shape",
        words: "only in A",
        "extra": "only in B",
    }
    assert found[KEY]["text"] == "types float32 / bfloat16"


def test_objects(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Arguments, groups and random states are compared by their paths, and can be left out."""
    others = made.objects()
    a = made.write(tmp_path / "a", made.tensors(), others)
    arguments = vars(others["common_state/shard_0_1"]["args"])
    others["common_state/shard_0_1"]["args"] = Namespace(**{**arguments, "bf16": True})
    key = "mimo.language.optimizer.mimo.language.param_groups/shard_0_1"
    others[key] = [{**others[key][0], "lr": 0.25}]
    b = made.write(tmp_path / "b", made.tensors(), others)
    found = differences(capsys, a, b)
    assert {path: difference["text"] for path, difference in found.items()} == {
        "common_state.args.bf16": "False / True",
        f"{key}.0.lr": "0.5 / 0.25",
    }
    assert list(differences(capsys, a, b, "--ignore", "common_state.args.*")) == [f"{key}.0.lr"]
    assert not differences(capsys, a, b, "--weights")


def test_module_against_the_module_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A module of a MIMO checkpoint, also of one with wrappers in its keys, equals it alone."""
    values = made.tensors()
    wrapped = {
        key.replace("language_model.", "language_model.module.module."): value
        for key, value in values.items()
    }
    alone = {
        key.removeprefix("mimo.language.").replace("language_model.", ""): value
        for key, value in values.items()
        if "language" in key
    }
    stock = {"common_state/shard_0_1": {"args": Namespace(tensor_model_parallel_size=2)}}
    group = made.objects()["mimo.language.optimizer.mimo.language.param_groups/shard_0_1"][0]
    stock["common_state/shard_0_1"]["optimizer"] = {"optimizer": {"param_groups": [group]}}
    states = {key: value for key, value in made.objects().items() if key.startswith("language.rng")}
    stock |= {key.removeprefix("language."): value for key, value in states.items()}
    a = made.write(tmp_path / "a", values, made.objects())
    b = made.write(tmp_path / "b", wrapped, made.objects())
    c = made.write(tmp_path / "c", alone, stock)
    assert not differences(capsys, a, b, "--module", "language")
    assert not differences(capsys, a, c, "--module", "language")
    assert not differences(capsys, b, c, "--module", "language")
    stock["common_state/shard_0_1"]["optimizer"] = {"param_groups": [{**group, "step": 11}]}
    d = made.write(tmp_path / "d", alone, stock)
    assert list(differences(capsys, a, d, "--module", "language")) == [
        "optimizer.param_groups.0.step"
    ]
