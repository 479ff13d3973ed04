"""Rules of the whole suite: the installed package is this tree's, and tiers never vanish."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.unit_tests.helpers import torchrun
from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.process_state import quiet_environment
from tests.unit_tests.helpers.rank_failures import RankFailedError, RanksTimedOutError
from tests.unit_tests.helpers.tiers import TierPlugin, chosen_tiers
from tools.patch_series import installed

MISMATCH_EXIT = 3
RANK_ERRORS = (RankFailedError, RanksTimedOutError)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an installed package that is not this tree's, and get this process ready."""
    verdict = installed.inspect()
    if not verdict.matches:
        pytest.exit(verdict.message(), returncode=MISMATCH_EXIT)
    quiet_environment()
    if torchrun.is_active():
        torchrun.prepare(config, "nccl" if 2 in chosen_tiers(config) else "gloo")
    config.pluginmanager.register(TierPlugin(config), "tiers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep a rank's traceback to the failure itself: the summary gets its first line."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and call.excinfo and call.excinfo.errisinstance(RANK_ERRORS):
        crash.message = crash.message.splitlines()[0]
    return report


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A temporary folder of this test; under torchrun, the same one on every rank."""
    return torchrun.share(tmp_path) if torchrun.is_active() else tmp_path


@pytest.fixture(scope='module')
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """Ranks that the tests of one file share: ``rank_pool(4).run(function, *args)``."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            folder = tmp_path_factory.mktemp(f"ranks-{world_size}-")
            pools[world_size] = RankPool(world_size, folder=folder)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
