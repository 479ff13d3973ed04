"""Runs the stock GPT of ``stock_gpt.py`` on the ranks of the harness, and reads its losses."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = (
    '--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 '
    '--max-position-embeddings 32 --vocab-size 96 --make-vocab-size-divisible-by 16 '
    '--position-embedding-type learned_absolute'
).split()
TRAINING = (
    '--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-3 '
    '--lr-decay-style constant --calculate-per-token-loss --num-workers 0 --seed 1234 '
    '--log-interval 1 --eval-iters 1 --eval-interval 4'
).split()
NO_DROPOUT = '--attention-dropout 0 --hidden-dropout 0'.split()
DROPOUT = '--attention-dropout 0.1 --hidden-dropout 0.1'.split()
TENSOR_PARALLEL = '--tensor-model-parallel-size 2'.split()
DISTRIBUTED_OPTIMIZER = (
    '--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather'
).split()


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Every micro-batch loss of one rank, in order."""

    training: list[float]
    evaluation: list[float]


def train_stock(arguments: Sequence[str], folder: Path) -> Losses:
    """Train the stock GPT on this rank, losses going to ``folder``; every rank calls it."""
    from megatron.training.cpu_device import add_cpu_arguments
    from tests.unit_tests.training import stock_gpt

    file = folder / 'losses'
    own = ['--losses', str(file), '--initial', str(folder)]
    sys.argv = ['stock_gpt.py', *add_cpu_arguments([*arguments, *own])]
    try:
        stock_gpt.main()
    except SystemExit as leaving:  # how --exit-interval ends a run
        if leaving.code:
            raise
    rank = stock_gpt.get_args().rank
    return read_losses(Path(f'{file}.{rank}'))


def read_losses(file: Path) -> Losses:
    """Return what the script wrote; empty for a rank that computes no loss."""
    lines = file.read_text(encoding='utf-8').splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    by_phase = {
        phase: [float.fromhex(r['loss']) for r in records if r['training'] is phase]
        for phase in (True, False)
    }
    return Losses(training=by_phase[True], evaluation=by_phase[False])
