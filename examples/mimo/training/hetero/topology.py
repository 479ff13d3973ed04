"""Process groups of a heterogeneous run: one grid and one group collection per module.

Every rank calls :func:`build_topology` and creates **every** group of **every** module in the same
order, also those it is no member of: gloo connects while a group is created, so a rank that skips
one leaves the others waiting (NCCL connects lazily and hides the mistake).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)

from examples.mimo.training.hetero.layout import LANGUAGE, Layout, ModuleGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXPERT_VIEW = "expert"
"""Name of the expert factorization that ``megatron.core.models.mimo.optimizer`` looks up."""

_DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "mp": ("tp", "pp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "expt_tp": ("expt_tp",),
    "ep": ("ep",),
    "expt_dp": ("expt_dp",),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
}
# Fields that equal another one while each module has one distributed-optimizer instance and no
# weight rematerialization groups (see the field comments of ProcessGroupCollection).
_ALIASES = {
    "intra_dp_cp": "dp_cp",
    "dp_cp_gtp_remat": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Grids of all modules and the groups of those modules that this rank hosts."""

    layout: Layout
    rank: int
    grids: dict[str, HyperCommGrid]
    collections: dict[str, ProcessGroupCollection]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules on this rank."""
        return tuple(self.collections)

    @property
    def primary(self) -> str:
        """Module that speaks for this rank: the language module if hosted, else the first one."""
        return LANGUAGE if LANGUAGE in self.collections else self.modules[0]

    def multi_module_collection(self) -> MultiModuleProcessGroupCollection:
        """Collection that selects the multi-module schedule of the stock loop."""
        return MultiModuleProcessGroupCollection(
            module_pgs=self.collections,
            language_model_module_name=LANGUAGE if LANGUAGE in self.collections else None,
        )


def build_topology(layout: Layout, backend: str) -> Topology:
    """Create all process groups of all modules.

    Collective over the world: every rank calls it once, after ``init_process_group``.

    Args:
        layout: the checked layout; its world size must be that of the default group.
        backend: ``"gloo"`` or ``"nccl"``.

    Raises:
        ValueError: the world has another size than the layout.
    """
    if dist.get_world_size() != layout.world_size:
        msg = f"the layout is for {layout.world_size} ranks, not {dist.get_world_size()}."
        raise ValueError(msg)
    rank = dist.get_rank()
    grids: dict[str, HyperCommGrid] = {}
    collections: dict[str, ProcessGroupCollection] = {}
    for module in layout.grids:
        grid, collection = _build_module_groups(module, backend)
        grids[module.name] = grid
        if rank in module.ranks:
            collections[module.name] = collection
    return Topology(layout=layout, rank=rank, grids=grids, collections=collections)


def _build_module_groups(
    module: ModuleGrid, backend: str
) -> tuple[HyperCommGrid, ProcessGroupCollection]:
    """Create the groups of one module; the collection is meaningful on its ranks only."""
    grid = HyperCommGrid(
        shape=[module.tp, module.cp, module.dp, module.pp],
        dim_names=["tp", "cp", "dp", "pp"],
        rank_offset=module.offset,
        backend=backend,
    )
    grid.register_view(
        EXPERT_VIEW,
        shape=[module.etp, module.ep, module.expert_dp, module.pp],
        dim_names=["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    collection = ProcessGroupCollection()
    for field, dims in _DENSE_GROUPS.items():
        setattr(collection, field, _member(grid.create_pg(list(dims))))
    for field, dims in _EXPERT_GROUPS.items():
        setattr(collection, field, _member(grid.create_pg(list(dims), view=EXPERT_VIEW)))
    for field, source in _ALIASES.items():
        setattr(collection, field, getattr(collection, source))
    pipelines = grid.get_rank_enum("pp")
    collection.embd = _enumerated([sorted({line[0], line[-1]}) for line in pipelines], backend)
    collection.pos_embd = _enumerated([[line[0]] for line in pipelines], backend)
    return grid, collection


def _enumerated(rank_lists: list[list[int]], backend: str) -> ProcessGroup | None:
    """Create disjoint groups on every rank and return this rank's own, if any."""
    group, _ = dist.new_subgroups_by_enumeration(rank_lists, backend=backend)
    return _member(group)


def _member(group: ProcessGroup | None) -> ProcessGroup | None:
    """``None`` in place of torch's sentinel for a group that this rank is no member of."""
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group
