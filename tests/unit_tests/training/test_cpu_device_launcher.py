"""Tier 1: ``python -m megatron.training.cpu_device`` as a user runs it, whole processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.helpers import torchrun
from tests.unit_tests.training.stock_runs import (
    DISTRIBUTED_OPTIMIZER,
    MODEL,
    NO_DROPOUT,
    TENSOR_PARALLEL,
    TRAINING,
    read_losses,
)

pytestmark = [
    pytest.mark.tier1,
    pytest.mark.skipif(torchrun.is_active(), reason='starts processes of its own'),
]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name('stock_gpt.py')
TIMEOUT = 120


def launch(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the launcher with ``words`` outside of any job, and check its exit status."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
    }
    paths = [str(ROOT), environment.get('PYTHONPATH', '')]
    environment['PYTHONPATH'] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, '-m', 'megatron.training.cpu_device', *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def test_two_processes_train_a_stock_script(tmp_path: Path) -> None:
    """The script runs unchanged on two ranks, and one line of one rank says that it is the CPU."""
    losses = tmp_path / 'losses'
    done = launch(
        '--nproc-per-node',
        '2',
        str(SCRIPT),
        *MODEL,
        *TRAINING,
        *NO_DROPOUT,
        *TENSOR_PARALLEL,
        *DISTRIBUTED_OPTIMIZER,
        '--train-iters',
        '2',
        '--losses',
        str(losses),
    )
    assert done.stdout.count('running on CPU with gloo, 2 processes') == 1
    first, second = (read_losses(Path(f'{losses}.{rank}')) for rank in range(2))
    assert len(first.training) == 4
    assert first == second


def test_a_module_runs_alone_and_its_exit_status_passes_through(tmp_path: Path) -> None:
    """Without torchrun the world has one process; ``-m`` runs a module; its status is ours."""
    module = tmp_path / 'of_one.py'
    module.write_text(
        'import os, sys, torch\n'
        "torch.distributed.init_process_group('nccl')\n"
        "value = torch.ones(1, device='cuda')\n"
        'torch.distributed.all_reduce(value)\n'
        "print('sum', value.item(), os.environ['WORLD_SIZE'], sys.argv[1:], __name__)\n"
        'torch.distributed.destroy_process_group()\n'
        'sys.exit(7)\n',
        encoding='utf-8',
    )
    done = launch('--keep-arguments', str(module), '--own', 'flag', expect=7)
    assert "sum 1.0 1 ['--own', 'flag'] __main__" in done.stdout
    assert 'running on CPU with gloo, 1 process\n' in done.stdout


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        (['missing.py'], 'error: script missing.py does not exist'),
        (['-m', 'json.tool', '--fp8-format', 'hybrid'], 'error: --fp8-format does not work on the'),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str) -> None:
    """A command line that cannot run ends with status 2 and says why, without a traceback."""
    done = launch(*words, expect=2)
    assert sentence in done.stderr
    assert 'Traceback' not in done.stderr


def test_the_table_of_redirections_is_printed() -> None:
    """``--list`` names what is replaced, its stand-in and the reason."""
    done = launch('--list')
    assert '| nothing | a CPU operator has finished when it returns |' in done.stdout
    assert '`torch.distributed`: init_process_group' in done.stdout
