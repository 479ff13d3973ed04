"""Tier 1: processes that a CPU process spawns are on the CPU device too."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue

import pytest
import torch

from tests.unit_tests.helpers.distributed import RankPool

pytestmark = pytest.mark.tier1


def answer_where(answers: SimpleQueue) -> None:
    """Say where this process puts a CUDA tensor, and how many devices it sees."""
    answers.put((str(torch.zeros(2, device='cuda').device), torch.cuda.device_count()))


def ask_a_spawned_child() -> tuple[str, int]:
    """Spawn a child and return its answer."""
    context = multiprocessing.get_context('spawn')
    answers = context.SimpleQueue()
    child = context.Process(target=answer_where, args=(answers,))
    child.start()
    child.join(90)
    assert child.exitcode == 0
    return answers.get()


def test_a_spawned_child_is_on_the_cpu(rank_pool: Callable[[int], RankPool]) -> None:
    """It starts a fresh interpreter, yet computes where its parent does."""
    assert rank_pool(1).run(ask_a_spawned_child) == [('cpu', 1)]
