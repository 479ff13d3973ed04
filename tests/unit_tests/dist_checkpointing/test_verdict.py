"""Tier 1: what fails on one rank is raised on all of them, with one text and without a hang."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.saves import caught, load_state, save_state, sharded_state

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
TIMEOUT = 240
FULL = '[Errno 28] No space left:'


def fail_on(failing: list[int]) -> tuple[str, bool]:
    """Fail on some ranks; return what this rank caught and whether it keeps its own error."""
    from megatron.core.dist_checkpointing.verdict import SharedVerdictError, shared_verdict

    try:
        with shared_verdict('do it'):
            if dist.get_rank() in failing:
                raise OSError(28, 'No space left', f'file{dist.get_rank() % 2}')
    except SharedVerdictError as error:
        return str(error), isinstance(error.__cause__, OSError)
    return '', False


@pytest.mark.parametrize(
    ('failing', 'text'),
    [
        ([], ''),
        ([1], "cannot do it: [Errno 28] No space left: 'file1' (rank 1)"),
        ([0, 1, 3], f"cannot do it: {FULL} 'file0' (rank 0); {FULL} 'file1' (rank 1, 3)"),
    ],
)
def test_every_rank_raises_the_same_text(failing: list[int], text: str, rank_pool: Pools) -> None:
    """No rank, one rank, several ranks fail: all four raise one text, each with its own cause."""
    expected = [(text, rank in failing) for rank in range(4)]
    assert rank_pool(4).run(fail_on, failing, timeout=TIMEOUT) == expected


def fail_in_subgroup() -> str:
    """Fail in a section of ranks 0 and 1 inside a section of all four ranks."""
    from megatron.core.dist_checkpointing.verdict import shared_verdict

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def work() -> None:
        with shared_verdict('do all'), shared_verdict('do half', pairs[dist.get_rank() // 2]):
            if dist.get_rank() == 1:
                raise ValueError('no')

    return caught(work)


def test_a_subgroups_verdict_reaches_the_world(rank_pool: Pools) -> None:
    """A verdict that half of the ranks share becomes that of all."""
    (text,) = set(rank_pool(4).run(fail_in_subgroup, timeout=TIMEOUT))
    expected = 'do all: cannot do half: ValueError: no (rank 1) (rank 0, 1)'
    assert text == f'CheckpointingException: cannot {expected}'


def save_twice_owned(directory: Path) -> str:
    """Have two ranks claim to be the writer of one object."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    state = {**sharded_state(1.0), 'mine': ShardedObject('mine', 1, (1,), (0,))}
    return caught(dist_checkpointing.save, state, str(directory))


def test_validation_error_reaches_every_rank(rank_pool: Pools, tmp_path: Path) -> None:
    """Two writers of one object: the same error on both ranks, and nothing on disk."""
    first, second = rank_pool(2).run(save_twice_owned, tmp_path / 'ckpt', timeout=TIMEOUT)
    assert first == second
    assert "Duplicate ShardedObject keys: ['mine/shard_0_1']" in first
    assert list(tmp_path.glob('ckpt')) == list(tmp_path.glob('.ckpt*')) == []


def save_failing(directory: Path, where: str, rank: int) -> tuple[str, dict]:
    """Save while one function fails on one rank; then save for real and load."""
    if dist.get_rank() == rank:
        with mock.patch(where, side_effect=MemoryError(f'at {where.rpartition(".")[2]}')):
            text = caught(save_state, directory, 1.0)
    else:
        text = caught(save_state, directory, 1.0)
    dist.barrier()  # rank 0 clears up
    left = sorted(path.name for path in directory.parent.iterdir())
    assert left == ['others'], left
    save_state(directory, 2.0)
    return text, load_state(directory)


STRATEGIES = 'megatron.core.dist_checkpointing.strategies'
POINTS = [
    f'{STRATEGIES}.torch.MCoreSavePlanner.create_local_plan',
    f'{STRATEGIES}.torch.MCoreSavePlanner.create_global_plan',
    f'{STRATEGIES}.filesystem_async.FileSystemWriterAsync.prepare_write_data',
    f'{STRATEGIES}.filesystem_async.FileSystemWriterAsync.preload_tensors',
    f'{STRATEGIES}.filesystem_async.FileSystemWriterAsync.write_preloaded_data',
    f'{STRATEGIES}.filesystem_async.FileSystemWriterAsync.finish',
    'megatron.core.dist_checkpointing.staging.make_manifest',
]


@pytest.mark.parametrize('where', POINTS, ids=lambda where: where.rpartition('.')[2])
def test_any_step_of_a_save_may_fail_on_one_rank(
    where: str, rank_pool: Pools, tmp_path: Path
) -> None:
    """Each step fails on one rank: one text on both, nothing is left, and the next save works."""
    name = where.rpartition('.')[2]
    coordinates = name in ('create_global_plan', 'finish', 'make_manifest')
    (tmp_path / 'others').mkdir()
    outcomes = rank_pool(2).run(
        save_failing, tmp_path / 'ckpt', where, 0 if coordinates else 1, timeout=TIMEOUT
    )
    (text,) = {outcome[0] for outcome in outcomes}
    assert f'MemoryError: at {name}' in text
    for rank, (_, loaded) in enumerate(outcomes):
        assert loaded['weights'] == [pytest.approx(2.0 + rank / 10)]


def test_a_rank_that_cannot_load_tells_the_others(rank_pool: Pools, tmp_path: Path) -> None:
    """A key that one rank alone misses is the same error on both."""
    texts = rank_pool(2).run(load_one_side, tmp_path / 'ckpt', timeout=TIMEOUT)
    assert texts[0] == texts[1]
    assert 'cannot load checkpoint' in texts[0]
    assert 'rank 1' in texts[0]


def load_one_side(directory: Path) -> str:
    """Load while reading fails on rank 1 alone."""
    from torch.distributed.checkpoint import FileSystemReader

    error = OSError(5, 'Input/output error', 'shard')
    save_state(directory, 1.0)
    if dist.get_rank() == 1:
        with mock.patch.object(FileSystemReader, 'read_data', side_effect=error):
            return caught(load_state, directory)
    return caught(load_state, directory)
