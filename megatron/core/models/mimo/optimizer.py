"""Optimizers of the modules that train."""

from copy import deepcopy
from typing import Optional

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.optimizer import (
    ModuleOptimizerInfo,
    _get_pg_collection_for_optimizer,
)
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


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
        squares = torch.zeros(len(names), dtype=torch.float64, device=torch.cuda.current_device())
        for index, name in enumerate(names):
            info = self.module_infos[name]
            if info.is_active and info.optimizer is not None:
                squares[index] = (info.optimizer.get_grad_norm() or 0.0) ** 2
        torch.distributed.all_reduce(squares, op=torch.distributed.ReduceOp.MAX)
        return squares.sum().sqrt().item()


def _extract_param_groups(sub_sd, module_name, suffix, replica_id):
    """Save: move the parameter groups, with the common step, into a ShardedObject.

    Both are plain values. Left where they are, they would be common state, of which only global
    rank 0 writes its own.
    """
    # In full precision torch's state dictionary is the whole of it, else it is one entry.
    torch_part = sub_sd if 'param_groups' in sub_sd else sub_sd.get('optimizer')
    if not isinstance(torch_part, dict) or 'param_groups' not in torch_part:
        return
    groups = deepcopy(torch_part.pop('param_groups'))
    step = torch_part.get('state', {}).pop('common_step', None)
    for group in groups:
        group['params'] = []
        if step is not None:
            group['common_step'] = step
    if not torch_part:
        del sub_sd['optimizer']
    sub_sd[f'_mimo_param_groups{suffix}'] = ShardedObject(
        f'optimizer.mimo.{module_name}{suffix}.param_groups',
        groups,
        (1,),
        (0,),
        replica_id=replica_id,
    )


def _extract_grad_scaler(sub_sd, module_name, suffix, replica_id):
    """Save: move the gradient scaler's state, if there is one, into a ShardedObject.

    Not collective. A distributed optimizer that is not fully reshardable has made one of its own
    for every entry, which stays: wrapped once more, the inner one would be saved as it is and come
    back unread.
    """
    scaler = sub_sd.get('grad_scaler')
    if scaler is None or isinstance(scaler, ShardedObject):
        return
    key = f'optimizer.mimo.{module_name}{suffix}.grad_scaler'
    sub_sd[f'_mimo_grad_scaler{suffix}'] = ShardedObject(
        key, sub_sd.pop('grad_scaler'), (1,), (0,), replica_id=replica_id
    )


def _restore_param_groups(sub_sd, inner_optimizer, module_name):
    """Load: put the parameter groups and the common step back where the optimizer reads them.

    Raises:
        ValueError: when the checkpoint has another number of groups.
    """
    key = next((key for key in sub_sd if key.startswith('_mimo_param_groups')), None)
    if key is None:
        return
    loaded = sub_sd.pop(key)
    current = inner_optimizer.optimizer.state_dict()['param_groups']
    if len(loaded) != len(current):
        raise ValueError(
            f"optimizer of module '{module_name}': the checkpoint has {len(loaded)} parameter "
            f"groups, this run {len(current)}"
        )
    steps = [group.pop('common_step', None) for group in loaded]
    for group, own in zip(loaded, current, strict=True):
        group['params'] = own['params']
    (inner_optimizer,) = getattr(inner_optimizer, 'chained_optimizers', [inner_optimizer])
    is_whole = isinstance(inner_optimizer, FP32Optimizer)
    torch_part = sub_sd if is_whole else sub_sd.setdefault('optimizer', {})
    torch_part['param_groups'] = loaded
    if steps and steps[0] is not None:
        torch_part['state']['common_step'] = steps[0]


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
    mimo_model: MegatronModule, name: str, grid: HyperCommGrid, config: OptimizerConfig
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


def get_mimo_optimizer(mimo_model: MegatronModule, config: OptimizerConfig) -> MimoOptimizer:
    """Create the optimizer of a MIMO model: one per module that trains on this rank.

    Called on every rank; collective over each module's ranks.
    """
    infos = {
        name: _module_optimizer_info(mimo_model, name, grid, config)
        for name, grid in mimo_model.mimo_config.module_to_grid_map.items()
    }
    return MimoOptimizer(infos, config)
