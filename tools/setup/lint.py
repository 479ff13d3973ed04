"""Run every linter and say which passed: ``python -m tools.setup.lint [--fix]``.

All of them run, also after one failed, so that one run shows everything there is to mend.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.setup.report import complain, step

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM_STYLE = ("megatron", "tests/unit_tests")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One command of the environment's Python, and what it looks at."""

    title: str
    module: Sequence[str]
    paths: Sequence[str] = ()
    fix: Sequence[str] = ()
    """The same command when it is to mend what it finds; empty where it can only report."""


CHECKS = (
    Check(
        title="ruff",
        module=("ruff", "check", "--quiet"),
        paths=(".",),
        fix=("ruff", "check", "--quiet", "--fix"),
    ),
    Check(
        title="ruff format",
        module=("ruff", "format", "--check"),
        paths=(".",),
        fix=("ruff", "format", "--quiet"),
    ),
    Check(
        title="isort",
        module=("isort", "--check-only", "--diff"),
        paths=UPSTREAM_STYLE,
        fix=("isort", "--quiet"),
    ),
    Check(
        title="black",
        module=("black", "--check", "--quiet", "--diff"),
        paths=UPSTREAM_STYLE,
        fix=("black", "--quiet"),
    ),
    Check(title="pylint", module=("pylint", "--recursive=y", "--score=n"), paths=UPSTREAM_STYLE),
    Check(title="house rules", module=("tools.setup.house_rules",)),
    Check(title="patch series", module=("tools.patch_series", "check")),
    Check(title="installed packages", module=("pip", "check", "--disable-pip-version-check")),
)


def passes(check: Check, *, fix: bool) -> bool:
    """Run one check, print its line, and its output if it failed."""
    module = check.fix if fix and check.fix else check.module
    paths = [path for path in check.paths if (ROOT / path).exists()]
    with step(check.title):
        finished = subprocess.run(
            [sys.executable, "-m", *module, *paths],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        complain(f"{check.title} found something:\n{finished.stdout.rstrip()}")
    return finished.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the linters and return 0 if all passed, else 1."""
    parser = argparse.ArgumentParser(prog="tools.setup.lint", description=__doc__)
    parser.add_argument(
        "--fix", action="store_true", help="format, and mend what can be mended without asking"
    )
    options = parser.parse_args(arguments)
    checks = [check for check in CHECKS if check.fix or not options.fix]
    failed = [check.title for check in checks if not passes(check, fix=options.fix)]
    if failed:
        complain(f"{len(failed)} of {len(checks)} failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
