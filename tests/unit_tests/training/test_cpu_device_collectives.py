"""Tier 1: collectives that NCCL has and gloo lacks, and groups that ask for NCCL."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import RankPool

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]


def nccl_groups_are_gloo() -> list[str]:
    """Make groups in every way Megatron does, asking for NCCL, and reduce over each."""
    options = object()  # stands for NCCL's options, which gloo would refuse
    pairs = [[0, 1]]
    groups = [
        dist.new_group([0, 1], backend='nccl', pg_options=options),
        dist.new_group([0, 1], None, 'cpu:gloo,cuda:nccl'),
        dist.new_subgroups_by_enumeration(pairs, backend='nccl')[0],
        dist.init_device_mesh('cuda', (2,)).get_group(),
    ]
    for group in groups:
        value = torch.ones(2, device='cuda')
        dist.all_reduce(value, group=group)
        assert value.tolist() == [2.0, 2.0]
    dist.barrier(device_ids=[0])
    return [dist.get_backend(group) for group in groups]


def lists_to_all(uneven: bool) -> None:
    """Exchange lists of tensors, synchronously and not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for is_async in (False, True):
        inputs = [torch.full((to + 1 if uneven else 2,), 10.0 * rank + to) for to in range(size)]
        outputs = [torch.zeros(rank + 1 if uneven else 2) for _ in range(size)]
        handle = dist.all_to_all(outputs, inputs, async_op=is_async)
        if is_async:
            handle.wait()
        assert [float(output[0]) for output in outputs] == [10.0 * i + rank for i in range(size)]


def uneven_gather() -> None:
    """Gather tensors of unequal shapes into a list."""
    rank = dist.get_rank()
    for is_async in (False, True):
        outputs = [torch.zeros(peer + 1) for peer in range(dist.get_world_size())]
        handle = dist.all_gather(outputs, torch.full((rank + 1,), rank + 1.0), async_op=is_async)
        if is_async:
            handle.wait()
        assert [output.tolist() for output in outputs] == [[1.0], [2.0, 2.0]]


def split_sizes_as_tensors() -> None:
    """Give the flat all-to-all its sizes as the token dispatcher does."""
    rank = dist.get_rank()
    sent = torch.tensor([[1, 3], [2, 2]][rank])
    received = torch.tensor([[1, 2], [3, 2]][rank])
    output = torch.zeros(int(received.sum()))
    values = torch.full((4,), float(rank))
    dist.all_to_all_single(output, values, received.tolist(), sent.tolist())
    again = torch.zeros_like(output)
    dist.group.WORLD.alltoall_base(again, values, received, sent).wait()
    assert torch.equal(again, output)


def odd_types_travel() -> None:
    """Broadcast and send types that gloo does not know."""
    rank = dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.int16):
        value = torch.full((4,), float(2 * (1 - rank))).to(dtype)
        dist.broadcast(value, src=0)
        assert value.float().tolist() == [2.0] * 4
        if rank == 0:
            dist.send(value, dst=1)
        else:
            received = torch.zeros(4).to(dtype)
            dist.recv(received, src=0)
            assert received.float().tolist() == [2.0] * 4


def scaled_sum_is_refused() -> None:
    """Ask for NCCL's pre-multiplied sum."""
    operation = dist._make_nccl_premul_sum(0.5)
    with pytest.raises(ValueError, match='scale the tensor first'):
        dist.all_reduce(torch.ones(2), op=operation)


def averages_in_place(dtype: torch.dtype) -> None:
    """Average and scatter into a view of the input, coalesced, as the grad buffer does."""
    rank = dist.get_rank()
    buffers = [(torch.arange(4.0) + 2 * rank).to(dtype) for _ in range(2)]
    with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        for buffer in buffers:
            own = buffer[2 * rank : 2 * rank + 2]
            dist.reduce_scatter_tensor(own, buffer, op=dist.ReduceOp.AVG, async_op=True)
    manager.wait()
    with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        for buffer in buffers:
            dist.all_gather_into_tensor(buffer, buffer[2 * rank : 2 * rank + 2], async_op=True)
    manager.wait()
    for buffer in buffers:
        assert buffer.float().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_groups_for_nccl_run_over_gloo(rank_pool: Pools) -> None:
    """Backend names, options and meshes of GPUs are accepted."""
    assert rank_pool(2).run(nccl_groups_are_gloo) == [['gloo'] * 4] * 2


@pytest.mark.parametrize('uneven', [False, True])
def test_all_to_all_of_lists(uneven: bool, rank_pool: Pools) -> None:
    """Each rank gets the piece meant for it."""
    rank_pool(2).run(lists_to_all, uneven)


def test_all_gather_of_unequal_shapes(rank_pool: Pools) -> None:
    """Every rank's tensor arrives whole."""
    rank_pool(2).run(uneven_gather)


def test_all_to_all_takes_sizes_as_tensors(rank_pool: Pools) -> None:
    """The result is that of sizes given as lists."""
    rank_pool(2).run(split_sizes_as_tensors)


def test_types_that_gloo_does_not_know(rank_pool: Pools) -> None:
    """Eight-bit floats and int16 are moved as bytes."""
    rank_pool(2).run(odd_types_travel)


def test_a_scaled_sum_says_what_to_do(rank_pool: Pools) -> None:
    """Nothing is reduced wrongly in silence."""
    rank_pool(2).run(scaled_sum_is_refused)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_the_grad_buffers_collectives(dtype: torch.dtype, rank_pool: Pools) -> None:
    """Coalesced averages and gathers in place give the same numbers in every precision."""
    rank_pool(2).run(averages_in_place, dtype)
