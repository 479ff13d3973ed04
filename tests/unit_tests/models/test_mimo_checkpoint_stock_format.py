"""The fully reshardable format, ours and the released package's: each reads the other's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers.checkpoint_values import Values, assembled, equal_bits, values_of
from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import Built, with_built
from tests.unit_tests.helpers.mimo_runs import train_mimo
from tools.patch_series.upstream import open_base

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
FULLY = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", "--train-iters", "2")
CASES = {
    "gated MLP": (
        *("--module", "vision", "--module", "language:dp=2"),
        *("--bf16", "--swiglu", *FULLY),
    ),
    "experts": (
        *("--module", "vision", "--module", "language:dp=2", "--num-experts", "4"),
        *("--moe-token-dispatcher-type", "alltoall", "--swiglu", "--disable-bias-linear"),
        *("--bf16", *FULLY),
    ),
}
WRITE = 'sharded_param_state_fully_reshardable'
READ = 'load_parameter_state_from_fully_reshardable'


@contextmanager
def stock_format() -> Iterator[None]:
    """Let the released package's own methods read and write the format. Local to the process."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    path = "megatron/core/optimizer/distrib_optimizer.py"
    text = open_base(Path(__file__).parents[3]).text(path)
    assert text is not None
    stock = ModuleType("megatron.core.optimizer.stock_distrib_optimizer")
    stock.__package__ = "megatron.core.optimizer"
    exec(compile(text, path, "exec"), vars(stock))  # noqa: S102 - the text of the pinned wheel
    methods = {name: getattr(stock.DistributedOptimizer, name) for name in (WRITE, READ)}
    with mock.patch.multiple(DistributedOptimizer, **methods):
        yield


def exchanged(built: Built, folder: str) -> list[Values]:
    """Save in both ways and read each with the other.

    Collective. Returns the values that were saved, then those that each way read.
    """
    from megatron.training import checkpointing

    groups = built.checkpoint_groups()
    parts = ([built.model], built.optimizer, built.scheduler)
    seen = [values_of(built)]
    for name, way in {"ours": nullcontext, "stock": stock_format}.items():
        built.args.save = f"{folder}/{name}"
        with way():
            checkpointing.save_checkpoint(1, *parts, 0, **groups)
    for name, other_way in {"ours": stock_format, "stock": nullcontext}.items():
        spoil(built)
        built.args.load = f"{folder}/{name}"
        with other_way():
            checkpointing.load_checkpoint(*parts, **groups)
        seen.append(values_of(built))
    return seen


def spoil(built: Built) -> None:
    """Zero every weight and every optimizer value. Local."""
    import torch

    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.zero_()
        for optimizer in built.optimizer._active_optimizers:
            for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
                for main, state in part.optimizer.state.items():
                    for value in (main, *state.values()):
                        if isinstance(value, torch.Tensor):
                            value.zero_()


def on_disk(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, read without knowing who wrote it. Collective over one rank."""
    from megatron.core import dist_checkpointing

    plain = dist_checkpointing.load_plain_tensors(str(folder / "iter_0000001"))
    return {key: value for key, value in plain.items() if hasattr(value, 'untyped_storage')}


@pytest.mark.parametrize('case', CASES)
def test_each_reads_the_other(rank_pool: Pools, tmp_path: Path, case: str) -> None:
    """Ours and the released package's way write equal tensors and read each other's."""
    arguments = CASES[case]
    trained = str(tmp_path / "trained")
    rank_pool(3).run(train_mimo, (*arguments, "--save", trained))
    load = (*arguments, "--load", trained)
    seen = rank_pool(3).run(with_built, exchanged, load, str(tmp_path))
    saved, by_stock, by_ours = (assembled(ranks) for ranks in zip(*seen, strict=True))
    ours, stock = (rank_pool(1).run(on_disk, tmp_path / way)[0] for way in ("ours", "stock"))
    assert set(saved) == set(ours) == set(stock)
    for key, value in saved.items():
        for other in (by_stock, by_ours, ours, stock):
            assert equal_bits(value, other[key]), key
    assert sum("optimizer.state" in key for key in saved) > 3
    assert all(value.any() for key, value in saved.items() if "state.param" in key)
