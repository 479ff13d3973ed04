"""What each checkpoint flag saves, loads and leaves, and what every checkpoint tells of its run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import with_built
from tests.unit_tests.helpers.recorded_runs import Recorded, Step, train_recorded

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]

COMMON = (
    *("--train-iters", "5", "--use-distributed-optimizer", "--bf16", "--lr-warmup-iters", "2"),
    *("--start-weight-decay", "0.01", "--end-weight-decay", "0.1"),
    *("--weight-decay-incr-style", "linear", "--module", "vision", "--module", "language"),
)
AT = 4


@pytest.fixture(scope='module')
def saved(
    rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Recorded]]:
    """A run of five iterations that saves every second one, and the folder where it did."""
    folder = tmp_path_factory.mktemp('saved')
    saving = ("--save", str(folder), "--save-interval", "2")
    return folder, rank_pool(2).run(train_recorded, (*COMMON, *saving))


def loaded(rank_pool: Pools, folder: Path, *flags: str) -> list[Recorded]:
    """A run that loads what was saved at iteration 4 under some flags, by rank."""
    loading = ("--load", str(folder), "--ckpt-step", str(AT), *flags)
    return rank_pool(2).run(train_recorded, (*COMMON, *loading))


def test_intervals_and_the_last_iteration(saved: tuple[Path, list[Recorded]]) -> None:
    """Saved are every second iteration and the last one, which the tracker names."""
    folder, _ = saved
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert (folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "5"


def fresh(before: Step, first: Step, *fields: str) -> Step:
    """The step ``before``, with some of what it starts from as in the run's first step."""
    return replace(before, **{field: getattr(first, field) for field in fields})


@pytest.mark.parametrize(
    ('flags', 'anew'),
    [
        ((), ()),
        (("--no-load-scheduler",), ("rates",)),
        (("--no-load-rng",), ("streams",)),
        (("--no-load-optim",), ("rates", "moments", "main")),
    ],
    ids=" ".join,
)
def test_what_is_left_starts_anew(
    rank_pool: Pools,
    saved: tuple[Path, list[Recorded]],
    flags: tuple[str, ...],
    anew: tuple[str, ...],
) -> None:
    """What a flag leaves is that of a new run; all else is what was saved."""
    folder, whole = saved
    for rank, run in enumerate(loaded(rank_pool, folder, *flags)):
        before, first = whole[rank].steps[AT], whole[rank].steps[0]
        assert [step.consumed for step in run.steps] == [16]
        if "main" in anew:  # made from the loaded weights
            first = replace(first, main=run.steps[0].main)
            assert run.steps[0].main != before.main
        assert run.steps[0] == fresh(before, first, *anew)
        for field in anew:
            assert getattr(before, field) != getattr(run.steps[0], field)


def test_finetune_is_a_new_run(rank_pool: Pools, saved: tuple[Path, list[Recorded]]) -> None:
    """Fine-tuning keeps the weights; iteration, samples, rates, optimizer and streams are new."""
    folder, whole = saved
    for rank, run in enumerate(loaded(rank_pool, folder, "--finetune")):
        first = whole[rank].steps[0]
        assert [step.consumed for step in run.steps] == [0, 4, 8, 12, 16]
        assert run.steps[0].moments == ()
        assert run.steps[0] == replace(
            first, weights=whole[rank].steps[AT].weights, main=run.steps[0].main
        )
        assert [step.rates for step in run.steps] == [step.rates for step in whole[rank].steps]
        assert run.samples == whole[rank].samples


def test_what_is_not_saved_is_not_there(rank_pool: Pools, tmp_path: Path) -> None:
    """A checkpoint without optimizer and streams resumes its iteration with new ones of both."""
    saving = ("--save", str(tmp_path), "--no-save-optim", "--no-save-rng", "--exit-interval", "2")
    first = rank_pool(2).run(train_recorded, (*COMMON, *saving))
    loading = ("--load", str(tmp_path), "--no-load-optim")
    for rank, run in enumerate(rank_pool(2).run(train_recorded, (*COMMON, *loading))):
        assert run.steps[0].consumed == 8
        assert run.steps[0].moments == ()
        assert run.steps[0].streams == first[rank].steps[0].streams
        assert run.steps[0].weights != first[rank].steps[0].weights


def test_iteration_can_be_overridden(rank_pool: Pools, saved: tuple[Path, list[Recorded]]) -> None:
    """With --override-ckpt-iteration the data start where that iteration would have them."""
    folder, whole = saved
    for rank, run in enumerate(loaded(rank_pool, folder, "--override-ckpt-iteration", "1")):
        assert [step.consumed for step in run.steps] == [4, 8, 12, 16]
        assert run.samples == whole[rank].samples[1:]
        assert replace(run.steps[0], consumed=16) == whole[rank].steps[AT]


def common_state(folder: str) -> dict[str, Any]:
    """What a checkpoint's common state tells, read back by one rank."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load_common_state_dict(folder)
    return {
        "version": state['checkpoint_version'],
        "iteration": state['iteration'],
        "samples": state['args'].consumed_train_samples,
        "layers": state['args'].num_layers,
        "layout": state['args'].module_layout,
        "schedule": state['opt_param_scheduler']['num_steps'],
        "content": dist_checkpointing.load_content_metadata(preloaded_state_dict=state),
    }


def test_common_state(rank_pool: Pools, saved: tuple[Path, list[Recorded]]) -> None:
    """Arguments, version 3.0, iteration, samples and the optimizer's kind of sharding are there."""
    folder, _ = saved
    (state,) = rank_pool(1).run(common_state, str(folder / "iter_0000004"))
    sizes = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "etp": 1}
    assert state == {
        "version": 3.0,
        "iteration": AT,
        "samples": 16,
        "layers": 2,
        "layout": {"vision": {**sizes, "offset": 0}, "language": {**sizes, "offset": 1}},
        "schedule": 16,
        "content": {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "random_streams": "per_rank",
        },
    }


def described(built: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata before and after a model of several modules was described with it."""
    metadata = {'dp_cp_group': built.model.pg_collection.dp_cp, 'singleton_local_shards': False}
    before = dict(metadata)
    state = {"model": built.model.sharded_state_dict(metadata=metadata)}
    built.optimizer.sharded_state_dict(state, metadata=metadata)
    return {key: str(value) for key, value in before.items()}, {
        key: str(value) for key, value in metadata.items()
    }


def test_metadata_is_not_changed(rank_pool: Pools) -> None:
    """The dictionary that describes every module comes out as it went in, on ranks of two."""
    modules = ("--module", "vision:tp=2,colocated", "--module", "language:tp=2")
    for before, after in rank_pool(2).run(with_built, described, modules):
        assert before == after
