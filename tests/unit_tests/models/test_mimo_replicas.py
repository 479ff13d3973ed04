"""Who writes what: every rank of many grids, played in turn by one process that has no peers.

The order of a replica id is (PP, TP, DP with CP). Its sources are the checks and rewrites of
``megatron/core``: ``transformer/moe/experts.py`` and ``extensions/transformer_engine.py`` assert it
and put the expert data rank in the last place, ``optimizer/distrib_optimizer.py`` asserts it and
replaces the last place, ``optimizer/layer_wise_optimizer.py`` folds another axis into the middle
one. Only the rank that is all zeros writes (``dist_checkpointing/mapping.py``).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.groups import record_group_creation
from tests.unit_tests.helpers.mimo_models import Built, with_built

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

TEXT = ("--mock-text-only",)
EXPERTS = ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--swiglu")
SMALL_IMAGES = ("--image-patch-size", "4")
PLAIN = ("--bf16",)
SHARDED = ("--bf16", "--use-distributed-optimizer")


@dataclass(frozen=True)
class Grids:
    """A world and its modules."""

    ranks: int
    modules: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def arguments(self) -> tuple[str, ...]:
        """Command line of a run over these grids, without its optimizer."""
        modules = [part for module in self.modules for part in ("--module", module)]
        batch = ("--micro-batch-size", "4", "--global-batch-size", "16")
        return (*batch, *modules, *self.flags)


GRIDS = {
    "TP, CP and DP": Grids(8, ("language:tp=2,cp=2,dp=2",), TEXT),
    "TP 2 with TP 2 and PP 3": Grids(
        8, ("vision:tp=2", "language:tp=2,pp=3"), ("--num-layers", "3")
    ),
    "EP 2 in TP 2": Grids(
        4, ("language:tp=2,dp=2,ep=2,etp=1",), (*TEXT, *EXPERTS, "--sequence-parallel")
    ),
    "EP 2, CP 2 and PP 2": Grids(8, ("language:cp=2,dp=2,ep=2,pp=2",), (*TEXT, *EXPERTS)),
    "two encoders": Grids(6, ("left:tp=2", "right:dp=2", "language:pp=2"), SMALL_IMAGES),
    "colocated": Grids(
        4, ("left:tp=2,colocated", "right:dp=4,colocated", "language:tp=4"), SMALL_IMAGES
    ),
    "untied, a frozen tower": Grids(
        4,
        ("vision:dp=2", "language:pp=2"),
        ("--untie-embeddings-and-output-weights", "--freeze", "vision.encoder"),
    ),
}


def saved_by_each_rank(arguments: Sequence[str], ranks: int) -> list[list[list[Any]]]:
    """What each rank of a world would save, for each format that its optimizer has.

    Runs in one process, which plays the ranks in turn: groups are real, collectives return at once.
    Megatron's own check of a save is run over the whole, as global rank 0 would run it.

    Raises:
        CheckpointingException: a tensor is not covered exactly, or an object is missing.
    """
    import torch.distributed as dist

    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
    from tests.unit_tests.helpers.context_parallel import local_context_parallelism

    saved: list[list[list[Any]]] = []

    def play() -> None:
        with local_context_parallelism():
            saved.append(with_built(saved_in_each_format, arguments))

    dist.destroy_process_group()  # the harness's own
    record_group_creation(play, ranks)

    def check() -> None:
        for shards_of_ranks in zip(*saved, strict=True):
            validate_sharding_integrity(list(shards_of_ranks))

    record_group_creation(check, 1)
    return saved


def saved_in_each_format(built: Built) -> list[list[Any]]:
    """Tensors and objects that this rank describes, without their data, for each format."""
    formats = (False, True) if built.args.use_distributed_optimizer else (False,)
    return [saved_shards(built, fully_reshardable) for fully_reshardable in formats]


def saved_shards(built: Built, fully_reshardable: bool) -> list[Any]:
    """Tensors and objects of model, optimizer, random streams and rerun state of this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import checkpointing

    built.args.dist_ckpt_optim_fully_reshardable = fully_reshardable
    state = built.sharded_state_dict()
    groups = built.checkpoint_groups()
    state["rng_state"] = checkpointing.get_rng_state(
        "torch_dist",
        groups["tp_group"],
        groups["pp_group"],
        dp_cp_group=groups["dp_cp_group"],
        dp_group=groups["dp_group"],
        key_prefix=groups["rng_state_key_prefix"],
    )
    state["rerun"] = get_rerun_state_machine().state_dict(None, "torch_dist", force=True)
    apply_factories(state)
    return [
        value.without_data() for value in nested_values(state) if isinstance(value, ShardedBase)
    ]


def place(shard: Any) -> tuple[Any, ...]:
    """Name of a shard that no other part of the same tensor, and no other object, has."""
    return (shard.key, shard.global_offset, getattr(shard, "local_shape", None))


def is_main(shard: Any) -> bool:
    """Whether the rank that describes the shard writes it."""
    replica = shard.replica_id
    return not any(replica) if isinstance(replica, tuple) else replica == 0


@pytest.mark.parametrize('optimizer', [PLAIN, SHARDED], ids=["plain", "distributed"])
@pytest.mark.parametrize('name', GRIDS)
def test_every_shard_has_one_writer(
    rank_pool: Pools, name: str, optimizer: tuple[str, ...]
) -> None:
    """Over all ranks each tensor is covered once and each object written once, no rank twice."""
    grids = GRIDS[name]
    arguments = (*grids.arguments(), *optimizer)
    (ranks,) = rank_pool(1).run(saved_by_each_rank, arguments, grids.ranks)
    assert len(ranks) == grids.ranks
    for shards_of_ranks in zip(*ranks, strict=True):
        writers: Counter[tuple[Any, ...]] = Counter()
        for shards in shards_of_ranks:
            assert all(len(s.replica_id) == 3 for s in shards if isinstance(s.replica_id, tuple))
            writers.update({place(shard): 0 for shard in shards})
            writers.update(place(shard) for shard in shards if is_main(shard))
        assert set(writers.values()) == {1}, [key for key, n in writers.items() if n != 1]
        keys = {key for key, *_ in writers}
        for part in ("language_model.", "optimizer", "rng_state", "rerun_state_machine"):
            assert any(part in key for key in keys), part


def refusal_of_two_writers(built: Built, folder: str) -> str:
    """What a save says where all ranks of a module claim to write its parameter groups."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.models.mimo import optimizer
    from megatron.training import checkpointing

    built.args.save = folder
    parts = ([built.model], built.optimizer, built.scheduler, 0)
    with (
        mock.patch.object(optimizer, '_get_replica_id', return_value=(0, 0, 0)),
        pytest.raises(CheckpointingException) as refusal,
    ):
        checkpointing.save_checkpoint(1, *parts, **built.checkpoint_groups())
    return str(refusal.value)


@pytest.mark.parametrize(
    'modules',
    [
        ("language:pp=2",),
        ("vision", "language:pp=2"),
        ("vision:dp=2", "language"),
        ("vision:tp=2,colocated", "language:dp=2"),
    ],
)
def test_two_writers_are_refused(
    rank_pool: Pools, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    """A save checks who writes what in every layout, and all ranks refuse with the same words."""
    ranks = 3 if len(modules) == 2 and "colocated" not in modules[0] else 2
    arguments = Grids(ranks, modules).arguments()
    answers = rank_pool(ranks).run(with_built, refusal_of_two_writers, arguments, str(tmp_path))
    assert len(set(answers)) == 1
    assert "Duplicate ShardedObject keys" in answers[0]
    assert "param_groups" in answers[0]
