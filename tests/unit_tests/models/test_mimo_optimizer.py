"""The optimizer of a MIMO model: gradient norm, frozen modules, and who writes its objects."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.groups import record_group_creation
from tests.unit_tests.helpers.mimo_models import Built, with_built

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]


class NormOnly:
    """Stands in for a module's optimizer and has nothing but a gradient norm."""

    def __init__(self, norm: float | None) -> None:
        """Keep the norm."""
        self.norm = norm

    def get_grad_norm(self) -> float | None:
        """Return the norm."""
        return self.norm


def combined_norm(norms: dict[str, list[float | None]]) -> float:
    """Norm of a model whose module ``m`` has gradient norm ``norms[m][rank]``, or is not there."""
    import torch.distributed as dist

    from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    infos = {
        name: ModuleOptimizerInfo(
            optimizer=NormOnly(ranks[dist.get_rank()]) if ranks[dist.get_rank()] else None,
            grid=None,
            pg_collection=None,
            is_active=ranks[dist.get_rank()] is not None,
        )
        for name, ranks in norms.items()
    }
    return MimoOptimizer(infos, OptimizerConfig()).get_grad_norm()


def single_norms(count: int) -> list[tuple[str, str]]:
    """Many norms of a single module beside what the optimizer makes of them."""
    import torch

    generator = torch.Generator().manual_seed(1)
    norms = torch.rand(count, generator=generator, dtype=torch.float64) * 10
    pairs = [(norm, combined_norm({"language": [norm, norm]})) for norm in norms.tolist()]
    return [(norm.hex(), combined.hex()) for norm, combined in pairs]


def test_norm_of_one_module_is_unchanged(rank_pool: Pools) -> None:
    """The norm of a single module comes back bit for bit, which single precision cannot do."""
    import torch

    pairs = rank_pool(2).run(single_norms, 200)[0]
    assert [combined for _, combined in pairs] == [norm for norm, _ in pairs]
    norms = torch.tensor([float.fromhex(norm) for norm, _ in pairs], dtype=torch.float64)
    assert (norms.square().float().sqrt() != norms).all()


def test_norm_of_modules_on_different_ranks(rank_pool: Pools) -> None:
    """Modules on disjoint ranks combine to one norm that all ranks agree on."""
    norms = {"language": [None, 4.0], "vision": [3.0, None]}
    assert rank_pool(2).run(combined_norm, norms) == [5.0, 5.0]
    frozen = {"language": [None, 4.0], "vision": [0.0, None]}
    assert rank_pool(2).run(combined_norm, frozen) == [4.0, 4.0]


def frozen_module(built: Built) -> dict[str, Any]:
    """What is there of a frozen module's training on this rank."""
    model, optimizer = built.model, built.optimizer
    for module in model.wrapped_modules().values():
        for buffer in module.buffers:
            buffer.grad_data.fill_(1)
    model.zero_grad_buffer()
    left = [
        b.grad_data.abs().sum().item() for m in model.wrapped_modules().values() for b in m.buffers
    ]
    infos = optimizer.module_infos
    return {
        "wrapped": list(model.wrapped_modules()),
        "gradients left": left,
        "hosted": [name for name, info in infos.items() if info.is_active],
        "optimized": [name for name, info in infos.items() if info.optimizer is not None],
        "stub": optimizer.is_stub_optimizer,
        "step": optimizer.step()[0],
    }


def test_frozen_module_has_neither_buffer_nor_optimizer(rank_pool: Pools) -> None:
    """A frozen encoder is not wrapped and has no optimizer, and its ranks take part in a step."""
    arguments = ("--module", "vision", "--module", "language", "--freeze", "vision")
    vision, language = rank_pool(2).run(with_built, frozen_module, arguments)
    assert vision == {
        "wrapped": [],
        "gradients left": [],
        "hosted": ["vision"],
        "optimized": [],
        "stub": True,
        "step": True,
    }
    assert language == {
        "wrapped": ["language"],
        "gradients left": [0.0],
        "hosted": ["language"],
        "optimized": ["language"],
        "stub": False,
        "step": True,
    }


def gathered_keys() -> list[Any] | None:
    """Parameter group keys that ranks 0 and 1 gather while the others build no optimizer."""
    import torch
    import torch.distributed as dist

    from megatron.core.optimizer import _gather_param_group_keys
    from megatron.core.process_groups_config import ProcessGroupCollection

    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    model = torch.nn.Module()
    model.pg_collection = ProcessGroupCollection()
    model.pg_collection.intra_dist_opt = group
    return _gather_param_group_keys([model], [f"key of {dist.get_rank()}"])


def test_parameter_groups_are_aligned_within_a_model(rank_pool: Pools) -> None:
    """Only the ranks of a model gather its parameter group keys; others need not be there."""
    both = [["key of 0"], ["key of 1"]]
    assert rank_pool(3).run(gathered_keys) == [both, both, None]


def scratch_tensors() -> tuple[bool, list[int]]:
    """Use the global memory buffer where ``initialize_model_parallel`` was never called."""
    import torch

    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized()
    buffer = parallel_state.get_global_memory_buffer()
    tensor = buffer.get_tensor((2, 3), torch.float32, "test")
    return parallel_state.get_global_memory_buffer() is buffer, list(tensor.shape)


def test_memory_buffer_needs_no_global_groups(rank_pool: Pools) -> None:
    """The scratch buffer is made on first use and kept."""
    assert rank_pool(1).run(scratch_tensors) == [(True, [2, 3])]


GRIDS = {
    "TP, CP and PP": (8, ("language:tp=2,cp=2,pp=2",)),
    "CP and DP": (8, ("language:cp=2,dp=4",)),
    "two modules": (8, ("vision:tp=2,dp=1", "language:tp=2,pp=3")),
    "colocated": (4, ("vision:dp=4,colocated", "language:tp=2")),
    "experts": (8, ("language:tp=2,dp=2,ep=4,etp=1,pp=2",)),
}


@pytest.mark.parametrize('name', GRIDS)
def test_optimizer_objects_have_one_writer(name: str) -> None:
    """Of each module's optimizer objects one rank is all zeros, and the order is PP, TP, DP."""
    from examples.mimo.training.hetero.layout import Layout
    from examples.mimo.training.hetero.topology import build_topology
    from megatron.core.models.mimo.optimizer import (
        _get_pg_collection_for_optimizer,
        _get_replica_id,
    )

    world_size, options = GRIDS[name]
    layout = Layout.from_options(options, world_size)
    replicas: dict[str, list[tuple[int, ...]]] = {grid.name: [] for grid in layout.grids}

    def note() -> None:
        topology = build_topology(layout, "gloo")
        for module in topology.modules:
            groups = _get_pg_collection_for_optimizer(topology.grids[module])
            where = layout[module].coordinates(topology.rank)
            replica = _get_replica_id(groups)
            assert replica[:2] == (where["pp"], where["tp"])
            replicas[module].append(replica)

    record_group_creation(note, world_size)
    for found in replicas.values():
        assert len(set(found)) == len(found)
        assert sum(not any(replica) for replica in found) == 1
