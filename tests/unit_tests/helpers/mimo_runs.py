"""Short MIMO training runs inside a test's ranks, and what came of them, exactly."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

COMMON = (
    *("--log-interval", "1000000"),
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "24", "--max-position-embeddings", "24", "--vocab-size", "128"),
    # Padding enters the softmax and is a multiple of this times TP: keep it equal for TP 1 and 2.
    *("--make-vocab-size-divisible-by", "32"),
    *("--vision-num-layers", "1", "--vision-hidden-size", "16", "--mock-samples", "16"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2"),
    *("--lr-decay-style", "cosine", "--seed", "7", "--no-create-attention-mask-in-dataloader"),
)
"""A model that takes milliseconds a step."""
DETERMINISTIC = ("--bf16", "--use-distributed-optimizer", "--deterministic-mode")
"""Arguments of a run on GPUs that is compared bit for bit, under `DETERMINISTIC_VARIABLES`."""
DETERMINISTIC_VARIABLES = {
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""What Megatron's deterministic mode asks of the environment."""
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@dataclass
class Run:
    """What one rank of a run has to tell; floats as hexadecimal text, so that equal means equal."""

    losses: list[str] = field(default_factory=list)
    """Loss sum of every training microbatch, on ranks that compute it."""
    evaluations: list[str] = field(default_factory=list)
    """The same of evaluation microbatches."""
    weights: dict[str, str] = field(default_factory=dict)
    """Digest of the final weights of each module on this rank."""
    optimizer: list[str] = field(default_factory=list)
    """Digest of the optimizer's state tensors, in order."""


def train_mimo(arguments: Sequence[str]) -> Run:
    """Run ``examples.mimo.train_hetero`` in this process. Collective over the ranks of the test."""
    from examples.mimo import train_hetero
    from examples.mimo.training.hetero import loop
    from examples.mimo.training.hetero.args import parse_hetero_arguments

    run = Run()
    argv = [*COMMON, *_device(), *arguments]

    def train(hooks: list[Callable[[Any], Any]]) -> None:
        config, stock = parse_hetero_arguments(argv)
        loop.train(config, train_hetero.prepare(config, stock), hooks)

    _record(run, argv, train)
    return run


def train_stock_gpt(arguments: Sequence[str]) -> Run:
    """Train Megatron's own GPT on the language lane's data. Collective over the ranks.

    Takes the arguments of :func:`train_mimo`, of which the language module's grid alone counts.
    """
    from examples.mimo import train_hetero
    from examples.mimo.data import get_data_provider
    from examples.mimo.data.lanes import LaneBatches, SampleOrder, rank_lanes
    from examples.mimo.training.hetero import step
    from examples.mimo.training.hetero.args import parse_hetero_arguments
    from megatron.core.enums import ModelType
    from megatron.training import cpu_device, global_vars, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    run = Run()
    argv = [*COMMON, *_device(), *arguments]

    def train(hooks: list[Callable[[Any], Any]]) -> None:
        config, stock = parse_hetero_arguments(argv)
        args = train_hetero.prepare(config, stock)
        model = gpt_config_from_args(args)
        model.post_wrap_hooks.extend(hooks)
        dataset = get_data_provider(config.data_provider).datasets(args).train
        del args.module_layout  # a stock run knows of no modules, nor does its checkpoint

        def batches(_: Any) -> tuple[Any, None, None]:
            order = SampleOrder(size=len(dataset), seed=args.seed, shuffle=True)
            lanes = rank_lanes(config.layout, args.rank, args.micro_batch_size)
            size = args.micro_batch_size * config.layout.language.dp
            consumed = args.consumed_train_samples  # 0, or what a loaded checkpoint says
            return LaneBatches(dataset, order, lanes, size, consumed), None, None

        def forward_step(iterator: Any, gpt: Any) -> Any:
            batch = place.move(next(iterator))
            output = gpt(batch['input_ids'], batch['position_ids'], None, labels=batch['labels'])
            return output, lambda losses: step.token_loss(batch['loss_mask'], losses)

        place = step.ForwardStep(cpu_device.device(), args.params_dtype)
        batches.is_distributed = True
        pretrain(
            pretrain_cfg_container_from_args(args, model),
            batches,
            ModelType.encoder_or_decoder,
            forward_step,
        )
        assert global_vars.get_args() is args

    _record(run, argv, train)
    return run


def _device() -> tuple[str, str]:
    """Choose the device that the test's ranks talk over."""
    import torch.distributed as dist

    return ("--device", "gpu" if dist.get_backend() == "nccl" else "cpu")


def _record(run: Run, argv: Sequence[str], train: Callable[[list[Callable]], None]) -> None:
    """Call ``train`` and write into ``run`` what its steps and its end look like."""
    from examples.mimo.training.hetero import step

    kept: list[Any] = []
    token_loss = step.token_loss

    def recorded_loss(mask: Any, losses: Any) -> Any:
        result = token_loss(mask, losses)
        records = run.losses if kept[0][0].training else run.evaluations
        records.append(float(result[0].detach()).hex())
        return result

    def keep(model: list[Any]) -> list[Any]:
        kept.append(model)
        return model

    with (
        mock.patch.object(step, 'token_loss', recorded_loss),
        mock.patch.object(sys, 'argv', ['train', *argv]),
        _keeping_optimizer(kept),
    ):
        try:
            train([keep])
        except SystemExit as end:  # the stock loop leaves so at --exit-interval
            if end.code:
                raise
    run.weights = {name: digest(module) for name, module in _modules(kept[0][0]).items()}
    run.optimizer = [digest_tensor(tensor) for tensor in optimizer_tensors(kept[1])]


def _keeping_optimizer(kept: list[Any]) -> Any:
    """Patch the stock loop so that the optimizer it builds is kept as well."""
    from megatron.training import training

    build = training.get_megatron_optimizer

    def building(*args: Any, **kwargs: Any) -> Any:
        kept.append(build(*args, **kwargs))
        return kept[-1]

    return mock.patch.object(training, 'get_megatron_optimizer', building)


def _modules(model: Any) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    bare = unwrap_model(model)
    return bare.modules_by_name() if hasattr(bare, 'modules_by_name') else {'language': model}


def optimizer_parts(optimizer: Any) -> Iterator[Any]:
    """Optimizers over one torch optimizer each of a MIMO, chained or plain one, in order."""
    if hasattr(optimizer, 'module_infos'):
        for _, info in sorted(optimizer.module_infos.items()):
            if info.optimizer is not None:
                yield from optimizer_parts(info.optimizer)
    elif hasattr(optimizer, 'chained_optimizers'):
        for part in optimizer.chained_optimizers:
            yield from optimizer_parts(part)
    else:
        yield optimizer


def optimizer_tensors(optimizer: Any) -> list[Any]:
    """Tensors of a MIMO, chained or plain optimizer's torch state, in a fixed order."""
    import torch

    return [
        value
        for part in optimizer_parts(optimizer)
        for parameters in part.optimizer.state.values()
        for _, value in sorted(parameters.items())
        if isinstance(value, torch.Tensor)
    ]


def digest(module: Any) -> str:
    """Digest of all tensors of a module's state, independent of wrappers."""
    from megatron.core.utils import unwrap_model

    state = unwrap_model(module).state_dict()
    text = "".join(
        f"{name}:{digest_tensor(value)}"
        for name, value in sorted(state.items())
        if hasattr(value, 'detach')
    )
    return hashlib.sha256(text.encode()).hexdigest()


def digest_tensor(tensor: Any) -> str:
    """Digest of a tensor's bits."""
    import torch

    data = tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.ndim else tensor.cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
