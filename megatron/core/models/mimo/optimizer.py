"""Optimizers of the modules that train."""

from typing import Optional

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection


class MimoOptimizer(MegatronOptimizer):
    """Optimizer of a MIMO model."""

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the L2 norm of all modules' gradients. Collective over the world.

        Ranks of one module agree on its norm, ranks without it contribute zero. The squares are
        taken in double precision: the norm of a single module comes back bit for bit, so that
        clipping scales its gradients as without MIMO.
        """
        names = sorted(self.module_infos)
        squares = torch.zeros(
            len(names), dtype=torch.float64, device=torch.cuda.current_device()
        )
        for index, name in enumerate(names):
            info = self.module_infos[name]
            if info.is_active and info.optimizer is not None:
                squares[index] = (info.optimizer.get_grad_norm() or 0.0) ** 2
        torch.distributed.all_reduce(squares, op=torch.distributed.ReduceOp.MAX)
        return squares.sum().sqrt().item()


def _get_replica_id(pg_collection: Optional[ProcessGroupCollection]) -> tuple:
    """Tell which copy of a module's optimizer objects this rank holds: (PP, TP, DP with CP).

    That order is the one that the distributed optimizer and the expert layers assert: they keep
    the first two places and rewrite the third. Exactly one rank of a module is all zeros and
    writes; without CP in the last place every context-parallel peer would be.
    """
    assert pg_collection is not None, "a module's optimizer state needs its pg_collection"
    groups = (pg_collection.pp, pg_collection.tp, pg_collection.dp_cp)
    assert None not in groups, "a module's pg_collection needs pp, tp and dp_cp to save"
    return tuple(group.rank() for group in groups)


def _module_optimizer_info(
    mimo_model: "MimoModel", name: str, grid: "HyperCommGrid", config: OptimizerConfig
) -> ModuleOptimizerInfo:
    """Build the optimizer of one module on this rank, if the rank hosts it and it trains.

    Called on every rank for every module, in the order of the grids; collective over the
    module's ranks only. A frozen module is not wrapped in data parallelism and gets none.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    hosted = grid.is_current_rank_in_grid()
    module = None
    if hosted:
        module = (
            mimo_model.language_model
            if name == MIMO_LANGUAGE_MODULE_KEY
            else mimo_model.modality_submodules[name]
        )
    info = ModuleOptimizerInfo(optimizer=None, grid=grid, pg_collection=None, is_active=hosted)
    if not isinstance(module, DistributedDataParallel):
        return info
    instances = module.ddp_config.num_distributed_optimizer_instances
    assert instances == 1, (
        f"module '{name}' asks for {instances} distributed optimizer instances; a MIMO optimizer "
        "supports one (--num-distributed-optimizer-instances 1)"
    )
    info.pg_collection = _get_pg_collection_for_optimizer(grid)
    info.optimizer = get_megatron_optimizer(
        config=config,
        model_chunks=[module],
        pg_collection=info.pg_collection,
        use_gloo_process_groups=False,
    )
    return info


def get_mimo_optimizer(mimo_model: "MimoModel", config: OptimizerConfig) -> MimoOptimizer:
    """Create the optimizer of a MIMO model: one per module that trains on this rank.

    Called on every rank; collective over each module's ranks.
    """
    infos = {
        name: _module_optimizer_info(mimo_model, name, grid, config)
        for name, grid in mimo_model.mimo_config.module_to_grid_map.items()
    }
    return MimoOptimizer(infos, config)
