"""Tier 0: importing the package changes nothing; switching it on changes what the table says."""

import json
import subprocess
import sys

import pytest

from tests.unit_tests.helpers import torchrun

pytestmark = [
    pytest.mark.tier0,
    pytest.mark.skipif(torchrun.is_active(), reason='starts a fresh process; once is enough'),
]

PROGRAM = """
import json, os, sys, warnings
warnings.filterwarnings('ignore')
import torch, torch.distributed, megatron.training
from torch.distributed import distributed_c10d, device_mesh
from torch.utils import _device
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from multiprocessing import context
owners = [torch, torch.random, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.Tensor,
          torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx, torch.accelerator,
          torch.serialization, torch.distributed, distributed_c10d, device_mesh,
          torch._C._distributed_c10d.ProcessGroup, torch.amp.autocast_mode.autocast,
          _device.DeviceContext, DataLoader, _BaseDataLoaderIter, context.SpawnProcess,
          context.ForkServerProcess]
def names():
    return {(i, n): id(v) for i, o in enumerate(owners) for n, v in vars(o).items()}
before, environment = names(), dict(os.environ)
from megatron.training import cpu_device
from megatron.training.cpu_device import redirect
def changes():
    after = names()
    return sum(after.get(k) != v for k, v in before.items() if k[1] != '__annotations__')
answer = {'imported': changes(), 'enabled_by_import': cpu_device.is_enabled(),
          'environment_kept': environment == dict(os.environ), 'recorded': len(redirect.redirects())}
cpu_device.enable()
answer['switched'] = changes()
count = len(redirect.redirects())
cpu_device.enable()
answer['second_call'] = len(redirect.redirects()) - count
answer['device'], answer['backend'] = str(cpu_device.device()), cpu_device.backend()
answer['enabled'] = cpu_device.is_enabled()
answer['undocumented'] = [r.name for r in redirect.redirects() if not (r.to and r.why)]
answer['count'] = count
answer['table'] = redirect.table()
from pathlib import Path
answer['readme'] = (Path(cpu_device.__file__).parent / 'README.md').read_text()
print(json.dumps(answer))
"""


@pytest.fixture(scope='module')
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a fresh process observed of itself."""
    program = tmp_path_factory.mktemp('switch') / 'program.py'
    program.write_text(PROGRAM, encoding='utf-8')
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_changes_nothing(answer: dict) -> None:
    """Torch, its classes and the environment are untouched until the switch is used."""
    assert answer['imported'] == 0
    assert answer['recorded'] == 0
    assert answer['environment_kept']
    assert not answer['enabled_by_import']


def test_switching_on_replaces_and_records(answer: dict) -> None:
    """After the switch the names are replaced, each is in the table, and a second call is idle."""
    assert answer['enabled']
    assert answer['switched'] > 100
    assert answer['count'] >= answer['switched']
    assert answer['second_call'] == 0
    assert answer['undocumented'] == []


def test_the_readme_documents_every_replacement(answer: dict) -> None:
    """The table of the README is the one that ``--list`` prints, word for word."""
    assert answer['readme'].partition('## What is replaced')[2].strip() == answer['table']


def test_device_and_backend_follow_the_switch(answer: dict) -> None:
    """Our own code asks for both at one place."""
    assert (answer['device'], answer['backend']) == ('cpu', 'gloo')
