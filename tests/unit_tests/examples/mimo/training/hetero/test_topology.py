"""Process groups of a run: the same ones on every rank, in the same order, with the right ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.mimo.training.hetero import topology as topology_module
from examples.mimo.training.hetero.layout import Layout, ModuleGrid
from examples.mimo.training.hetero.runtime import hetero_runtime
from examples.mimo.training.hetero.topology import Topology, build_topology
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from tests.unit_tests.helpers.groups import assert_same_groups, record_group_creation

pytestmark = pytest.mark.tier0

LAYOUTS = {
    "language alone": (4, "language:tp=2,pp=2"),
    "fan-in": (6, "vision:dp=4", "language:dp=2"),
    "fan-out": (4, "vision", "language:dp=3"),
    "TP 2 x PP 3": (8, "vision:tp=1,dp=2", "language:tp=2,pp=3"),
    "encoder of TP 2 x PP 2": (6, "vision:tp=2,pp=2", "language:tp=2"),
    "colocated": (4, "vision:dp=4,colocated", "language:tp=2,dp=2"),
    "three modules": (7, "vision:dp=2", "audio:tp=2,dp=1", "language:pp=3"),
    "experts": (6, "vision:tp=2,dp=1", "language:tp=2,dp=2,ep=2"),
    "experts of their own TP": (8, "language:tp=2,dp=4,ep=4,etp=1"),
    "context parallel": (8, "language:tp=2,cp=2,pp=2"),
    "reversed by offsets": (4, "language:tp=2,offset=2", "vision:dp=2,offset=0"),
}
DISJOINT = [name for name in LAYOUTS if name not in ("colocated", "language alone")]


def layout_named(name: str) -> Layout:
    """One of the layouts above."""
    world_size, *options = LAYOUTS[name]
    return Layout.from_options(options, world_size)


def enter_runtime(layout: Layout) -> None:
    """Build everything that a run builds: topology, pipeline communicator, bridges."""
    config = ModelParallelConfig(pipeline_dtype=torch.float32)
    with hetero_runtime(layout, config) as runtime:
        assert runtime.layout is layout
        assert runtime.pg_collection.module_pgs is runtime.topology.collections


def build(layout: Layout, found: list[Topology] | None = None) -> None:
    """Build the topology alone; keep it for a look."""
    topology = build_topology(layout, "gloo")
    if found is not None:
        found.append(topology)


@pytest.mark.parametrize('name', LAYOUTS)
@pytest.mark.parametrize('function', [build, enter_runtime])
def test_all_ranks_create_the_same_groups(function: Callable[..., None], name: str) -> None:
    """Every rank creates every group of every module and bridge in the same order."""
    layout = layout_named(name)
    records = record_group_creation(function, layout.world_size, layout)
    assert_same_groups(records)
    assert len(records[0]) >= 16 * len(layout.grids)
    members = {rank for creation in records[0] for rank in creation.ranks}
    assert members == set(range(layout.world_size))


@pytest.mark.parametrize('name', DISJOINT)
def test_bridges_add_groups(name: str) -> None:
    """A bridge joins the ranks of two modules, which no group of one module does."""
    layout = layout_named(name)
    records = record_group_creation(enter_runtime, layout.world_size, layout)[0]
    bridges = {
        grid.name
        for grid in layout.encoders
        for creation in records
        if set(creation.ranks) & set(grid.ranks)
        and set(creation.ranks) & set(layout.language.ranks)
    }
    assert bridges == {grid.name for grid in layout.encoders}


def peers(grid: ModuleGrid, rank: int, same: tuple[str, ...]) -> list[int]:
    """Ranks of a grid that share the named coordinates with ``rank``."""
    here = grid.coordinates(rank)
    return [r for r in grid.ranks if all(grid.coordinates(r)[key] == here[key] for key in same)]


def expected_groups(grid: ModuleGrid, rank: int) -> dict[str, list[int]]:
    """Ranks of each field of a collection, by the meaning of its name."""
    line = peers(grid, rank, ("tp", "cp", "dp"))
    dense = {
        "tp": peers(grid, rank, ("cp", "dp", "pp")),
        "cp": peers(grid, rank, ("tp", "dp", "pp")),
        "dp": peers(grid, rank, ("tp", "cp", "pp")),
        "pp": line,
        "dp_cp": peers(grid, rank, ("tp", "pp")),
        "tp_cp": peers(grid, rank, ("dp", "pp")),
        "mp": peers(grid, rank, ("cp", "dp")),
        "tp_dp_cp": peers(grid, rank, ("pp",)),
        "intra_dist_opt": list(grid.ranks),
    }
    width = grid.tp * grid.cp * grid.dp
    stage = [r for r in grid.ranks if (r - grid.offset) // width == (rank - grid.offset) // width]
    place, share = stage.index(rank), grid.etp * grid.ep
    model = stage[place // share * share : (place // share + 1) * share]
    first = model[(place % share) // grid.etp * grid.etp :]
    expert = {
        "expt_tp": first[: grid.etp],
        "ep": model[place % grid.etp :: grid.etp],
        "expt_dp": stage[place % share :: share],
        "tp_ep": model,
        "tp_ep_pp": [r for r in grid.ranks if (r - grid.offset) % width // share == place // share],
    }
    aliases = {
        "intra_dp_cp": dense["dp_cp"],
        "dp_cp_gtp_remat": dense["dp_cp"],
        "intra_expt_dp": expert["expt_dp"],
        "expt_dp_gtp_remat": expert["expt_dp"],
        "tp_ep_pp_with_egtp_remat": expert["tp_ep_pp"],
    }
    return dense | expert | aliases | {"embd": sorted({line[0], line[-1]}), "pos_embd": [line[0]]}


def group_ranks(collection: Any, fields: dict[str, list[int]]) -> dict[str, list[int]]:
    """Sorted ranks of a collection's groups; empty where this rank is no member."""
    groups = {field: getattr(collection, field) for field in fields}
    return {
        field: sorted(dist.get_process_group_ranks(group)) if group is not None else []
        for field, group in groups.items()
    }


def check_collections(layout: Layout, checked: list[int]) -> None:
    """Compare this rank's collections with what the layout says."""
    topology = build_topology(layout, "gloo")
    rank = dist.get_rank()
    assert topology.modules == layout.modules_of(rank)
    assert topology.primary == (
        "language" if rank in layout.language.ranks else topology.modules[0]
    )
    for name, collection in topology.collections.items():
        expected = expected_groups(layout[name], rank)
        for field in ("embd", "pos_embd"):
            if rank not in expected[field]:
                expected[field] = []
        assert group_ranks(collection, expected) == expected
    language = topology.multi_module_collection().language_model_module_name
    assert language == ("language" if rank in layout.language.ranks else None)
    checked.append(rank)


@pytest.mark.parametrize('name', LAYOUTS)
def test_collections_hold_the_right_ranks(name: str) -> None:
    """Every group of a rank's collections has the ranks that its name promises."""
    layout = layout_named(name)
    checked: list[int] = []
    record_group_creation(check_collections, layout.world_size, layout, checked)
    assert checked == list(range(layout.world_size))


def test_world_of_another_size_is_refused() -> None:
    """A topology is not built in a world that its layout is not for."""
    layout = layout_named("fan-out")
    with pytest.raises(ValueError, match=r"^the layout is for 4 ranks, not 5\.$"):
        record_group_creation(build, 5, layout)


def test_teardown_after_a_failure() -> None:
    """A run that fails inside leaves no bridge group behind in the class's caches."""

    def fail(layout: Layout) -> None:
        with hetero_runtime(layout, ModelParallelConfig(pipeline_dtype=torch.float32)):
            assert BridgeCommunicator._bridge_pg_cache
            raise RuntimeError("step failed")

    with pytest.raises(RuntimeError, match="step failed"):
        record_group_creation(fail, 4, layout_named("fan-out"))
    assert not BridgeCommunicator._bridge_pg_cache
    assert not BridgeCommunicator._broadcast_pg_cache


def only_own_lists(rank_lists: list[list[int]], backend: str) -> Any:
    """Create the embedding groups of this rank's pipeline alone: the mistake gloo punishes."""
    for ranks in rank_lists:
        if dist.get_rank() in ranks:
            return dist.new_group(ranks, backend=backend)
    return None


def test_skipped_embedding_group_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding groups that only their own pipeline creates do not pass for the same groups."""
    monkeypatch.setattr(topology_module, '_enumerated', only_own_lists)
    layout = layout_named("TP 2 x PP 3")
    with pytest.raises(AssertionError, match="group creation"):
        assert_same_groups(record_group_creation(build, layout.world_size, layout))


def test_skipped_module_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves out the groups of a module that it does not host is caught."""
    make = topology_module._build_module_groups

    def make_own(module: ModuleGrid, backend: str) -> Any:
        return make(module, backend) if dist.get_rank() in module.ranks else (None, None)

    monkeypatch.setattr(topology_module, '_build_module_groups', make_own)
    layout = layout_named("three modules")
    with pytest.raises(AssertionError, match="group creation"):
        assert_same_groups(record_group_creation(build, layout.world_size, layout))


def test_skipped_bridge_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge group that only its two ends create is caught in the full runtime."""
    make = BridgeCommunicator._get_or_create_bridge_pg.__func__

    def make_own(cls: type, ranks: list[int]) -> Any:
        return make(cls, ranks) if dist.get_rank() in ranks else None

    monkeypatch.setattr(BridgeCommunicator, '_get_or_create_bridge_pg', classmethod(make_own))
    layout = layout_named("TP 2 x PP 3")
    with pytest.raises(AssertionError, match="group creation"):
        assert_same_groups(record_group_creation(enter_runtime, layout.world_size, layout))
