"""Tier 1: the host's and the device's random streams on the one generator of the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.unit_tests.helpers.distributed import RankPool

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]


def peers_draw_after_one_loads() -> list[float]:
    """Seed alike, shuffle data on rank 0 only, and return what dropout then keeps."""
    torch.manual_seed(7)
    if dist.get_rank() == 0:
        assert len(list(DataLoader(range(64), batch_size=4, shuffle=True))) == 16
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def streams_round_trip() -> None:
    """Save both states, use both streams, restore in either order, and compare the draws."""
    for order in (0, 1):
        torch.manual_seed(11)
        torch.rand(3)
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        copies = [state.clone() for state in states]  # as a checkpoint holds them
        shuffled = shuffled_order()
        drawn = torch.rand(5)
        setters = [torch.set_rng_state, torch.cuda.set_rng_state]
        for position in (order, 1 - order):
            setters[position](copies[position])
        if order == 1:
            # A copied host state knows no device state: the device's own is set last in Megatron.
            torch.cuda.set_rng_state(copies[1])
        assert shuffled_order() == shuffled
        assert torch.equal(torch.rand(5), drawn)


def shuffled_order() -> list[int]:
    """Return the order in which a shuffling loader visits ten samples."""
    return [int(item) for item in DataLoader(range(10), batch_size=None, shuffle=True)]


def plain_code_repeats_itself() -> None:
    """Draw, restore and draw again as code for the CPU does; also through torch's helpers."""
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    before = torch.cuda.get_rng_state()
    with torch.random.fork_rng():
        torch.rand(9)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=expected))
    x = torch.ones(256, requires_grad=True)
    for reentrant in (True, False):
        x.grad = None
        y = checkpoint(torch.nn.Dropout(0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())


def tracker_forks_without_touching_the_rest() -> tuple[list[float], list[float]]:
    """Return draws of the data-parallel stream and of the model-parallel one on this rank."""
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, tp_rank=dist.get_rank(), ep_rank=0, etp_rank=0)
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    with get_cuda_rng_tracker().fork():
        own = torch.rand(4, device='cuda')
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.cuda.get_rng_state(), device)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4, device='cuda'), own)
    return torch.rand(4, device='cuda').tolist(), own.tolist()


def a_gpus_state_seeds() -> None:
    """Give the device stream a state of a real CUDA generator, twice."""
    state = torch.tensor([1234, 8], dtype=torch.int64).view(torch.uint8)
    draws = []
    for _ in range(2):
        with pytest.warns(UserWarning, match='cannot be continued on the CPU'):
            torch.cuda.set_rng_state(state)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


def test_loading_data_on_one_rank_keeps_dropout_equal(rank_pool: Pools) -> None:
    """Tensor-parallel peers must keep equal device streams although one of them shuffles."""
    first, second = rank_pool(2).run(peers_draw_after_one_loads)
    assert first == second
    assert len(set(first)) == 2


def test_both_states_round_trip(rank_pool: Pools) -> None:
    """A checkpoint's two states bring both streams back, whichever is restored first."""
    rank_pool(1).run(streams_round_trip)


def test_plain_cpu_code_is_reproducible(rank_pool: Pools) -> None:
    """Code that knows only torch's own random API sees it behave as ever."""
    rank_pool(1).run(plain_code_repeats_itself)


def test_the_tracker_separates_its_streams(rank_pool: Pools) -> None:
    """Peers draw equal numbers outside a fork and different ones inside."""
    (data0, model0), (data1, model1) = rank_pool(2).run(tracker_forks_without_touching_the_rest)
    assert data0 == data1
    assert model0 != model1


def test_a_checkpoint_of_a_gpu_can_be_loaded(rank_pool: Pools) -> None:
    """Its random state is said to be lost and seeds the stream, always to the same numbers."""
    rank_pool(1).run(a_gpus_state_seeds)
