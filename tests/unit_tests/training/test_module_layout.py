"""The grids of a checkpoint against those of the run, module by module. Pure logic."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.module_layout import (
    Grid,
    compare_grids,
    grids_of,
    own_modules,
    present_data_parallel,
    present_model_parallel,
    saved_data_parallel,
    saved_model_parallel,
)

pytestmark = pytest.mark.tier0


def modular(**grids: dict[str, int]) -> SimpleNamespace:
    """Arguments of a MIMO run; the stock sizes are those of its language module."""
    language = Grid.from_record(grids.get('language', {}))
    return SimpleNamespace(
        module_layout=grids,
        tensor_model_parallel_size=language.tp,
        pipeline_model_parallel_size=language.pp,
        data_parallel_size=language.dp,
    )


def stock(**sizes: int) -> SimpleNamespace:
    """Arguments of a stock GPT run."""
    return SimpleNamespace(**sizes)


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be a global rank."""
    return lambda rank: monkeypatch.setattr(torch.distributed, 'get_rank', lambda: rank)


def test_stock_arguments_are_a_language_module() -> None:
    """A checkpoint without a layout tells the language module's sizes, and 1 where it is silent."""
    args = stock(tensor_model_parallel_size=2, data_parallel_size=4, context_parallel_size=None)
    assert grids_of(args) == {'language': Grid(tp=2, dp=4)}
    assert grids_of(SimpleNamespace()) == {'language': Grid()}


def test_a_later_key_is_passed_over() -> None:
    """A layout with a key that this version does not know can still be read."""
    assert grids_of(modular(language={'tp': 2, 'warp': 9})) == {'language': Grid(tp=2)}


def test_comparison_names_module_and_sizes() -> None:
    """Each module says which sizes differ; a module of one side only has none to compare."""
    saved = modular(vision={'tp': 2}, audio={}, language={'pp': 2, 'offset': 2})
    present = modular(vision={'tp': 1}, sonar={}, language={'pp': 2, 'offset': 1})
    changes = compare_grids(saved, present)
    assert list(changes) == ['vision', 'sonar', 'language', 'audio']
    assert changes['vision'].sizes == ('tp',)
    assert changes['vision'].describe() == "tp 2 -> 1"
    assert changes['language'].sizes == ()
    assert not changes['language'].is_same
    assert changes['audio'].present is None
    assert changes['sonar'].saved is None


@pytest.mark.parametrize(
    ('rank', 'modules'), [(0, ('vision',)), (1, ('vision',)), (2, ('language',))]
)
def test_own_modules(rank: int, modules: tuple[str, ...], on_rank: Any) -> None:
    """A rank's modules are those whose ranks hold it."""
    on_rank(rank)
    args = modular(vision={'dp': 2}, language={'tp': 2, 'offset': 2})
    assert own_modules(args) == modules


@pytest.mark.parametrize(('rank', 'same'), [(0, False), (1, True)])
def test_model_parallel_is_that_of_own_modules(rank: int, same: bool, on_rank: Any) -> None:
    """A changed encoder is a change on its ranks alone; where data went changed for all."""
    on_rank(rank)
    saved = modular(vision={'tp': 2}, language={'offset': 2})
    present = modular(vision={'tp': 1}, language={'offset': 1})
    assert (saved_model_parallel(saved, present) == present_model_parallel(present)) is same
    assert saved_data_parallel(saved, present) != present_data_parallel(present)


def test_a_module_that_the_checkpoint_lacks_is_a_change(on_rank: Any) -> None:
    """Nothing saved never equals something present."""
    on_rank(0)
    present = modular(vision={}, language={'offset': 1})
    saved = modular(language={})
    assert saved_model_parallel(saved, present) != present_model_parallel(present)


def test_stock_runs_compare_what_they_always_did() -> None:
    """A stock run compares the same numbers as upstream, with upstream's defaults."""
    args = stock(tensor_model_parallel_size=2, pipeline_model_parallel_size=3, data_parallel_size=4)
    assert present_model_parallel(args) == (2, 3)
    assert present_data_parallel(args) == 4
    assert saved_model_parallel(args, args) == (2, 3)
    assert saved_data_parallel(args, args) == 4
    assert saved_model_parallel(SimpleNamespace(), args) == (1, 1)
    assert saved_data_parallel(SimpleNamespace(), args) == 0
