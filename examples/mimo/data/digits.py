"""Questions about real handwritten digits, answered in writing.

scikit-learn ships 1,797 scans of digits, 8 x 8 pixels in 17 shades of grey. Each image comes with
three questions, so a model that does not read the question answers one in three at best:

    [16 x <image>] which digit? seven<end>
    [16 x <image>] is it even?  no<end>
    [16 x <image>] above four?  yes<end>

The vocabulary is one character per token, and the loss counts the answer and its end only. The
held-out images (30 of each digit) are the same in every run and never trained on. What a training
sample looks like follows from its index and the epoch alone.
"""

from __future__ import annotations

import functools
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from examples.mimo.data import DataSources
from examples.mimo.model_providers import clip_gpt
from examples.mimo.training.hetero.layout import LANGUAGE, LayoutError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from numpy.typing import NDArray

    from examples.mimo.training.hetero.exact_match import ExactMatchCheck
    from examples.mimo.training.hetero.runtime import HeteroRuntime

PAD, END = 0, 1
CHARACTERS = " ?" + string.ascii_lowercase
_FIRST_CHARACTER = 2
IMAGE = _FIRST_CHARACTER + len(CHARACTERS)
"""The image placeholder, the last id of the vocabulary."""
VOCABULARY = IMAGE + 1

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGITS = len(WORDS)
_SIDE = 8
_WHITE = 16.0
_MEAN, _DEVIATION = 0.305, 0.376
"""Of all pixels of the training images, on a scale from 0 to 1."""
HELD_OUT_PER_DIGIT = 30
_SPLIT_SEED = 20_240_229
_AUGMENTATION_STREAM = 0xD1617
"""First word of the augmentation seed, so that no other use of a seed repeats its numbers."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One kind of question: its name in reports, its text, and the answer by digit."""

    kind: str
    text: str
    answer: Callable[[int], str]


def _yes_no(condition: Callable[[int], bool]) -> Callable[[int], str]:
    return lambda digit: "yes" if condition(digit) else "no"


QUESTIONS = (
    Question(kind="digit", text="which digit?", answer=WORDS.__getitem__),
    Question(kind="even", text="is it even?", answer=_yes_no(lambda digit: digit % 2 == 0)),
    Question(kind="above four", text="above four?", answer=_yes_no(lambda digit: digit > 4)),  # noqa: PLR2004
)
LONGEST_ANSWER = max(len(question.answer(d)) for question in QUESTIONS for d in range(_DIGITS))

_IMAGE_TOKENS = 16
_LONGEST_QUESTION = max(len(question.text) for question in QUESTIONS)
SEQUENCE = _IMAGE_TOKENS + _LONGEST_QUESTION + LONGEST_ANSWER
"""Longest input; it ends with the last character of an answer, which predicts the end."""

DEFAULT_ARGUMENTS = (
    *("--vocab-size", str(VOCABULARY), "--make-vocab-size-divisible-by", "8"),
    *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)),
    *("--image-size", str(_SIDE), "--image-patch-size", "2"),
)


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [_FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """Text of token ids up to the end token; an id that is no character becomes ``#``."""
    text = ""
    for token in ids:
        if token == END:
            break
        place = token - _FIRST_CHARACTER
        text += CHARACTERS[place] if 0 <= place < len(CHARACTERS) else "#"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where answers go, and the switch that leaves them out."""
    group = parser.add_argument_group(title="digits data")
    group.add_argument(
        "--answers-file",
        default=None,
        help="write the held-out answers of the latest evaluation to this file, as JSON",
    )
    group.add_argument(
        "--no-answer-check",
        action="store_true",
        help="evaluate the loss only; do not write out held-out answers",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Scans and what they show."""

    pixels: NDArray[np.float32]
    """``[images, 8, 8]`` from 0 (paper) to 1 (ink)."""
    digits: NDArray[np.int64]
    """``[images]``."""
    numbers: NDArray[np.int64]
    """Place of each image in scikit-learn's file."""


@functools.cache
def load_images() -> dict[str, Images]:
    """Read scikit-learn's digits; return those to train on and those held out, by name."""
    from sklearn.datasets import load_digits

    source = load_digits()
    held_out = held_out_numbers(source.target)
    numbers = np.arange(len(source.target))
    parts = {"train": np.setdiff1d(numbers, held_out), "held-out": held_out}
    pixels = (source.images / _WHITE).astype(np.float32)
    return {
        name: Images(pixels=pixels[part], digits=source.target[part], numbers=part)
        for name, part in parts.items()
    }


def held_out_numbers(digits: NDArray[np.int64], seed: int = _SPLIT_SEED) -> NDArray[np.int64]:
    """Choose the same number of images of each digit, always the same ones for a seed."""
    generator = np.random.default_rng(seed)
    chosen = [
        generator.permutation(np.flatnonzero(digits == digit))[:HELD_OUT_PER_DIGIT]
        for digit in range(_DIGITS)
    ]
    return np.sort(np.concatenate(chosen))


class DigitsDataset:
    """Every question about every image: sample ``i`` asks question ``i % 3`` about image ``i // 3``.

    Args of the constructor are the images, the length of a token sequence, and whether training's
    augmentation applies.
    """

    def __init__(self, images: Images, sequence: int, *, augment: bool) -> None:
        """Keep the images and prepare the token sequences, of which there are thirty."""
        self.images = images
        self._augment = augment
        self._sequence = sequence
        self._texts = [
            [_tokens(question, digit, sequence) for digit in range(_DIGITS)]
            for question in QUESTIONS
        ]

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return len(self.images.digits) * len(QUESTIONS)

    def question(self, index: int) -> Question:
        """Return what a sample asks."""
        return QUESTIONS[index % len(QUESTIONS)]

    def digit(self, index: int) -> int:
        """Return what the image of a sample shows."""
        return int(self.images.digits[index // len(QUESTIONS)])

    def kind(self, index: int) -> str:
        """Return the kind of question of a sample."""
        return self.question(index).kind

    def truth(self, index: int) -> str:
        """Return the right answer of a sample."""
        return self.question(index).answer(self.digit(index))

    def text(self, tokens: list[int]) -> str:
        """Return what written tokens say."""
        return decode(tokens)

    def prompt(self, index: int) -> torch.Tensor:
        """Return the tokens in front of the answer, ``[length]``."""
        return torch.tensor([IMAGE] * _IMAGE_TOKENS + encode(self.question(index).text))

    def language(self, index: int, epoch: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return tokens, labels, loss mask and positions, each ``[sequence]``."""
        return self._texts[index % len(QUESTIONS)][self.digit(index)]

    def modality(
        self,
        name: str,  # noqa: ARG002 - one encoder
        index: int,
        epoch: int,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the image, ``[3, 8, 8]``; in training moved and scaled anew each epoch."""
        pixels = self.images.pixels[index // len(QUESTIONS)]
        if self._augment:
            pixels = augmented(pixels, np.random.default_rng([_AUGMENTATION_STREAM, index, epoch]))
        image = torch.from_numpy((pixels - _MEAN) / _DEVIATION)
        return {clip_gpt.ENCODER: {"x": image.expand(3, -1, -1)}}


def _tokens(question: Question, digit: int, sequence: int) -> dict[str, torch.Tensor]:
    """Inputs and labels of a question about a digit; labels are the inputs one place on."""
    prompt = [IMAGE] * _IMAGE_TOKENS + encode(question.text)
    answer = [*encode(question.answer(digit)), END]
    tokens = torch.full((sequence + 1,), PAD)
    tokens[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    mask = torch.zeros(sequence)
    mask[len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1
    return {
        "input_ids": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": mask,
        "position_ids": torch.arange(sequence),
    }


def augmented(pixels: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.float32]:
    """Move an image by up to a pixel each way and change its contrast by up to a tenth."""
    down, right = generator.integers(-1, 2, size=2)
    moved = np.zeros_like(pixels)
    rows, columns = _overlap(down), _overlap(right)
    moved[rows[0], columns[0]] = pixels[rows[1], columns[1]]
    return moved * np.float32(generator.uniform(0.9, 1.1))


def _overlap(shift: int) -> tuple[slice, slice]:
    """Slices of one axis into which and from which a shift moves pixels."""
    to = slice(max(shift, 0), _SIDE + min(shift, 0))
    return to, slice(to.start - shift, to.stop - shift)


def datasets(args: argparse.Namespace) -> DataSources:
    """Training and held-out samples of the sequence length that the flags give.

    Raises:
        LayoutError: the flags describe other images, several encoders or too short a sequence.
    """
    _check(args)
    images = load_images()
    held_out = DigitsDataset(images["held-out"], args.seq_length, augment=False)
    return DataSources(
        train=DigitsDataset(images["train"], args.seq_length, augment=True),
        valid=held_out,
        answer_check=None if args.no_answer_check else functools.partial(_check_of, held_out, args),
    )


def _check_of(
    held_out: DigitsDataset, args: argparse.Namespace, runtime: HeteroRuntime
) -> ExactMatchCheck:
    """Exact match on all held-out samples."""
    from examples.mimo.training.hetero.exact_match import ExactMatchCheck
    from examples.mimo.training.hetero.generate import GreedyConfig

    config = GreedyConfig(
        micro_batch_size=args.eval_micro_batch_size,
        sequence=args.seq_length,
        vocabulary=args.vocab_size,
        end=END,
        new_tokens=LONGEST_ANSWER + 1,
        dtype=args.params_dtype,
    )
    answers = None if args.answers_file is None else Path(args.answers_file)
    return ExactMatchCheck(runtime, held_out, config, answers)


def _check(args: argparse.Namespace) -> None:
    encoders = [name for name in args.module_layout if name != LANGUAGE]
    if len(encoders) > 1:
        msg = (
            f"--module {', '.join(encoders)}: a sample of the digits has one image, for one module."
        )
        raise LayoutError(msg)
    if args.image_size != _SIDE or clip_gpt.image_tokens(args) != _IMAGE_TOKENS:
        msg = (
            f"--image-size {args.image_size} --image-patch-size {args.image_patch_size}: the "
            f"digits have {_SIDE} pixels a side and become {_IMAGE_TOKENS} patches of 2."
        )
        raise LayoutError(msg)
    if args.seq_length < SEQUENCE:
        msg = f"--seq-length {args.seq_length} is too short: the digits need {SEQUENCE}."
        raise LayoutError(msg)
    if args.vocab_size != VOCABULARY:
        msg = f"--vocab-size {args.vocab_size} must be {VOCABULARY}, one per character."
        raise LayoutError(msg)
