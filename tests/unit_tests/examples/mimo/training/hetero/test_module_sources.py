"""The options of --load-module."""

from pathlib import Path

import pytest

from examples.mimo.training.hetero.args import parse_hetero_arguments
from examples.mimo.training.hetero.layout import LayoutError

pytestmark = pytest.mark.tier0

MODULES = ["--module", "vision", "--module", "language"]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's world has two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_sources_in_order() -> None:
    """Every module has its checkpoint, in the order of the options, and what it may lack."""
    options = ["--load-module", "language=a=b", "--load-module", "vision=v"]
    allowed = ["--load-module-allow-missing", "vision.projection"]
    config, rest = parse_hetero_arguments([*MODULES, *options, *allowed, "--bf16"])
    first, second = config.load_modules
    assert (first.module, first.path, first.may_miss) == ("language", Path("a=b"), ())
    assert (second.module, second.may_miss) == ("vision", ("input_projections",))
    assert second.allows("input_projections.0.weight")
    assert not second.allows("encoders.tower.weight")
    assert not second.allows("input_projections_2.weight")
    assert not first.allows("decoder.weight")
    assert rest == ["--bf16"]


def test_a_whole_module_may_be_missing() -> None:
    """Without a part, the path allows everything of the module to be missing."""
    options = ["--load-module", "vision=v", "--load-module-allow-missing", "vision"]
    (source,) = parse_hetero_arguments([*MODULES, *options])[0].load_modules
    assert source.allows("encoders.tower.weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load-module", "language"], "--load-module language: write NAME=PATH"),
        (["--load-module", "audio=x"], "no such module; the modules are vision, language"),
        (
            ["--load-module", "vision=x", "--load-module", "vision=y"],
            "--load-module vision=y: vision already starts from x",
        ),
        (
            ["--load-module-allow-missing", "vision.encoder"],
            "vision.encoder: no --load-module loads this module",
        ),
    ],
)
def test_refused(options: list[str], message: str) -> None:
    """A wrong option is answered with the option and the modules."""
    with pytest.raises(LayoutError, match=message):
        parse_hetero_arguments([*MODULES, *options])
