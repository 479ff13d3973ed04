"""Tier 1: an async save writes what the tensors were when it was asked for."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.saves import caught, load_state, sharded_state

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
TIMEOUT = 240


def change_after_scheduling(directory: Path, persistent: bool) -> dict:
    """Schedule a save of shared memory, change it in place, finalize, load."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=persistent)
    state = sharded_state(1.0)
    weight = state['weight'].data.share_memory_()  # as it is after a first persistent save
    request = dist_checkpointing.save(
        state, str(directory), async_sharded_save=True, async_strategy='mcore'
    )
    queue.schedule_async_request(request)
    weight.fill_(7.0)
    assert not directory.exists()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return load_state(directory)


@pytest.mark.parametrize('persistent', [False, True], ids=['forked writer', 'persistent writer'])
def test_save_is_what_the_tensors_were(persistent: bool, rank_pool: Pools, tmp_path: Path) -> None:
    """Tensors on the CPU that change right after the request are saved as they were."""
    loaded = rank_pool(2).run(
        change_after_scheduling, tmp_path / 'ckpt', persistent, timeout=TIMEOUT
    )
    for rank, state in enumerate(loaded):
        assert state['weights'] == [torch.tensor(1.0 + rank / 10).item()]


def kill_writer(directory: Path) -> tuple[str, dict]:
    """Kill rank 1's persistent writer in a save; finalize; save and load again."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        PersistentAsyncCaller,
    )

    queue = AsyncCallsQueue(persistent=True)

    def request(value: float) -> None:
        state = sharded_state(value)
        options = {'async_sharded_save': True, 'async_strategy': 'mcore'}
        queue.schedule_async_request(dist_checkpointing.save(state, str(directory), **options))

    request(1.0)
    queue.maybe_finalize_async_calls(blocking=True)
    if dist.get_rank() == 1:
        PersistentAsyncCaller._persistent_process.kill()
        PersistentAsyncCaller._persistent_process.join()
        with mock.patch.object(PersistentAsyncCaller, '_living_process', lambda self: self.process):
            request(2.0)
    else:
        request(2.0)
    text = caught(queue.maybe_finalize_async_calls, blocking=True)
    request(3.0)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return text, load_state(directory)


def test_killed_writer_fails_one_save_only(rank_pool: Pools, tmp_path: Path) -> None:
    """One rank's writer is killed: both ranks say so, without a hang, and the next save works."""
    outcomes = rank_pool(2).run(kill_writer, tmp_path / 'ckpt', timeout=TIMEOUT)
    (text,) = {outcome[0] for outcome in outcomes}
    assert 'the process that writes ended without a result; was it killed? (rank 1)' in text
    assert [outcome[1]['iteration'] for outcome in outcomes] == [3.0, 3.0]
