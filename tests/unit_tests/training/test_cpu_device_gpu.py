"""Tier 2: on a host with GPUs the switch hides them, and without it nothing changes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.tier2

HIDDEN = """
import torch
from megatron.training.cpu_device import backend, device, enable
assert not torch.cuda.is_initialized()
enable()
assert torch.zeros(2, device='cuda').device.type == 'cpu'
assert torch.nn.Linear(2, 2).cuda().weight.device.type == 'cpu'
assert (device().type, backend()) == ('cpu', 'gloo')
assert torch.cuda.get_device_name() == 'cpu'
"""
UNTOUCHED = """
import torch
from megatron.training.cpu_device import backend, device, enable
assert (device().type, backend()) == ('cuda', 'nccl')
assert torch.zeros(2, device=device()).is_cuda
try:
    enable()
except RuntimeError as error:
    assert 'before the process first uses a GPU' in str(error)
else:
    raise AssertionError('a process that uses a GPU was switched')
"""


@pytest.mark.parametrize('program', [HIDDEN, UNTOUCHED], ids=['enabled', 'not enabled'])
def test_a_host_with_gpus(program: str) -> None:
    """The program's assertions hold in a fresh process."""
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
