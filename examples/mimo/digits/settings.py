"""What a run is: its settings, its folder and the command that trains."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.mimo.training.hetero.layout import Layout

ROOT = Path(__file__).parents[3]
"""The repository, from which the training command runs."""

_BATCH = 96
_HELD_OUT_SAMPLES = 900
_EVALUATION_BATCH = 100
_LOG_LINES = 100
"""Loss lines in the log over a whole run."""


class DigitsError(Exception):
    """Something the user can mend; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Choices of a run. Saved with it, so that ``--resume`` needs no options.

    Attributes:
        iterations: optimizer steps in all.
        evaluations: how often held-out images are looked at, the last time at the end.
        processes: ranks, all on this machine.
        modules: rank grid of each module, see ``--module`` of ``examples.mimo.train_hetero``.
        device: ``cpu`` or ``gpu``.
        seed: of initialization, data order and everything else.
    """

    iterations: int = 800
    evaluations: int = 5
    processes: int = 4
    modules: tuple[str, ...] = ("vision:tp=1,dp=2", "language:tp=2")
    device: str = "cpu"
    seed: int = 1234

    def __post_init__(self) -> None:
        """Check the numbers against each other."""
        if self.iterations < 2 or self.iterations % 2:  # noqa: PLR2004 - two halves
            msg = f"--iterations {self.iterations} must be even: the run stops half way."
            raise DigitsError(msg)
        if self.evaluations < 1 or self.iterations % self.evaluations:
            msg = (
                f"--evaluations {self.evaluations} must divide --iterations {self.iterations}, "
                "so that the last one comes at the end."
            )
            raise DigitsError(msg)

    @property
    def half(self) -> int:
        """Iteration at which the run stops to be started again."""
        return self.iterations // 2

    def layout(self) -> Layout:
        """Rank grids of the run.

        Raises:
            LayoutError: they cannot work.
        """
        return Layout.from_options(self.modules, self.processes)


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Stock checkpoints, one folder per saved iteration."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def answers(self) -> Path:
        """Held-out answers of the latest evaluation."""
        return self.path / "answers.json"

    @property
    def settings(self) -> Path:
        """The run's settings; the file that tells a run's folder from any other."""
        return self.path / "settings.json"

    def logs(self) -> list[Path]:
        """Logs of all launches so far, in order."""
        return sorted(self.path.glob("logs/train-*.log"), key=lambda path: (len(path.name), path))

    def next_log(self) -> Path:
        """File for the log of the next launch; its folder is there."""
        path = self.path / "logs" / f"train-{len(self.logs()) + 1}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, settings: Settings) -> Path | None:
        """Make the folder of a new run; return where an older run was moved, if there was one.

        Raises:
            DigitsError: the folder holds something else than a run.
        """
        moved = None
        if self.path.exists() and any(self.path.iterdir()):
            moved = self._move_away()
        self.path.mkdir(parents=True, exist_ok=True)
        content = json.dumps(dataclasses.asdict(settings), indent=1)
        self.settings.write_text(content + "\n", encoding="utf-8")
        return moved

    def load(self) -> Settings:
        """Read the settings of the run that is here.

        Raises:
            DigitsError: there is none.
        """
        try:
            content = json.loads(self.settings.read_text(encoding="utf-8"))
            return Settings(**{**content, "modules": tuple(content["modules"])})
        except FileNotFoundError:
            msg = f"--resume: there is no run in {self.path}; start one without --resume."
            raise DigitsError(msg) from None
        except (ValueError, TypeError, KeyError) as error:
            msg = f"--resume: {self.settings} cannot be read: {error}."
            raise DigitsError(msg) from None

    def _move_away(self) -> Path:
        """Keep one older run beside the new one."""
        previous = RunFolder(self.path.with_name(self.path.name + ".previous"))
        for folder in (self, previous):
            if folder.path.exists() and not folder.settings.exists():
                msg = (
                    f"{folder.path} is not a folder of an earlier run (no {self.settings.name} in "
                    "it); choose another --output."
                )
                raise DigitsError(msg)
        if previous.path.exists():
            remove_tree(previous.path)
        self.path.rename(previous.path)
        return previous.path


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it; links are removed, not followed."""
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            child.unlink()
    path.rmdir()


def train_command(settings: Settings, folder: RunFolder) -> list[str]:
    """Build the command line of one launch; the second launch is the same command again."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(settings.processes), "-m", "examples.mimo.train_hetero"),
        *("--device", settings.device, "--data-provider", "digits"),
        *[word for module in settings.modules for word in ("--module", module)],
        *_model_flags(),
        *_optimizer_flags(settings),
        *_batch_flags(settings.layout()),
        *_loop_flags(settings, folder),
    ]


def _model_flags() -> list[str]:
    return [
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--vision-num-layers", "3", "--vision-hidden-size", "64"),
        *("--vision-num-attention-heads", "4", "--init-method-std", "0.06"),
        *("--hidden-dropout", "0", "--attention-dropout", "0"),
        "--no-bias-gelu-fusion",  # without a compiler the fusion is slower than its parts
    ]


def _optimizer_flags(settings: Settings) -> list[str]:
    return [
        *("--use-distributed-optimizer", "--lr", "2e-3", "--lr-decay-style", "cosine"),
        *("--lr-warmup-fraction", "0.1", "--adam-beta2", "0.98", "--clip-grad", "1.0"),
        *("--train-iters", str(settings.iterations), "--seed", str(settings.seed)),
    ]


def _batch_flags(layout: Layout) -> list[str]:
    """Batch sizes: one microbatch per step, several where the language model is a pipeline."""
    language = layout.language
    microbatches = language.dp * (1 if language.pp == 1 else 4)
    return [
        *("--global-batch-size", str(_BATCH)),
        *("--micro-batch-size", str(_BATCH // microbatches)),
        *("--eval-global-batch-size", str(_EVALUATION_BATCH)),
        *("--eval-micro-batch-size", str(_EVALUATION_BATCH // language.dp)),
        *("--eval-iters", str(_HELD_OUT_SAMPLES // _EVALUATION_BATCH)),
    ]


def _loop_flags(settings: Settings, folder: RunFolder) -> list[str]:
    every = str(settings.iterations // settings.evaluations)
    log_every = str(max(1, settings.iterations // _LOG_LINES))
    return [
        *("--save", str(folder.checkpoints), "--load", str(folder.checkpoints)),
        *("--save-interval", every, "--eval-interval", every),
        *("--exit-interval", str(settings.half)),
        *("--log-interval", log_every, "--tensorboard-log-interval", log_every),
        *("--tensorboard-dir", str(folder.tensorboard)),
        *("--answers-file", str(folder.answers)),
    ]
