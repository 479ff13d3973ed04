"""The digits: what a sample is, that it follows from index and epoch, and who sees which image."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from examples.mimo.data import digits
from examples.mimo.model_providers import clip_gpt
from examples.mimo.training.hetero.layout import LayoutError

pytestmark = pytest.mark.tier0


@pytest.fixture(scope='module')
def train() -> digits.DigitsDataset:
    """Training samples."""
    return digits.DigitsDataset(digits.load_images()["train"], digits.SEQUENCE, augment=True)


@pytest.fixture(scope='module')
def held_out() -> digits.DigitsDataset:
    """Held-out samples."""
    return digits.DigitsDataset(digits.load_images()["held-out"], digits.SEQUENCE, augment=False)


def image(dataset: digits.DigitsDataset, index: int, epoch: int) -> torch.Tensor:
    """The pixels of a sample as the encoder gets them."""
    return dataset.modality("vision", index, epoch)[clip_gpt.ENCODER]["x"]


def test_images_are_those_of_scikit_learn() -> None:
    """Every image of scikit-learn is there once, with its own digit."""
    from sklearn.datasets import load_digits

    source = load_digits()
    parts = digits.load_images().values()
    numbers = np.concatenate([part.numbers for part in parts])
    assert sorted(numbers) == list(range(1797))
    for part in parts:
        np.testing.assert_array_equal(part.pixels * 16, source.images[part.numbers])
        np.testing.assert_array_equal(part.digits, source.target[part.numbers])


def test_no_held_out_image_is_trained_on() -> None:
    """The two parts share no image, not even a copy of one under another number."""
    images = digits.load_images()
    train, held_out = (
        {pixels.tobytes() for pixels in images[name].pixels} for name in ("train", "held-out")
    )
    assert len(held_out) == 300
    assert not train & held_out


def test_split_is_fixed_and_stratified() -> None:
    """Thirty images of each digit are held out, always the same ones."""
    truth = np.arange(1797) % 10
    first, again = digits.held_out_numbers(truth), digits.held_out_numbers(truth)
    np.testing.assert_array_equal(first, again)
    assert np.bincount(truth[first]).tolist() == [30] * 10
    assert digits.load_images()["held-out"].numbers[:5].tolist() == [1, 5, 12, 14, 15]


def test_text_survives_the_vocabulary() -> None:
    """Questions and answers come back from their tokens, which are all of the vocabulary."""
    for question in digits.QUESTIONS:
        for digit in range(10):
            for text in (question.text, question.answer(digit)):
                ids = digits.encode(text)
                assert digits.decode([*ids, digits.END, digits.PAD]) == text
                assert not {digits.PAD, digits.END, digits.IMAGE} & set(ids)
                assert max(ids) < digits.IMAGE == digits.VOCABULARY - 1


def test_what_is_no_character_shows() -> None:
    """A placeholder or padding in an answer cannot pass for a right one."""
    assert digits.decode([*digits.encode("no"), digits.IMAGE, digits.PAD, digits.END]) == "no##"
    assert digits.decode([digits.END]) == ""


def test_questions_have_the_answers_of_people() -> None:
    """Three kinds of question, spot-checked."""
    answers = {q.kind: [q.answer(digit) for digit in (0, 4, 5, 7)] for q in digits.QUESTIONS}
    assert answers == {
        "digit": ["zero", "four", "five", "seven"],
        "even": ["yes", "yes", "no", "no"],
        "above four": ["no", "no", "yes", "yes"],
    }


def test_the_image_alone_does_not_answer(held_out: digits.DigitsDataset) -> None:
    """One image has different answers, so the question has to be read."""
    assert len({held_out.truth(index) for index in range(3)}) > 1
    torch.testing.assert_close(image(held_out, 0, 0), image(held_out, 2, 0), rtol=0, atol=0)


@pytest.mark.parametrize('index', [0, 1, 2, 4489, 4490])
def test_sample_layout(train: digits.DigitsDataset, index: int) -> None:
    """Placeholders, question, answer, end; labels one place on; loss on answer and end only."""
    sample = train.language(index, epoch=3)
    prompt = train.prompt(index).tolist()
    text = digits.encode(train.truth(index))
    tokens = [*sample["input_ids"].tolist(), sample["labels"][-1].item()]
    assert prompt[:16] == [digits.IMAGE] * 16
    assert digits.decode(prompt[16:]) == train.question(index).text
    assert tokens[: len(prompt) + len(text) + 1] == [*prompt, *text, digits.END]
    assert set(tokens[len(prompt) + len(text) + 1 :]) <= {digits.PAD}
    assert sample["labels"].tolist() == tokens[1:]
    counted = sample["labels"][sample["loss_mask"].bool()].tolist()
    assert counted == [*text, digits.END]
    assert sample["position_ids"].tolist() == list(range(digits.SEQUENCE))


def test_longest_sample_fits_exactly(train: digits.DigitsDataset) -> None:
    """The default sequence has room for every answer and no place to spare."""
    used = [train.language(index, 0)["loss_mask"].nonzero().max() for index in range(300)]
    assert max(used) == digits.SEQUENCE - 1


def test_augmentation_follows_from_index_and_epoch(train: digits.DigitsDataset) -> None:
    """A sample is the same whenever it is asked for, and another one in the next epoch."""
    again = digits.DigitsDataset(digits.load_images()["train"], digits.SEQUENCE, augment=True)
    for index in (0, 17, 4490):
        assert torch.equal(image(train, index, 5), image(again, index, 5))
    assert any(not torch.equal(image(train, i, 0), image(train, i, 1)) for i in range(3))


def test_held_out_images_are_left_alone(held_out: digits.DigitsDataset) -> None:
    """Evaluation sees the scans as they are, standardized, in three equal channels."""
    pixels = image(held_out, 30, epoch=9)
    assert pixels.shape == (3, 8, 8)
    assert torch.equal(pixels[0], pixels[1])
    assert torch.equal(pixels[0], pixels[2])
    back = pixels[0].numpy() * digits._DEVIATION + digits._MEAN
    np.testing.assert_allclose(back, held_out.images.pixels[10], atol=1e-6)


def test_augmentation_moves_by_a_pixel_at_most() -> None:
    """One dot in the middle stays within a pixel, and all nine places occur."""
    pixels = np.zeros((8, 8), dtype=np.float32)
    pixels[4, 3] = 0.5
    places = set()
    for seed in range(200):
        moved = digits.augmented(pixels, np.random.default_rng(seed))
        ((row, column),) = np.argwhere(moved)
        assert moved.dtype == np.float32
        assert 0.45 <= moved[row, column] <= 0.55
        places.add((int(row) - 4, int(column) - 3))
    assert places == {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}


def test_standardization_constants_are_the_training_images() -> None:
    """Mean and deviation are those of the training pixels, of no held-out one."""
    pixels = digits.load_images()["train"].pixels
    assert pixels.mean() == pytest.approx(digits._MEAN, abs=2e-3)
    assert pixels.std() == pytest.approx(digits._DEVIATION, abs=2e-3)


def test_one_image_feeds_one_module() -> None:
    """A layout with two encoders is refused, since a sample of the digits has one image."""
    args = Namespace(module_layout={"left": {}, "right": {}, "language": {}})
    with pytest.raises(LayoutError, match=r"--module left, right: .* one image, for one module"):
        digits.datasets(args)
