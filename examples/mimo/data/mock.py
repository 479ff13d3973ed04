"""Random tokens and images, for layouts and speed rather than for learning.

A sample is ``[image tokens][random tokens]``; with ``--mock-text-only`` it is random tokens alone,
as a language-model run would see them. Everything follows from the sample's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from examples.mimo.data import DataSources
from examples.mimo.model_providers import clip_gpt

if TYPE_CHECKING:
    import argparse

DEFAULT_ARGUMENTS: tuple[str, ...] = ()
_HELD_OUT = 1 << 40
"""Index offset of the held-out samples, far above any training index."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of an epoch and the text-only switch."""
    group = parser.add_argument_group(title="mock data")
    group.add_argument("--mock-samples", type=int, default=1024, help="samples in an epoch")
    group.add_argument("--mock-text-only", action="store_true", help="no image tokens")


@dataclass(frozen=True, kw_only=True)
class MockDataset:
    """Samples made from their index."""

    size: int
    sequence: int
    vocabulary: int
    image_size: int
    image_tokens: int
    first: int = 0

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return self.size

    def language(self, index: int, epoch: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Random tokens behind the image placeholders; the loss counts predicted text only."""
        placeholder = self.vocabulary - 1
        text = torch.randint(
            self.vocabulary - 1,
            (self.sequence - self.image_tokens + 1,),
            generator=self._generator(index, stream=1),
        )
        image = torch.full((self.image_tokens,), placeholder)
        tokens = torch.cat([image, text])
        labels = tokens[1:]
        return {
            "input_ids": tokens[:-1],
            "labels": labels,
            "loss_mask": (labels != placeholder).float(),
            "position_ids": torch.arange(self.sequence),
        }

    def modality(
        self,
        name: str,  # noqa: ARG002 - one encoder
        index: int,
        epoch: int,  # noqa: ARG002 - no augmentation
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return an image of normal noise, ``[3, height, width]``."""
        shape = (3, self.image_size, self.image_size)
        image = torch.randn(shape, generator=self._generator(index, stream=2))
        return {clip_gpt.ENCODER: {"x": image}}

    def _generator(self, index: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.first + index) * 8 + stream)


def datasets(args: argparse.Namespace) -> DataSources:
    """Training and held-out noise of the sizes that the flags give."""

    def make(first: int) -> MockDataset:
        return MockDataset(
            size=args.mock_samples,
            sequence=args.seq_length,
            vocabulary=args.vocab_size,
            image_size=args.image_size,
            image_tokens=0 if args.mock_text_only else clip_gpt.image_tokens(args),
            first=first,
        )

    return DataSources(train=make(0), valid=make(_HELD_OUT))
