"""A checkpoint that is loaded and saved again is the same, byte for byte under every key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import train_mimo
from tools.checkpoint.index import Index, Place, read_index

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

EXPERTS = (
    *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--disable-bias-linear"),
)
LAYOUTS = {
    "disjoint, fp16": (
        *(4, ("--fp16", "--initial-loss-scale", "1024", "--use-distributed-optimizer")),
        ("vision:dp=2", "language:tp=2"),
    ),
    "tied pipeline, fully reshardable": (
        2,
        ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", "--mock-text-only"),
        ("language:pp=2",),
    ),
    "colocated, plain optimizer": (2, ("--bf16",), ("vision:tp=2,colocated", "language:tp=2")),
    "experts": (
        *(2, (*EXPERTS, "--mock-text-only", "--use-distributed-optimizer")),
        ("language:dp=2,ep=2",),
    ),
}


def content(index: Index) -> dict[str, list[bytes]]:
    """Bytes of every chunk and object by key, but for the arguments, which tell the run's own."""

    def read(place: Place | None) -> bytes:
        assert place is not None
        with (index.directory / place.file).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    found: dict[str, list[bytes]] = {}
    for key, place in index.places():
        if not key.startswith("common_state"):
            found.setdefault(key, []).append(read(place))
    return {key: sorted(parts) for key, parts in found.items()}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_same_bytes(rank_pool: Pools, tmp_path: Path, layout: str) -> None:
    """Model, optimizer, schedule and streams of all ranks come out as they went in.

    The second run has nothing left to train; its last iteration, the loaded one, is saved as ever.
    """
    world_size, flags, modules = LAYOUTS[layout]
    common = (
        "--train-iters",
        "3",
        *flags,
        *(w for module in modules for w in ("--module", module)),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    pool = rank_pool(world_size)
    pool.run(train_mimo, (*common, "--save", str(first)))
    again = ("--load", str(first), "--save", str(second), "--save-interval", "2")
    pool.run(train_mimo, (*common, *again))
    before, after = content(read_index(first)), content(read_index(second))
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []
    for part in ("rng_state", "optimizer", "exp_avg", "linear_fc1.weight"):
        assert any(part in key for key in before), part
