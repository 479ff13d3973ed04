"""A language model alone may be a pipeline."""

from dataclasses import dataclass
from typing import Dict

from megatron.core.hyper_comm_grid import HyperCommGrid


@dataclass
class RankRole:
    """Role of this rank in a multi-module run."""

    @staticmethod
    def _all_grids_colocated(module_to_grid_map: Dict[str, 'HyperCommGrid']) -> bool:
        """Whether the modules share their ranks and none of them is a pipeline.

        The colocated forward runs every module whole, so a single module that has several
        pipeline stages takes the path of separate grids instead.
        """
        spans = {(grid.rank_offset, grid.size) for grid in module_to_grid_map.values()}
        stages = [
            grid.shape[grid.dim_names.index('pp')]
            for grid in module_to_grid_map.values()
            if 'pp' in grid.dim_names
        ]
        return len(spans) == 1 and all(count == 1 for count in stages)
