"""What one process of a heterogeneous run holds: process groups, communicator, device.

Built once by :func:`hetero_runtime`, torn down whatever happens.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.pipeline_parallel.multimodule_communicator import (
    MultiModulePipelineCommunicator,
)
from megatron.training import cpu_device

from examples.mimo.training.hetero.layout import LANGUAGE, Layout
from examples.mimo.training.hetero.topology import Topology, build_topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

_SEQUENCE_FIRST = {"s": 0, "b": 1, "h": 2}


@dataclass(frozen=True, kw_only=True)
class HeteroRuntime:
    """Groups and communicator of this process, in the form that stock ``pretrain`` takes."""

    topology: Topology
    communicator: MultiModulePipelineCommunicator
    pg_collection: MultiModuleProcessGroupCollection
    device: torch.device

    @property
    def layout(self) -> Layout:
        """The checked rank layout."""
        return self.topology.layout


@contextlib.contextmanager
def hetero_runtime(
    layout: Layout, config: ModelParallelConfig, timeout_minutes: float = 10
) -> Iterator[HeteroRuntime]:
    """Join the world, build every process group, and take all of it down at the end.

    Collective over the world: every rank enters it once, under a launcher that sets ``RANK``,
    ``WORLD_SIZE`` and a rendezvous (torchrun, Slurm), or within a world that is there already, which
    then stays.

    Args:
        layout: the checked layout.
        config: the language model's configuration (``pipeline_dtype`` types the bridge).
        timeout_minutes: of every collective.
    """
    owns_world = not dist.is_initialized()
    if owns_world:
        _join_world(timeout_minutes)
    topology = None
    try:
        topology = build_topology(layout, cpu_device.backend())
        yield HeteroRuntime(
            topology=topology,
            communicator=_communicator(topology, config),
            pg_collection=topology.multi_module_collection(),
            device=cpu_device.device(),
        )
    finally:
        BridgeCommunicator.destroy_broadcast_pgs()
        BridgeCommunicator.destroy_bridge_pgs()
        if owns_world:
            dist.destroy_process_group()
        elif topology is not None:
            for grid in topology.grids.values():
                grid.destroy()


def _join_world(timeout_minutes: float) -> None:
    if torch.accelerator.is_available() and not cpu_device.is_enabled():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    dist.init_process_group(
        backend=cpu_device.backend(), timeout=timedelta(minutes=timeout_minutes)
    )


def _communicator(
    topology: Topology, config: ModelParallelConfig
) -> MultiModulePipelineCommunicator:
    """Pipeline communicator over disjoint modules; over the language module where they share ranks.

    Colocated modules exchange activations inside the model, so their pipeline has one stage.
    """
    names = [LANGUAGE] if topology.layout.colocated else list(topology.grids)
    return MultiModulePipelineCommunicator(
        module_to_grid_map={name: topology.grids[name] for name in names},
        topology={name: [] if name == LANGUAGE else [LANGUAGE] for name in names},
        config=config,
        dim_mapping=_SEQUENCE_FIRST,
        module_output_ndim={name: 2 for name in names if name != LANGUAGE},
    )
