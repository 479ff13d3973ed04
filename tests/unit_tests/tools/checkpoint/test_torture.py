"""Tier 1: a few kills in the middle of saves, and what the campaign says of bad outcomes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.saves import save_state
from tools.checkpoint import torture_findings
from tools.checkpoint.torture_findings import find_phase, inspect_folder

pytestmark = pytest.mark.tier1

TRACKER = 'latest_checkpointed_iteration.txt'


def test_kills_cost_nothing() -> None:
    """Four kills: nothing lost, nothing half-written in sight, and every value is loaded again."""
    done = subprocess.run(
        [sys.executable, '-m', 'tools.checkpoint', 'torture', '--kills', '4', '--json'],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout[done.stdout.index('{') :])
    zero = {'checkpoints lost': 0, 'half-written accepted': 0, 'unloadable': 0}
    assert report['summary'] == {'kills': 4, **zero}
    assert [kill['mode'] for kill in report['kills']] == ['sync', 'async'] * 2
    assert all(kill['tracked'] >= 1 and kill['saves'] >= 1 for kill in report['kills'])


def save_three(root: Path) -> None:
    """Save three iterations; collective over the world."""
    for iteration in (1, 2, 3):
        save_state(root / f'iter_{iteration:07d}', iteration)


def test_losses_are_counted(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """A campaign sees a lost iteration, a half-written one, and a tracker that fell back."""
    rank_pool(2).run(save_three, tmp_path, timeout=240)
    (tmp_path / TRACKER).write_text('3')
    good = inspect_folder(tmp_path, [1, 2, 3])
    assert (good.lost, good.half_written, good.error, good.tracked) == ((), (), '', 3)
    (tmp_path / TRACKER).write_text('2')
    assert inspect_folder(tmp_path, [1, 2, 3]).lost == (3,)
    shutil.rmtree(tmp_path / 'iter_0000003')
    assert inspect_folder(tmp_path, [1, 2, 3]).lost == (3, 3)
    (tmp_path / 'iter_0000002' / '__0_0.distcp').unlink()
    bad = inspect_folder(tmp_path, [1, 2])
    assert bad.lost == (2,)
    assert bad.half_written == ('iter_0000002: __0_0.distcp: missing',)
    assert 'cannot load iteration 2' in bad.error


@pytest.mark.parametrize(
    ('files', 'phase'),
    [
        ([], torture_findings._BETWEEN),
        (['.iter_0000002.saving/'], torture_findings._MADE),
        (['.iter_0000002.saving/__0_0.distcp'], torture_findings._SHARDS),
        (['.iter_0000002.saving/.metadata'], torture_findings._METADATA),
        (['.iter_0000002.saving/metadata.json'], torture_findings._CONFIG),
        (['.iter_0000002.saving/integrity.json'], torture_findings._MANIFEST),
        (
            ['.iter_0000002.replaced/a', '.iter_0000002.saving/integrity.json'],
            torture_findings._ASIDE,
        ),
        (['.iter_0000001.replaced/a'], torture_findings._REPLACED),
        (['iter_0000002/a'], torture_findings._PUBLISHED),
        (['iter_0000002/a', f'.{TRACKER}.new'], torture_findings._TRACKER),
        (['.iter_0000000.removing/a'], torture_findings._REMOVING),
    ],
)
def test_phases_are_told_apart(files: list[str], phase: str, tmp_path: Path) -> None:
    """Each state of the disk is one phase of a save."""
    (tmp_path / TRACKER).write_text('1')
    for name in ['iter_0000001/a', *files]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith('/') else path.touch()
    assert find_phase(tmp_path) == phase
