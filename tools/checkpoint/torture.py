"""Kill runs in the middle of saves, again and again, and count what is lost: nothing may be.

Two ranks save in a loop, through Megatron's own save, tracker and removal of older iterations, at
once (sync) or in the background (async); some saves are over an iteration that is there already. At
a random moment all of it is killed with SIGKILL. Then the folder has to load: the tracker names an
iteration that is complete, no older than the last one that was reported as saved, and every other
iteration in sight is complete as well. The next ranks resume from it and compare every value.

File operations are stretched by random pauses of a few milliseconds, so that the kills meet the
short phases, too; the table says which phase each one met, as seen on the disk. ``--training N``
adds kills of a real training run.
"""

# ruff: noqa: T201 - what is printed is the answer
from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.tables import plural, print_json, print_table
from tools.checkpoint.torture_findings import PHASES, Finding, inspect_folder
from tools.checkpoint.torture_runs import MODES, RANKS, Orders, read_progress, save_in_a_loop
from tools.checkpoint.torture_training import kill_training

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess

_START_SECONDS = 180.0
_LONGEST_SECONDS = 1.2
"""The kill comes at most so long after the first save: a few saves, stretched."""
_TRAINING = "training"


class TortureError(CheckpointError):
    """The campaign itself did not work: its ranks did not start, or failed by themselves."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill and what was found after it."""

    number: int
    mode: str
    finding: Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--kills", type=int, default=60, help="how many, half of them async")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument(
        "--training", type=int, default=0, metavar="N", help="kills of a real training run besides"
    )
    parser.add_argument("--folder", type=Path, help="where to save; a temporary one by default")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Run the campaign; return 0 if nothing was lost and nothing half-written was accepted."""
    started = time.monotonic()
    with _folder(options.folder) as folder:
        kills = list(_kill_all(options, folder))
        if options.training:
            kills += [
                Kill(number=len(kills) + number, mode=_TRAINING, finding=finding)
                for number, finding in enumerate(
                    kill_training(folder / _TRAINING, options.training, options.seed)
                )
            ]
    summary = _summary(kills)
    if options.json:
        print_json({"kills": [_record(kill) for kill in kills], "summary": summary})
    else:
        _print(kills, summary, time.monotonic() - started)
    return 1 if any(summary[name] for name in _MUST_BE_ZERO) else 0


def _kill_all(options: argparse.Namespace, folder: Path) -> Sequence[Kill]:
    """Kill the loops of both modes, each in a folder of its own."""
    dice = random.Random(options.seed)  # noqa: S311 - moments, not secrets
    _import_megatron()
    kills = []
    for number in range(options.kills):
        mode = MODES[number % len(MODES)]
        place = folder / mode
        place.mkdir(exist_ok=True)
        finding = _kill_once(place, mode, dice)
        kills.append(Kill(number=number, mode=mode, finding=finding))
        if not options.json:
            print(f"kill {number + 1:3d} {mode:5s} {finding}", flush=True)
    return kills


def _kill_once(place: Path, mode: str, dice: random.Random) -> Finding:
    """Start two ranks, kill them at a random moment, and look at what they left.

    Raises:
        TortureError: the ranks failed by themselves, or saw other values than were saved.
    """
    with tempfile.TemporaryDirectory(prefix="torture-") as meeting:
        orders = Orders(place=place, mode=mode, meeting=Path(meeting), seed=dice.randrange(1 << 30))
        # Forked from this process, which has imported Megatron and started no thread.
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=save_in_a_loop, args=(r, orders)) for r in range(RANKS)]
        for rank in ranks:
            rank.start()
        try:
            _wait_for_the_first_save(ranks, orders)
            time.sleep(dice.uniform(0, _LONGEST_SECONDS))
            _refuse_ended(ranks, orders)
        finally:
            _kill(ranks)
        saved = read_progress(orders)
    return inspect_folder(place, saved)


def _wait_for_the_first_save(ranks: list[BaseProcess], orders: Orders) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not orders.started.exists():
        _refuse_ended(ranks, orders)
        if time.monotonic() > deadline:
            message = f"the ranks did not start within {_START_SECONDS:.0f} s"
            raise TortureError(message)
        time.sleep(0.005)


def _refuse_ended(ranks: list[BaseProcess], orders: Orders) -> None:
    """Stop the campaign when a rank ended before it was killed."""
    if all(rank.is_alive() for rank in ranks):
        return
    time.sleep(1)  # the other one may have more to say
    said = orders.failure.read_text() if orders.failure.exists() else "it left no word"
    message = f"a rank failed by itself while it loaded or saved:\n{said}"
    raise TortureError(message)


def _kill(ranks: list[BaseProcess]) -> None:
    """Kill the ranks with their writers; each is the head of a process group."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.kill()
    for rank in ranks:
        rank.join()


def _import_megatron() -> None:
    """Import once what every rank needs, for the CPU and with one thread."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from megatron.training.cpu_device import enable

    enable()
    importlib.import_module("megatron.training.checkpointing")


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Give the folder to save in, empty, and remove a temporary one after."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="torture-") as made:
            yield Path(made)
        return
    if given.exists() and any(given.iterdir()):
        message = f"--folder {given} is not empty"
        raise TortureError(message)
    given.mkdir(parents=True, exist_ok=True)
    yield given


_MUST_BE_ZERO = ("checkpoints lost", "half-written accepted", "unloadable")


def _summary(kills: list[Kill]) -> dict[str, int]:
    """Count what must be zero."""
    return {
        "kills": len(kills),
        "checkpoints lost": sum(len(kill.finding.lost) for kill in kills),
        "half-written accepted": sum(len(kill.finding.half_written) for kill in kills),
        "unloadable": sum(bool(kill.finding.error) for kill in kills),
    }


def _record(kill: Kill) -> dict[str, Any]:
    return {"number": kill.number, "mode": kill.mode, **json.loads(kill.finding.to_json())}


def _print(kills: list[Kill], summary: dict[str, int], seconds: float) -> None:
    """Print how many kills met each phase, and the sums."""
    modes = sorted({kill.mode for kill in kills}, key=lambda mode: (mode == _TRAINING, mode))
    counts = Counter((kill.finding.phase, kill.mode) for kill in kills)
    rows = [
        [phase, *(counts[phase, mode] for mode in modes)]
        for phase in PHASES
        if any(counts[phase, mode] for mode in modes)
    ]
    totals = Counter(kill.mode for kill in kills)
    rows.append(["all", *(totals[mode] for mode in modes)])
    print()
    print_table(["killed", *(f">{mode}" for mode in modes)], rows)
    print()
    saves = sum(kill.finding.saves for kill in kills)
    print(
        f"{plural(saves, 'save')} completed between {plural(len(kills), 'kill')}; {seconds:.0f} s"
    )
    for name in _MUST_BE_ZERO:
        print(f"{summary[name]} {name}")
