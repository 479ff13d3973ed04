"""What the CLIP and GPT model cannot be split into, and which providers there are."""

from argparse import ArgumentParser, Namespace

import pytest

from examples.mimo.data import get_data_provider
from examples.mimo.model_providers import clip_gpt, get_model_provider, provider_names
from examples.mimo.training.hetero.layout import Layout, LayoutError

pytestmark = pytest.mark.tier0


def model_args(**values: object) -> Namespace:
    """The family's own flags at their defaults, and the stock ones that it checks."""
    parser = ArgumentParser()
    clip_gpt.add_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(num_layers=6, num_attention_heads=8, vocab_size=256, transformer_impl="local")
    args.seq_length = 64
    vars(args).update(values)
    return args


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, ("language",)),
        (8, ("vision:tp=1,dp=2", "language:tp=2,pp=3")),
        (4, ("vision:tp=4,colocated", "language:tp=4")),
        (4, ("left:tp=2", "right", "language")),
    ],
)
def test_accepts(world_size: int, options: tuple[str, ...]) -> None:
    """Layouts that split every size evenly pass in silence."""
    clip_gpt.check(model_args(), Layout.from_options(options, world_size))


REFUSED: list[tuple[tuple[str, ...], int, dict[str, object], str]] = [
    (
        ("vision:pp=2", "language"),
        3,
        {},
        "--module vision:pp=2 must be 1: the tower is a single stage.",
    ),
    (
        ("vision:tp=3", "language"),
        4,
        {},
        "--vision-num-attention-heads 4 cannot be split evenly over --module vision:tp=3.",
    ),
    (
        ("vision", "language"),
        2,
        {"image_size": 9, "image_patch_size": 4},
        "--image-size 9 is not a multiple of --image-patch-size 4.",
    ),
    (
        ("language",),
        1,
        {"image_patch_size": 0},
        "--image-size 8 is not a multiple of --image-patch-size 0.",
    ),
    (
        ("vision", "language"),
        2,
        {"seq_length": 16},
        (
            "--seq-length 16 leaves no text behind the 16 tokens of an image (--image-size 8 "
            "--image-patch-size 2)."
        ),
    ),
    (
        ("left", "right", "language"),
        3,
        {"seq_length": 32},
        (
            "--seq-length 32 leaves no text behind the 16 tokens of each of 2 images (--image-size "
            "8 --image-patch-size 2)."
        ),
    ),
    (
        ("vision", "language:tp=3"),
        4,
        {},
        "--num-attention-heads 8 cannot be split evenly over --module language:tp=3.",
    ),
    (
        ("language:pp=4",),
        4,
        {},
        "--num-layers 6 cannot be split evenly over --module language:pp=4.",
    ),
    (
        ("language:cp=2",),
        2,
        {},
        (
            "--module language:cp=2 needs --transformer-impl transformer_engine: local attention "
            "has no context parallelism."
        ),
    ),
]


@pytest.mark.parametrize(("options", "world_size", "sizes", "sentence"), REFUSED)
def test_refuses(
    options: tuple[str, ...], world_size: int, sizes: dict[str, object], sentence: str
) -> None:
    """Sizes that cannot be split as asked are refused with the flags and the numbers."""
    layout = Layout.from_options(options, world_size)
    with pytest.raises(LayoutError) as caught:
        clip_gpt.check(model_args(**sizes), layout)
    assert str(caught.value) == sentence


def test_context_parallelism_with_transformer_engine() -> None:
    """Transformer Engine's attention takes a context-parallel language module."""
    layout = Layout.from_options(["language:cp=2"], 2)
    clip_gpt.check(model_args(transformer_impl="transformer_engine"), layout)


def test_image_tokens() -> None:
    """An image becomes one token per patch."""
    assert clip_gpt.image_tokens(model_args(image_size=8, image_patch_size=2)) == 16


def test_placeholders_are_the_last_tokens() -> None:
    """The last ids of the vocabulary stand for pieces of images, one id for each encoder."""
    args = model_args()
    with_images = Layout.from_options(["vision", "language"], 2)
    assert clip_gpt.special_token_ids(args, with_images) == {"vision": 255}
    two = Layout.from_options(["left", "right", "language"], 3)
    assert clip_gpt.special_token_ids(args, two) == {"left": 255, "right": 254}
    assert clip_gpt.special_token_ids(args, Layout.from_options(["language"], 1)) == {}


def test_providers_by_name() -> None:
    """Families and data sources are found by name, and an unknown one names those there are."""
    assert get_model_provider("clip_gpt") is clip_gpt
    assert "clip_gpt" in provider_names()
    with pytest.raises(LayoutError, match=r"--model-provider clap: no such family; .*clip_gpt"):
        get_model_provider("clap")
    assert get_data_provider("mock").DEFAULT_ARGUMENTS == ()
    with pytest.raises(LayoutError, match=r"--data-provider lock: no such source; .*mock"):
        get_data_provider("lock")


@pytest.mark.parametrize("name", ["_submodules", "__init__", ""])
def test_helpers_are_no_providers(name: str) -> None:
    """A file that only helps the families cannot be chosen."""
    with pytest.raises(LayoutError, match="no such family"):
        get_model_provider(name)
