"""Random streams saved and read back by ranks of several grids, each having its own."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.recorded_runs import draw_as_often_as_the_rank, streams

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
SEED = 11
ITERATION = 5


class Place:
    """Where a rank stands in a layout, and the arguments of a run under it."""

    def __init__(self, modules: Sequence[str], **flags: bool) -> None:
        """Create the groups; collective over the ranks of the test."""
        import torch.distributed as dist

        from examples.mimo.training.hetero.layout import Layout
        from examples.mimo.training.hetero.seeds import module_seed_offset, seed_module
        from examples.mimo.training.hetero.topology import build_topology
        from megatron.training import global_vars

        layout = Layout.from_options(list(modules), dist.get_world_size())
        topology = build_topology(layout, 'gloo')
        self.name = topology.primary
        self.prefix = f'{self.name}.'
        self.seed_offset = module_seed_offset(layout, self.name)
        self.pg_collection = topology.collections[self.name]
        self.args = Namespace(
            module_layout=layout.record(),
            seed=SEED,
            finetune=False,
            no_load_rng=False,
            no_save_rng=False,
            te_rng_tracker=False,
            inference_rng_tracker=False,
            cuda_graph_impl="none",
            data_parallel_random_init=flags.pop('random_init', False),
        )
        assert not flags
        global_vars._GLOBAL_ARGS = self.args
        seed_module(SEED, self.seed_offset, self.pg_collection)

    def save(self, folder: str, per_rank: bool = True) -> dict[str, str]:
        """Save this rank's streams as ``save_checkpoint`` does. Collective; returns digests."""
        from dataclasses import replace

        from megatron.core import dist_checkpointing
        from megatron.training import random_streams
        from megatron.training.checkpointing import get_rng_state

        draw_as_often_as_the_rank()
        groups = self.pg_collection
        state = get_rng_state(
            'torch_dist', groups.tp, groups.pp, groups.dp_cp, groups.dp, key_prefix=self.prefix
        )
        metadata = {random_streams.METADATA_KEY: random_streams.PER_RANK}
        if not per_rank:  # as unpatched Megatron does
            metadata = {}
            state = replace(state, key=f'{self.prefix}rng_state', replica_id=groups.dp_cp.rank())
        common = {'rng_state': state, 'args': self.args}
        dist_checkpointing.save(common, folder, content_metadata=metadata)
        return streams()

    def load(self, folder: str) -> dict[str, str]:
        """Read streams as ``load_checkpoint`` does and return their digests. Collective."""
        from megatron.core import dist_checkpointing
        from megatron.training import random_streams

        common = dist_checkpointing.load_common_state_dict(folder)
        groups = self.pg_collection
        template, loader = random_streams.plan_load(
            self.args,
            common['args'],
            common,
            random_streams.StreamGroups.of(groups.tp, groups.pp, groups.dp, groups.dp_cp),
            key_prefix=self.prefix,
            release=False,
            is_local=False,
        )
        # A rank with nothing to read takes part all the same.
        wanted = {} if template is None else {'rng_state': template}
        state = dist_checkpointing.load(wanted, folder)
        random_streams.restore(loader, state.get('rng_state'), [self], ITERATION)
        return streams()


def save_then_load(
    folder: str, saved: Sequence[str], present: Sequence[str], per_rank: bool, random_init: bool
) -> tuple[dict[str, str], dict[str, str], str]:
    """Streams of this rank as saved and as loaded, and the module that speaks for it."""
    before = Place(saved, random_init=random_init).save(folder, per_rank)
    now = Place(present, random_init=random_init)
    return before, now.load(folder), now.name


def restarted(present: Sequence[str]) -> dict[str, str]:
    """Streams of this rank in a new run whose seed is the loaded iteration higher."""
    from examples.mimo.training.hetero.seeds import seed_module

    place = Place(present)
    seed_module(SEED + ITERATION, place.seed_offset, place.pg_collection)
    return streams()


def run(
    rank_pool: Pools,
    folder: Path,
    saved: Sequence[str],
    present: Sequence[str],
    per_rank: bool = True,
    random_init: bool = False,
) -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """Saved and loaded streams and the speaking module of each of four ranks."""
    arguments = (str(folder), saved, present, per_rank, random_init)
    before, after, names = zip(*rank_pool(4).run(save_then_load, *arguments), strict=True)
    for name in before[0]:  # no two ranks save the same stream
        assert len({rank[name] for rank in before}) == 4, name
    return list(before), list(after), list(names)


@pytest.mark.parametrize('random_init', [False, True], ids=["", "random init"])
@pytest.mark.parametrize(
    'layout',
    [
        ("vision:dp=2", "language:tp=2"),
        ("language:cp=2,dp=2",),
        ("language:dp=4,ep=2",),
        ("language:pp=2,tp=2",),
        ("vision:tp=2,dp=2,colocated", "language:tp=2,dp=2"),
    ],
    ids=" ".join,
)
def test_every_rank_gets_its_own_back(
    rank_pool: Pools, tmp_path: Path, layout: tuple[str, ...], random_init: bool
) -> None:
    """Ranks that differ in DP, CP or EP only have streams of their own after a resume as well."""
    before, after, _ = run(rank_pool, tmp_path, layout, layout, random_init=random_init)
    assert after == before


def test_one_module_changes(rank_pool: Pools, tmp_path: Path) -> None:
    """The encoder goes on on other ranks, the language module starts anew."""
    saved = ("vision:dp=2", "language:tp=2")
    present = ("vision:dp=2,offset=0", "language:pp=2")
    before, after, _ = run(rank_pool, tmp_path, saved, present)
    assert after[:2] == before[:2]
    assert after[2:] == rank_pool(4).run(restarted, present)[2:]
    assert after[2] != before[2]


def test_replicas_change(rank_pool: Pools, tmp_path: Path) -> None:
    """With other DP alone, ranks take the streams of their place modulo the saved DP."""
    saved, present = ("vision", "language:dp=3"), ("vision:dp=3", "language")
    before, after, _ = run(rank_pool, tmp_path, saved, present)
    assert after == [before[0], before[0], before[0], before[1]]


def test_modules_part(rank_pool: Pools, tmp_path: Path) -> None:
    """An encoder that shared the language module's ranks starts streams of its own."""
    saved = ("vision:tp=2,dp=2,colocated", "language:tp=2,dp=2")
    present = ("vision:tp=2", "language:tp=2")
    before, after, names = run(rank_pool, tmp_path, saved, present)
    assert names == ["vision", "vision", "language", "language"]
    assert after[:2] == rank_pool(4).run(restarted, present)[:2]
    assert after[2:] == before[:2]


@pytest.mark.parametrize('random_init', [False, True], ids=["", "random init"])
def test_older_checkpoints_load(rank_pool: Pools, tmp_path: Path, random_init: bool) -> None:
    """One stream for each (PP, TP) place, as stock saves it, reaches all ranks of the place."""
    layout = ("language:tp=2,dp=2",)
    before, after, _ = run(rank_pool, tmp_path, layout, layout, False, random_init)
    assert after == (before if random_init else [*before[:2], *before[:2]])
