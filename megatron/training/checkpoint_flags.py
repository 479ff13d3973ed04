"""Options of trusted checkpoints, and what ``--async-save`` stands for."""

import argparse

from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support
from megatron.training.utils import warn_rank_0


def add_trusted_checkpoint_arguments(group: argparse._ArgumentGroup) -> None:
    """Add our options to Megatron's group for checkpoints."""
    group.add_argument(
        '--load-newest-good',
        action='store_true',
        help='If the checkpoint to load, or the tracker, is damaged, incomplete or missing, go on '
        'from the newest good iteration in --load. Without it, that ends the run with a message '
        'that names the damaged file and the newest good iteration.',
    )
    group.add_argument(
        '--no-verify-checksums',
        action='store_true',
        help='Before a load compare the sizes of the files with the manifest, but not their '
        'checksums, which takes reading all of it once, shared between the ranks.',
    )


def settle_async_save(args: argparse.Namespace) -> None:
    """Make ``--async-save`` work as it is given; local, on every rank.

    It needs a persistent writer, and a strategy: Megatron's own where nvidia-resiliency-ext is not
    installed.
    """
    if not args.async_save or not args.use_dist_ckpt:
        return
    args.use_persistent_ckpt_worker = True
    if args.async_strategy == 'nvrx' and not has_nvrx_async_support():
        warn_rank_0(
            'nvidia-resiliency-ext is not installed: --async-save uses --async-strategy mcore.'
        )
        args.async_strategy = 'mcore'
