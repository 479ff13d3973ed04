"""Checkpoint flags that do nothing in the company they are in, one sentence each."""

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from examples.mimo.training.hetero.checkpointing import (
    add_checkpoint_arguments,
    flags_without_effect,
    warn_of_flags_without_effect,
)

pytestmark = pytest.mark.tier0


def namespace(**given: Any) -> Namespace:
    """Parsed arguments of a run that saves and loads with the distributed optimizer."""
    defaults = {
        "save": "folder",
        "load": "folder",
        "pretrained_checkpoint": None,
        "use_distributed_optimizer": True,
        "save_interval": None,
        "save_retain_interval": None,
        "no_save_optim": None,
        "no_save_rng": None,
        "dist_ckpt_optim_fully_reshardable": False,
        "finetune": False,
        "override_ckpt_iteration": None,
        "no_load_optim": None,
        "no_load_rng": None,
        "no_load_scheduler": False,
        "override_opt_param_scheduler": False,
        "use_checkpoint_opt_param_scheduler": False,
        "data_parallel_random_init": False,
    }
    assert given.keys() <= defaults.keys()
    return Namespace(**{**defaults, **given})


SAVING = {
    "--save-interval": {"save_interval": 3},
    "--save-retain-interval": {"save_retain_interval": 6},
    "--no-save-optim": {"no_save_optim": True},
    "--no-save-rng": {"no_save_rng": True},
    "--dist-ckpt-optim-fully-reshardable": {"dist_ckpt_optim_fully_reshardable": True},
}
LOADING = {
    "--finetune": {"finetune": True},
    "--override-ckpt-iteration": {"override_ckpt_iteration": 2},
    "--no-load-optim": {"no_load_optim": True},
    "--no-load-rng": {"no_load_rng": True},
    "--no-load-scheduler": {"no_load_scheduler": True},
    "--override-opt_param-scheduler": {"override_opt_param_scheduler": True},
    "--use-checkpoint-opt_param-scheduler": {"use_checkpoint_opt_param_scheduler": True},
}


@pytest.mark.parametrize('flag', [*SAVING, *LOADING])
def test_flags_with_effect_are_silent(flag: str) -> None:
    """Each flag alone, in a run that saves and loads, is no matter of a warning."""
    assert flags_without_effect(namespace(**{**SAVING, **LOADING}[flag])) == []


@pytest.mark.parametrize('flag', SAVING)
def test_saving_flags_need_save(flag: str) -> None:
    """Flags about what is saved do nothing in a run that saves nothing."""
    idle = namespace(save=None, **SAVING[flag])
    assert flags_without_effect(idle) == [f"{flag} has no effect without --save."]


@pytest.mark.parametrize('flag', LOADING)
def test_loading_flags_need_load(flag: str) -> None:
    """Flags about what is loaded do nothing in a run that loads nothing."""
    idle = namespace(load=None, **LOADING[flag])
    assert flags_without_effect(idle) == [f"{flag} has no effect without --load."]
    assert (
        flags_without_effect(namespace(load=None, pretrained_checkpoint="f", **LOADING[flag])) == []
    )


FINETUNE = "with --finetune, which loads the model alone"
NO_OPTIMIZER = "with --no-load-optim, which loads no schedule either"
FRESH = "with --no-load-scheduler, which starts a schedule anew"
PAIRS = [
    ("--no-load-optim", {"finetune": True}, FINETUNE),
    ("--no-load-rng", {"finetune": True}, FINETUNE),
    ("--no-load-scheduler", {"finetune": True}, FINETUNE),
    ("--override-opt_param-scheduler", {"finetune": True}, FINETUNE),
    ("--use-checkpoint-opt_param-scheduler", {"finetune": True}, FINETUNE),
    ("--no-load-scheduler", {"no_load_optim": True}, NO_OPTIMIZER),
    ("--override-opt_param-scheduler", {"no_load_optim": True}, NO_OPTIMIZER),
    ("--use-checkpoint-opt_param-scheduler", {"no_load_optim": True}, NO_OPTIMIZER),
    ("--override-opt_param-scheduler", {"no_load_scheduler": True}, FRESH),
    ("--use-checkpoint-opt_param-scheduler", {"no_load_scheduler": True}, FRESH),
    (
        "--dist-ckpt-optim-fully-reshardable",
        {"use_distributed_optimizer": False},
        "without --use-distributed-optimizer",
    ),
    ("--dist-ckpt-optim-fully-reshardable", {"no_save_optim": True}, "with --no-save-optim"),
]


@pytest.mark.parametrize(('flag', 'beside', 'reason'), PAIRS)
def test_flags_that_another_one_idles(flag: str, beside: dict[str, Any], reason: str) -> None:
    """A flag that another one makes idle is named with that one, once."""
    given = namespace(**{**SAVING, **LOADING}[flag], **beside)
    assert flags_without_effect(given) == [f"{flag} has no effect {reason}."]


def test_one_sentence_per_flag() -> None:
    """Of several reasons the first one is given."""
    given = namespace(load=None, finetune=True, no_load_scheduler=True, no_load_optim=True)
    assert flags_without_effect(given) == [
        "--finetune has no effect without --load.",
        "--no-load-optim has no effect without --load.",
        "--no-load-scheduler has no effect without --load.",
    ]


def test_stock_seed_flag() -> None:
    """Modules do not follow stock's flag for seeds that differ between replicas."""
    (sentence,) = flags_without_effect(namespace(data_parallel_random_init=True))
    assert sentence == (
        "--data-parallel-random-init has no effect on the seeds of modules: data-parallel ranks "
        "start alike."
    )


@pytest.mark.parametrize(('rank', 'lines'), [("0", 1), ("1", 0)])
def test_one_rank_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, lines: int
) -> None:
    """Rank 0 alone prints the warnings."""
    monkeypatch.setenv("RANK", rank)
    warn_of_flags_without_effect(namespace(save=None, save_interval=2))
    expected = "warning: --save-interval has no effect without --save.\n"
    assert capsys.readouterr().err == expected * lines


def test_no_load_scheduler_is_off_by_default() -> None:
    """The new flag is a switch like stock's."""
    parser = add_checkpoint_arguments(ArgumentParser())
    assert parser.parse_args([]).no_load_scheduler is False
    assert parser.parse_args(["--no-load-scheduler"]).no_load_scheduler is True
