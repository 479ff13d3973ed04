"""Greedy decoding of written answers with the schedule that trains, for any layout.

Every decoding step is one forward-only pass of the stock pipeline schedule over all prompts, the
whole sequence again each time (no key-value cache: held-out sets are small and answers short). All
ranks walk in step, those that host an encoder only included, and all stop together.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from examples.mimo.data.lanes import collate, rank_lanes
from examples.mimo.training.hetero.layout import LANGUAGE
from examples.mimo.training.hetero.step import ForwardStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.process_groups_config import ProcessGroupCollection

    from examples.mimo.data.lanes import Lane
    from examples.mimo.training.hetero.model import HeteroMimoModel
    from examples.mimo.training.hetero.runtime import HeteroRuntime
    from examples.mimo.training.hetero.step import Batch


class PromptDataset(Protocol):
    """Prompts by index, with the inputs of the encoders that belong to them."""

    def __len__(self) -> int:
        """Return the number of prompts."""

    def prompt(self, index: int) -> torch.Tensor:
        """Return the tokens in front of the answer, placeholders included, ``[length]``."""

    def modality(self, name: str, index: int, epoch: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the inputs of a module's encoders; read for epoch 0."""


@dataclass(frozen=True, kw_only=True)
class GreedyConfig:
    """How to decode.

    Attributes:
        micro_batch_size: prompts per language replica and microbatch.
        sequence: length of the token sequences, prompt and answer together.
        vocabulary: number of real tokens; the padding of the embedding table is never written.
        end: token that ends an answer.
        new_tokens: longest answer, its end included.
        dtype: of floating-point encoder inputs.
    """

    micro_batch_size: int
    sequence: int
    vocabulary: int
    end: int
    new_tokens: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("micro_batch_size", "sequence", "vocabulary", "new_tokens"):
            if getattr(self, name) < 1:
                msg = f"{name} is {getattr(self, name)}; greedy decoding needs at least 1."
                raise ValueError(msg)


class GreedyDecoder:
    """Writes the most likely answer to every prompt of a dataset."""

    def __init__(
        self, runtime: HeteroRuntime, dataset: PromptDataset, config: GreedyConfig
    ) -> None:
        """Find out which prompts this rank sees. Called on every rank; not collective.

        Raises:
            ValueError: the language module splits sequences (``cp`` above 1).
            LayoutError: the prompts of a microbatch do not split over a module's replicas.
        """
        if runtime.layout.language.cp > 1:
            msg = (
                f"--module {LANGUAGE}:cp={runtime.layout.language.cp}: answers cannot be decoded "
                "with context parallelism, which leaves no rank with a whole sequence."
            )
            raise ValueError(msg)
        self._runtime = runtime
        self._dataset = dataset
        self._config = config
        self._lanes = rank_lanes(runtime.layout, runtime.topology.rank, config.micro_batch_size)
        self._step_size = config.micro_batch_size * runtime.layout.language.dp
        self._steps = -(-len(dataset) // self._step_size)
        self._move = ForwardStep(runtime.device, config.dtype).move

    def __call__(self, model: Sequence[HeteroMimoModel]) -> torch.Tensor | None:
        """Decode all prompts with a model in evaluation mode.

        Collective over the world: every rank calls it once. Neither random state nor the model's
        configuration is different afterwards.

        Returns:
            Written tokens in the dataset's order, ``[prompts, new_tokens]``, the end token behind
            an answer's end. The same on every rank of the language module, ``None`` on others.
        """
        rows = _Rows(self._prompts(), self._config, self._runtime.device)
        inputs = [self._modality_inputs(step) for step in range(self._steps)]
        language = self._runtime.topology.collections.get(LANGUAGE)
        with torch.no_grad(), _without_timers(get_model_config(model[0])):
            for _ in range(self._config.new_tokens):
                best = self._forward(model, rows, inputs)
                if language is not None:
                    rows.append(self._next_tokens(best, language))
                if self._all_finished(rows, speaks=language is not None):
                    break
        return None if language is None else self._gather(rows.written(), language)

    def _sample(self, step: int, offset: int) -> int:
        """Index of a prompt; a last microbatch that is not full starts again from the first."""
        return (step * self._step_size + offset) % len(self._dataset)

    def _samples(self, lane: Lane, step: int) -> list[int]:
        return [self._sample(step, offset) for offset in lane.offsets]

    def _prompts(self) -> list[torch.Tensor]:
        lane = next(lane for lane in self._lanes if lane.speaks)
        return [
            self._dataset.prompt(index)
            for step in range(self._steps)
            for index in self._samples(lane, step)
        ]

    def _modality_inputs(self, step: int) -> Batch:
        """Inputs of this rank's encoders for one microbatch, on the device."""
        inputs = {
            lane.module: collate(
                [
                    self._dataset.modality(lane.module, index, 0)
                    for index in self._samples(lane, step)
                ]
            )
            for lane in self._lanes
            if lane.module != LANGUAGE
        }
        return self._move({"modality_inputs": inputs})

    def _forward(
        self, model: Sequence[HeteroMimoModel], rows: _Rows, inputs: Sequence[Batch]
    ) -> torch.Tensor | None:
        """One pass over all prompts: each row's best score and token of this rank's vocabulary.

        Collective over the world. Returns ``[rows, 2]`` on the last language stage, else ``None``.
        """
        forward_backward = get_forward_backward_func(
            schedule_pg_collection=self._runtime.pg_collection
        )
        best = forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=rows.microbatches(inputs),
            model=list(model),
            num_microbatches=self._steps,
            seq_length=self._config.sequence,
            micro_batch_size=self._config.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
            pg_collection=self._runtime.pg_collection,
            p2p_communicator=self._runtime.communicator,
        )
        return torch.cat(best) if best else None

    def _forward_step(
        self, data_iterator: Iterator[tuple[Batch, torch.Tensor]], model: HeteroMimoModel
    ) -> tuple[Any, Callable[..., torch.Tensor]]:
        """Take one microbatch through this rank's part of the model, as the schedule asks."""
        batch, last = next(data_iterator)
        output, _ = model(**batch)

        def choose(logits: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
            assert non_loss_data, "decoding has no loss"
            return self._best_local(logits[torch.arange(len(last), device=last.device), last])

        return output, choose

    def _best_local(self, logits: torch.Tensor) -> torch.Tensor:
        """Highest score and its token among the tokens of this tensor rank, ``[rows, 2]``."""
        group = self._runtime.topology.collections[LANGUAGE].tp
        first = group.rank() * logits.size(-1)
        tokens = torch.arange(first, first + logits.size(-1), device=logits.device)
        scores = logits.double().masked_fill(tokens >= self._config.vocabulary, -torch.inf)
        score, place = scores.max(dim=-1)
        return torch.stack([score, tokens[place].double()], dim=-1)

    def _next_tokens(
        self, best: torch.Tensor | None, language: ProcessGroupCollection
    ) -> torch.Tensor:
        """Best token of the whole vocabulary for each row; of equal scores the lowest token.

        Collective over the language module's ``tp`` and ``pp`` groups: its tensor ranks compare
        notes on the last stage, which tells the other stages.
        """
        count = self._steps * (self._step_size // self._runtime.layout.language.dp)
        tokens = torch.empty(count, dtype=torch.long, device=self._runtime.device)
        if best is not None:
            shards = [torch.empty_like(best) for _ in range(language.tp.size())]
            dist.all_gather(shards, best.contiguous(), group=language.tp)
            stacked = torch.stack(shards)
            winner = stacked[..., 0].argmax(dim=0)  # the first of equals, so the lowest shard
            tokens = stacked[winner, torch.arange(count, device=winner.device), 1].long()
        if language.pp.size() > 1:
            last = dist.get_global_rank(language.pp, language.pp.size() - 1)
            dist.broadcast(tokens, src=last, group=language.pp)
        return tokens

    def _all_finished(self, rows: _Rows, *, speaks: bool) -> bool:
        """Whether every answer has ended. Collective over the world; ranks agree."""
        open_rows = torch.tensor([int(speaks and not rows.finished())], device=self._runtime.device)
        dist.all_reduce(open_rows)
        return not open_rows.item()

    def _gather(self, written: torch.Tensor, language: ProcessGroupCollection) -> torch.Tensor:
        """Put the answers of all language replicas into the dataset's order.

        Collective over the language module's ``dp`` group.
        """
        lanes = [torch.empty_like(written) for _ in range(language.dp.size())]
        dist.all_gather(lanes, written.contiguous(), group=language.dp)
        by_step = [lane.view(self._steps, -1, written.size(-1)) for lane in lanes]
        ordered = torch.cat(by_step, dim=1).flatten(0, 1)
        return ordered[: len(self._dataset)].cpu()


class _Rows:
    """Token sequences of this rank's prompts and how far each has come."""

    def __init__(
        self, prompts: Sequence[torch.Tensor], config: GreedyConfig, device: torch.device
    ) -> None:
        longest = max(len(prompt) for prompt in prompts)
        if longest + config.new_tokens - 1 > config.sequence:
            msg = (
                f"a prompt of {longest} tokens and an answer of {config.new_tokens} do not fit "
                f"into sequences of {config.sequence} tokens."
            )
            raise ValueError(msg)
        self._end = config.end
        self._start = torch.tensor([len(prompt) for prompt in prompts], device=device)
        # One place more than the model sees: an answer's last token is never an input.
        self._tokens = torch.full((len(prompts), config.sequence + 1), config.end, device=device)
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = prompt
        self._positions = torch.arange(config.sequence, device=device)
        self._new_tokens = config.new_tokens
        self._count = 0
        self._ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def microbatches(self, inputs: Sequence[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield the model's arguments and the place of each row's last token."""
        size = len(self._tokens) // len(inputs)
        last = self._start + self._count - 1
        for step, modality in enumerate(inputs):
            part = slice(step * size, (step + 1) * size)
            yield (
                {
                    "input_ids": self._tokens[part, :-1],
                    "position_ids": self._positions.expand(size, -1),
                    **modality,
                },
                last[part],
            )

    def append(self, tokens: torch.Tensor) -> None:
        """Write one more token to each row; a row that has ended gets the end token again."""
        tokens = torch.where(self._ended, self._end, tokens)
        rows = torch.arange(len(tokens), device=tokens.device)
        self._tokens[rows, self._start + self._count] = tokens
        self._ended |= tokens == self._end
        self._count += 1

    def finished(self) -> bool:
        """Whether every answer has ended."""
        return bool(self._ended.all())

    def written(self) -> torch.Tensor:
        """Return what was written behind the prompts, ``[rows, new_tokens]``."""
        places = self._start[:, None] + torch.arange(self._new_tokens, device=self._start.device)
        return self._tokens.gather(1, places)


@contextlib.contextmanager
def _without_timers(config: Any) -> Iterator[None]:  # noqa: ANN401 - a module's configuration
    """Keep decoding out of the training timers, as the stock loop does for its evaluation."""
    timers, config.timers = config.timers, None
    try:
        yield
    finally:
        config.timers = timers
