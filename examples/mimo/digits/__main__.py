"""Train a model to answer questions about handwritten digits: ``python -m examples.mimo.digits``.

Four processes train a vision encoder (two data-parallel replicas) and a language model (two tensor-
parallel ranks) with Megatron's stock loop, on CPU where there are not enough GPUs. Half way through
the processes stop, the same command starts them again, and they go on from their checkpoint. The
run ends with the share of held-out questions that are answered right to the letter.

A new run starts from nothing: the run before it is kept as ``runs/digits.previous``, the one before
that is removed. ``--resume`` goes on with a run that was interrupted instead. Everything lies in
``runs/digits/``: ``loss.png``, ``examples.png``, ``results.json``, ``tensorboard/``,
``checkpoints/`` and ``logs/``, which have all that Megatron says.
"""

# ruff: noqa: T201 - the job speaks on standard output
from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples.mimo.digits.launch import LaunchError, launch
from examples.mimo.digits.log_lines import History
from examples.mimo.digits.progress import Progress, shares_in_words
from examples.mimo.digits.settings import DigitsError, RunFolder, Settings, train_command
from examples.mimo.training.hetero.layout import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.mimo.digits.log_lines import Event

_FAILED, _USAGE_ERROR, _INTERRUPTED = 1, 2, 130
_GOOD = 0.95
"""Exact match below which the run says that something is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    options = _parser().parse_args(argv)
    folder = RunFolder(options.output.resolve())
    try:
        settings = _prepare(options, folder)
        return _run(settings, folder, options.require)
    except (DigitsError, LayoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except LaunchError as error:
        print(f"{error}\nThe whole log: {_short(folder.logs()[-1])}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print(
            "\ninterrupted; all training processes have ended. To go on from the last checkpoint:\n"
            f"  {_resume_command(options)}",
            file=sys.stderr,
        )
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.mimo.digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/digits"), help="folder of the run")
    add("--resume", action="store_true", help="go on with the run in --output, as it was started")
    add("--iterations", type=int, help=f"optimizer steps, {Settings.iterations} if not given")
    add("--evaluations", type=int, help="looks at the held-out images on the way")
    add("--processes", type=int, help="ranks on this machine")
    add("--module", action="append", help="rank grid of a module, as for train_hetero; repeatable")
    add("--device", choices=("auto", "cpu", "gpu"), help="auto: GPUs where there is one per rank")
    add("--seed", type=int, help="of everything random")
    add("--require", type=float, help="exit with 1 where held-out exact match is below this")
    return parser


def _prepare(options: argparse.Namespace, folder: RunFolder) -> Settings:
    """Settings of the run and its folder, new or as it was left."""
    names = ("iterations", "evaluations", "processes", "device", "seed")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.module:
        chosen["modules"] = tuple(options.module)
    if options.resume:
        if chosen:
            flag = "--" + next(iter(chosen)).replace("modules", "module")
            msg = f"{flag} does not go with --resume: the run keeps the settings it began with."
            raise DigitsError(msg)
        return folder.load()
    if chosen.get("device", "auto") == "auto":
        chosen["device"] = _device(chosen.get("processes", Settings.processes))
    settings = Settings(**chosen)
    settings.layout()
    moved = folder.start(settings)
    if moved is not None:
        print(f"the run that was here is now {_short(moved)}")
    return settings


def _device(processes: int) -> str:
    """GPUs where every rank can have its own; the driver says how many there are."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "cpu"
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return "gpu" if listing.stdout.count("GPU ") >= processes else "cpu"


def _run(settings: Settings, folder: RunFolder, require: float | None) -> int:
    """Train to the end in as many launches as it takes, and report."""
    begun = time.monotonic()
    print(_headline(settings), flush=True)
    history = History.from_logs(folder.logs())
    command = train_command(settings, folder)
    if history.saved >= settings.iterations:
        print("the run is complete; only its report is written again")
    while history.saved < settings.iterations:
        _launch_once(settings, folder, command, history)
    seconds = time.monotonic() - begun
    share = _report(settings, folder, history, seconds)
    if require is not None and share < require:
        print(f"exact match {share:.3f} is below --require {require}", file=sys.stderr)
        return _FAILED
    return 0


def _headline(settings: Settings) -> str:
    grids = [
        f"{grid.name} (tp {grid.tp}, pp {grid.pp}, dp {grid.dp}) on ranks "
        f"{grid.ranks[0]}-{grid.ranks[-1]}"
        for grid in settings.layout().grids
    ]
    device = {"cpu": "on CPU", "gpu": "on GPUs"}[settings.device]
    return f"{settings.processes} processes {device}: {'; '.join(grids)}"


def _launch_once(
    settings: Settings, folder: RunFolder, command: list[str], history: History
) -> None:
    """Start the training command and follow it until its processes leave, half way or at the end.

    Raises:
        LaunchError: it failed, or got no further, or did not resume where it should have.
    """
    start, log = history.saved, folder.next_log()
    stop = settings.half if start < settings.half else settings.iterations
    how = "starting" if start == 0 else "the same command again"
    with Progress(settings.iterations, start) as progress:
        progress.say(f"{how}, from iteration {start} to {stop}; log: {_short(log)}")

        def show(event: Event) -> None:
            history.add(event)
            progress.show(event)

        launch(command, log, show)
        if history.saved != stop:
            msg = f"the processes left after iteration {history.saved}, not after {stop}."
            raise LaunchError(msg)
        if start and (not history.resumed or history.resumed[-1] != start):
            msg = f"the processes did not resume from the checkpoint of iteration {start}."
            raise LaunchError(msg)
        if stop < settings.iterations:
            progress.say(f"  stopped half way, as planned, with a checkpoint of iteration {stop}")


def _report(settings: Settings, folder: RunFolder, history: History, seconds: float) -> float:
    """Write pictures and results, print where they are and what was reached."""
    from examples.mimo.digits import report  # matplotlib and scikit-learn take a second

    dataset = report.held_out_dataset()
    answers = report.read_answers(folder.answers, settings.iterations)
    shares = history.matches[settings.iterations].shares
    report.draw_curves(folder.path / "loss.png", history)
    report.draw_examples(folder.path / "examples.png", dataset, answers)
    report.write_results(
        folder.path / "results.json",
        history,
        {"iterations": settings.iterations, "seconds_of_last_call": round(seconds, 1)},
    )
    print(f"loss curve:   {_short(folder.path / 'loss.png')}")
    print(f"examples:     {_short(folder.path / 'examples.png')}")
    print(f"checkpoints:  {_short(folder.checkpoints)}")
    print(f"TensorBoard:  tensorboard --logdir {_short(folder.tensorboard)}")
    print(f"{seconds / 60:.1f} minutes; by kind of question: {shares_in_words(shares)}")
    if shares["all"] < _GOOD:
        print(f"warning: {_GOOD} is expected of a full run of {Settings.iterations} iterations")
    print(f"held-out exact match: {shares['all']:.3f}", flush=True)
    return shares["all"]


def _short(path: Path) -> str:
    """Path as seen from where the user is, if below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _resume_command(options: argparse.Namespace) -> str:
    output = "" if options.output == Path("runs/digits") else f" --output {options.output}"
    return f'make train ARGS="--resume{output}"'


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a termination ends the ranks, too
    sys.exit(main())
