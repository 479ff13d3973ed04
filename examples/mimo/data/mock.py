"""Random tokens and images, for layouts and speed rather than for learning.

A sample is ``[image tokens][random tokens]``, with one image for each encoder of the layout; with
``--mock-text-only`` it is random tokens alone, as a language-model run would see them. Everything
follows from the sample's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from examples.mimo.data import DataSources
from examples.mimo.model_providers import clip_gpt
from examples.mimo.training.hetero.layout import LANGUAGE

if TYPE_CHECKING:
    import argparse

DEFAULT_ARGUMENTS: tuple[str, ...] = ()
_HELD_OUT = 1 << 28
"""Index offset of the held-out samples: above any training index, and with the streams below 32
bits, of which torch's generator takes no more of a seed."""
_STREAMS = 8
"""Distance between the seeds of two samples: the text has stream 1, images have those above."""


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
    """Tokens of one image; 0 for text alone."""
    encoders: tuple[str, ...]
    """Modules that see an image of their own each, in the order of their placeholders."""
    first: int = 0

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return self.size

    def language(self, index: int, epoch: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Random tokens behind the image placeholders; the loss counts predicted text only."""
        images = max(1, len(self.encoders))  # a language model alone sees the same sequence
        words = self.vocabulary - images
        text = torch.randint(
            words,
            (self.sequence - images * self.image_tokens + 1,),
            generator=self._generator(index, stream=1),
        )
        placeholders = torch.arange(self.vocabulary - 1, words - 1, -1)
        tokens = torch.cat([placeholders.repeat_interleave(self.image_tokens), text])
        labels = tokens[1:]
        return {
            "input_ids": tokens[:-1],
            "labels": labels,
            "loss_mask": (labels < words).float(),
            "position_ids": torch.arange(self.sequence),
        }

    def modality(
        self,
        name: str,
        index: int,
        epoch: int,  # noqa: ARG002 - no augmentation
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return an image of normal noise, ``[3, height, width]``."""
        shape = (3, self.image_size, self.image_size)
        stream = 2 + self.encoders.index(name)
        image = torch.randn(shape, generator=self._generator(index, stream))
        return {clip_gpt.ENCODER: {"x": image}}

    def _generator(self, index: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.first + index) * _STREAMS + stream)


def datasets(args: argparse.Namespace) -> DataSources:
    """Training and held-out noise of the sizes that the flags give."""

    def make(first: int) -> MockDataset:
        return MockDataset(
            size=args.mock_samples,
            sequence=args.seq_length,
            vocabulary=args.vocab_size,
            image_size=args.image_size,
            image_tokens=0 if args.mock_text_only else clip_gpt.image_tokens(args),
            encoders=tuple(name for name in args.module_layout if name != LANGUAGE),
            first=first,
        )

    return DataSources(train=make(0), valid=make(_HELD_OUT))
