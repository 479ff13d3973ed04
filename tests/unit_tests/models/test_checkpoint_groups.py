"""Groups in the description of single modules: a module's own, the caller's, or a refusal."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import Built, global_groups_refused, with_built

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
MIXER = "megatron.core.ssm.mamba_mixer"


def language_groups() -> Any:
    """Groups of a language module at TP 2 that has the world to itself. Collective."""
    import torch.distributed as dist

    from examples.mimo.training.hetero.layout import Layout
    from examples.mimo.training.hetero.topology import build_topology

    layout = Layout.from_options(["language:tp=2"], dist.get_world_size())
    return build_topology(layout, "gloo").collections["language"]


def described_with(which: str) -> list[str]:
    """Refusals, or replica ids, of three descriptions that are given one group or both."""
    import torch

    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from megatron.core.utils import (
        make_sharded_tensor_for_checkpoint,
        make_tp_sharded_tensor_for_checkpoint,
    )

    groups = language_groups()
    given = {
        "tp_group": groups.tp if which != "dp_cp" else None,
        "dp_cp_group": groups.dp_cp if which != "tp" else None,
    }
    tensor = torch.zeros(2)
    answers = []
    for describe in (
        lambda: make_sharded_tensor_for_checkpoint(tensor, "one", **given),
        lambda: make_tp_sharded_tensor_for_checkpoint(tensor, "split", **given),
        lambda: make_sharded_tensors_for_checkpoint({"w": tensor}, "all.", **given)["all.w"],
    ):
        try:
            answers.append(str(describe().replica_id))
        except ValueError as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize(("which", "missing"), [("tp", "dp_cp"), ("dp_cp", "tp")])
def test_one_group_alone_is_refused(rank_pool: Pools, which: str, missing: str) -> None:
    """A missing group is not taken for one of a single rank, which every rank would be first of."""
    for answers in rank_pool(2).run(described_with, which):
        for answer, key in zip(answers, ("one", "split", "all."), strict=True):
            assert answer.startswith(f"checkpoint of '{key}': no {missing} group was given")


def test_both_groups_tell_the_ranks_apart(rank_pool: Pools) -> None:
    """With both groups given a replicated tensor has one writer and a split one two."""
    first, second = rank_pool(2).run(described_with, "both")
    assert first == ["(0, 0, 0)"] * 3
    assert second == ["(0, 1, 0)", "(0, 0, 0)", "(0, 1, 0)"]


def described_children() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Global shape and replica id of a modality's tensors, among them those of odd children."""
    import torch

    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = language_groups()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    split = ColumnParallelLinear(
        4, 6, config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=groups.tp
    )
    wrapper = MegatronModule(config)  # as the Hugging Face wrappers: no groups of its own
    wrapper.model = torch.nn.Linear(4, 4, bias=False)
    modality = VisionModalitySubmodules(
        encoders={"wrapped": wrapper},
        input_projections=[torch.nn.Sequential(split, torch.nn.Linear(6, 2, bias=False))],
        pg_collection=groups,
    )
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    before = dict(metadata)
    with global_groups_refused():
        state = modality.sharded_state_dict(metadata=metadata)
    assert metadata == before
    return {
        key: (tuple(value.global_shape), value.replica_id)
        for key, value in state.items()
        if hasattr(value, "global_shape") and not key.endswith("_extra_state")
    }


def test_children_without_groups_get_the_modality_s(rank_pool: Pools) -> None:
    """A wrapper that has no groups, and layers in a plain container, are told apart by TP rank."""
    for rank, state in enumerate(rank_pool(2).run(described_children)):
        assert state == {
            "encoders.wrapped.model.weight": ((4, 4), (0, rank, 0)),
            "input_projections.0.0.weight": ((6, 4), (0, 0, 0)),
            "input_projections.0.1.weight": ((2, 6), (0, rank, 0)),
        }


@contextmanager
def mamba_mixer_with_stubs() -> Iterator[Any]:
    """Import Megatron's Mamba mixer where its kernels are missing; only the forward needs them."""
    import torch

    class RMSNorm(torch.nn.Module):
        """Holds the weight that the kernel package's gated norm has."""

        def __init__(self, hidden_size: int, **kwargs: Any) -> None:
            """Take what the mixer passes."""
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=kwargs["dtype"]))

    stubs = {}
    for name, members in {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": len,
            "mamba_split_conv1d_scan_combined": len,
        },
    }.items():
        path = name.split(".")
        for depth in range(1, len(path)):
            stubs.setdefault(".".join(path[:depth]), ModuleType(".".join(path[:depth])))
        stubs[name] = ModuleType(name)
        vars(stubs[name]).update(members)
    with mock.patch.dict(sys.modules, stubs):
        sys.modules.pop(MIXER, None)
        yield importlib.import_module(MIXER)


def saved_mixer(folder: str) -> tuple[dict[str, Any], bool, str]:
    """Describe, save and load a Mamba mixer at TP 2; and describe its norm without a group."""
    import torch
    import torch.distributed as dist

    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = language_groups()
    model_parallel_cuda_manual_seed(5, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        mamba_state_dim=4,
        mamba_head_dim=8,
        mamba_num_groups=2,
        gradient_accumulation_fusion=False,
    )
    metadata = {"dp_cp_group": groups.dp_cp}
    with mamba_mixer_with_stubs() as mixers:
        parts = mixers.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
        mixer = mixers.MambaMixer(config, parts, d_model=32, layer_number=1, pg_collection=groups)
    torch.nn.init.uniform_(mixer.norm.weight)
    saved = {name: value.detach().clone() for name, value in mixer.named_parameters()}
    with global_groups_refused():
        described = mixer.sharded_state_dict("mixer.", metadata=metadata)
        dist_checkpointing.save(described, folder)
        for parameter in mixer.parameters():
            torch.nn.init.zeros_(parameter)
        template = mixer.sharded_state_dict("mixer.", metadata=metadata)
        loaded = dist_checkpointing.load(template, folder)
    same = [torch.equal(loaded[f"mixer.{name}"], value) for name, value in saved.items()]
    del mixer.norm.tp_group
    with pytest.raises(ValueError, match="tp_group") as refusal:
        mixer.norm.sharded_state_dict("norm.", metadata=metadata)
    dist.barrier()
    norm = described["mixer.norm.weight"]
    place = {"shape": norm.global_shape, "offset": norm.global_offset}
    return place, all(same), str(refusal.value)


def test_mamba_mixer_uses_its_own_group(rank_pool: Pools, tmp_path: Path) -> None:
    """A mixer and its norm are split over its own ranks; a norm without a group is refused."""
    for rank, (norm, same, refusal) in enumerate(rank_pool(2).run(saved_mixer, str(tmp_path))):
        assert norm == {"shape": (64,), "offset": (32 * rank,)}
        assert same
        assert refusal == "checkpoint of 'norm.weight': its tp_group is not set"


def counted_zeros(built: Built) -> int:
    """Zeros in the gradients of a model without any other."""
    built.model.zero_grad_buffer()
    built.optimizer.prepare_grads()
    return built.optimizer.count_zeros()


def test_experts_of_every_rank_are_counted(rank_pool: Pools) -> None:
    """Experts that are whole on each of two tensor ranks are no copies of one another."""
    experts = ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--swiglu")
    flags = ("--mock-text-only", "--sequence-parallel", "--log-num-zeros-in-grad")
    arguments = (*flags, *experts, "--module")
    split = rank_pool(2).run(with_built, counted_zeros, (*arguments, "language:tp=2,ep=2,etp=1"))
    whole = rank_pool(1).run(with_built, counted_zeros, (*arguments, "language"))
    assert split == whole * 2
