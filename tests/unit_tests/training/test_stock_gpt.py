"""Tier 1: the stock loop on the CPU, against plain PyTorch and against itself after a resume."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.training.counting import Counting
from tests.unit_tests.training.plain_gpt import (
    PlainGPT,
    Shape,
    merge_pipeline,
    merge_tensor_parallel,
    train,
)
from tests.unit_tests.training.stock_runs import (
    DISTRIBUTED_OPTIMIZER,
    DROPOUT,
    MODEL,
    NO_DROPOUT,
    TENSOR_PARALLEL,
    TRAINING,
    Losses,
    train_stock,
)

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
PIPELINE = ['--pipeline-model-parallel-size', '2']
EXPERTS = (
    '--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear'
).split()
STEPS = 8


def run_stock(pools: Pools, folder: Path, *options: list[str]) -> list[Losses]:
    """Train on two ranks, losses and initial weights going to the new ``folder``."""
    folder.mkdir(exist_ok=True)
    arguments = [word for option in (MODEL, TRAINING, *options) for word in option]
    return pools(2).run(train_stock, arguments, folder, timeout=120)


def iterations(count: int) -> list[str]:
    """Return the option for ``count`` iterations."""
    return ['--train-iters', str(count)]


def plain_losses(weights: dict, steps: int = STEPS) -> list[float]:
    """Return the micro-batch losses of the plain model on the stock run's samples."""
    data = Counting(4 * steps, 32, 96, seed=0)
    batches = [[data.batch(4 * step + first, 2) for first in (0, 2)] for step in range(steps)]
    return train(PlainGPT(weights, Shape(layers=2, heads=4)), batches, lr=1e-3)


def test_tensor_parallel_matches_plain_pytorch(rank_pool: Pools, tmp_path: Path) -> None:
    """TP 2 with the distributed optimizer and both overlaps trains to the plain model's losses."""
    stock = run_stock(
        rank_pool, tmp_path, NO_DROPOUT, TENSOR_PARALLEL, DISTRIBUTED_OPTIMIZER, iterations(STEPS)
    )
    expected = plain_losses(merge_tensor_parallel(tmp_path))
    assert stock[0].training == pytest.approx(expected, rel=1e-5)
    assert stock[0].training == stock[1].training
    assert len(stock[0].evaluation) == 2 * 4  # two in training, one on each held-out set


def test_data_parallel_matches_plain_pytorch(rank_pool: Pools, tmp_path: Path) -> None:
    """DP 2 trains each rank's half of the batch to the plain model's losses."""
    stock = run_stock(rank_pool, tmp_path, NO_DROPOUT, DISTRIBUTED_OPTIMIZER, iterations(STEPS))
    first, second = (file for file in sorted(tmp_path.glob('rank*.pt')))
    second.unlink()
    expected = plain_losses(merge_tensor_parallel(first.parent))
    assert stock[0].training == pytest.approx(expected[0::2], rel=1e-5)
    assert stock[1].training == pytest.approx(expected[1::2], rel=1e-5)


def test_pipeline_parallel_matches_plain_pytorch(rank_pool: Pools, tmp_path: Path) -> None:
    """PP 2 sends activations and gradients so that the last stage has the plain model's losses."""
    stock = run_stock(
        rank_pool, tmp_path, NO_DROPOUT, PIPELINE, DISTRIBUTED_OPTIMIZER, iterations(STEPS)
    )
    assert stock[0].training == []
    assert stock[1].training == pytest.approx(plain_losses(merge_pipeline(tmp_path)), rel=1e-5)


RESUMED = {
    'tp2 fp32': [*DROPOUT, *TENSOR_PARALLEL, *DISTRIBUTED_OPTIMIZER],
    'tp2 bf16': [*DROPOUT, *TENSOR_PARALLEL, *DISTRIBUTED_OPTIMIZER, '--bf16'],
    'tp2 fp16': [
        *DROPOUT,
        *TENSOR_PARALLEL,
        *DISTRIBUTED_OPTIMIZER,
        '--fp16',
        '--initial-loss-scale',
        '1024',
    ],
    'dp2 parallel load': [*DROPOUT, *DISTRIBUTED_OPTIMIZER, '--ckpt-fully-parallel-load'],
    'dp2 reshardable': [*DROPOUT, *DISTRIBUTED_OPTIMIZER, '--dist-ckpt-optim-fully-reshardable'],
    'dp2 async': [*DROPOUT, *DISTRIBUTED_OPTIMIZER, '--async-save', '--async-strategy', 'mcore'],
    'dp2 persistent writer': [
        *DROPOUT,
        *DISTRIBUTED_OPTIMIZER,
        '--async-save',
        '--async-strategy',
        'mcore',
        '--use-persistent-ckpt-worker',
    ],
    'pp2': [*DROPOUT, *PIPELINE, *DISTRIBUTED_OPTIMIZER],
}


@pytest.mark.parametrize('options', RESUMED.values(), ids=RESUMED.keys())
def test_resumed_losses_are_the_uninterrupted_ones(
    options: list[str], rank_pool: Pools, tmp_path: Path
) -> None:
    """Six iterations, a new start from the checkpoint and three more equal nine, bit for bit."""
    checkpoint = str(tmp_path / 'checkpoint')
    saving = ['--save', checkpoint, '--save-interval', '3', '--exit-interval', '6']
    whole = run_stock(rank_pool, tmp_path / 'whole', options, iterations(9))
    before = run_stock(rank_pool, tmp_path / 'before', options, iterations(9), saving)
    after = run_stock(rank_pool, tmp_path / 'after', options, iterations(9), ['--load', checkpoint])
    for rank in range(2):
        assert before[rank].training + after[rank].training == whole[rank].training
        assert len(after[rank].training) * 2 == len(before[rank].training)
    losses = whole[1].training
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


def test_recomputing_repeats_dropout(rank_pool: Pools, tmp_path: Path) -> None:
    """Activations that are computed again in the backward see the same dropout, bit for bit."""
    options = [*DROPOUT, *TENSOR_PARALLEL, *DISTRIBUTED_OPTIMIZER, *iterations(4)]
    recompute = '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1'
    kept = run_stock(rank_pool, tmp_path / 'kept', options)
    again = run_stock(rank_pool, tmp_path / 'again', options, recompute.split())
    assert again[0].training == kept[0].training


def test_sequence_parallel_matches_plain_pytorch(rank_pool: Pools, tmp_path: Path) -> None:
    """Sequence parallelism over torch's norms sums their gradients over the tensor ranks."""
    stock = run_stock(
        rank_pool,
        tmp_path,
        NO_DROPOUT,
        TENSOR_PARALLEL,
        ['--sequence-parallel'],
        DISTRIBUTED_OPTIMIZER,
        iterations(STEPS),
    )
    expected = plain_losses(merge_tensor_parallel(tmp_path))
    assert stock[0].training == pytest.approx(expected, rel=1e-5)


def test_expert_dispatchers_agree(rank_pool: Pools, tmp_path: Path) -> None:
    """EP 2 through all-to-all and through all-gather trains to the same losses."""
    options = [*NO_DROPOUT, *EXPERTS, *DISTRIBUTED_OPTIMIZER, *iterations(4)]
    losses = {
        name: run_stock(rank_pool, tmp_path / name, options, ['--moe-token-dispatcher-type', name])
        for name in ('alltoall', 'allgather')
    }
    assert losses['alltoall'][0].training == pytest.approx(
        losses['allgather'][0].training, rel=1e-5
    )
