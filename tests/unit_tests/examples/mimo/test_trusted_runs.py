"""Tier 1: runs that save, are damaged, and go on; MIMO and stock, at once and asynchronously."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, train_mimo, train_stock_gpt
from tests.unit_tests.helpers.saves import caught

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
MIMO = ('--module', 'vision:dp=1', '--module', 'language:dp=1')
STOCK = ('--module', 'language:dp=2')
TRACKER = 'latest_checkpointed_iteration.txt'


def run(
    kind: str, arguments: Sequence[str], folder: Path, iterations: int
) -> tuple[str, list[str]]:
    """Train up to an iteration, from ``folder`` if there is something; return error and losses."""
    train = train_mimo if kind == 'mimo' else train_stock_gpt
    layout = MIMO if kind == 'mimo' else STOCK
    losses: list[str] = []
    options = ('--train-iters', '6', '--exit-interval', str(iterations), '--save-interval', '2')
    places = ('--save', str(folder), '--load', str(folder))

    def work() -> None:
        losses.extend(train([*layout, *NO_DROPOUT, *options, *places, *arguments]).losses)

    return caught(work), losses


def flip_shard(iteration: Path) -> str:
    """Flip a bit in the middle of a shard; return the file's name."""
    path = max(iteration.glob('*.distcp'))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


@pytest.mark.parametrize('kind', ['mimo', 'stock'])
def test_damaged_run_goes_on_from_the_newest_good_iteration(
    kind: str, rank_pool: Pools, tmp_path: Path
) -> None:
    """A bit flips in iteration 4: the run stops with a message, or repeats from 2 with the flag."""
    asynchronous = ['--async-save'] if kind == 'mimo' else []
    first = rank_pool(2).run(run, kind, asynchronous, tmp_path, 4, timeout=400)
    assert [error for error, _ in first] == ['', '']
    assert (tmp_path / TRACKER).read_text() == '4'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['iter_0000002', 'iter_0000004', TRACKER]
    name = flip_shard(tmp_path / 'iter_0000004')
    refused = rank_pool(2).run(run, kind, [], tmp_path, 6, timeout=400)
    assert len({error for error, _ in refused}) == 1
    assert f'{name}: checksum' in refused[0][0]
    assert 'The newest good iteration is 2; --load-newest-good takes it.' in refused[0][0]
    again = rank_pool(2).run(run, kind, ['--load-newest-good'], tmp_path, 4, timeout=400)
    assert [error for error, _ in again] == ['', '']
    assert [losses[len(losses) // 2 :] for _, losses in first] == [losses for _, losses in again]
    assert any(losses for _, losses in again)


def test_older_iterations_go_after_the_tracker(rank_pool: Pools, tmp_path: Path) -> None:
    """``--save-retain-interval`` keeps what it says, and leftovers of a killed run are removed."""
    (tmp_path / '.iter_0000002.saving').mkdir()
    (tmp_path / '.iter_0000009.removing').mkdir()
    kept = ['--save-retain-interval', '4', '--async-save']
    assert rank_pool(2).run(run, 'mimo', kept, tmp_path, 6, timeout=400)[0][0] == ''
    assert sorted(p.name for p in tmp_path.iterdir()) == ['iter_0000004', 'iter_0000006', TRACKER]
