"""Seeds per module: which generators they set, and that nothing leaks to another module."""

import contextlib
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from examples.mimo.training.hetero.layout import Layout
from examples.mimo.training.hetero.seeds import (
    MODULE_SEED_STRIDE,
    module_seed_offset,
    module_seeded,
    seed_module,
)

pytestmark = pytest.mark.tier1

SEED = 1234


def collection(*, tp: int = 0, pp: int = 0, ep: int = 0, expt_tp: int = 0) -> Any:
    """Groups of a rank at these places; seeding asks for nothing but ranks."""
    ranks = {"tp": tp, "pp": pp, "ep": ep, "expt_tp": expt_tp}
    return mock.Mock(
        spec=list(ranks),
        **{name: mock.Mock(**{"rank.return_value": rank}) for name, rank in ranks.items()},
    )


def states() -> dict[str, Any]:
    """State of every generator of this process, the device and its tracker included."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker().get_states()
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - what checkpoints store
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
        "device": torch.cuda.get_rng_state().tolist(),
        **{f"tracker {key}": state.tolist() for key, state in tracker.items()},
    }


def draws() -> dict[str, float]:
    """One number from every generator."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numbers = {
        "python": random.random(),  # noqa: S311 - the generator under test
        "numpy": float(np.random.random()),  # noqa: NPY002 - what checkpoints store
        "torch": torch.rand(()).item(),
    }
    for name in get_cuda_rng_tracker().get_states():
        with get_cuda_rng_tracker().fork(name):
            numbers[f"tracker {name}"] = torch.rand((), device="cuda").item()
    return numbers


def seeded_draws(offset: int, places: dict[str, int]) -> dict[str, float]:
    """Numbers that a module draws first."""
    seed_module(SEED, offset, collection(**places))
    return draws()


def standalone_draws() -> tuple[dict[str, float], dict[str, float]]:
    """Numbers of a language module, and of a stock run seeded by Megatron itself."""
    from megatron.core import parallel_state
    from megatron.training import initialize

    ours = seeded_draws(0, {})
    parallel_state.initialize_model_parallel()
    initialize._set_random_seed(SEED)
    return ours, draws()


def module_after_module(fails: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """States before, inside and after the seeding of one more module."""
    seed_module(SEED, 0, collection())
    draws()
    before = states()
    end = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with end, module_seeded(SEED, MODULE_SEED_STRIDE, collection(tp=1)):
        inside = states()
        draws()
        assert 1 // (not fails)
    return before, inside, states()


def test_offsets() -> None:
    """The language module has offset 0 wherever it is listed, encoders their own in order."""
    first = Layout.from_options(["vision", "audio", "language"], 3)
    offsets = [module_seed_offset(first, grid.name) for grid in first.grids]
    assert offsets == [MODULE_SEED_STRIDE, 2 * MODULE_SEED_STRIDE, 0]
    listed_first = Layout.from_options(["language:offset=1", "vision:offset=0"], 2)
    assert module_seed_offset(listed_first, "language") == 0
    assert module_seed_offset(listed_first, "vision") == MODULE_SEED_STRIDE


def test_language_equals_a_standalone_run(rank_pool: Any) -> None:
    """The language module's generators are those of a stock run, bit for bit."""
    ((ours, stock),) = rank_pool(1).run(standalone_draws)
    assert ours == stock
    assert len(ours) >= 6


def test_encoder_streams_are_their_own(rank_pool: Any) -> None:
    """No generator of an encoder repeats the language module's or another encoder's numbers."""
    (language,) = rank_pool(1).run(seeded_draws, 0, {})
    (first,) = rank_pool(1).run(seeded_draws, MODULE_SEED_STRIDE, {})
    (second,) = rank_pool(1).run(seeded_draws, 2 * MODULE_SEED_STRIDE, {})
    for name in language:
        assert len({language[name], first[name], second[name]}) == 3, name


def test_seeding_is_deterministic(rank_pool: Any) -> None:
    """The same module at the same place draws the same numbers again."""
    once = rank_pool(1).run(seeded_draws, MODULE_SEED_STRIDE, {"tp": 1, "pp": 2})
    assert once == rank_pool(1).run(seeded_draws, MODULE_SEED_STRIDE, {"tp": 1, "pp": 2})


STREAMS = {
    "tp": {"tracker model-parallel-rng"},
    "ep": {"tracker expert-parallel-rng"},
    "expt_tp": {"tracker expert-parallel-rng"},
}


@pytest.mark.parametrize("dimension", STREAMS)
def test_ranks_differ_where_they_have_to(rank_pool: Any, dimension: str) -> None:
    """A tensor or expert rank changes its own stream and leaves all others equal."""
    (zero,) = rank_pool(1).run(seeded_draws, 0, {})
    (one,) = rank_pool(1).run(seeded_draws, 0, {dimension: 1})
    assert {name for name in zero if zero[name] != one[name]} == STREAMS[dimension]


def test_pipeline_stages_differ(rank_pool: Any) -> None:
    """Stages of one pipeline draw different numbers from every generator."""
    (zero,) = rank_pool(1).run(seeded_draws, 0, {})
    (one,) = rank_pool(1).run(seeded_draws, 0, {"pp": 1})
    assert all(zero[name] != one[name] for name in zero)


@pytest.mark.parametrize("fails", [False, True])
def test_one_more_module_leaves_no_trace(rank_pool: Any, fails: bool) -> None:
    """Every generator is put back after a second module, also when building it fails."""
    ((before, inside, after),) = rank_pool(1).run(module_after_module, fails)
    assert before == after
    assert before.keys() == inside.keys()
    assert [name for name in before if before[name] == inside[name]] == []
