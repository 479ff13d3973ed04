"""A stock GPT trained by ``megatron.training.pretrain``: the script that the CPU tests run.

It knows nothing of the CPU. ``--losses FILE`` receives every micro-batch loss exactly, and
``--initial FOLDER`` the weights before the first step, one file per rank.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from tests.unit_tests.training.counting import Counting


def provide_datasets(
    samples: list[int], vp_stage: int | None = None
) -> tuple[Dataset, Dataset, Dataset]:
    """Return the training, validation and test sets; called on the ranks that load data.

    Every virtual pipeline stage (``vp_stage``) reads the same ones.
    """
    del vp_stage
    args = get_args()
    return tuple(
        Counting(max(number, 1), args.seq_length, args.vocab_size, seed)
        for seed, number in enumerate(samples)
    )


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """Run one micro-batch; ranks of a tensor-parallel group get the batch from their first."""
    args = get_args()
    batch = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(['tokens', 'labels'], batch, torch.int64)
    positions = torch.arange(args.seq_length, device='cuda').expand_as(batch['tokens'])
    losses = model(batch['tokens'], positions, None, labels=batch['labels'])

    def reduce_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the summed loss, the number of tokens and the report."""
        total = output.float().sum()
        tokens = torch.tensor(output.numel(), dtype=torch.int, device='cuda')
        record_loss(args, model.training, float(total) / output.numel())
        report = torch.stack([total.detach(), tokens.float()])
        return total, tokens, {'lm loss': report}

    return losses, reduce_loss


def record_loss(args: Namespace, training: bool, loss: float) -> None:
    """Append the loss of this micro-batch to the rank's file."""
    if args.losses:
        line = json.dumps({'training': training, 'loss': loss.hex()})
        with Path(f'{args.losses}.{args.rank}').open('a', encoding='utf-8') as file:
            file.write(line + '\n')


def save_initial(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Keep the weights of this rank's model as they are before the first step."""
    args = get_args()
    if args.initial:
        weights = {k: v for k, v in models[0].state_dict().items() if torch.is_tensor(v)}
        torch.save(weights, Path(args.initial) / f'rank{args.rank}.pt')
    return models


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's own options."""
    parser.add_argument('--losses', help='file for every loss; the rank is appended')
    parser.add_argument('--initial', help='folder for the initial weights')
    return parser


def main() -> None:
    """Train."""
    args = parse_and_validate_args(add_arguments, args_defaults={'tokenizer_type': 'NullTokenizer'})
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(save_initial)
    config = pretrain_cfg_container_from_args(args, model)
    provide_datasets.is_distributed = False
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == '__main__':
    main()
