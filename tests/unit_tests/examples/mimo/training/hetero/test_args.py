"""The command line: what is parsed, what contradicts the layout, what is handed to Megatron."""

import dataclasses
from argparse import Namespace

import pytest

from examples.mimo.training.hetero.args import (
    HeteroConfig,
    apply_layout,
    check_batch,
    parse_hetero_arguments,
    restore_world_size,
)
from examples.mimo.training.hetero.device import select_device
from examples.mimo.training.hetero.layout import Layout, LayoutError

pytestmark = pytest.mark.tier0

MODULES = ("--module", "vision:tp=1,dp=2", "--module", "language:tp=2,pp=3")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse as a process that no launcher started, whatever started this one."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def refusal(*argv: str) -> str:
    """The sentence with which a command line is refused."""
    with pytest.raises(LayoutError) as caught:
        parse_hetero_arguments(argv)
    return str(caught.value)


def test_parses_our_flags_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of ours become the configuration, all others go on to Megatron in their order."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    config, rest = parse_hetero_arguments(
        ["--num-layers", "6", *MODULES, "--freeze", "vision.encoder", "--device=cpu", "--bf16"]
    )
    assert rest == ["--num-layers", "6", "--bf16"]
    assert config.layout == Layout.from_options([MODULES[1], MODULES[3]], 8)
    assert dataclasses.asdict(config) | {"layout": None} == {
        "layout": None,
        "device": "cpu",
        "model_provider": "clip_gpt",
        "data_provider": "mock",
        "freeze": ("vision.encoder",),
        "load_modules": (),
        "dry_run": False,
    }


def test_configuration_is_frozen() -> None:
    """A parsed configuration cannot be changed afterwards."""
    config, _ = parse_hetero_arguments(["--module", "language"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "gpu"


@pytest.mark.parametrize("device", ["auto", "cpu", "gpu"])
def test_device(device: str) -> None:
    """The device is the one asked for."""
    config, _ = parse_hetero_arguments(["--module", "language", "--device", device])
    assert config.device == device


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_missing_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that there is not is refused in one sentence, not taken for another."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(LayoutError, match=f"--device {device}: "):
        select_device(device, [])


def test_abbreviations_are_not_ours() -> None:
    """A stock flag that starts like one of ours is not swallowed."""
    _, rest = parse_hetero_arguments(["--module", "language", "--dev", "x", "--fre", "y"])
    assert rest == ["--dev", "x", "--fre", "y"]


def test_world_size_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has as many ranks as its launcher started, one without a launcher."""
    assert parse_hetero_arguments(["--module", "language"])[0].layout.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_hetero_arguments(["--module", "language"])[0].layout.world_size == 4
    assert parse_hetero_arguments(["--module", "language", "--world-size", "4"])[0]


def test_world_size_of_a_run_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number than the launcher's is refused, unless nothing is started."""
    argv = ("--module", "language", "--world-size", "8")
    assert refusal(*argv) == (
        "--world-size 8 is for --dry-run; this run has 1 process(es) from its launcher."
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refusal(*argv) == (
        "--world-size 8 is for --dry-run; this run has 4 process(es) from its launcher."
    )
    config, _ = parse_hetero_arguments([*argv, "--dry-run"])
    assert config.dry_run
    assert config.layout.world_size == 8


def test_dry_run_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without --world-size is for the ranks that the launcher gives, else for one."""
    argv = ["--module", "language", "--dry-run"]
    assert parse_hetero_arguments(argv)[0].layout.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse_hetero_arguments(argv)[0].layout.world_size == 2


CONTRADICTIONS = {
    "--tensor-model-parallel-size": "tp=2",
    "--pipeline-model-parallel-size": "pp=3",
    "--context-parallel-size": "cp=1",
    "--expert-model-parallel-size": "ep=1",
    "--expert-tensor-parallel-size": "etp=2",
}


@pytest.mark.parametrize("flag", CONTRADICTIONS)
def test_stock_sizes_must_agree(flag: str) -> None:
    """A stock size may repeat the language module's and is refused when it says something else."""
    plan = ("--dry-run", "--world-size", "8", *MODULES)
    ours = CONTRADICTIONS[flag]
    assert refusal(*plan, flag, "4") == (
        f"{flag} 4 contradicts --module language:{ours}; give the size at --module only."
    )
    assert refusal(*plan, f"{flag}=4") == refusal(*plan, flag, "4")
    size = ours.partition("=")[2]
    _, rest = parse_hetero_arguments([*plan, flag, size])
    assert rest == [flag, size]


def test_freeze_names_a_module() -> None:
    """A path to freeze starts with a module of the layout."""
    plan = ("--dry-run", "--world-size", "8", *MODULES)
    assert refusal(*plan, "--freeze", "audio.encoder") == (
        "--freeze audio.encoder: no such module; the modules are vision, language."
    )
    layout = Layout.from_options(["language"], 1)
    with pytest.raises(LayoutError, match="--freeze vision: no such module"):
        HeteroConfig(
            layout=layout,
            device="cpu",
            model_provider="clip_gpt",
            data_provider="mock",
            freeze=("vision",),
        )


def stock_args(**values: object) -> Namespace:
    """A stock namespace as far as the layout touches it."""
    defaults = {
        "world_size": 8,
        "save": None,
        "save_interval": None,
        "train_iters": 12,
        "micro_batch_size": 2,
        "eval_micro_batch_size": None,
        "global_batch_size": None,
        "calculate_per_token_loss": False,
    }
    return Namespace(**(defaults | values))


def test_stock_namespace_describes_the_language_module() -> None:
    """Megatron's validation sees the language module as the world, then the world is put back."""
    layout = Layout.from_options(["vision:dp=2", "language:tp=2,pp=3,etp=1,ep=2"], 8)
    args = stock_args()
    apply_layout(args, layout)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 3)
    assert (args.context_parallel_size, args.expert_model_parallel_size) == (1, 2)
    assert args.expert_tensor_parallel_size == 1
    assert args.world_size == layout.language.size == 6
    assert args.calculate_per_token_loss is True
    assert args.module_layout == layout.record()
    restore_world_size(args, layout)
    assert args.world_size == 8


@pytest.mark.parametrize(
    ("save", "interval", "expected"), [("x", None, 12), ("x", 5, 5), (None, None, None)]
)
def test_save_interval(save: str | None, interval: int | None, expected: int | None) -> None:
    """A run that saves has an interval, since the stock loop divides by it; the user's own wins."""
    args = stock_args(save=save, save_interval=interval)
    apply_layout(args, Layout.from_options(["language"], 1))
    assert args.save_interval == expected


LAYOUT = Layout.from_options(["vision:dp=4", "language:dp=2"], 6)


@pytest.mark.parametrize("batch", [None, 4, 8])
def test_batches_that_split(batch: int | None) -> None:
    """Batch sizes that split over all modules pass in silence."""
    check_batch(stock_args(global_batch_size=batch), LAYOUT)
    check_batch(stock_args(eval_micro_batch_size=4), LAYOUT)


WRONG_BATCHES: list[tuple[dict[str, int], str]] = [
    (
        {"global_batch_size": 6},
        "--global-batch-size 6 is not a multiple of --micro-batch-size 2 times language dp 2 = 4.",
    ),
    (
        {"micro_batch_size": 1},
        (
            "--micro-batch-size 1 times language dp 2 = 2 samples cannot be split evenly over "
            "--module vision:dp=4."
        ),
    ),
    (
        {"eval_micro_batch_size": 3},
        (
            "--eval-micro-batch-size 3 times language dp 2 = 6 samples cannot be split evenly over "
            "--module vision:dp=4."
        ),
    ),
]


@pytest.mark.parametrize(("sizes", "sentence"), WRONG_BATCHES)
def test_batches_that_do_not_split(sizes: dict[str, int], sentence: str) -> None:
    """A batch that leaves replicas unequal is refused, for training and for evaluation."""
    with pytest.raises(LayoutError) as caught:
        check_batch(stock_args(**sizes), LAYOUT)
    assert str(caught.value) == sentence
