"""Every kind of damage is found, named with its file or key, and answered with exit code 1."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit_tests.tools.checkpoint import made
from tools.checkpoint.__main__ import main
from tools.checkpoint.index import read_index
from tools.checkpoint.place import TRACKER
from tools.checkpoint.writing import dumped, new_iteration

pytestmark = pytest.mark.tier0

KEY = "language_model.decoder.layers.mlp.weight"
FILE = "__0_0.distcp"


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def flip_value(directory: Path) -> None:
    """Change one bit of a weight's values."""
    place = read_index(directory).tensors[KEY].chunks[0].place
    raw = (directory / FILE).read_bytes()
    value = made.tensors()[KEY][:1, :4, :2].contiguous().numpy().tobytes()
    at = raw.index(value, place.offset)
    assert at < place.offset + place.length
    flip(directory / FILE, at + 5)


def truncate(directory: Path) -> None:
    """Cut the last byte off."""
    path = directory / FILE
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "value": (flip_value, f"{FILE}: {KEY} at byte 0: BadZipFile: Bad CRC-32"),
    "cut off": (truncate, f"{FILE}: is cut off"),
    "no shard": (lambda d: (d / FILE).unlink(), f"{FILE}: is missing"),
    "no metadata": (lambda d: (d / ".metadata").unlink(), ".metadata is missing"),
    "empty metadata": (lambda d: (d / ".metadata").write_bytes(b""), ".metadata cannot be read"),
    "unfinished": (lambda d: (d / "metadata.json").unlink(), "metadata.json is missing"),
    "json": (lambda d: (d / "metadata.json").write_text("{"), "metadata.json cannot be read"),
    "empty tracker": (lambda d: (d.parent / TRACKER).write_text(""), f"{TRACKER} is empty"),
    "tracker": (lambda d: (d.parent / TRACKER).write_text("?"), "'?', which is no iteration"),
    "no iteration": (
        lambda d: shutil.move(d, d.with_name("iter_0000009")),
        "there are iter_0000009",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Damaged files are found, in the root as well as in an iteration."""
    directory = made.write(tmp_path, made.tensors(), made.objects(), pieces=(2, 2, 2))
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    inflict, message = DAMAGES[damage]
    inflict(directory)
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_every_bit_of_the_values_counts(tmp_path: Path) -> None:
    """No flipped bit in the stored values goes unnoticed."""
    values = {KEY: torch.arange(12.0).reshape(3, 4)}
    directory = made.write(tmp_path, values, made.objects())
    path = directory / FILE
    start = path.read_bytes().index(values[KEY].numpy().tobytes())
    for at in range(start, start + 48):
        flip(path, at)
        assert main(["verify", str(tmp_path)]) == 1
        flip(path, at)
    assert main(["verify", str(tmp_path)]) == 0


def written(root: Path, chunks: list[tuple[tuple[int, int], torch.Tensor]]) -> Path:
    """A checkpoint with one tensor of 4 x 4 in these chunks."""
    with new_iteration(root, 1, manifest=False) as writer:
        for offsets, chunk in chunks:
            made.add(writer, "decoder.weight", (4, 4), offsets, chunk)
        writer.add_object("common_state/shard_0_1", dumped({"iteration": 1}))
        writer.add_object("rng_state/shard_0.1_1.2", dumped([{}]))
        writer.add_object("rng_state/shard_0.0_1.2", dumped([{}]))
    return root


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([((0, 0), (4, 4))], None),
        ([((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))], None),
        ([((0, 0), (2, 4)), ((2, 0), (2, 1))], "its chunks cover 10 of 16 values"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "chunks [0:3, 0:4] and [2:4, 0:4] overlap"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "chunk [3:5, 0:4] lies outside of the shape [4, 4]"),
    ],
)
def test_coverage(
    chunks: list[tuple[tuple[int, int], tuple[int, int]]],
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Chunks make up the whole tensor, once."""
    root = written(tmp_path, [(offsets, torch.ones(sizes)) for offsets, sizes in chunks])
    assert main(["verify", str(root), "--quick"]) == (message is not None)
    assert message is None or f"damaged: decoder.weight: {message}" in capsys.readouterr().out


def test_wrong_shape_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A shard of another shape or type than .metadata says is damage."""
    values = {"decoder.weight": torch.ones(4, 4)}
    root = written(tmp_path, [((0, 0), values["decoder.weight"])])
    other = made.write(tmp_path / "other", {"decoder.weight": torch.ones(2, 8)}, {"a": 1})
    place = read_index(other).tensors["decoder.weight"].chunks[0].place
    assert place == read_index(root).tensors["decoder.weight"].chunks[0].place
    path = root / "iter_0000001" / FILE
    raw = bytearray(path.read_bytes())
    raw[: place.length] = (other / FILE).read_bytes()[: place.length]
    path.write_bytes(raw)
    assert main(["verify", str(root)]) == 1
    assert "holds TensorHeader(sizes=(2, 8)" in capsys.readouterr().out


def test_missing_object(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A rank's random state that is not there is damage, for scripts as well."""
    others = made.objects()
    del others["language.rng_state/shard_0.0_1.2"]
    made.write(tmp_path, made.tensors(), others)
    assert main(["verify", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"][0]["problem"] == "language.rng_state: 1 of 2 shards are missing"
    assert report["checks"]["files are whole"] is True


def test_manifest(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With the checksums of a save, no byte at all can change, nor a file be added."""
    directory = made.write(tmp_path, made.tensors(), made.objects(), manifest=True)
    assert main(["verify", str(tmp_path)]) == 0
    assert "files match integrity.json      ok" in capsys.readouterr().out
    flip(directory / FILE, 8)  # in a header, which no checksum inside the file covers
    assert main(["verify", str(tmp_path)]) == 1
    assert f"damaged: {FILE}: " in capsys.readouterr().out
    flip(directory / FILE, 8)
    shutil.copy(directory / FILE, directory / "__9_0.distcp")
    assert main(["verify", str(tmp_path), "--quick"]) == 1
    assert "__9_0.distcp: not in integrity.json" in capsys.readouterr().out


def test_memory_is_that_of_a_chunk(tmp_path: Path) -> None:
    """Checking, comparing and copying 96 MiB in chunks of 2 MiB takes little more than starting."""
    values = {f"language_model.w{i}": torch.rand(12, 512, 1024) for i in range(4)}
    for name, pieces in (("a", (12, 1, 1)), ("b", (12, 1, 2))):
        made.write(tmp_path / name, values, made.objects(), pieces=pieces, manifest=True)
    script = f"""
from pathlib import Path
from tools.checkpoint.__main__ import main

from tools.checkpoint.quiet import import_quietly

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

import_quietly("megatron.core.safe_globals")
assert main(["inspect", {str(tmp_path / "a")!r}]) == 0
start = peak()
assert main(["verify", {str(tmp_path / "a")!r}]) == 0
assert main(["diff", {str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}]) == 0
assert main(["extract", {str(tmp_path / "a")!r}, "--module", "language",
             "--output", {str(tmp_path / "c")!r}]) == 0
print(peak() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout.split()[-1])
    assert grown < 40, grown
