"""Tier 1: every way to ask for a CUDA device gives the CPU, in a process that is switched on."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit_tests.helpers.distributed import RankPool

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
CPU = torch.device('cpu')
DEVICES = ('cuda', 'cuda:1', 0, torch.device('cuda'), torch.device('cuda', 1))


def factories_and_methods() -> None:
    """Make and move tensors with every spelling of a device."""
    for device in DEVICES:
        made = [
            torch.zeros(2, device=device),
            torch.tensor([1.0], device=device),
            torch.empty_like(torch.ones(2), device=device),
            torch.randperm(3, device=device),
            torch.as_tensor([1], device=device),
            torch.ones(2).new_zeros(3, device=device),
            torch.ones(2).to(device),
            torch.ones(2).to(device=device, dtype=torch.half),
            torch.nn.Linear(2, 2, device=device).weight,
            torch.nn.Linear(2, 2).to(device).weight,
        ]
        assert {tensor.device for tensor in made} == {CPU}
        with torch.device(device):
            assert torch.zeros(2).device == CPU
    assert torch.ones(2).cuda().cuda(1).device == CPU
    assert torch.nn.Linear(2, 2).cuda().weight.device == CPU
    assert torch.zeros(2, pin_memory=True).pin_memory().is_pinned() is False


def meta_device_is_left_alone() -> None:
    """Factories still follow a context of another device, and an explicit meta device."""
    with torch.device('meta'):
        assert torch.zeros(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert torch.zeros(2, device='meta').is_meta


def other_threads_are_covered() -> None:
    """A thread that was not there when the switch was used gets the CPU too."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(2, device='cuda').device))
    thread.start()
    thread.join()
    assert found == [CPU]


def types_generators_and_autocast() -> None:
    """Type names read as on a GPU; generators and autocast regions are the CPU's."""
    assert torch.zeros(2).type() == 'torch.cuda.FloatTensor'
    assert torch.zeros(2).type('torch.cuda.HalfTensor').dtype is torch.half
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    generator = torch.Generator(device='cuda')
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.rand(2, generator=generator).device == CPU
    with torch.autocast('cuda', dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def saved_tensors_are_loaded(folder: Path) -> None:
    """Load a file with each kind of map_location."""
    torch.save({'x': torch.arange(3)}, folder / 'x.pt')
    for location in (None, 'cuda', torch.device('cuda', 0), {'cuda:0': 'cuda:1'}):
        assert torch.load(folder / 'x.pt', map_location=location)['x'].device == CPU


def queries_streams_and_memory() -> None:
    """Ask what Megatron asks of a device."""
    from megatron.training.cpu_device import backend, device

    assert (device(), backend()) == (CPU, 'gloo')
    assert torch.cuda.is_available()
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
    resident = torch.cuda.memory_allocated()
    assert 2**26 < resident <= torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_stats()['allocated_bytes.all.peak'] >= resident
    side, start, end = (
        torch.cuda.Stream(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        torch.ones(2).record_stream(side)
    end.record(side)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match='both events'):
        torch.cuda.Event().elapsed_time(end)


def loaders_do_not_pin() -> None:
    """Iterate pinned loaders with and without workers, whose samples come back unpinned."""
    for workers in (0, 1):
        loader = DataLoader([torch.ones(2)] * 4, batch_size=2, pin_memory=True, num_workers=workers)
        assert sum(int(batch.sum()) for batch in loader) == 8


def test_factories_and_methods(rank_pool: Pools) -> None:
    """Strings, indices and device objects mean the CPU."""
    rank_pool(1).run(factories_and_methods)


def test_the_meta_device(rank_pool: Pools) -> None:
    """Only CUDA devices are mapped."""
    rank_pool(1).run(meta_device_is_left_alone)


def test_other_threads(rank_pool: Pools) -> None:
    """The redirections hold in all threads."""
    rank_pool(1).run(other_threads_are_covered)


def test_types_generators_and_autocast(rank_pool: Pools) -> None:
    """Names by which optimizers tell tensors apart, and objects that carry a device."""
    rank_pool(1).run(types_generators_and_autocast)


def test_loading_files(rank_pool: Pools, tmp_path: Path) -> None:
    """Whatever map_location says, tensors arrive on the CPU."""
    rank_pool(1).run(saved_tensors_are_loaded, tmp_path)


def test_queries_streams_and_memory(rank_pool: Pools) -> None:
    """Properties, memory, streams and events have sensible answers."""
    rank_pool(1).run(queries_streams_and_memory)


def test_data_loaders(rank_pool: Pools) -> None:
    """Pinned loading works without a device."""
    rank_pool(1).run(loaders_do_not_pin)
