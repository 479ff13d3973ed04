"""Share of held-out answers that are right to the letter, at every evaluation of the stock loop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from megatron.training import get_args, get_tensorboard_writer

from examples.mimo.training.hetero.generate import GreedyConfig, GreedyDecoder, PromptDataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from examples.mimo.training.hetero.model import HeteroMimoModel
    from examples.mimo.training.hetero.runtime import HeteroRuntime

ALL = "all"
"""Name of the share over all kinds of question."""


class AnsweredDataset(PromptDataset, Protocol):
    """Prompts whose right answers are known."""

    def kind(self, index: int) -> str:
        """Return the kind of question, a name for reports."""

    def truth(self, index: int) -> str:
        """Return the right answer."""

    def text(self, tokens: list[int]) -> str:
        """Return what written tokens say."""


class ExactMatchCheck:
    """The stock loop's ``non_loss_data_func``: decode the held-out prompts and compare.

    The last rank, which also logs the loss, prints one line, writes TensorBoard scalars and keeps
    the answers in a file.
    """

    def __init__(
        self,
        runtime: HeteroRuntime,
        dataset: AnsweredDataset,
        config: GreedyConfig,
        answers_file: Path | None = None,
    ) -> None:
        """Prepare the decoder. Called on every rank; not collective."""
        self._decoder = GreedyDecoder(runtime, dataset, config)
        self._dataset = dataset
        self._answers_file = answers_file

    def __call__(self, model: Sequence[HeteroMimoModel]) -> dict[str, float] | None:
        """Return the share of right answers by kind; collective over the world.

        ``None`` on ranks without the language module.
        """
        tokens = self._decoder(model)
        if tokens is None:
            return None
        answers = [self._dataset.text(row) for row in tokens.tolist()]
        shares = exact_match(self._dataset, answers)
        if dist.get_rank() == dist.get_world_size() - 1:
            self._report(answers, shares)
        return shares

    def _report(self, answers: Sequence[str], shares: Mapping[str, float]) -> None:
        args = get_args()
        # The loop's own counter is one behind while it evaluates; the samples are up to date.
        iteration = args.consumed_train_samples // args.global_batch_size
        print(log_line(iteration, shares), flush=True)  # noqa: T201 - a line of the stock log
        writer = get_tensorboard_writer()
        if writer is not None:
            for kind, share in shares.items():
                writer.add_scalar(f"exact match/{kind}", share, iteration)
        if self._answers_file is not None:
            _write_atomically(
                self._answers_file, {"iteration": iteration, "answers": list(answers)}
            )


def exact_match(dataset: AnsweredDataset, answers: Sequence[str]) -> dict[str, float]:
    """Share of answers equal to the truth, over all and by kind of question."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for index, answer in enumerate(answers):
        for kind in (ALL, dataset.kind(index)):
            asked[kind] += 1
            right[kind] += answer == dataset.truth(index)
    return {kind: right[kind] / count for kind, count in asked.items()}


def log_line(iteration: int, shares: Mapping[str, float]) -> str:
    """One line in the manner of the stock log."""
    parts = [f" exact match at iteration {iteration} |"]
    parts += [f"{kind}: {share:.6f} |" for kind, share in shares.items()]
    return " ".join(parts)


def _write_atomically(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
