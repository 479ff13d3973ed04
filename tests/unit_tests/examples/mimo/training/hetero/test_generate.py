"""Greedy decoding in several layouts against a plain loop on one process, and what it leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit_tests.helpers import mimo_models, mimo_runs
from tests.unit_tests.helpers.mimo_models import Built, with_built
from tests.unit_tests.helpers.mimo_runs import NO_DROPOUT, train_mimo

pytestmark = pytest.mark.tier1

# Digits in a model of the helpers' size. With wild weights an untrained model writes many things.
DIGITS = (
    *("--data-provider", "digits", "--vocab-size", "31", "--make-vocab-size-divisible-by", "8"),
    *("--seq-length", "33", "--max-position-embeddings", "33", "--init-method-std", "0.5"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--eval-iters", "1"),
)
# One iteration that moves no weight, so that the evaluation at its end is of those loaded.
STANDSTILL = ("--train-iters", "1", "--lr", "1e-30", "--weight-decay", "0")
ONE_PROCESS = ("--module", "vision:colocated", "--module", "language")
LAYOUTS = {
    "disjoint": (2, ("--module", "vision", "--module", "language")),
    "colocated TP 2": (2, ("--module", "vision:tp=2,colocated", "--module", "language:tp=2")),
    "colocated DP 2": (2, ("--module", "vision:tp=2,colocated", "--module", "language:dp=2")),
    "vision DP 2, language TP 2": (4, ("--module", "vision:dp=2", "--module", "language:tp=2")),
    "vision TP 2, language PP 2": (4, ("--module", "vision:tp=2", "--module", "language:pp=2")),
    "vision DP 1, language DP 2": (3, ("--module", "vision", "--module", "language:dp=2")),
}


def on_digits(function: Callable[..., Any], *args: Any) -> Any:
    """Call a helper's function on this rank without the flags of the mock data."""
    common = list(mimo_runs.COMMON)
    place = common.index("--mock-samples")
    del common[place : place + 2]
    with (
        mock.patch.object(mimo_runs, 'COMMON', common),
        mock.patch.object(mimo_models, 'COMMON', common),
    ):
        return function(*args)


def answers_in(folder: Path) -> list[str]:
    """Answers that the last evaluation wrote."""
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))["answers"]


@pytest.fixture(scope='module')
def weights(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of weights as they are after one step."""
    folder = str(tmp_path_factory.mktemp('weights'))
    start = (*DIGITS, *NO_DROPOUT, "--no-answer-check", "--train-iters", "1", "--save", folder)
    rank_pool(1).run(on_digits, train_mimo, (*start, *ONE_PROCESS))
    return folder


def decoded_plainly(built: Built, samples: range) -> list[str]:
    """Answers by one forward pass per token, one sample and its tokens alone, without padding."""
    import torch

    from examples.mimo.data import digits
    from examples.mimo.data.lanes import collate

    held_out = digits.datasets(built.args).valid
    built.model.eval()
    answers = []
    for index in samples:
        tokens = held_out.prompt(index).tolist()
        written: list[int] = []
        inputs = {"vision": collate([held_out.modality("vision", index, 0)])}
        while len(written) <= digits.LONGEST_ANSWER and digits.END not in written:
            ids = torch.tensor([tokens + written])
            with torch.no_grad():
                built.model.set_input_tensor(None)
                logits, _ = built.model(
                    input_ids=ids,
                    position_ids=torch.arange(ids.size(1))[None],
                    modality_inputs=inputs,
                )
            written.append(int(logits[0, -1, : digits.VOCABULARY].argmax()))
        answers.append(digits.decode(written))
    return answers


@pytest.fixture(scope='module')
def expected(rank_pool: Any, weights: str) -> list[str]:
    """Answers of the plain loop to the first held-out samples."""
    load = ("--load", weights, "--finetune", "--train-iters", "1")
    (answers,) = rank_pool(1).run(
        on_digits,
        with_built,
        decoded_plainly,
        (*DIGITS, *NO_DROPOUT, *load, *ONE_PROCESS),
        range(150),
    )
    assert len(set(answers)) > 20, "weights that say nothing make a test that proves nothing"
    assert len({len(answer) for answer in answers}) > 1
    return answers


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_layout_writes_the_same(
    rank_pool: Any, weights: str, expected: list[str], tmp_path: Path, layout: str
) -> None:
    """Whatever the layout, all 900 answers are there and those of the plain loop."""
    world_size, modules = LAYOUTS[layout]
    evaluate = (
        *("--load", weights, "--finetune", *STANDSTILL),
        *("--eval-micro-batch-size", "20", "--eval-global-batch-size", "40"),
        *("--answers-file", str(tmp_path / "answers.json")),
    )
    rank_pool(world_size).run(on_digits, train_mimo, (*DIGITS, *NO_DROPOUT, *evaluate, *modules))
    answers = answers_in(tmp_path)
    assert len(answers) == 900
    assert answers[: len(expected)] == expected


def test_prompts_need_not_fill_the_microbatches(
    rank_pool: Any, weights: str, expected: list[str], tmp_path: Path
) -> None:
    """A last microbatch that is not full changes no answer and adds none."""
    evaluate = (
        *("--load", weights, "--finetune", *STANDSTILL),
        *("--eval-micro-batch-size", "128", "--eval-global-batch-size", "128"),
        *("--answers-file", str(tmp_path / "answers.json")),
    )
    world_size, modules = LAYOUTS["vision DP 2, language TP 2"]
    rank_pool(world_size).run(on_digits, train_mimo, (*DIGITS, *NO_DROPOUT, *evaluate, *modules))
    answers = answers_in(tmp_path)
    assert len(answers) == 900
    assert answers[: len(expected)] == expected


@pytest.mark.parametrize('layout', ["vision DP 2, language TP 2", "vision TP 2, language PP 2"])
def test_decoding_changes_nothing(rank_pool: Any, layout: str) -> None:
    """Training with the answer check equals training without it bit for bit, dropout included."""
    world_size, modules = LAYOUTS[layout]
    arguments = (
        *(*DIGITS, "--init-method-std", "0.02", "--train-iters", "3", "--eval-interval", "2"),
        *("--eval-micro-batch-size", "100", "--eval-global-batch-size", "200"),
        *("--use-distributed-optimizer", *modules),
    )
    plain = rank_pool(world_size).run(on_digits, train_mimo, (*arguments, "--no-answer-check"))
    checked = rank_pool(world_size).run(on_digits, train_mimo, arguments)
    assert plain[-1].losses
    for without, with_check in zip(plain, checked, strict=True):
        assert with_check.losses == without.losses
        assert with_check.evaluations == without.evaluations
        assert with_check.weights == without.weights
        assert with_check.optimizer == without.optimizer


def test_decoding_leaves_random_state_and_timers(rank_pool: Any) -> None:
    """Random generators and the schedule's timers are the same before and after."""
    modules = ("--module", "vision", "--module", "language")
    runs = rank_pool(2).run(on_digits, states_survive, (*DIGITS, "--train-iters", "1", *modules))
    assert runs == [True, True]


def states_survive(arguments: tuple[str, ...]) -> bool:
    """Decode once by the run's own answer check; say whether all state is as it was."""
    import random

    import numpy as np
    import torch

    from examples.mimo.training.hetero import loop
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.utils import get_model_config
    from megatron.training import get_timers

    checks: list[Any] = []
    kept = loop.get_data_provider

    def provider(name: str) -> Any:
        """Keep the answer check that the run makes."""
        source = kept(name)
        wrapped = mock.MagicMock(wraps=source)

        def datasets(args: Any) -> Any:
            sources = source.datasets(args)

            def answer_check(runtime: Any) -> Any:
                checks.append(sources.answer_check(runtime))
                return checks[-1]

            return mock.MagicMock(train=sources.train, answer_check=answer_check)

        wrapped.datasets = datasets
        return wrapped

    def states(config: Any) -> list[Any]:
        tracker = get_cuda_rng_tracker().get_states()
        return [
            random.getstate(),
            str(np.random.get_state()),  # noqa: NPY002 - the generator that checkpoints store
            torch.get_rng_state().tolist(),
            {name: state.tolist() for name, state in tracker.items()},
            config.timers,
        ]

    def compare(built: Built) -> bool:
        config = get_model_config(built.model)
        config.timers = get_timers()
        built.model.eval()
        before = states(config)
        checks[0]([built.model])
        return states(config) == before

    with mock.patch.object(loop, 'get_data_provider', provider):
        return with_built(compare, arguments)
