"""The grids that a checkpoint was saved under, against those of the run that loads it, by module.

A MIMO run has one grid per module in ``args.module_layout``, and its checkpoints keep it in their
common state, which every rank reads. A stock checkpoint has none: it counts as a language module
alone, of the sizes that its stock arguments tell. Nothing here is collective.
"""

from argparse import Namespace
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Dict, Optional, Tuple, Union

import torch

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY

Arguments = Union[Namespace, SimpleNamespace]

_STOCK_SIZES = {
    'tp': 'tensor_model_parallel_size',
    'pp': 'pipeline_model_parallel_size',
    'dp': 'data_parallel_size',
    'cp': 'context_parallel_size',
    'ep': 'expert_model_parallel_size',
    'etp': 'expert_tensor_parallel_size',
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Parallel sizes of one module and its first rank."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    offset: int = 0

    @classmethod
    def from_record(cls, record: Dict[str, int]) -> 'Grid':
        """Read one module of ``args.module_layout``; keys of a later version are passed over."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in record.items() if key in known})

    @property
    def ranks(self) -> range:
        """Global ranks that host the module."""
        return range(self.offset, self.offset + self.tp * self.cp * self.dp * self.pp)


@dataclass(frozen=True, kw_only=True)
class GridChange:
    """One module then and now; ``None`` where the checkpoint or the run has no such module."""

    module: str
    saved: Optional[Grid]
    present: Optional[Grid]

    @property
    def sizes(self) -> Tuple[str, ...]:
        """Names of the parallel sizes that differ; empty where one side lacks the module."""
        if self.saved is None or self.present is None:
            return ()
        return tuple(
            key for key in _STOCK_SIZES if getattr(self.saved, key) != getattr(self.present, key)
        )

    @property
    def is_same(self) -> bool:
        """Whether the module has the same sizes on the same ranks."""
        return self.saved == self.present

    def describe(self, *sizes: str) -> str:
        """Put sizes into words, saved and present number: ``tp 2 -> 1, pp 1 -> 2``."""
        return ", ".join(
            f"{key} {getattr(self.saved, key)} -> {getattr(self.present, key)}"
            for key in sizes or self.sizes
        )


def has_modules(args: Arguments) -> bool:
    """Whether a run, or the run that wrote a checkpoint, is one of MIMO modules."""
    return bool(getattr(args, 'module_layout', None))


def grids_of(args: Arguments) -> Dict[str, Grid]:
    """Grid of each module, from the arguments of a run or of a checkpoint.

    Stock arguments are those of a language module alone; what they do not tell is 1.
    """
    if has_modules(args):
        return {name: Grid.from_record(record) for name, record in args.module_layout.items()}
    sizes = {key: getattr(args, name, None) or 1 for key, name in _STOCK_SIZES.items()}
    return {MIMO_LANGUAGE_MODULE_KEY: Grid(**sizes)}


def compare_grids(saved_args: Arguments, args: Arguments) -> Dict[str, GridChange]:
    """Every module of the checkpoint or the run, changed or not, those of the run first."""
    saved, present = grids_of(saved_args), grids_of(args)
    return {
        name: GridChange(module=name, saved=saved.get(name), present=present.get(name))
        for name in {**present, **saved}
    }


def own_modules(args: Arguments) -> Tuple[str, ...]:
    """Names of the modules on this rank, in the order of the options."""
    rank = torch.distributed.get_rank()
    return tuple(name for name, grid in grids_of(args).items() if rank in grid.ranks)


def saved_model_parallel(saved_args: Arguments, args: Arguments) -> Tuple[Any, ...]:
    """What the checkpoint says of (TP, PP): of this rank's own modules in a MIMO run.

    Compared by ``load_checkpoint`` with :func:`present_model_parallel` for equality only.
    """
    if not has_modules(args):
        return _stock_model_parallel(saved_args)
    return _model_parallel(grids_of(saved_args), own_modules(args))


def present_model_parallel(args: Arguments) -> Tuple[Any, ...]:
    """What the run says of (TP, PP); see :func:`saved_model_parallel`."""
    if not has_modules(args):
        return _stock_model_parallel(args)
    return _model_parallel(grids_of(args), own_modules(args))


def saved_data_parallel(saved_args: Arguments, args: Arguments) -> Any:
    """What the checkpoint says of DP: in a MIMO run, everything about every module.

    Compared by ``load_checkpoint`` for equality only, where state of single ranks (that of the
    rerun state machine) can go on only if no rank has changed its place.
    """
    if not has_modules(args):
        return getattr(saved_args, 'data_parallel_size', 0)
    return grids_of(saved_args)


def present_data_parallel(args: Arguments) -> Any:
    """What the run says of DP; see :func:`saved_data_parallel`."""
    return grids_of(args) if has_modules(args) else getattr(args, 'data_parallel_size', 0)


def _stock_model_parallel(args: Arguments) -> Tuple[int, int]:
    return (
        getattr(args, 'tensor_model_parallel_size', 1),
        getattr(args, 'pipeline_model_parallel_size', 1),
    )


def _model_parallel(grids: Dict[str, Grid], modules: Tuple[str, ...]) -> Tuple[Any, ...]:
    return tuple(
        (name, grids[name].tp, grids[name].pp) if name in grids else (name, None, None)
        for name in modules
    )
