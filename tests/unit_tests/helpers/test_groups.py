"""Tier 0: the recorder of process groups."""

import pytest
import torch.distributed as dist

from tests.unit_tests.helpers.groups import GroupCreation, assert_same_groups, record_group_creation

pytestmark = pytest.mark.tier0


def create_pairs() -> None:
    """Create two pairs and then a group of all ranks."""
    dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="gloo")
    dist.new_group(group_desc="everybody")


def create_only_my_line(lines: list[list[int]]) -> None:
    """Create a group for this rank's line alone: the mistake that gloo punishes."""
    for line in lines:
        if dist.get_rank() in line:
            dist.new_group(line, backend="nccl")


def create_grid() -> None:
    """Create what a Megatron grid of TP 2 and PP 2 creates on ranks 4 to 7 of 8."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grid = HyperCommGrid([2, 2], ["tp", "pp"], rank_offset=4, backend="nccl")
    grid.create_pg("tp")
    pp = grid.create_pg("pp")
    rank = dist.get_rank()
    if rank >= 4:
        assert dist.get_process_group_ranks(pp) == [4 + rank % 2, 6 + rank % 2]


def create_model_parallel() -> None:
    """Create what Megatron's own globals create for TP 2 and PP 2 on 4 ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2


def test_records_ranks_in_order_and_descriptions() -> None:
    """Every rank creates every group, also those that it is not in."""
    everybody = GroupCreation((0, 1, 2, 3), "everybody")
    records = record_group_creation(create_pairs, 4)
    assert [[creation.ranks for creation in record[:2]] for record in records] == [
        [(0, 1), (2, 3)]
    ] * 4
    assert [record[2] for record in records] == [everybody] * 4
    assert_same_groups(records)


def test_names_the_first_rank_that_differs() -> None:
    """A group that only its members create is told with the call's number and the rank."""
    records = record_group_creation(create_only_my_line, 4, [[0, 2], [1, 3]])
    assert records[1] == [GroupCreation((1, 3))]
    with pytest.raises(AssertionError, match=r"creation 0: rank 0 .*\(0, 2\).* rank 1 .*\(1, 3\)"):
        assert_same_groups(records)


def test_names_a_rank_that_creates_fewer() -> None:
    """A rank that stops early is a difference too."""
    records = record_group_creation(create_only_my_line, 3, [[0, 1]])
    with pytest.raises(AssertionError, match="rank 2 creates nothing more"):
        assert_same_groups(records)


def test_a_grid_is_recorded_on_all_ranks_of_the_world() -> None:
    """Megatron's grid creates its groups also on the ranks outside of its span."""
    records = record_group_creation(create_grid, 8)
    assert [creation.ranks for creation in records[0]] == [(4, 5), (6, 7), (4, 6), (5, 7)]
    assert_same_groups(records)


def test_megatrons_globals_are_recorded_and_cleared() -> None:
    """Megatron's globals work under the recorder and are gone after each simulated rank."""
    from megatron.core import parallel_state

    records = record_group_creation(create_model_parallel, 4)
    assert_same_groups(records)
    assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= {creation.ranks for creation in records[0]}
    assert not parallel_state.model_parallel_is_initialized()
    assert not dist.is_initialized()


def test_a_failing_function_leaves_nothing_behind() -> None:
    """The simulated process group is destroyed when the function raises."""
    with pytest.raises(ValueError, match="rank"):
        record_group_creation(dist.new_group, 2, [0, 7])
    assert not dist.is_initialized()
