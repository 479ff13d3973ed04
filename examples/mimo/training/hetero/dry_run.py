# ruff: noqa: T201 - the table is this command's answer
"""``--dry-run``: what every rank would hold, without starting a process or allocating the model.

The model of each kind of rank is really built, by the code that a run uses, over torch's fake
process groups and fake tensors: shapes are exact, no memory is taken and nothing is computed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.data import get_data_provider
from examples.mimo.model_providers import get_model_provider
from examples.mimo.training.hetero.layout import LANGUAGE, Layout
from examples.mimo.training.hetero.model import HeteroMimoBuilder, HeteroMimoConfig
from examples.mimo.training.hetero.seeds import module_seed_offset, seed_module
from examples.mimo.training.hetero.topology import build_topology
from tools.checkpoint.tables import table_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from examples.mimo.training.hetero.args import HeteroConfig

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Share:
    """Parameters of one module on one rank."""

    module: str
    trained: int
    frozen: int

    def bytes(self, *, half: bool, optimizer_shards: int) -> float:
        """Bytes of weights, gradients and optimizer state; activations are not counted.

        In half precision a trained parameter takes 2 (weight) + 4 (gradient) + 12 (main copy and
        two moments) bytes, in single precision 4 + 4 + 8. The distributed optimizer splits the
        last part over ``optimizer_shards`` ranks. Source: the formula behind Megatron's
        ``theoretical_memory_usage`` for Adam.
        """
        weight, gradient, state = (2, 4, 12) if half else (4, 4, 8)
        per_trained = weight + gradient + state / optimizer_shards
        return self.trained * per_trained + self.frozen * weight


def print_plan(config: HeteroConfig, args: argparse.Namespace) -> None:
    """Print the rank table and what was checked. Runs in one process; returns if all is well."""
    layout = config.layout
    get_data_provider(config.data_provider).datasets(args)  # refuses flags that do not fit it
    args.perform_initialization = False  # shapes are wanted, not values
    shares = _measure(config, args)
    print(f"{layout.world_size} ranks, {'colocated' if layout.colocated else 'disjoint'} modules\n")
    for line in rank_table(layout, shares, args):
        print(line)
    print("\nmemory: weights, gradients and optimizer state; activations come on top")
    print("\nchecked:")
    for line in checks(layout, args):
        print(f"  ok  {line}")


def rank_table(
    layout: Layout, shares: dict[int, tuple[Share, ...]], args: argparse.Namespace
) -> list[str]:
    """Lines of the rank table, one per rank and module."""
    headers = (">rank", "module", ">tp", ">pp", ">dp", ">cp", ">ep", ">parameters", ">memory (MiB)")
    rows = []
    for rank in range(layout.world_size):
        for share in shares[rank]:
            grid = layout[share.module]
            where = grid.coordinates(rank)
            shards = grid.dp * grid.cp if args.use_distributed_optimizer else 1
            size = share.bytes(half=args.bf16 or args.fp16, optimizer_shards=shards)
            rows.append(
                (
                    str(rank),
                    share.module,
                    *(str(where[key]) for key in ("tp", "pp", "dp", "cp", "ep")),
                    f"{share.trained + share.frozen:,}",
                    f"{size / MIB:.1f}",
                )
            )
    return table_lines(headers, rows)


def checks(layout: Layout, args: argparse.Namespace) -> list[str]:
    """One line per rule that the layout passed, with its numbers."""
    language = layout.language
    lines = [
        f"every one of {layout.world_size} ranks hosts a module: "
        + ", ".join(f"{g.name} {g.ranks[0]}-{g.ranks[-1]}" for g in layout.grids)
    ]
    for grid in layout.encoders:
        kind = "fan-in" if grid.dp > language.dp else "fan-out"
        ratio = max(grid.dp, language.dp) // min(grid.dp, language.dp)
        flow = "one to one" if ratio == 1 else f"{kind} of {ratio}"
        lines.append(f"bridge {grid.name} dp {grid.dp} -> {LANGUAGE} dp {language.dp}: {flow}")
    samples = args.micro_batch_size * language.dp
    split = ", ".join(
        f"{g.name} {layout.samples_per_lane(g.name, args.micro_batch_size)}" for g in layout.grids
    )
    lines.append(f"a microbatch step of {samples} samples splits evenly, per replica: {split}")
    lines.append(
        f"global batch {args.global_batch_size} = {args.global_batch_size // samples} "
        f"microbatches of {samples}"
    )
    lines += [
        f"{g.name}: experts etp*ep*dp = {g.etp}*{g.ep}*{g.expert_dp} share tp*cp*dp = "
        f"{g.tp}*{g.cp}*{g.dp}"
        for g in layout.grids
        if g.ep > 1
    ]
    lines.append(
        f"{args.num_layers} layers over {language.pp} stage(s), {args.num_attention_heads} heads "
        f"over tp {language.tp}"
    )
    seeds = ", ".join(f"{g.name} +{module_seed_offset(layout, g.name)}" for g in layout.grids)
    lines.append(f"seed {args.seed}, offsets: {seeds}")
    return lines


def _measure(config: HeteroConfig, args: argparse.Namespace) -> dict[int, tuple[Share, ...]]:
    """Parameters per rank and module; each kind of rank is built once."""
    known: dict[tuple[object, ...], tuple[Share, ...]] = {}
    shares = {}
    for rank in range(config.layout.world_size):
        kind = tuple(
            (name, *(config.layout[name].coordinates(rank)[key] for key in ("tp", "pp", "ep")))
            for name in config.layout.modules_of(rank)
        )
        if kind not in known:
            known[kind] = _build(config, args, rank)
        shares[rank] = known[kind]
    return shares


def _build(config: HeteroConfig, args: argparse.Namespace, rank: int) -> tuple[Share, ...]:
    provider = get_model_provider(config.model_provider)
    with _fake_world(rank, config.layout.world_size):
        topology = build_topology(config.layout, "fake")
        seed_module(args.seed, 0, topology.collections[topology.primary])
        language = provider.language_config(args)
        groups = {name: topology.collections.get(name) for name in topology.grids}
        model_config = HeteroMimoConfig(
            topology=topology,
            language=language,
            encoder_specs=provider.encoder_specs(args, groups),
            special_token_ids=provider.special_token_ids(args, config.layout),
            seed=args.seed,
            frozen=config.freeze,
        )
        with FakeTensorMode():
            model = HeteroMimoBuilder(model_config).build_model()
        return tuple(_share(name, module) for name, module in model.modules_by_name().items())


def _share(name: str, module: torch.nn.Module) -> Share:
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.parameters())
    return Share(module=name, trained=trained, frozen=total - trained)


@contextlib.contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world that does not exist."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(world_size)  # HyperCommGrid asks the environment first
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
