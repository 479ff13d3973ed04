"""Freezing by dotted path: whole modules, their parts, and what is refused."""

import pytest
from torch import nn

from examples.mimo.training.hetero.freeze import check_frozen, freeze
from examples.mimo.training.hetero.layout import Layout, LayoutError

pytestmark = pytest.mark.tier0


def modules() -> dict[str, nn.Module]:
    """A vision module of two parts and a language module of two layers."""
    vision = nn.Module()
    vision.encoders = nn.ModuleDict({"clip": nn.Linear(2, 2)})
    vision.input_projections = nn.ModuleList([nn.Linear(2, 2)])
    language = nn.Module()
    language.decoder = nn.Module()
    language.decoder.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    language.embedding = nn.Embedding(3, 2)
    return {"vision": vision, "language": language}


def frozen_by(*paths: str, hosted: tuple[str, ...] = ("vision", "language")) -> set[str]:
    """Names of the parameters that no longer train once ``paths`` are frozen."""
    parts = {name: module for name, module in modules().items() if name in hosted}
    freeze(parts, paths)
    return {
        f"{name}.{inner}"
        for name, module in parts.items()
        for inner, parameter in module.named_parameters()
        if not parameter.requires_grad
    }


ENCODER = {"vision.encoders.clip.weight", "vision.encoders.clip.bias"}
PROJECTION = {"vision.input_projections.0.weight", "vision.input_projections.0.bias"}
LAYER = {"language.decoder.layers.0.weight", "language.decoder.layers.0.bias"}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ((), set()),
        (("vision",), ENCODER | PROJECTION),
        (("vision.encoder",), ENCODER),
        (("vision.projection",), PROJECTION),
        (("vision.encoders.clip",), ENCODER),
        (("language.decoder.layers.0",), LAYER),
        (("language.embedding", "vision.projection"), {"language.embedding.weight"} | PROJECTION),
        (("vision", "vision.encoder"), ENCODER | PROJECTION),
    ],
)
def test_paths(paths: tuple[str, ...], expected: set[str]) -> None:
    """Exactly the parameters below the paths stop training."""
    assert frozen_by(*paths) == expected


def test_modules_elsewhere_are_skipped() -> None:
    """A rank freezes what it hosts and leaves other ranks' modules to them."""
    assert frozen_by("vision", "language.embedding", hosted=("language",)) == {
        "language.embedding.weight"
    }


def test_unknown_part_names_the_parts() -> None:
    """A part that a hosted module lacks is refused with the parts that it has."""
    with pytest.raises(LayoutError) as caught:
        frozen_by("language.head")
    assert str(caught.value) == (
        "--freeze language.head: module language has no part 'head'; its parts are decoder, "
        "embedding."
    )


def test_unknown_module_names_the_modules() -> None:
    """A path that starts with no module of the layout is refused before anything is built."""
    layout = Layout.from_options(["vision", "language"], 2)
    check_frozen(layout, ["vision.encoder", "language"])
    with pytest.raises(LayoutError) as caught:
        check_frozen(layout, ["vision", "visions.encoder"])
    assert str(caught.value) == (
        "--freeze visions.encoder: no such module; the modules are vision, language."
    )
