r"""Train a multimodal model whose modules each live on their own rank grid.

    torchrun --nproc-per-node 4 -m examples.mimo.train_hetero \
        --module vision:tp=1,dp=2 --module language:tp=2 [stock Megatron flags]

Wiring only: command line, device, and the hand-over to Megatron's stock loop.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from typing import TYPE_CHECKING

from examples.mimo.data import get_data_provider
from examples.mimo.model_providers import get_model_provider
from examples.mimo.training.hetero.args import (
    HeteroConfig,
    add_hetero_arguments,
    apply_layout,
    check_batch,
    parse_hetero_arguments,
    restore_world_size,
)
from examples.mimo.training.hetero.checkpointing import (
    add_checkpoint_arguments,
    warn_of_flags_without_effect,
)
from examples.mimo.training.hetero.device import select_device
from examples.mimo.training.hetero.layout import LayoutError, SharedLayoutError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

USAGE_ERROR = 2
LOOP_ARGUMENTS = ("--dataloader-type", "external", "--eval-interval", "1000")
"""Stock flags of every run; the user's own come after them and win."""


def main() -> None:
    """Entry point of every process of a run, and of ``--dry-run``."""
    speaks = speaks_first = os.environ.get("RANK", "0") == "0"  # all ranks meet the same error
    try:
        config, stock_argv = parse_hetero_arguments(sys.argv[1:])
        args = prepare(config, stock_argv)
        if config.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--dry-run | head` ends quietly
            from examples.mimo.training.hetero.dry_run import (
                print_plan,
            )

            print_plan(config, args)
            return
        from examples.mimo.training.hetero.loop import train

        speaks = True  # from here on an error may be that of the ranks of one module
        train(config, args)
    except LayoutError as error:
        if speaks and (speaks_first or not isinstance(error, SharedLayoutError)):
            print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the user's answer
        sys.exit(USAGE_ERROR)


def prepare(config: HeteroConfig, stock_argv: list[str]) -> argparse.Namespace:
    """Switch the device on, then parse and validate the stock flags for this layout.

    Called on every rank; not collective.

    Raises:
        LayoutError: the layout does not fit the model or the batch sizes.
    """
    _quieten(everything=config.dry_run)
    # Megatron asks for it with tensor parallelism: kernels then start in the order of the host.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    provider = get_model_provider(config.model_provider)
    data = get_data_provider(config.data_provider)
    defaults = [*LOOP_ARGUMENTS, *provider.DEFAULT_ARGUMENTS, *data.DEFAULT_ARGUMENTS]
    device = "cpu" if config.dry_run else config.device
    argv = select_device(device, [*defaults, *stock_argv])

    from megatron.training import arguments, global_vars

    def extra_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        provider.add_arguments(parser)
        data.add_arguments(parser)
        return add_checkpoint_arguments(add_hetero_arguments(parser))

    sys.argv[1:] = argv
    with contextlib.redirect_stdout(io.StringIO() if config.dry_run else sys.stdout):
        args = arguments.parse_args(extra_arguments)
        warn_of_flags_without_effect(args)
        provider.check(args, config.layout)
        check_batch(args, config.layout)
        apply_layout(args, config.layout)
        _validate(arguments.validate_args, args)
        _validate(provider.language_config, args)
        restore_world_size(args, config.layout)
    if not config.dry_run:
        global_vars.set_global_variables(args)
    return args


def _validate(validate: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    """Run Megatron's own validation; what it refuses is the user's answer, not our defect.

    Many of its assertions say nothing but what they assert, so that is what the user gets to see.

    Raises:
        LayoutError: what Megatron says in one sentence.
    """
    try:
        validate(args)
    except (AssertionError, ValueError) as error:
        rule = (traceback.extract_tb(error.__traceback__)[-1].line or "").removeprefix("assert ")
        says = " ".join(str(error).split()) or f"this does not hold: {rule}"
        msg = f"Megatron refuses these flags: {says}"
        raise LayoutError(msg) from error


def _quieten(*, everything: bool) -> None:
    """Silence Megatron's warnings about optional packages and experimental classes.

    Args:
        everything: also its log, for a command whose answer is a table.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=".* is experimental and still under active")
    warnings.filterwarnings("ignore", message=".*not installed.*")
    if everything:
        logging.disable(logging.WARNING)


if __name__ == "__main__":
    main()
