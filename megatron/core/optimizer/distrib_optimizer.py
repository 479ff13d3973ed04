"""Resume over torch's Adam, and the fully reshardable state without a gather."""

import logging
from dataclasses import replace
from typing import Any, Dict, Iterator, Optional, Tuple

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import KEEP_VARS_HINT
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import logger
from megatron.core.optimizer.model_space import Piece, pieces_of_slice
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.utils import log_single_rank


class DistributedOptimizer(MixedPrecisionOptimizer):
    """Optimizer whose state is split over the data-parallel ranks."""

    def _own_slices(self) -> Iterator[Tuple[torch.nn.Parameter, int, int]]:
        """Go through the parameters of which this rank holds state, each with its flat slice.

        Local. The order is that of the buffers, the same whenever it is called.
        """
        for gbuf_range_maps in self.gbuf_ranges:
            for gbuf_range_map_for_all_buckets in gbuf_range_maps.values():
                for gbuf_range_map in gbuf_range_map_for_all_buckets:
                    for model_param, ranges in gbuf_range_map['param_map'].items():
                        yield model_param, ranges['param'].start, ranges['param'].end

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: Optional[dict] = None,
    ) -> ShardedStateDict:
        """Describe this rank's state in the shape of the model's parameters.

        Called on every rank of the optimizer; local, no rank gathers anything. Keys, shapes and
        dtype on disk are those of upstream's format, which gathers every buffer first: each reads
        what the other wrote. Here a rank writes, and asks for, the blocks that its own slices
        are; they are views of its state, so that a load reads into place.

        Args:
            model_sharded_state_dict: what the model's checkpoint says of its parameters.
            is_loading: whether the state is going to be read.
            metadata: ``distrib_optim_fully_reshardable_mem_efficient`` has no effect, as there is
                no gather that it could make smaller.

        Raises:
            ValueError: a parameter that the model's checkpoint does not contain.
            NotImplementedError: a parameter that is not saved in blocks.
        """
        if (metadata or {}).get('distrib_optim_fully_reshardable_mem_efficient') and not is_loading:
            log_single_rank(
                logger,
                logging.WARNING,
                "--distrib-optim-fully-reshardable-mem-efficient has no effect: every rank saves "
                "its own part of the optimizer state, and nothing is gathered.",
            )
        sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        described = {entry.data: entry for entry in nested_values(sharded)}
        pieces, tensors = {}, {}
        for index, (model_param, start, end) in enumerate(self._own_slices()):
            if model_param not in described:
                raise ValueError(
                    f"parameter {self._param_name(model_param)} is not in the model's sharded "
                    f"state.{KEEP_VARS_HINT}"
                )
            shape = tuple(described[model_param].data.shape)
            pieces[index] = pieces_of_slice(
                described[model_param], shape, start, end, self.distributed_optimizer_instance_id
            )
            own = self._get_main_param_and_optimizer_states(model_param)
            tensors[index] = {
                name: _sharded_pieces(pieces[index], name, own[name])
                for name in ('param', *self.optimizer_state_keys)
            }
        return {'pieces': LocalNonpersistentObject(pieces), 'tensors': tensors}

    @torch.no_grad()
    def load_parameter_state_from_fully_reshardable(self, state_dict: Dict[str, Any]) -> None:
        """Take over what was read for :meth:`sharded_param_state_fully_reshardable`.

        Called on every rank of the optimizer; local. What was read into place is there already;
        the rest are copies, of state that is kept scaled or in another precision.
        """
        for index, (model_param, _, _) in enumerate(self._own_slices()):
            own = self._get_main_param_and_optimizer_states(model_param)
            for name, loaded in state_dict['tensors'][index].items():
                for number, piece in enumerate(state_dict['pieces'][index]):
                    place = piece.view(own[name])
                    if loaded[number].data_ptr() != place.data_ptr():
                        place.copy_(loaded[number])
            self._set_main_param_and_optimizer_states(model_param, own)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer._sync_hdo_state_to_sub_optimizers()


def _sharded_pieces(pieces: list[Piece], name: str, flat: torch.Tensor) -> dict[int, Any]:
    """Put one kind of state of a parameter's slice into its pieces, in single precision. Local."""
    flat = flat.detach().float()
    return {
        number: replace(
            piece.target,
            key=f'optimizer.state.{name}.{piece.target.key}',
            data=piece.view(flat),
            dtype=flat.dtype,
        )
        for number, piece in enumerate(pieces)
    }


def _torch_steps(state: dict[int, dict[str, Any]]) -> list[float]:
    """Return the distinct step counts of a torch optimizer's state; one that never stepped has 0.

    Local. A load asks for the state's layout before the first step, when the state is empty.
    """
    return sorted({entry['step'].item() for entry in state.values()}) or [0.0]


def _set_torch_step(entry: dict[str, Any], step: torch.Tensor) -> None:
    """Give one parameter's state its own copy of the step, which torch increments in place.

    Local. One tensor for all parameters would be incremented once for each of them.
    """
    entry['step'] = step.clone()


@torch.no_grad()
def _copy_loaded(targets: dict[str, torch.Tensor], sources: dict[str, Any]) -> None:
    """Copy one parameter's loaded tensors over its main parameter and optimizer state.

    Local. In full precision the main parameter is a view of the model's, which requires grad. The
    step travels with the parameter groups and is set already; a source that names it as well holds
    the step of the fresh optimizer, which the default layout hands through the load.
    """
    for name, target in targets.items():
        if name == 'step':
            continue
        if isinstance(sources[name], torch.Tensor):
            target.copy_(sources[name])
