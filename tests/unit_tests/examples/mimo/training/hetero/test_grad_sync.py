"""Gradients of all modules against plain autograd over the same samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import Built, with_built
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, train_mimo

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
Gradients = dict[str, dict[str, NDArray[np.float32]]]

ONE_EACH = ("--module", "vision", "--module", "language")
LAYOUTS = {
    "vision DP 2, language TP 2": (4, ("--module", "vision:dp=2", "--module", "language:tp=2")),
    "vision DP 1, language DP 2": (3, ("--module", "vision", "--module", "language:dp=2")),
    "vision TP 2, language PP 2": (4, ("--module", "vision:tp=2", "--module", "language:pp=2")),
    "colocated, vision DP 2": (
        2,
        ("--module", "vision:dp=2,colocated", "--module", "language:tp=2"),
    ),
}


@contextmanager
def uneven_masks() -> Iterator[None]:
    """Let the samples of the mock data count different numbers of tokens."""
    from examples.mimo.data.mock import MockDataset

    language = MockDataset.language

    def masked(self: Any, index: int, epoch: int) -> Any:
        sample = language(self, index, epoch)
        sample["loss_mask"][-(index % 7) or len(sample["loss_mask"]) :] = 0
        return sample

    with mock.patch.object(MockDataset, 'language', masked):
        yield


def finalized_gradients(arguments: tuple[str, ...]) -> tuple[Gradients, int]:
    """Gradients of this rank's modules once one step's are finalized, and the tokens counted."""
    from examples.mimo.training.hetero.grad_sync import GradFinalizer

    found: Gradients = {}
    counted = []
    finalize = GradFinalizer.__call__

    def watched(self: Any, model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        counted.append(int(num_tokens))
        finalize(self, model, num_tokens, **kwargs)
        for name, module in model[0].wrapped_modules().items():
            found[name] = {
                parameter_name: parameter.main_grad.clone().numpy()
                for parameter_name, parameter in module.module.named_parameters()
            }

    with uneven_masks(), mock.patch.object(GradFinalizer, '__call__', watched):
        train_mimo(arguments)
    assert len(counted) == 1
    return found, counted[0]


def plain_autograd(arguments: tuple[str, ...]) -> tuple[Gradients, list[int]]:
    """Gradients of mean loss per token over one global batch, by ``torch.autograd`` alone.

    Runs in a world of one rank. The mean is written out here; neither the run's loss function nor
    its schedule nor its gradient buffers take part.
    """
    with uneven_masks():
        return with_built(_plain_autograd, arguments)


def _plain_autograd(built: Built) -> tuple[Gradients, list[int]]:
    import torch

    train, _, _ = built.datasets((0, None, 0))
    batch = built.forward_step.move(next(train))
    losses, mask = built.model(**batch)
    assert losses.shape == (4, 24)
    loss = (losses * mask).sum() / mask.sum()
    named = {
        (name, inner): parameter
        for name, module in built.model.wrapped_modules().items()
        for inner, parameter in module.module.named_parameters()
    }
    gradients = torch.autograd.grad(loss, list(named.values()))
    found: Gradients = {}
    for (name, inner), gradient in zip(named, gradients, strict=True):
        found.setdefault(name, {})[inner] = gradient.numpy()
    return found, mask.sum(dim=1).int().tolist()


@pytest.fixture(scope='module')
def reference(rank_pool: Pools, tmp_path_factory: Any) -> tuple[Any, Gradients, list[int]]:
    """Arguments that load common weights, and the gradients there by plain autograd."""
    folder = str(tmp_path_factory.mktemp('weights'))
    rank_pool(2).run(train_mimo, ("--train-iters", "1", "--save", folder, *NO_DROPOUT, *ONE_EACH))
    arguments = ("--train-iters", "1", "--load", folder, "--finetune", *NO_DROPOUT)
    one_rank = ("--module", "vision:colocated", "--module", "language")
    whole = (*arguments, *one_rank, "--micro-batch-size", "4")
    ((gradients, tokens),) = rank_pool(1).run(plain_autograd, whole)
    return arguments, gradients, tokens


def test_masks_are_uneven(reference: tuple[Any, Gradients, list[int]]) -> None:
    """The samples count different numbers of tokens, so that a mean of means would be wrong."""
    _, gradients, tokens = reference
    assert len(set(tokens)) > 1
    assert tokens[0] + tokens[1] != tokens[2] + tokens[3]
    assert gradients.keys() == {"vision", "language"}


def shard_of(whole: NDArray[np.float32], shape: tuple[int, ...], rank: int) -> NDArray[np.float32]:
    """Part of a gradient that a tensor rank holds: split along the one axis that is shorter."""
    for axis, (full, part) in enumerate(zip(whole.shape, shape, strict=True)):
        if full != part:
            return np.split(whole, full // part, axis=axis)[rank]
    return whole


def renamed(parameter: str, stage: int, layers: int) -> str:
    """Name in the whole model of a parameter on a pipeline stage that holds ``layers`` layers."""
    if parameter == "output_layer.weight":
        return "embedding.word_embeddings.weight"  # tied; the last stage has a copy
    start, mark, rest = parameter.partition("decoder.layers.")
    if not mark or not stage:
        return parameter
    number, _, inner = rest.partition(".")
    return f"{start}{mark}{int(number) + stage * layers}.{inner}"


@pytest.mark.parametrize('layout', LAYOUTS)
def test_gradients_equal_plain_autograd(
    rank_pool: Pools, reference: tuple[Any, Gradients, list[int]], layout: str
) -> None:
    """Every module's gradients are those of the mean over all tokens, wherever the loss was."""
    from examples.mimo.training.hetero.layout import Layout

    arguments, expected, tokens = reference
    world_size, modules = LAYOUTS[layout]
    runs = rank_pool(world_size).run(finalized_gradients, (*arguments, *modules))
    grids = Layout.from_options(modules[1::2], world_size)
    compared = set()
    for rank, (gradients, _) in enumerate(runs):
        assert tuple(gradients) == grids.modules_of(rank)
        for name, parameters in gradients.items():
            where = grids[name].coordinates(rank)
            for parameter, found in parameters.items():
                inner = renamed(parameter, where["pp"], 2 // grids[name].pp)
                whole = expected[name][inner]
                part = shard_of(whole, found.shape, where["tp"])
                scale = np.abs(whole).max()
                np.testing.assert_allclose(found, part, rtol=2e-4, atol=2e-6 * scale + 1e-9)
                compared.add((name, inner))
    assert compared == {(name, inner) for name in expected for inner in expected[name]}
    last = {"tp": 0, "pp": grids.language.pp - 1}
    speakers = [
        rank
        for rank in grids.language.ranks
        if last.items() <= grids.language.coordinates(rank).items()
    ]
    assert sum(runs[rank][1] for rank in speakers) == sum(tokens)


def without_token_count(arguments: tuple[str, ...]) -> str:
    """What the finalizer says when the schedule did not count tokens."""

    def finalize(built: Built) -> str:
        with pytest.raises(ValueError, match="per-token") as caught:
            built.model.config.finalize_model_grads_func([built.model])
        return str(caught.value)

    return with_built(finalize, arguments)


def test_needs_the_token_count(rank_pool: Pools) -> None:
    """Without a token count there is nothing to divide by, which is said and not guessed."""
    sentence = "a MIMO run needs --calculate-per-token-loss to normalize over all modules."
    assert rank_pool(2).run(without_token_count, ONE_EACH) == [sentence] * 2
