"""What a finished run leaves for people: two pictures and a file of results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

from matplotlib import pyplot as plt

from examples.mimo.data.digits import QUESTIONS, SEQUENCE, DigitsDataset, load_images

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from examples.mimo.digits.log_lines import History

_INK, _FAINT, _RIGHT, _WRONG = "#222222", "#8a8a8a", "#1b6e3c", "#c2261c"
_TRAINING, _HELD_OUT = "#9db4cf", "#c2561c"
_KINDS = ("#1f4e8c", "#5b8f3a", "#8c5aa8")
_COLUMNS, _ROWS = 4, 5
_DOTS = 130


@dataclass(frozen=True, kw_only=True)
class Card:
    """One held-out image and what was written about it."""

    number: int
    """Place of the image in scikit-learn's file."""
    pixels: NDArray[Any]
    lines: tuple[tuple[str, str, str], ...]
    """Question, written answer and truth."""

    @property
    def right(self) -> bool:
        """Whether all answers are right."""
        return all(written == truth for _, written, truth in self.lines)


def held_out_dataset() -> DigitsDataset:
    """The held-out samples as the run's evaluation sees them."""
    return DigitsDataset(load_images()["held-out"], SEQUENCE, augment=False)


def read_answers(path: Path, iteration: int) -> list[str]:
    """Read the answers of the evaluation at ``iteration``.

    Raises:
        ValueError: the file is of another evaluation.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["iteration"] != iteration:
        msg = f"{path} holds the answers of iteration {content['iteration']}, not of {iteration}."
        raise ValueError(msg)
    return content["answers"]


def make_cards(dataset: DigitsDataset, answers: list[str]) -> list[Card]:
    """One card per image, in the dataset's order."""
    if len(answers) != len(dataset):
        msg = f"there are {len(answers)} answers to {len(dataset)} questions."
        raise ValueError(msg)
    cards = []
    for first in range(0, len(dataset), len(QUESTIONS)):
        samples = range(first, first + len(QUESTIONS))
        image = first // len(QUESTIONS)
        cards.append(
            Card(
                number=int(dataset.images.numbers[image]),
                pixels=dataset.images.pixels[image],
                lines=tuple(
                    (dataset.question(sample).text, answers[sample], dataset.truth(sample))
                    for sample in samples
                ),
            )
        )
    return cards


def choose_cards(cards: list[Card], digits: NDArray[Any]) -> list[Card]:
    """One image of each digit, then images with a wrong answer, then more of each digit."""
    first_of_each = [next(i for i, d in enumerate(digits) if d == digit) for digit in range(10)]
    wrong = [place for place, card in enumerate(cards) if not card.right]
    order = dict.fromkeys([*first_of_each, *wrong, *range(len(cards))])
    return [cards[place] for place in list(order)[: _COLUMNS * _ROWS]]


def draw_examples(path: Path, dataset: DigitsDataset, answers: list[str]) -> None:
    """Draw a table of images with questions and answers; wrong answers are red."""
    cards = make_cards(dataset, answers)
    wrong = sum(not card.right for card in cards)
    figure, axes = plt.subplots(
        _ROWS, 2 * _COLUMNS, figsize=(13, 8.6), width_ratios=[1, 1.6] * _COLUMNS
    )
    shown = choose_cards(cards, dataset.images.digits)
    for place, card in enumerate(shown):
        row, column = divmod(place, _COLUMNS)
        _draw_card(axes[row][2 * column], axes[row][2 * column + 1], card)
    figure.suptitle(
        f"Held-out images: the first of each digit, then images with a wrong answer "
        f"({wrong} of {len(cards)} have one)",
        fontsize=12,
        color=_INK,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98), w_pad=0.3)
    _save(figure, path)


def _draw_card(picture: Axes, text: Axes, card: Card) -> None:
    picture.imshow(card.pixels, cmap="gray_r", vmin=0, vmax=1)
    picture.set(xticks=[], yticks=[])
    picture.set_xlabel(f"image {card.number}", fontsize=7, color=_FAINT, labelpad=2)
    for spine in picture.spines.values():
        spine.set_color("#d0d0d0")
    text.axis("off")
    for line, (question, written, truth) in enumerate(card.lines):
        height = 0.96 - 0.35 * line
        text.text(0.03, height, question, fontsize=8.5, color=_FAINT, va="center")
        right = written == truth
        answer = written if right else f"{written or '(nothing)'}  (is {truth})"
        style = {"color": _RIGHT if right else _WRONG, "weight": "normal" if right else "bold"}
        text.text(0.07, height - 0.155, answer, fontsize=10, va="center", **style)


def draw_curves(path: Path, history: History) -> None:
    """Draw loss, exact match and learning rate over the iterations, with the restarts marked."""
    figure, (loss, match, rate) = plt.subplots(
        3, 1, figsize=(9, 8.6), sharex=True, height_ratios=[3, 2.2, 1.2]
    )
    _draw_loss(loss, history)
    _draw_match(match, history)
    steps = [history.steps[key] for key in sorted(history.steps)]
    rate.plot([s.iteration for s in steps], [s.learning_rate for s in steps], color=_INK)
    rate.set(ylabel="learning rate", xlabel="iteration", ylim=(0, None))
    rate.ticklabel_format(axis="y", scilimits=(-3, -3))
    for axes in (loss, match, rate):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for restart in sorted(set(history.resumed)):
            axes.axvline(restart, color=_FAINT, linestyle="--", linewidth=1)
    for restart in sorted(set(history.resumed)):
        loss.annotate(
            " stopped and resumed",
            (restart, 0.97),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color=_FAINT,
            va="top",
        )
    figure.align_ylabels()
    figure.tight_layout()
    _save(figure, path)


def _draw_loss(axes: Axes, history: History) -> None:
    # A launch logs its very first iteration alone; among averages it would look like a spike.
    alone = {restart + 1 for restart in history.resumed}
    steps = [history.steps[key] for key in sorted(history.steps) if key not in alone]
    axes.plot(
        [step.iteration for step in steps],
        [step.loss for step in steps],
        color=_TRAINING,
        label="training",
    )
    validations = [history.validations[key] for key in sorted(history.validations)]
    axes.plot(
        [validation.iteration for validation in validations],
        [validation.loss for validation in validations],
        "o-",
        color=_HELD_OUT,
        label="held-out images",
    )
    axes.set(yscale="log", ylabel="loss per answer token")
    axes.legend(frameon=False, loc="lower left")


def _draw_match(axes: Axes, history: History) -> None:
    matches = [history.matches[key] for key in sorted(history.matches)]
    iterations = [match.iteration for match in matches]
    kinds = [kind for kind in matches[-1].shares if kind != "all"] if matches else []
    for kind, color in zip(kinds, _KINDS, strict=False):
        shares = [match.shares[kind] for match in matches]
        axes.plot(iterations, shares, "o-", color=color, markersize=3, linewidth=1, label=kind)
    if matches:
        shares = [match.shares["all"] for match in matches]
        axes.plot(iterations, shares, "o-", color=_INK, linewidth=2, label="all questions")
        axes.annotate(
            f"{shares[-1]:.3f}",
            (iterations[-1], shares[-1]),
            textcoords="offset points",
            xytext=(-4, -14),
            ha="right",
            color=_INK,
        )
        axes.legend(frameon=False, loc="lower right", ncols=2)
    axes.set(ylabel="held-out exact match", ylim=(0, 1.02))


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DOTS)
    plt.close(figure)


def write_results(path: Path, history: History, details: dict[str, Any]) -> None:
    """Write what the run reached, for programs."""
    content = {
        **details,
        "exact_match": {key: history.matches[key].shares for key in sorted(history.matches)},
        "validation_loss": {
            key: history.validations[key].loss for key in sorted(history.validations)
        },
        "resumed_from": history.resumed,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
