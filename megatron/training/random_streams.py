"""Random streams in a checkpoint: every rank saves its own and gets its own back.

A rank has one stream per generator (Python, NumPy, torch, the device, and each of the
tensor-parallel tracker), seeded for the module that speaks for it. Stock saves those of the first
rank of each (PP, TP) place, under ``rng_state``; ranks that differ in DP, CP or EP got that one's
back. Here

- the first rank of a place, with rank 0 in its DPxCP group, writes what stock writes and where;
- every other one writes beside it, under ``rng_state.dp_cp_N``, N being its DPxCP rank.

Both keys carry the prefix of the module. The content metadata of such a checkpoint says
``random_streams: per_rank``; without it (stock, or saved before this was so) all ranks of a place
read the one object there is. Stock reads our checkpoints as its own.

**The rule for a changed layout**, module by module:

- the sizes are the same: each rank goes on with its own streams, wherever the module's ranks are;
- only DP has changed: a rank takes the streams of its place with its DP rank modulo the saved DP;
- TP, PP, CP, EP or ETP has changed, or the module had no streams of its own (it shared its ranks
  with the language module): the streams are those that a new run begins with, before it builds its
  model, whose ``--seed`` is this run's plus the loaded iteration.
"""

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training.module_layout import Grid, GridChange, compare_grids
from megatron.training.utils import print_rank_0

METADATA_KEY = 'random_streams'
PER_RANK = 'per_rank'
LANGUAGE = MIMO_LANGUAGE_MODULE_KEY
"""Module that a run without ``--module`` counts as."""


class Origin(Enum):
    """Where the streams of a module come from."""

    OWN = 'its own'
    REPLICA = 'those of the data-parallel rank modulo the saved size'
    PLACE = 'those of the first rank at its place'
    ANEW = 'anew'


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a rank of one module continues.

    Attributes:
        origin: the case of the rule.
        why: the sizes that changed, or which checkpoint it is, for people.
        saved_dp: data-parallel size that the streams were saved under.
    """

    origin: Origin
    why: str = ''
    saved_dp: int = 0

    def __str__(self) -> str:
        """Say it in a few words."""
        return f"{self.origin.value} ({self.why})" if self.why else self.origin.value


def sources_of(changes: Mapping[str, GridChange], *, per_rank: bool) -> dict[str, Source]:
    """Apply the rule to every module of this run that has streams of its own.

    Pure; every rank comes to the same answer.

    Args:
        changes: every module then and now.
        per_rank: whether the checkpoint has streams of every rank.
    """
    saved = {name: change.saved for name, change in changes.items() if change.saved}
    present = {name: change.present for name, change in changes.items() if change.present}
    sources = {}
    for name in present:
        if not _speaks(name, present):
            continue
        if name in saved and not _speaks(name, saved):
            sources[name] = Source(origin=Origin.ANEW, why=f"saved on the ranks of {LANGUAGE}")
        else:
            sources[name] = _source_of(changes[name], per_rank)
    return sources


def _source_of(change: GridChange, per_rank: bool) -> Source:
    if change.saved is None:
        return Source(origin=Origin.ANEW, why="not in the checkpoint")
    if set(change.sizes) - {'dp'}:
        return Source(origin=Origin.ANEW, why=change.describe())
    if not per_rank:
        return Source(origin=Origin.PLACE, why="older checkpoint", saved_dp=change.saved.dp)
    if change.sizes:
        return Source(origin=Origin.REPLICA, why=change.describe(), saved_dp=change.saved.dp)
    return Source(origin=Origin.OWN, saved_dp=change.saved.dp)


def _speaks(module: str, grids: Mapping[str, Grid]) -> bool:
    """Whether a module's ranks are seeded and saved as its own: the language's always are."""
    if module == LANGUAGE or LANGUAGE not in grids:
        return True
    return not set(grids[module].ranks) & set(grids[LANGUAGE].ranks)


def saved_rank(dp_cp_rank: int, cp_size: int, saved_dp: int) -> tuple[int, int]:
    """Tell which DPxCP rank's streams to take, and how many ranks before this one take them too.

    CP varies faster than DP in a DPxCP group (``HyperCommGrid`` and ``RankGenerator`` orders).
    """
    dp_rank, cp_rank = divmod(dp_cp_rank, cp_size)
    return (dp_rank % saved_dp) * cp_size + cp_rank, dp_rank // saved_dp


def stream_key(key_prefix: str, dp_cp_rank: int) -> str:
    """Key of the streams that the rank with this place in its DPxCP group writes."""
    return f'{key_prefix}rng_state' + (f'.dp_cp_{dp_cp_rank}' if dp_cp_rank else '')


def sharded_streams(
    key_prefix: str,
    own: dict[str, Any],
    replicas: list[dict[str, Any]],
    place: tuple[tuple[int, int], tuple[int, int]],
    dp_cp_rank: int,
) -> ShardedObject:
    """Describe this rank's streams for saving. Called on every rank; not collective.

    Args:
        key_prefix: namespace of the module that speaks for the rank.
        own: states of this rank's generators.
        replicas: what stock saves: those of all data-parallel ranks with
            ``--data-parallel-random-init``, else ``[own]``.
        place: (PP, TP) sizes and ranks.
        dp_cp_rank: this rank's place in its DPxCP group.
    """
    shape, offset = place
    states = [own] if dp_cp_rank else replicas
    return ShardedObject(stream_key(key_prefix, dp_cp_rank), states, shape, offset, replica_id=0)


@dataclass(frozen=True, kw_only=True)
class StreamGroups:
    """Groups of the module that speaks for this rank; those not given are the global ones."""

    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup

    @classmethod
    def of(
        cls,
        tp: ProcessGroup | None,
        pp: ProcessGroup | None,
        dp: ProcessGroup | None,
        dp_cp: ProcessGroup | None,
    ) -> 'StreamGroups':
        """Take the groups that ``load_checkpoint`` was called with. Not collective."""
        given = {'tp': tp, 'pp': pp, 'dp': dp, 'dp_cp': dp_cp}
        missing = [name for name, group in given.items() if group is None]
        if missing:
            stock = ProcessGroupCollection.use_mpu_process_groups(missing)
            given |= {name: getattr(stock, name) for name in missing}
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class StreamLoader:
    """Asks a checkpoint for this rank's streams and puts them in place, in two steps.

    Attributes:
        args: this run's arguments.
        sources: the rule's answer for every module of this run that has streams of its own.
        per_rank: whether the checkpoint has streams of every rank.
        key_prefix: namespace of the module that speaks for this rank.
        groups: that module's groups.
    """

    args: Namespace
    sources: Mapping[str, Source]
    per_rank: bool
    key_prefix: str
    groups: StreamGroups

    @property
    def _source(self) -> Source:
        return self.sources[self.key_prefix.removesuffix('.') or LANGUAGE]

    def template(self) -> ShardedObject | None:
        """Describe what to read, or ``None`` if nothing. Called on every rank; not collective."""
        source = self._source
        if source.origin is Origin.ANEW:
            return None
        groups, rank = self.groups, self.groups.dp_cp.rank()
        key, copy = stream_key(self.key_prefix, 0), rank
        if self.per_rank:
            cp_size = groups.dp_cp.size() // groups.dp.size()
            place, copy = saved_rank(rank, cp_size, source.saved_dp)
            key = stream_key(self.key_prefix, place)
        shape = (groups.pp.size(), groups.tp.size())
        offset = (groups.pp.rank(), groups.tp.rank())
        return ShardedObject(key, None, shape, offset, replica_id=copy)

    def restore(
        self, states: Sequence[Mapping[str, Any]] | None, model: Any, iteration: int
    ) -> None:
        """Put the loaded streams in place, or start new ones, and say which rule applied.

        Called on every rank, as the last use of a generator before training; not collective.

        Args:
            states: what was read under :meth:`template`.
            model: whose first chunk tells the groups and, as ``seed_offset``, what its module
                adds to the seed.
            iteration: the iteration that was loaded.
        """
        rule = "; ".join(f"{name}: {source}" for name, source in self.sources.items())
        anew = any(source.origin is Origin.ANEW for source in self.sources.values())
        seed = f"; anew is from --seed {self.args.seed} + iteration {iteration}" if anew else ""
        print_rank_0(f"random streams: {rule}{seed}")
        if self._source.origin is Origin.ANEW:
            restart_streams(self.args, model, iteration)
            return
        assert states is not None, "the checkpoint has no random streams of this rank"
        varies = self.args.data_parallel_random_init and not self.per_rank
        set_streams(states[self.groups.dp.rank() if varies else 0])


def plan_load(
    args: Namespace,
    saved_args: Any,
    common: Mapping[str, Any],
    groups: StreamGroups,
    *,
    key_prefix: str,
    release: bool,
    is_local: bool,
) -> tuple[ShardedObject | None, StreamLoader | None]:
    """Decide about this rank's streams. Called by ``load_checkpoint`` on every rank.

    Not collective: all ranks decide from the same common state.

    Args:
        args: this run's arguments.
        saved_args: the checkpoint's.
        common: the checkpoint's common state.
        groups: those of the module that speaks for this rank.
        key_prefix: its namespace.
        release: whether it is a release checkpoint, which has no streams.
        is_local: whether it is a local checkpoint, which only a run like this one wrote.

    Returns:
        What to read, and what puts it in place; nothing if the flags of either run say so.
    """
    unwanted = release or args.finetune or args.no_load_rng
    if unwanted or getattr(saved_args, 'no_save_rng', False):
        return None, None
    metadata = common.get('content_metadata') or {}
    per_rank = is_local or metadata.get(METADATA_KEY) == PER_RANK
    sources = sources_of(compare_grids(saved_args, args), per_rank=per_rank)
    loader = StreamLoader(
        args=args, sources=sources, per_rank=per_rank, key_prefix=key_prefix, groups=groups
    )
    return loader.template(), loader


def restore(
    loader: StreamLoader | None, states: Sequence[Mapping[str, Any]] | None, *where: Any
) -> None:
    """Call :meth:`StreamLoader.restore` if there is something to restore."""
    if loader is not None:
        loader.restore(states, *where)


def set_streams(state: Mapping[str, Any]) -> None:
    """Put the states of all generators of this rank in place; draws nothing.

    Args:
        state: as ``get_rng_state`` collects it.

    Raises:
        ValueError: it has no state of the tensor-parallel tracker.
    """
    if not state['rng_tracker_states']:
        raise ValueError(
            "the checkpoint has no state of the tensor-parallel random tracker; --no-load-rng "
            "starts new random streams"
        )
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    random.setstate(state['random_rng_state'])
    np.random.set_state(state['np_rng_state'])  # noqa: NPY002 - what checkpoints hold
    torch.set_rng_state(state['torch_rng_state'])
    torch.cuda.set_rng_state(state['cuda_rng_state'])
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(value, to_graphable=graphable)
            for name, value in state['rng_tracker_states'].items()
        }
    )


def restart_streams(args: Namespace, model: Any, iteration: int) -> None:
    """Seed this rank as a new run with ``--seed`` plus ``iteration`` would. Not collective."""
    from megatron.training.initialize import _set_random_seed

    bare, *_ = unwrap_model(model)
    groups = getattr(bare, 'pg_collection', None)
    _set_random_seed(
        args.seed + getattr(bare, 'seed_offset', 0) + iteration,
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
        pp_group=getattr(groups, 'pp', None),
        dp_group=getattr(groups, 'dp', None),
        tp_group=getattr(groups, 'tp', None),
        ep_group=getattr(groups, 'ep', None),
        etp_group=getattr(groups, 'expt_tp', None),
    )
