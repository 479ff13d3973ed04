"""Command line of a heterogeneous run: Megatron's own flags plus a few.

The stock flags (``--num-layers``, ``--hidden-size``, ``--save`` ...) keep their meaning and describe
the language model and the run. Parallel sizes come from ``--module`` alone: after parsing they are
written into the stock namespace as those of the language module, which is what the stock loop means
by them on every rank.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.mimo.training.hetero.freeze import check_frozen
from examples.mimo.training.hetero.layout import LANGUAGE, Layout, LayoutError, ModuleGrid
from examples.mimo.training.hetero.module_sources import ModuleSource, module_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stock flag of each parallel size, by key of the ``--module`` option.
_STOCK_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class HeteroConfig:
    """What the heterogeneous part of the command line says, checked."""

    layout: Layout
    device: str
    model_provider: str
    data_provider: str
    freeze: tuple[str, ...] = ()
    load_modules: tuple[ModuleSource, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        check_frozen(self.layout, self.freeze)


def add_hetero_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that stock Megatron lacks."""
    group = parser.add_argument_group(title="heterogeneous modules")
    group.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME:tp=..,pp=..,dp=..,cp=..,ep=..",
        help="rank grid of one module, repeatable; ranks follow in order unless offset=N is given; "
        "NAME:..,colocated shares the language ranks; encoders' dp defaults to 1, the language "
        "module's to the ranks that are left",
    )
    group.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="MODULE[.PART]",
        help="train without this part, repeatable (vision, vision.encoder, vision.projection, or a "
        "submodule path such as language.decoder.layers.0)",
    )
    group.add_argument(
        "--load-module",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="start a module with the weights of a checkpoint, repeatable: for the language module "
        "one that stock GPT wrote, for any module a MIMO checkpoint or what `python -m "
        "tools.checkpoint extract` made of it; any tensor and pipeline sizes; weights only; has no "
        "effect where --load finds a checkpoint",
    )
    group.add_argument(
        "--load-module-allow-missing",
        action="append",
        default=[],
        metavar="MODULE[.PART]",
        help="weights that --load-module need not find and that then start as without it, "
        "repeatable, with the paths of --freeze (vision.projection)",
    )
    group.add_argument(
        "--model-provider",
        default="clip_gpt",
        help="model family, one file in examples/mimo/model_providers",
    )
    group.add_argument(
        "--data-provider",
        default="mock",
        help="data source, one file in examples/mimo/data",
    )
    group.add_argument(
        "--device",
        default="auto",
        help="cpu runs Megatron on CPU with gloo, gpu (or torch's own name for it) on GPUs with "
        "NCCL; auto takes the GPU where one is present",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the rank table, the memory estimate and the checks, and start nothing",
    )
    group.add_argument(
        "--world-size",
        dest="planned_world_size",
        type=int,
        default=None,
        help="number of processes that --dry-run plans for (a run takes it from its launcher)",
    )
    return parser


def parse_hetero_arguments(argv: Sequence[str]) -> tuple[HeteroConfig, list[str]]:
    """Read the heterogeneous flags; return them checked, and what is left for Megatron.

    Needs neither torch nor Megatron, so that a wrong layout is answered at once.

    Raises:
        LayoutError: one sentence with the flag and the numbers.
    """
    parser = add_hetero_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    options, rest = parser.parse_known_args(list(argv))
    layout = Layout.from_options(options.module, _world_size(options))
    config = HeteroConfig(
        layout=layout,
        device=options.device,
        model_provider=options.model_provider,
        data_provider=options.data_provider,
        freeze=tuple(options.freeze),
        load_modules=module_sources(layout, options.load_module, options.load_module_allow_missing),
        dry_run=options.dry_run,
    )
    _refuse_stock_sizes(rest, config.layout.language)
    return config, rest


def apply_layout(args: argparse.Namespace, layout: Layout) -> None:
    """Write the layout into a freshly parsed stock namespace, before ``validate_args``.

    ``args.world_size`` becomes the language module's size meanwhile, since ``validate_args`` derives
    the data-parallel size from it; :func:`restore_world_size` puts the world back.
    """
    language = layout.language
    for key, name in _STOCK_SIZES.items():
        setattr(args, name, getattr(language, key))
    args.module_layout = layout.record()
    args.world_size = language.size
    args.calculate_per_token_loss = True
    if args.save and args.save_interval is None:
        args.save_interval = args.train_iters  # the stock loop divides by it at the end


def restore_world_size(args: argparse.Namespace, layout: Layout) -> None:
    """Undo what :func:`apply_layout` did to ``args.world_size``, after ``validate_args``."""
    args.world_size = layout.world_size


def check_batch(args: argparse.Namespace, layout: Layout) -> None:
    """Refuse batch sizes that do not split over the modules.

    Raises:
        LayoutError: naming the flag and the numbers.
    """
    per_step = args.micro_batch_size * layout.language.dp
    batch = args.global_batch_size
    if batch is not None and batch % per_step:
        msg = (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} times language dp {layout.language.dp} = {per_step}."
        )
        raise LayoutError(msg)
    for grid in layout.grids:
        layout.samples_per_lane(grid.name, args.micro_batch_size)
        if args.eval_micro_batch_size is not None:
            layout.samples_per_lane(
                grid.name, args.eval_micro_batch_size, "--eval-micro-batch-size"
            )


def _world_size(options: argparse.Namespace) -> int:
    launched = os.environ.get("WORLD_SIZE")
    planned = options.planned_world_size
    if options.dry_run:
        return planned if planned is not None else int(launched or 1)
    if planned is not None and planned != int(launched or 1):
        msg = (
            f"--world-size {planned} is for --dry-run; this run has {launched or 1} process(es) "
            "from its launcher."
        )
        raise LayoutError(msg)
    return int(launched or 1)


def _refuse_stock_sizes(argv: Sequence[str], language: ModuleGrid) -> None:
    """A stock parallel size on the command line must agree with the language module's grid."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _STOCK_SIZES.values():
        parser.add_argument("--" + name.replace("_", "-"), dest=name, type=int)
    given, _ = parser.parse_known_args(list(argv))
    for key, name in _STOCK_SIZES.items():
        value, ours = getattr(given, name), getattr(language, key)
        if value is not None and value != ours:
            flag = "--" + name.replace("_", "-")
            msg = (
                f"{flag} {value} contradicts --module {LANGUAGE}:{key}={ours}; give the size at "
                "--module only."
            )
            raise LayoutError(msg)
