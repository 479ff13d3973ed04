"""Checkpoint flags of a heterogeneous run: the one that stock lacks, and those that do nothing.

Everything else about checkpoints is stock ``megatron.training.checkpointing``, which this repository
patches where modules with grids of their own need it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the checkpoint flag that stock Megatron lacks."""
    group = parser.add_argument_group(title="checkpoints of modules")
    group.add_argument(
        "--no-load-scheduler",
        action="store_true",
        help="load the optimizer, but start the schedule of learning rate and weight decay anew",
    )
    return parser


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of a command line and the reasons why it may do nothing.

    Attributes:
        name: as it is written.
        given: whether it is on the command line.
        idle: pairs of a condition and what to say if it holds; the first one that holds counts.
    """

    name: str
    given: bool
    idle: tuple[tuple[bool, str], ...]

    def sentence(self) -> str | None:
        """Say why the flag has no effect, or nothing if it has one or is not given."""
        reasons = (reason for holds, reason in self.idle if holds)
        reason = next(reasons, None) if self.given else None
        return None if reason is None else f"{self.name} has no effect {reason}."


def flags_without_effect(args: argparse.Namespace) -> list[str]:
    """One sentence for each checkpoint flag that does nothing beside the others.

    Args:
        args: the parsed stock namespace, before ``validate_args`` sets flags of its own.
    """
    sentences = (flag.sentence() for flag in (*_saving(args), *_loading(args), *_seeding(args)))
    return [sentence for sentence in sentences if sentence is not None]


def warn_of_flags_without_effect(args: argparse.Namespace) -> None:
    """Print :func:`flags_without_effect` on rank 0. Called on every rank; not collective."""
    if os.environ.get("RANK", "0") == "0":
        for sentence in flags_without_effect(args):
            print(f"warning: {sentence}", file=sys.stderr)  # noqa: T201 - a line for the user


def _saving(args: argparse.Namespace) -> Iterator[Flag]:
    """Flags about what is saved and when."""
    nothing_saved = (not args.save, "without --save")
    no_optimizer = (bool(args.no_save_optim), "with --no-save-optim")
    plain = (not args.use_distributed_optimizer, "without --use-distributed-optimizer")
    for name, given, *more in (
        ("--save-interval", args.save_interval is not None),
        ("--save-retain-interval", args.save_retain_interval is not None),
        ("--no-save-optim", args.no_save_optim),
        ("--no-save-rng", args.no_save_rng),
        (
            "--dist-ckpt-optim-fully-reshardable",
            args.dist_ckpt_optim_fully_reshardable,
            plain,
            no_optimizer,
        ),
    ):
        yield Flag(name=name, given=bool(given), idle=(nothing_saved, *more))


def _loading(args: argparse.Namespace) -> Iterator[Flag]:
    """Flags about what is loaded, from the strongest to those that others make idle."""
    nothing_loaded = (not (args.load or args.pretrained_checkpoint), "without --load")
    finetune = (bool(args.finetune), "with --finetune, which loads the model alone")
    no_optimizer = (
        bool(args.no_load_optim),
        "with --no-load-optim, which loads no schedule either",
    )
    fresh = (args.no_load_scheduler, "with --no-load-scheduler, which starts a schedule anew")
    for name, given, *more in (
        ("--finetune", args.finetune),
        ("--override-ckpt-iteration", args.override_ckpt_iteration is not None),
        ("--no-load-optim", args.no_load_optim, finetune),
        ("--no-load-rng", args.no_load_rng, finetune),
        ("--no-load-scheduler", args.no_load_scheduler, finetune, no_optimizer),
        (
            "--override-opt_param-scheduler",
            args.override_opt_param_scheduler,
            finetune,
            no_optimizer,
            fresh,
        ),
        (
            "--use-checkpoint-opt_param-scheduler",
            args.use_checkpoint_opt_param_scheduler,
            finetune,
            no_optimizer,
            fresh,
        ),
    ):
        yield Flag(name=name, given=bool(given), idle=(nothing_loaded, *more))


def _seeding(args: argparse.Namespace) -> Iterator[Flag]:
    """Stock's seed flag, which a run of modules does not follow."""
    reason = "on the seeds of modules: data-parallel ranks start alike"
    yield Flag(
        name="--data-parallel-random-init",
        given=bool(args.data_parallel_random_init),
        idle=((True, reason),),
    )
