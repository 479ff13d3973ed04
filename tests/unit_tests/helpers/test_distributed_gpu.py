"""Tier 2: the process harness over NCCL, one GPU per rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.tier2(gpus=2)


def sum_on_gpus() -> tuple[float, int, str]:
    """Return the sum of all ranks, this rank's device, and the backend that added them up."""
    value = torch.tensor(float(dist.get_rank() + 1), device=torch.cuda.current_device())
    dist.all_reduce(value)
    return value.item(), torch.cuda.current_device(), dist.get_backend()


def test_each_rank_has_its_gpu(tmp_path: Path) -> None:
    """Two ranks add up over NCCL, each on the GPU of its rank."""
    assert run_ranks(sum_on_gpus, 2, tmp_path=tmp_path, backend="nccl") == [
        (3.0, 0, "nccl"),
        (3.0, 1, "nccl"),
    ]
