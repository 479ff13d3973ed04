"""MIMO training runs whose every step is on record: streams, rates, scaler, samples."""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.unit_tests.helpers.mimo_runs import (
    Run,
    digest,
    digest_tensor,
    optimizer_parts,
    optimizer_tensors,
    train_mimo,
)


@dataclass(frozen=True)
class Step:
    """What a rank is about to train with; floats as hexadecimal text, so that equal means equal."""

    consumed: int
    """Samples that the run has trained on so far."""
    streams: dict[str, str]
    """Digest of the state of each random generator."""
    rates: tuple[tuple[str, str], ...]
    """Learning rate and weight decay of each parameter group."""
    scalers: tuple[str, ...]
    """Scale and state of each gradient scaler."""
    weights: tuple[str, ...]
    """Digest of each module's state."""
    moments: tuple[str, ...]
    """Digest of each tensor of the optimizer's state; empty before the first step of all."""
    main: tuple[str, ...]
    """Digest of each parameter that an optimizer steps: of full precision, or a shard of one."""


@dataclass
class Recorded:
    """A run and its steps on one rank."""

    run: Run = field(default_factory=Run)
    steps: list[Step] = field(default_factory=list)
    samples: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """(module, index, epoch) of the training samples that each step read."""
    log: list[str] = field(default_factory=list)
    """Lines that Megatron logs about iterations, without date and time taken."""


def train_recorded(arguments: Sequence[str], unlike: bool = False) -> Recorded:
    """Run :func:`train_mimo` and record each of its training steps. Collective over the ranks.

    Args:
        arguments: those of `train_mimo`.
        unlike: make the streams of all ranks differ before the first step of a new run; a rank
            then draws other numbers than its tensor-parallel peers, which harms nothing here.
    """
    from megatron.training import get_args, training

    recorded = Recorded()
    train_step = training.train_step

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        if unlike and get_args().iteration == 0 and not recorded.steps:
            draw_as_often_as_the_rank()
        _, _, model, optimizer, *_ = args
        recorded.steps.append(
            Step(
                consumed=get_args().consumed_train_samples,
                streams=streams(),
                rates=rates(optimizer),
                scalers=tuple(scalers(optimizer)),
                weights=tuple(digest(m) for m in model[0].modules_by_name().values()),
                moments=tuple(digest_tensor(t) for t in optimizer_tensors(optimizer)),
                main=tuple(digest_tensor(t) for t in main_parameters(optimizer)),
            )
        )
        recorded.samples.append([])
        return train_step(*args, **kwargs)

    def recorded_line(line: str) -> None:
        found = re.search(r"iteration +\d+/.*", line)
        if found is not None:
            recorded.log.append(re.sub(r"elapsed time [^|]*\| ", "", found.group()))

    with (
        mock.patch.object(training, 'train_step', recorded_step),
        mock.patch.object(training, 'print_rank_last', recorded_line),
        _recorded_samples(recorded),
    ):
        recorded.run = train_mimo(arguments)
    return recorded


def streams() -> dict[str, str]:
    """Digest of the state of every generator of this process, the device's tracker included."""
    import numpy as np
    import torch

    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - what checkpoints store
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((name, keys.tolist(), *rest)).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "device": torch.cuda.get_rng_state().cpu().numpy().tobytes(),
    }
    for key, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker {key}"] = state.cpu().numpy().tobytes()
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in states.items()}


def draw_as_often_as_the_rank() -> None:
    """Draw from each generator a number of times that only this rank does."""
    import numpy as np
    import torch

    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    for _ in range(torch.distributed.get_rank()):
        random.random()  # noqa: S311 - the generator under test
        np.random.random()  # noqa: NPY002 - what checkpoints store
        torch.cuda.set_rng_state(_after_a_draw(torch.cuda.get_rng_state()))
        torch.set_rng_state(_after_a_draw(torch.get_rng_state()))
        for name in tracker.get_states():
            with tracker.fork(name):
                torch.rand((), device="cuda")


def _after_a_draw(state: Any) -> Any:
    import torch

    generator = torch.Generator()
    generator.set_state(state)
    torch.rand((), generator=generator)
    return generator.get_state()


def rates(optimizer: Any) -> tuple[tuple[str, str], ...]:
    """Learning rate and weight decay of each parameter group of this rank."""
    return tuple(
        (float(group['lr']).hex(), float(group['weight_decay']).hex())
        for group in optimizer.param_groups
    )


def scalers(optimizer: Any) -> Iterator[str]:
    """State of each gradient scaler of a MIMO, chained or plain optimizer."""
    for part in optimizer_parts(optimizer):
        if getattr(part, 'grad_scaler', None) is not None:
            state = part.grad_scaler.state_dict()
            values = {k: v.item() if hasattr(v, 'item') else v for k, v in state.items()}
            yield f"{float(part.grad_scaler.scale.item()).hex()} {sorted(values.items())}"


def main_parameters(optimizer: Any) -> Iterator[Any]:
    """Parameters that the torch optimizers of a rank step, in order."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group['params']


@contextmanager
def _recorded_samples(recorded: Recorded) -> Iterator[None]:
    """Write down which training samples are read; they are those of the data set from 0 on."""
    from examples.mimo.data.mock import MockDataset

    def recording(read: Callable[..., Any], named: bool) -> Callable[..., Any]:
        def read_and_record(self: Any, *args: Any) -> Any:
            if self.first == 0 and recorded.samples:
                name = args[0] if named else "language"
                recorded.samples[-1].append((name, *args[-2:]))
            return read(self, *args)

        return read_and_record

    with (
        mock.patch.object(MockDataset, 'language', recording(MockDataset.language, named=False)),
        mock.patch.object(MockDataset, 'modality', recording(MockDataset.modality, named=True)),
    ):
        yield
