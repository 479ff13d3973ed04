"""Checkpoints that are saved under one layout and loaded under another, module by module."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.helpers.checkpoint_values import Values, assembled, equal_bits, values_of
from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import with_built
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, train_mimo

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
BF16 = ("--bf16", "--use-distributed-optimizer")
FULLY = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
GATED = ("--swiglu",)
EXPERTS = (
    *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--disable-bias-linear"),  # what local layers can train
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two layouts, as ranks and the modules' options, and what they have in common."""

    saved: tuple[int, str]
    loaded: tuple[int, str]
    options: tuple[str, ...]


PAIRS = {
    "4 to 3 ranks": Pair(
        saved=(4, "vision:dp=2 language:tp=2"),
        loaded=(3, "vision language:pp=2"),
        options=("--bf16", *FULLY),
    ),
    "3 to 4 ranks": Pair(
        saved=(3, "vision language:dp=2"),
        loaded=(4, "vision:tp=2 language:pp=2"),
        options=("--bf16", *FULLY),
    ),
    "vision TP 2 to 1, language PP 2 to TP 2": Pair(
        saved=(4, "vision:tp=2 language:pp=2"), loaded=(3, "vision language:tp=2"), options=FULLY
    ),
    "disjoint to colocated": Pair(
        saved=(4, "vision:dp=2 language:tp=2"),
        loaded=(2, "vision:tp=2,colocated language:tp=2"),
        options=("--bf16", *FULLY),
    ),
    "colocated to disjoint": Pair(
        saved=(2, "vision:tp=2,colocated language:dp=2"),
        loaded=(3, "vision language:pp=2"),
        options=FULLY,
    ),
    "experts EP 2 to 1": Pair(
        saved=(3, "vision language:dp=2,ep=2"),
        loaded=(2, "vision language"),
        options=("--bf16", *FULLY, *EXPERTS),
    ),
    "experts EP 1 to 2": Pair(
        saved=(3, "vision language:pp=2"),
        loaded=(3, "vision language:dp=2,ep=2"),
        options=("--bf16", *FULLY, *EXPERTS),
    ),
    "tied embeddings PP 2 to 1": Pair(
        saved=(2, "language:pp=2"),
        loaded=(1, "language"),
        options=("--bf16", *FULLY, "--mock-text-only"),
    ),
    "gated MLP, TP 2 to DP 2": Pair(
        saved=(3, "vision language:tp=2"),
        loaded=(3, "vision language:dp=2"),
        options=("--bf16", *FULLY, *GATED),
    ),
    "CP 2 to TP 2": Pair(
        saved=(2, "language:cp=2"),
        loaded=(2, "language:tp=2"),
        options=("--bf16", *FULLY, "--mock-text-only"),
    ),
    "default format, CP 2 to DP 1": Pair(
        saved=(2, "language:cp=2"), loaded=(1, "language"), options=(*BF16, "--mock-text-only")
    ),
    "default format, DP 2 to 1": Pair(
        saved=(3, "vision language:dp=2"), loaded=(2, "vision language"), options=BF16
    ),
    "default format, DP 1 to 2 on other ranks": Pair(
        saved=(2, "vision language"),
        loaded=(4, "vision:dp=2 language:dp=2"),
        options=("--use-distributed-optimizer",),
    ),
    "default format, disjoint to colocated": Pair(
        saved=(3, "vision language:dp=2"),
        loaded=(2, "vision:dp=2,colocated language:dp=2"),
        options=BF16,
    ),
    "plain bf16, 4 to 3 ranks": Pair(
        saved=(4, "vision:dp=2 language:tp=2"),
        loaded=(3, "vision language:pp=2"),
        options=("--bf16",),
    ),
    "plain fp32, colocated to disjoint": Pair(
        saved=(2, "vision:tp=2,colocated language:tp=2"),
        loaded=(3, "vision language:pp=2"),
        options=(),
    ),
    "plain bf16 experts EP 2 to 1": Pair(
        saved=(3, "vision language:dp=2,ep=2"),
        loaded=(2, "vision language"),
        options=("--bf16", *EXPERTS),
    ),
}


def arguments_of(layout: str) -> tuple[str, ...]:
    """Options of a layout that is written in words."""
    return tuple(text for module in layout.split() for text in ("--module", module))


def in_any_layout(function: Callable[..., Any], arguments: tuple[str, ...], *rest: Any) -> Any:
    """Call a function with arguments that may ask for CP, which local layers lack. Collective."""
    from tests.unit_tests.helpers.context_parallel import local_context_parallelism

    asked = any("cp=" in text for text in arguments)
    with local_context_parallelism() if asked else nullcontext():
        return function(*rest, arguments)


def train(arguments: tuple[str, ...]) -> Any:
    """Run as `train_mimo`, in any layout. Collective over the ranks of the test."""
    return in_any_layout(train_mimo, arguments)


def loaded_values(arguments: tuple[str, ...]) -> Values:
    """Load a checkpoint and list this rank's values. Collective over the ranks of the test."""
    return in_any_layout(with_built, arguments, values_of)


@pytest.fixture(scope='module')
def checkpoint(rank_pool: Pools, tmp_path_factory: Any) -> Callable[..., tuple[str, list[Values]]]:
    """Folder of a checkpoint after two steps, and the values that were saved; made once each."""
    made: dict[Any, tuple[str, list[Values]]] = {}

    def make(saved: tuple[int, str], options: tuple[str, ...]) -> tuple[str, list[Values]]:
        if (saved, options) not in made:
            folder = str(tmp_path_factory.mktemp('saved'))
            ranks, layout = saved
            arguments = (*arguments_of(layout), *options, "--train-iters", "2")
            rank_pool(ranks).run(train, (*arguments, "--save", folder))
            values = rank_pool(ranks).run(loaded_values, (*arguments, "--load", folder))
            made[saved, options] = folder, values
        return made[saved, options]

    return make


REFUSED = {
    "vision TP": (
        (3, "vision:tp=2 language"),
        BF16,
        """--module vision: tp 1 -> 2 since {folder} was saved, whose optimizer state is in the
        default format and follows a change of dp or cp alone; save it under its own layout with
        --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to start with a fresh
        optimizer.""",
    ),
    "other optimizer": (
        (2, "vision language"),
        ("--bf16",),
        """{folder} was saved with --use-distributed-optimizer, this run is without
        --use-distributed-optimizer; pass --no-load-optim to start with a fresh optimizer.""",
    ),
    "module left out": (
        (1, "language"),
        (*BF16, "--mock-text-only"),
        """module vision of {folder} has no --module here and would be lost; add
        --module vision:..., or pass --finetune to go on without it.""",
    ),
    "more layers": (
        (2, "vision language"),
        (*BF16, "--num-layers", "4"),
        """module language: language_model.decoder.layers.mlp.linear_fc1.bias is (2, 128) in
        {folder}, but (4, 128) in this run; the model's sizes must be those that were saved.""",
    ),
}


def refusal(arguments: tuple[str, ...]) -> str:
    """What this rank is told when it loads; every rank of the run is asked."""
    from examples.mimo.training.hetero.layout import SharedLayoutError

    try:
        loaded_values(arguments)
    except SharedLayoutError as error:
        return str(error)
    return "it was loaded"


@pytest.mark.parametrize('name', REFUSED)
def test_every_rank_is_told(
    rank_pool: Pools, checkpoint: Callable[..., tuple[str, list[Values]]], name: str
) -> None:
    """What cannot be loaded is refused by every rank with the same sentence, and none hangs."""
    folder, _ = checkpoint((2, "vision language"), BF16)
    (ranks, layout), options, sentence = REFUSED[name]
    arguments = (*arguments_of(layout), *options, "--train-iters", "2", "--load", folder)
    told = rank_pool(ranks).run(refusal, arguments)
    expected = " ".join(sentence.split()).format(folder=f"{folder}/iter_0000002")
    assert told == [expected] * ranks


@pytest.mark.parametrize('name', PAIRS)
def test_every_value_arrives(
    rank_pool: Pools, checkpoint: Callable[..., tuple[str, list[Values]]], name: str
) -> None:
    """Weights, master weights, moments, groups and step are the same bits in the other layout."""
    pair = PAIRS[name]
    folder, saved = checkpoint(pair.saved, pair.options)
    ranks, layout = pair.loaded
    arguments = (*arguments_of(layout), *pair.options, "--train-iters", "2", "--load", folder)
    loaded = rank_pool(ranks).run(loaded_values, arguments)
    expected, found = assembled(saved), assembled(loaded)
    assert differences(expected, found) == []
    assert any("exp_avg_sq" in key for key in expected)
    before, after = groups_of(saved), groups_of(loaded)
    both = before.keys() & after.keys()  # experts have an optimizer of their own at EP > 1 only
    assert {key: after[key] for key in both} == {key: before[key] for key in both}
    assert len(both) == len(layout.split())
    steps = {
        float(group.get('step', group.get('common_step'))) for g in after.values() for group in g
    }
    assert steps == {2.0}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Keys that one side lacks or of which a bit differs."""
    return [
        key
        for key in sorted({*expected, *found})
        if key not in expected or key not in found or not equal_bits(found[key], expected[key])
    ]


def groups_of(ranks: list[Values]) -> dict[str, Any]:
    """Parameter groups by module, which all ranks of a module must agree on."""
    groups: dict[str, Any] = {}
    for rank in ranks:
        for key, group in rank.groups.items():
            assert groups.setdefault(key, group) == group
    return groups


def test_padding_of_the_vocabulary_follows(
    rank_pool: Pools, checkpoint: Callable[..., tuple[str, list[Values]]]
) -> None:
    """Where TP changes how far the vocabulary is padded, its words arrive and padding is zero."""
    options = ("--bf16", *FULLY, "--make-vocab-size-divisible-by", "72")  # 144 words at TP 1 or 2
    folder, saved = checkpoint((3, "vision language:tp=2"), (*options, "--vocab-size", "140"))
    words = (*options, "--vocab-size", "140", "--make-vocab-size-divisible-by", "100")
    arguments = (*arguments_of("vision language:pp=2"), *words, "--train-iters", "2")
    loaded = rank_pool(3).run(loaded_values, (*arguments, "--load", folder))
    expected, found = assembled(saved), assembled(loaded)
    padded = [key for key in expected if found[key].shape != expected[key].shape]
    assert len(padded) == 1 + 3  # the weight, its master weight and moments
    for key in padded:
        assert (found[key].shape[0], expected[key].shape[0]) == (200, 144)
        assert not found[key][144:].any()
        assert equal_bits(found.pop(key)[:140], expected.pop(key)[:140])
    assert differences(expected, found) == []


def test_training_goes_on(rank_pool: Pools, tmp_path: Path) -> None:
    """A run that changes its layout half way goes on with the losses of one that does not."""
    common = (*FULLY, *NO_DROPOUT, "--train-iters", "6")
    stays = arguments_of("vision:dp=2 language:tp=2")
    whole = rank_pool(4).run(train_mimo, (*common, *stays))
    saved = ("--save", str(tmp_path), "--exit-interval", "3")
    rank_pool(4).run(train_mimo, (*common, *stays, *saved))
    changed = arguments_of("vision language:pp=2")
    rest = rank_pool(3).run(train_mimo, (*common, *changed, "--load", str(tmp_path)))
    losses, expected = (
        [float.fromhex(loss) for loss in ranks[-1].losses] for ranks in (rest, whole)
    )
    assert losses == pytest.approx(expected[len(expected) // 2 :], rel=2e-5)
