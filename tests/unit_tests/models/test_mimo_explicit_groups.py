"""A MIMO model with process groups of its own: described, saved and loaded without global ones."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import Built, global_groups_refused, with_built
from tests.unit_tests.helpers.mimo_runs import digest, digest_tensor

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
DISJOINT = ("--module", "vision:dp=2", "--module", "language:tp=2")
TIED_PIPELINE = ("--module", "vision", "--module", "language:pp=2")
DISTRIBUTED = ("--use-distributed-optimizer",)
RESHARDABLE = ("--bf16", *DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")
CASES = {
    "disjoint": (4, DISJOINT),
    "disjoint, bf16": (4, (*DISJOINT, "--bf16")),
    "disjoint, distributed optimizer": (4, (*DISJOINT, *DISTRIBUTED)),
    "colocated, reshardable": (
        2,
        ("--module", "vision:tp=2,colocated", "--module", "language:tp=2", *RESHARDABLE),
    ),
    "tied embeddings": (3, TIED_PIPELINE),
    "tied embeddings, distributed optimizer": (3, (*TIED_PIPELINE, *DISTRIBUTED)),
    "untied, language only, reshardable": (
        4,
        (
            *("--module", "language:tp=2,pp=2", "--mock-text-only", *RESHARDABLE),
            "--untie-embeddings-and-output-weights",
        ),
    ),
    "experts, distributed optimizer": (
        3,
        (
            *("--module", "vision", "--module", "language:dp=2,ep=2", *DISTRIBUTED),
            *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
        ),
    ),
    "two encoders, fully parallel load": (
        4,
        (
            *("--module", "vision:dp=2", "--module", "right", "--module", "language", *DISTRIBUTED),
            *("--image-patch-size", "4", "--ckpt-fully-parallel-load"),
        ),
    ),
    "frozen encoder": (2, ("--module", "vision", "--module", "language", "--freeze", "vision")),
}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank saw of its model."""

    shards: dict[str, list[tuple[str, tuple[int, ...]]]]
    """Key with place, and replica id, of each shard of "model" and "optimizer"."""
    saved: dict[str, str]
    """Digests of weights and optimizer state as they were saved."""
    spoilt: dict[str, str]
    """The same after one more step."""
    loaded: dict[str, str]
    """The same after the load."""


def report(built: Built, folder: str) -> RankReport:
    """Describe, save, change and load a model, all with the global groups refused. Collective."""
    from megatron.core import parallel_state
    from megatron.training import checkpointing

    assert not parallel_state.model_parallel_is_initialized()
    take_a_step(built)
    shards = describe(built)
    saved = digests(built)
    built.args.save = built.args.load = folder
    parts = ([built.model], built.optimizer, built.scheduler)
    groups = built.checkpoint_groups()
    with global_groups_refused():
        checkpointing.save_checkpoint(1, *parts, 0, **groups)
    take_a_step(built)
    spoilt = digests(built)
    with global_groups_refused():
        iteration, _ = checkpointing.load_checkpoint(*parts, **groups)
    assert iteration == 1
    return RankReport(shards=shards, saved=saved, spoilt=spoilt, loaded=digests(built))


def take_a_step(built: Built) -> None:
    """Give every trained parameter a gradient and step, so that the optimizer has a state."""
    import torch

    for module in built.model.wrapped_modules().values():
        for parameter in module.parameters():
            if parameter.requires_grad:  # equal for equal shapes: copies of a parameter stay equal
                values = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.main_grad.copy_(torch.sin(values).view_as(parameter))
    built.scheduler.step(4)
    assert built.optimizer.step()[0]


def describe(built: Built) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """List this rank's shards of model and optimizer. Not collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    with global_groups_refused():
        state = built.sharded_state_dict()
    apply_factories(state)
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for part, content in state.items():
        shards[part] = []
        for value in nested_values(content):
            if isinstance(value, ShardedObject):
                place = value.unique_key
            elif isinstance(value, ShardedTensor):
                place = f"{value.key} {value.global_offset} {value.flattened_range}"
            else:
                continue
            replica = value.replica_id
            shards[part].append((place, (replica,) if isinstance(replica, int) else replica))
    return shards


def digests(built: Built) -> dict[str, str]:
    """Digests of each module's weights and of the optimizer's state, main parameters included."""
    import torch

    found = {name: digest(module) for name, module in built.model.modules_by_name().items()}
    for number, optimizer in enumerate(built.optimizer._active_optimizers):
        for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
            for place, (parameter, state) in enumerate(part.optimizer.state.items()):
                for name, value in {"parameter": parameter, **state}.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{number} {place} {name}"] = digest_tensor(value)
    return found


@pytest.fixture(scope='module', params=CASES)
def case(request: Any, rank_pool: Pools, tmp_path_factory: Any) -> tuple[str, list[RankReport]]:
    """Reports of all ranks of one of the cases."""
    world_size, arguments = CASES[request.param]
    folder = str(tmp_path_factory.mktemp('checkpoint'))
    return request.param, rank_pool(world_size).run(with_built, report, arguments, folder)


def test_every_shard_has_one_writer(case: tuple[str, list[RankReport]]) -> None:
    """Over all ranks each shard of model and optimizer has exactly one main replica."""
    _, reports = case
    for part in ("model", "optimizer"):
        writers: Counter[str] = Counter()
        for rank in reports:
            for key, replica in rank.shards[part]:
                writers[key] += not any(replica)
        assert set(writers.values()) == {1}, [key for key, n in writers.items() if n != 1]


def test_modules_have_keys_of_their_own(case: tuple[str, list[RankReport]]) -> None:
    """Keys name the module and not its wrappers, a frozen one has no optimizer state."""
    name, reports = case
    hosted = {"language"} if "language only" in name else {"language", "vision"}
    keys = {
        part: {key for r in reports for key, _ in r.shards[part]} for part in ("model", "optimizer")
    }
    marks = {"language": "language_model.", "vision": "modality_submodules.vision."}
    assert not [key for key in keys["model"] if "module." in key]  # how it is wrapped
    trained = hosted - ({"vision"} if name == "frozen encoder" else set())
    for module, mark in marks.items():
        assert any(key.startswith(mark) for key in keys["model"]) == (module in hosted)
        found = [key for key in keys["optimizer"] if f"mimo.{module}." in key]
        assert bool(found) == (module in trained)
        assert all(f"mimo.{other}." not in key for key in found for other in hosted - {module})


def test_load_brings_back_what_was_saved(case: tuple[str, list[RankReport]]) -> None:
    """Stock save and load restore every weight and every optimizer value without global groups."""
    name, reports = case
    for number, rank in enumerate(reports):
        assert rank.loaded == rank.saved
        is_frozen = name == "frozen encoder" and number == 0
        assert (rank.spoilt == rank.saved) == is_frozen
        assert (len(rank.saved) > 2) != is_frozen


def role_of(sizes: str) -> tuple[str, bool, bool]:
    """This rank's role in a model that is a language module alone."""
    import torch.distributed as dist

    from examples.mimo.training.hetero.layout import Layout
    from examples.mimo.training.hetero.topology import build_topology
    from megatron.core.models.mimo.config.role import RankRole

    layout = Layout.from_options([f"language:{sizes}"], dist.get_world_size())
    role = RankRole.build([], build_topology(layout, "gloo").grids)
    return role.mode.name, role.is_first_stage("language"), role.is_last_stage("language")


def test_language_alone_may_be_a_pipeline(rank_pool: Pools) -> None:
    """A language module alone has stages where its grid has them, and is whole where not."""
    assert rank_pool(3).run(role_of, "pp=3") == [
        ("NON_COLOCATED", True, False),
        ("NON_COLOCATED", False, False),
        ("NON_COLOCATED", False, True),
    ]
    assert rank_pool(2).run(role_of, "tp=2") == [("COLOCATED", True, True)] * 2


def saved_projection(folder: str) -> bool:
    """Save and load a plain torch projection of a modality. Collective over two ranks."""
    import torch
    import torch.distributed as dist

    from examples.mimo.training.hetero.layout import Layout
    from examples.mimo.training.hetero.topology import build_topology
    from megatron.core import dist_checkpointing
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

    layout = Layout.from_options(["language:tp=2"], 2)
    groups = build_topology(layout, "gloo").collections["language"]
    torch.manual_seed(5)
    projection = torch.nn.Linear(3, 4)
    modality = VisionModalitySubmodules(input_projections=[projection], pg_collection=groups)
    dist_checkpointing.save(modality.sharded_state_dict('vision.'), folder)
    weight = projection.weight.detach().clone()
    torch.nn.init.zeros_(projection.weight)
    loaded = dist_checkpointing.load(modality.sharded_state_dict('vision.'), folder)
    dist.barrier()
    return torch.equal(loaded['vision.input_projections.0.weight'], weight)


def test_plain_torch_projection(rank_pool: Pools, tmp_path: Path) -> None:
    """A plain torch child at TP 2 is written by one rank, as Megatron's check of a save demands."""
    assert rank_pool(2).run(saved_projection, str(tmp_path)) == [True, True]
