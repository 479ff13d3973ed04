"""The three tiers: which tests run where, and that a tier never vanishes in silence.

Every test names its tier, usually for its whole file: ``pytestmark = pytest.mark.tier0``. A run
takes tiers 0 and 1 and skips tier 2 in sight, or it takes just the tiers given with ``--tier``. A
run of the whole suite in which a chosen tier ran no test fails.
"""

import shutil
import subprocess
from collections import Counter
from functools import cache

import pytest

TIERS = (0, 1, 2)
WITHOUT_GPU = (0, 1)


def add_tier_option(parser: pytest.Parser) -> None:
    """Add ``--tier`` to pytest's command line."""
    parser.addoption(
        "--tier",
        type=int,
        action="append",
        choices=TIERS,
        help="run this tier (repeatable; the default is 0 and 1, which need no GPU)",
    )


def chosen_tiers(config: pytest.Config) -> tuple[int, ...]:
    """Return the tiers of this run."""
    return tuple(config.getoption("--tier") or WITHOUT_GPU)


@cache
def gpu_count() -> int:
    """Return how many GPUs the driver lists, without importing torch."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return listing.stdout.count("GPU ") if listing.returncode == 0 else 0


def tier_of(item: pytest.Item) -> int:
    """Return the test's tier.

    Raises:
        pytest.UsageError: when it names none, or several.
    """
    tiers = [tier for tier in TIERS if item.get_closest_marker(f"tier{tier}")]
    if len(tiers) != 1:
        raise pytest.UsageError(
            f"{item.nodeid} names {len(tiers)} tiers instead of one; put for example "
            "`pytestmark = pytest.mark.tier0` at the top of its file"
        )
    return tiers[0]


class TierPlugin:
    """Skip what is not chosen, count what ran, and fail a whole run with an empty tier."""

    def __init__(self, config: pytest.Config) -> None:
        """Start with nothing counted."""
        self.config = config
        self.chosen = chosen_tiers(config)
        self.tiers: dict[str, int] = {}
        self.ran: Counter[int] = Counter()
        self.skipped: Counter[int] = Counter()
        self.is_whole_run = _is_whole_run(config)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what was not chosen by hand, and mark what this machine cannot run."""
        for item in items:
            self.tiers[item.nodeid] = tier_of(item)
        if self.config.getoption("--tier"):
            others = [item for item in items if self.tiers[item.nodeid] not in self.chosen]
            items[:] = [item for item in items if self.tiers[item.nodeid] in self.chosen]
            self.config.hook.pytest_deselected(items=others)
        for item in items:
            reason = self._reason_to_skip(item, self.tiers[item.nodeid])
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def _reason_to_skip(self, item: pytest.Item, tier: int) -> str:
        if tier not in self.chosen:
            return f"tier {tier} was not asked for; run it with: make test-gpu"
        if tier not in WITHOUT_GPU:
            marker = item.get_closest_marker(f"tier{tier}")
            needed = marker.kwargs.get("gpus", 1) if marker else 1
            if gpu_count() < needed:
                return f"needs {needed} GPU(s); this machine has {gpu_count()}"
        return ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test as run once its body was called."""
        tier = self.tiers.get(report.nodeid)
        if tier is None:
            return
        if report.skipped and report.when in {"setup", "call"}:
            self.skipped[tier] += 1
        elif report.when == "call":
            self.ran[tier] += 1

    def empty_tiers(self) -> list[int]:
        """Return the chosen tiers that this machine can run and of which no test ran."""
        able = [tier for tier in self.chosen if tier in WITHOUT_GPU or gpu_count() > 0]
        return [tier for tier in able if not self.ran[tier]]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a whole run in which a tier ran no test."""
        if session.config.option.collectonly or not self.is_whole_run:
            return
        good = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
        if self.empty_tiers() and session.exitstatus in good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say for each tier how many tests ran and how many were skipped."""
        if self.config.option.collectonly:
            return
        given_by_hand = self.config.getoption("--tier")
        for tier in self.chosen if given_by_hand else TIERS:
            counts = f"{self.ran[tier]} ran, {self.skipped[tier]} skipped"
            terminalreporter.write_line(f"tier {tier}: {counts}")
        if self.is_whole_run:
            for tier in self.empty_tiers():
                terminalreporter.write_line(f"tier {tier} ran no test: this run fails", red=True)


def _is_whole_run(config: pytest.Config) -> bool:
    """Whether this run takes everything there is, and not a choice made by hand."""
    option = config.option
    picked = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    return config.args_source is not pytest.Config.ArgsSource.ARGS and not picked
