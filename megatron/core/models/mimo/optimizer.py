"""Optimizers of the modules that train."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Dict, Optional

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.optimizer import (
    _EXPERT_VIEW,
    ModuleOptimizerInfo,
    _extract_param_state_sharding_type,
    _iter_optimizer_sub_dicts,
    _restore_grad_scaler,
    _restore_param_state_sharding_type,
)
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import (
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class MimoOptimizer(MegatronOptimizer):
    """Optimizer of a MIMO model."""

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Unscale all modules' gradients and tell whether one anywhere is not finite.

        Collective over the world in fp16, else local. The loss is scaled once, by the optimizer of
        the rank that computes it, and each module unscales its gradients by its own scaler. So the
        scalers have to move together: where any module found a value that is not finite, all of
        them take note, not that module's alone.
        """
        scalers = list(_grad_scalers(self._active_optimizers))
        states = [scaler.state_dict() for scaler in scalers]
        answers = [optimizer.prepare_grads() for optimizer in self._active_optimizers]
        found = any(answers)
        if not self.config.fp16:
            return found
        flag = torch.tensor([found], dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        if flag.item():
            for scaler, state in zip(scalers, states, strict=True):
                scaler.load_state_dict(state)
                scaler.update(True)
        return bool(flag.item())

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

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Hand each module's optimizer what was loaded for it.

        Called on every rank; not collective. An optimizer that the module did not have when it was
        saved, such as that of experts at EP 1, starts from the groups of the one before it, of
        which its parameters were part.

        Raises:
            ValueError: the checkpoint lacks a parameter group.
        """
        for name, info in self.module_infos.items():
            module_sd = state_dict.get(name)
            if not info.is_active or info.optimizer is None or module_sd is None:
                continue
            own: Dict[str, Any] = {}
            for sub_sd, inner in _iter_optimizer_sub_dicts(module_sd, info.optimizer):
                own = {key: sub_sd[key] for key in _own_objects(sub_sd)} or own
                sub_sd.update(deepcopy(own))
                _restore_param_groups(sub_sd, inner, name)
                _restore_param_state_sharding_type(sub_sd)
                _restore_grad_scaler(sub_sd)
            info.optimizer.load_state_dict(module_sd)

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, **kwargs):
        """Describe the optimizer state of this rank's modules for saving or loading.

        Called on every rank; collective over each module's groups where its optimizer's format is.
        What is neither a tensor nor an object of its own would be common state, of which global
        rank 0 writes its own only; parameter groups, steps and gradient scalers become objects.
        """
        state = {}
        for name, info in self.module_infos.items():
            state[name] = {}
            if not (info.is_active and info.optimizer):
                continue
            _complete_state(info.optimizer)
            state[name] = info.optimizer.sharded_state_dict(
                model_sharded_state_dict, is_loading, **kwargs
            )
            replica_id = _get_replica_id(info.pg_collection)
            parts = [part for part, _ in _iter_optimizer_sub_dicts(state[name], info.optimizer)]
            step = _common_step(parts, info.optimizer)
            for number, part in enumerate(parts):
                place = (part, name, f'.{number}' if number else '', replica_id)
                _extract_param_groups(*place, step)
                _extract_param_state_sharding_type(*place)
                _extract_grad_scaler(*place)
            if is_loading:
                _ask_for_saved(parts, name, kwargs.get('metadata') or {})
            add_prefix_for_sharding(state[name], f'mimo.{name}.')
        return state


# Metadata of a load: how many optimizers each module had when it was saved.
SAVED_OPTIMIZERS = 'mimo_saved_optimizers'


def _own_objects(sub_sd):
    """List the objects that an optimizer's state keeps for a module, by their names in it."""
    return [key for key in sub_sd if str(key).startswith('_mimo_')]


def _ask_for_saved(parts, module_name, metadata):
    """Load: leave out the objects of optimizers that the module did not have when it was saved."""
    saved = metadata.get(SAVED_OPTIMIZERS, {}).get(module_name, len(parts))
    for part in parts[max(saved, 1) :]:
        for key in _own_objects(part):
            del part[key]


def _inner_optimizers(optimizer):
    """List what a module's optimizer consists of, in the order of its chain."""
    return getattr(optimizer, 'chained_optimizers', [optimizer])


def _complete_state(optimizer):
    """Save and load: give parameters that were never stepped the state of their first step. Local.

    An optimizer has no state until it steps, and under a gradient scaler the first steps of a run
    overflow and are skipped. A checkpoint of such a run would lack what its own load asks for.
    """
    for inner in _inner_optimizers(optimizer):
        if inner.optimizer is None or inner.init_state_fn is None:
            continue
        inner.init_state_fn(inner.optimizer, inner.config)
        if isinstance(inner.optimizer, torch.optim.Adam):  # AdamW is one
            for state in inner.optimizer.state.values():
                state.setdefault('step', torch.tensor(0.0))


def _torch_part(sub_sd):
    """Return what torch's optimizer has to say in the state of one of ours, if it is plain.

    In full precision that is the whole of it, else one entry; the distributed optimizer's default
    format makes an object of that entry.
    """
    part = sub_sd if 'param_groups' in sub_sd else sub_sd.get('optimizer')
    return part if isinstance(part, dict) and 'param_groups' in part else None


def _common_step(parts, optimizer):
    """Return the number of steps that a module's optimizers have taken, if they count it. Local.

    One without parameters on this rank, such as that of the experts on a stage that has none, has
    not counted; this rank may nevertheless be the one that writes for all. Torch's counts from 0,
    which ours leave out.
    """
    counts = any(isinstance(o.optimizer, torch.optim.Adam) for o in _inner_optimizers(optimizer))
    steps = [torch.tensor(0.0)] if counts else []
    for part in filter(None, map(_torch_part, parts)):
        steps += [group['step'] for group in part['param_groups'] if 'step' in group]
        state = part.get('state', {})
        steps += [state['common_step']] if 'common_step' in state else []
    return max(steps, key=float, default=None)


def _grad_scalers(optimizers: list[MegatronOptimizer]) -> Iterator[MegatronGradScaler]:
    """Gradient scalers of single and chained optimizers."""
    for optimizer in optimizers:
        if hasattr(optimizer, 'chained_optimizers'):
            yield from _grad_scalers(optimizer.chained_optimizers)
        elif getattr(optimizer, 'grad_scaler', None) is not None:
            yield optimizer.grad_scaler


def _extract_param_groups(sub_sd, module_name, suffix, replica_id, common_step):
    """Save: move the parameter groups, with the common step, into a ShardedObject.

    Both are plain values. Left where they are, they would be common state, of which only global
    rank 0 writes its own.
    """
    _place_main_params(sub_sd)
    torch_part = _torch_part(sub_sd)
    if torch_part is None:
        return
    groups = deepcopy(torch_part.pop('param_groups'))
    torch_part.get('state', {}).pop('common_step', None)
    for group in groups:
        group['params'] = []
        if common_step is not None:
            group['step' if 'step' in group else 'common_step'] = common_step
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


def _place_main_params(sub_sd):
    """Save and load: name the place of every main parameter in its group, instead of listing them.

    A group may be empty on one rank and not on another, such as that of the experts on a stage
    without any. Of lists, a checkpoint keeps the empty ones as rank 0's common state and puts the
    others together without them: a load would meet two lists of different lengths, or find a
    group's parameters in the place of another's.
    """
    groups = sub_sd.get('fp32_from_fp16_params')
    if groups is not None:
        sub_sd['fp32_from_fp16_params'] = {
            number: dict(enumerate(group)) for number, group in enumerate(groups) if group
        }


def _list_main_params(sub_sd, inner_optimizer):
    """Load: put the main parameters into the lists that a half-precision optimizer reads."""
    groups = getattr(inner_optimizer, 'fp32_from_float16_groups', None)
    if groups is None:
        return
    placed = sub_sd.get('fp32_from_fp16_params', {})
    sub_sd['fp32_from_fp16_params'] = [
        [placed[number][place] for place in range(len(group))]
        for number, group in enumerate(groups)
    ]


def _restore_param_groups(sub_sd, inner_optimizer, module_name):
    """Load: put the parameter groups and the common step back where the optimizer reads them.

    Groups are found by what distinguishes them, not by their place: those of experts are saved
    with the others where expert parallelism is 1, and apart where it is more.

    Raises:
        ValueError: when the checkpoint lacks one of the groups.
    """
    key = next((key for key in sub_sd if key.startswith('_mimo_param_groups')), None)
    if key is None:
        return
    loaded = sub_sd.pop(key)
    current = inner_optimizer.optimizer.state_dict()['param_groups']
    groups = [_matching_group(loaded, own, module_name) for own in current]
    steps = [group.pop('common_step', None) for group in groups]
    (inner_optimizer,) = _inner_optimizers(inner_optimizer)
    _list_main_params(sub_sd, inner_optimizer)
    is_whole = isinstance(inner_optimizer, FP32Optimizer)
    torch_part = sub_sd if is_whole else sub_sd.setdefault('optimizer', {})
    torch_part['param_groups'] = groups
    if steps and steps[0] is not None:
        torch_part['state']['common_step'] = steps[0]


def _matching_group(loaded, own, module_name):
    """Return a copy of the loaded group of this kind, for the parameters of the run's own group.

    Raises:
        ValueError: when there is none.
    """
    kind = [key for key in param_group_identifier_keys if key != 'is_expert_parallel']
    alike = [group for group in loaded if all(group.get(key) == own.get(key) for key in kind)]
    if not alike:
        asked = ", ".join(f"{key} {own.get(key)}" for key in kind)
        raise ValueError(
            f"optimizer of module '{module_name}': the checkpoint has no parameter group with "
            f"{asked}"
        )
    expert = own.get('is_expert_parallel')
    same = [group for group in alike if group.get('is_expert_parallel') == expert]
    found = deepcopy((same or alike)[0])
    return {**found, 'is_expert_parallel': expert, 'params': own['params']}


def _get_pg_collection_for_optimizer(grid) -> ProcessGroupCollection:
    """Collect the groups of a module's optimizer from its grid, on which all are created already.

    Not collective. Without ``expt_tp`` the optimizer takes the dense tensor-parallel group for the
    experts' and, where the two differ, leaves the experts of all but one rank out of its counts.
    """
    pg = ProcessGroupCollection()
    for name in ('tp', 'dp', 'pp'):
        setattr(pg, name, grid.get_pg(name))
    for name in ('expt_tp', 'ep', 'expt_dp'):
        setattr(pg, name, grid.get_pg(name, view=_EXPERT_VIEW))
    pg.dp_cp = grid.get_pg(['dp', 'cp'])
    pg.mp = grid.get_pg(['tp', 'pp'])
    pg.intra_dist_opt = grid.get_pg(['tp', 'cp', 'dp', 'pp'])
    pg.tp_ep_pp = grid.get_pg(['expt_tp', 'ep', 'pp'], view=_EXPERT_VIEW)
    return pg


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
