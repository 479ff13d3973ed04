"""Record which process groups each rank creates, without starting a process.

gloo connects eagerly: every rank has to create the same groups in the same order, or the ranks
wait for each other for ever. NCCL connects lazily and hides the mistake. So a test runs the code
that creates the groups once per rank, in one process, over torch's fake backend, and compares the
records.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.unit_tests.helpers.process_state import reset_megatron


@dataclass(frozen=True)
class GroupCreation:
    """One call that creates a process group: its ranks in the order given, and its description."""

    ranks: tuple[int, ...]
    description: str = ""


def record_group_creation(
    function: Callable[..., Any], world_size: int, *args: Any
) -> list[list[GroupCreation]]:
    """Run ``function(*args)`` as each rank in turn and return what each rank created, in order.

    Works for whatever ends in torch's group creation: ``new_group``,
    ``new_subgroups_by_enumeration``, ``HyperCommGrid.create_pg``, Megatron's ``parallel_state``.
    Collectives inside ``function`` return at once without moving data.
    """
    return [_record_one_rank(function, rank, world_size, args) for rank in range(world_size)]


def assert_same_groups(records: Sequence[Sequence[GroupCreation]]) -> None:
    """Check that all ranks created the same groups in the same order.

    Raises:
        AssertionError: naming the first call on which a rank differs from rank 0.
    """
    for rank, record in enumerate(records):
        for number in range(max(len(record), len(records[0]))):
            expected = records[0][number] if number < len(records[0]) else None
            found = record[number] if number < len(record) else None
            if expected != found:
                raise AssertionError(
                    f"group creation {number}: rank 0 creates {expected or 'nothing more'}, "
                    f"rank {rank} creates {found or 'nothing more'}"
                )


def _record_one_rank(
    function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]
) -> list[GroupCreation]:
    with _simulated_rank(rank, world_size), _recording(world_size) as record:
        function(*args)
    return record


@contextmanager
def _simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized in this process already")
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    with mock.patch.dict(os.environ, environment):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            reset_megatron()


@contextmanager
def _recording(world_size: int) -> Iterator[list[GroupCreation]]:
    """Record the calls at the one place that all of torch's group creation goes through."""
    from torch.distributed import distributed_c10d

    record: list[GroupCreation] = []
    create = distributed_c10d._new_group_with_tag
    signature = inspect.signature(create)

    def record_and_create(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        ranks = range(world_size) if given["ranks"] is None else given["ranks"]
        record.append(GroupCreation(tuple(ranks), given["group_desc"] or ""))
        # The fake backend stands in for gloo and NCCL and knows neither's options.
        given.update(backend="fake", backend_options=None, device_id=None)
        return create(*call.args, **call.kwargs)

    with mock.patch.object(distributed_c10d, "_new_group_with_tag", record_and_create):
        yield record
