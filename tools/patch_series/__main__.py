"""Command line of the tool: `python -m tools.patch_series status | build | check | record`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tools.patch_series import check, record, report, series, upstream, wheel
from tools.patch_series.records import PatchSeriesError

ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.patch_series", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="for people: base, patches, what is installed")
    checking = commands.add_parser("check", help="for scripts: 0 where everything applies, else 1")
    checking.add_argument(
        "--upstream", type=Path, metavar="PATH", help="a wheel or a checkout (the pinned base)"
    )
    building = commands.add_parser("build", help="write the patched wheel")
    building.add_argument("--output", type=Path, default=Path("dist"), help="folder (dist)")
    building.add_argument("--tag", help="another interpreter's tag, such as cp313-linux_x86_64")
    recording = commands.add_parser("record", help="fill in the fingerprints of the pinned base")
    recording.add_argument("patch", nargs="*", help="patch name or number (all)")
    return parser


def _say(text: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(f"{text}\n")


def _status(_: argparse.Namespace, ours: series.Series) -> int:
    base = upstream.open_base(ours.root)
    outcome = check.check(ours, base, base.version, _opener(ours))
    _say(report.status_text(ours, base, outcome))
    return 0


def _check(options: argparse.Namespace, ours: series.Series) -> int:
    default, _ = upstream.load_pins(ours.root)
    opener = _opener(ours)
    tree = upstream.read_path(options.upstream) if options.upstream else opener(default)
    recorded = {base for patch in ours.patches for base in patch.fingerprints}
    base = tree.version if tree.version in recorded else default
    outcome = check.check(ours, tree, base, opener)
    if outcome.problems:
        _say(report.problems_text(outcome.problems))
        _say(f"{len(outcome.problems)} problem(s) with {tree.label}")
        return 1
    _say(f"{len(ours.patches)} patches apply to {tree.label}")
    return 0


def _build(options: argparse.Namespace, ours: series.Series) -> int:
    built = wheel.build(ours, options.output, tag=options.tag)
    if built.problems:
        _say(report.problems_text(built.problems), sys.stderr)
    if built.wheel is None:
        _say("nothing was built", sys.stderr)
        return 1
    _say(str(built.wheel))
    return 0


def _record(options: argparse.Namespace, ours: series.Series) -> int:
    for done in record.record(ours, upstream.open_base(ours.root), options.patch):
        state = "written" if done.changed else "unchanged"
        _say(f"{done.patch}: {done.count} fingerprint(s), {state}")
    return 0


def _opener(ours: series.Series) -> check.BaseTexts:
    return lambda base: upstream.open_any_base(ours.root, base)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run one command on a repository and return its exit status."""
    options = _parser().parse_args(arguments)
    commands = {"status": _status, "check": _check, "build": _build, "record": _record}
    try:
        return commands[options.command](options, series.load(root))
    except PatchSeriesError as error:
        _say(f"patch_series: {error}", sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
