"""Random samples: one image and one placeholder for each encoder, in front of the text."""

from argparse import Namespace

import pytest
import torch

from examples.mimo.data.mock import MockDataset, datasets
from examples.mimo.model_providers.clip_gpt import ENCODER

pytestmark = pytest.mark.tier0


def samples(*encoders: str, first: int = 0) -> MockDataset:
    """Sequences of twelve tokens out of fifty, images of two tokens."""
    return MockDataset(
        size=8,
        sequence=12,
        vocabulary=50,
        image_size=4,
        image_tokens=2,
        encoders=encoders,
        first=first,
    )


def test_each_encoder_has_placeholder_and_image() -> None:
    """The placeholders of two encoders lead the text, and their images differ."""
    dataset = samples("left", "right")
    sample = dataset.language(3, 0)
    assert sample["input_ids"][:4].tolist() == [49, 49, 48, 48]
    assert (sample["input_ids"][4:] < 48).all()
    assert sample["loss_mask"].tolist() == [0.0] * 3 + [1.0] * 9
    left, right = (dataset.modality(name, 3, 0)[ENCODER]["x"] for name in ("left", "right"))
    assert left.shape == right.shape == (3, 4, 4)
    assert not torch.equal(left, right)


def test_language_alone_sees_the_same_text() -> None:
    """Without an encoder the sequence is that of a run with one."""
    alone, together = samples().language(5, 0), samples("vision").language(5, 0)
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[key], together[key]) for key in alone)


def test_sample_follows_from_its_index() -> None:
    """The same index gives the same sample in any epoch, another index another one."""
    dataset = samples("vision")
    text = dataset.language(1, 0)["input_ids"]
    assert torch.equal(text, dataset.language(1, 7)["input_ids"])
    assert not torch.equal(text, dataset.language(2, 0)["input_ids"])


def test_held_out_samples_are_others() -> None:
    """No held-out text is one of training's."""
    args = Namespace(mock_samples=4, mock_text_only=True, seq_length=12, vocab_size=50)
    vars(args).update(image_size=4, image_patch_size=2, module_layout={"language": {}})
    sources = datasets(args)
    texts = [
        tuple(source.language(index, 0)["input_ids"].tolist())
        for source in (sources.train, sources.valid)
        for index in range(4)
    ]
    assert len(set(texts)) == 8
