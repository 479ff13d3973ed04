"""Data lanes: all modules see the same samples, each once an epoch, in any layout."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.mimo.data.lanes import LaneBatches, SampleOrder, collate, rank_lanes
from examples.mimo.training.hetero.layout import Layout, LayoutError

pytestmark = pytest.mark.tier0

SIZE = 24
SEED = 3
LAYOUTS = {
    "one each": (2, "vision", "language"),
    "fan-in": (6, "vision:dp=4", "language:dp=2"),
    "fan-out": (5, "vision", "language:dp=4"),
    "TP and PP": (8, "vision:dp=2", "language:tp=2,pp=3"),
    "three modules": (7, "vision:dp=4", "audio", "language:dp=2"),
    "colocated": (4, "vision:dp=4,colocated", "language:tp=2,dp=2"),
}


class CountingDataset:
    """Samples that say who they are: index and epoch, and which module asked."""

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return SIZE

    def language(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        """Return the sample's identity in place of tokens."""
        return {"input_ids": torch.tensor([index, epoch])}

    def modality(self, name: str, index: int, epoch: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the sample's identity, and the length of the module's name as a mark."""
        return {"encoder": {"x": torch.tensor([index, epoch, len(name)])}}


def layout_named(name: str) -> Layout:
    """One of the layouts above."""
    world_size, *options = LAYOUTS[name]
    return Layout.from_options(options, world_size)


def lanes_of(layout: Layout, rank: int, *, micro: int, **settings: Any) -> LaneBatches:
    """Batches of one rank; a run that starts afresh unless ``consumed`` says otherwise."""
    order = SampleOrder(size=SIZE, seed=SEED, shuffle=settings.get("shuffle", True))
    return LaneBatches(
        dataset=CountingDataset(),
        order=order,
        lanes=rank_lanes(layout, rank, micro),
        step_size=micro * layout.language.dp,
        consumed=settings.get("consumed", 0),
    )


def seen(layout: Layout, steps: int, *, micro: int = 4, consumed: int = 0) -> dict[str, list]:
    """Samples (index, epoch) that each module saw, replica after replica within each step."""
    batches = [
        lanes_of(layout, r, micro=micro, consumed=consumed) for r in range(layout.world_size)
    ]
    samples: dict[str, list] = {grid.name: [] for grid in layout.grids}
    for _ in range(steps):
        step = [next(batch) for batch in batches]
        for grid in layout.grids:
            for replica in range(grid.dp):
                samples[grid.name] += of_replica(step, grid, replica)
    return samples


def of_replica(step: list[dict[str, Any]], grid: Any, replica: int) -> list[tuple[int, int]]:
    """What one replica of a module sees of a step; all of its ranks have to see the same."""
    views = []
    for rank in grid.ranks:
        if grid.coordinates(rank)["dp"] == replica:
            batch = step[rank]
            if grid.name == "language":
                found = batch["input_ids"]
            else:
                found = batch["modality_inputs"][grid.name]["encoder"]["x"]
                assert set(found[:, 2].tolist()) == {len(grid.name)}
            views.append([(index, epoch) for index, epoch, *_ in found.tolist()])
    assert all(view == views[0] for view in views)
    return views[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_modules_see_the_same_samples_in_the_same_order(name: str) -> None:
    """In every step each module splits the same samples, in order, over its replicas."""
    layout = layout_named(name)
    size = 4 * layout.language.dp
    order = SampleOrder(size=SIZE, seed=SEED, shuffle=True)
    expected = [
        (int(order.permutation(position // SIZE)[position % SIZE]), position // SIZE)
        for position in range(5 * size)
    ]
    assert seen(layout, 5) == {grid.name: expected for grid in layout.grids}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_of_an_encoder_rank_are_those_of_its_images(name: str) -> None:
    """A rank without the language module places its own lane's images by its own lane's tokens."""
    layout = layout_named(name)
    for rank in range(layout.world_size):
        if rank in layout.language.ranks:
            continue
        batch = next(lanes_of(layout, rank, micro=4))
        (images,) = batch["modality_inputs"].values()
        assert torch.equal(batch["input_ids"], images["encoder"]["x"][:, :2])


@pytest.mark.parametrize("vision", [1, 2, 4])
@pytest.mark.parametrize("language", [1, 2, 4])
def test_an_epoch_has_each_sample_once(vision: int, language: int) -> None:
    """Over an epoch every module sees each sample exactly once, at any pair of dp sizes."""
    layout = Layout.from_options(
        [f"vision:dp={vision}", f"language:dp={language}"], vision + language
    )
    micro = 4 // language or 1
    samples = seen(layout, SIZE // (micro * language), micro=micro)
    for module in ("vision", "language"):
        assert sorted(samples[module]) == [(index, 0) for index in range(SIZE)]


@settings(max_examples=60, deadline=None)
@given(
    dp_sizes=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])), min_size=2
    ),
    steps=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_resumes_at_any_layout(dp_sizes: list[tuple[int, int]], steps: list[int]) -> None:
    """A run that goes on with other dp sizes neither repeats nor skips a sample."""
    consumed = 0
    samples: list[tuple[int, int]] = []
    for (vision, language), count in zip(dp_sizes, steps, strict=False):
        options = [f"vision:dp={vision}", f"language:dp={language}"]
        layout = Layout.from_options(options, vision + language)
        part = seen(layout, count, consumed=consumed)
        assert part["vision"] == part["language"]
        samples += part["language"]
        consumed += count * 4 * language
    whole = seen(Layout.from_options(["vision", "language"], 2), consumed // 4)
    assert samples == whole["language"]


def test_orders_differ_by_epoch_and_by_seed() -> None:
    """Each epoch and each seed has an order of its own, the same one at every call."""
    orders = {
        (seed, epoch): tuple(SampleOrder(size=SIZE, seed=seed, shuffle=True).permutation(epoch))
        for seed, epoch in itertools.product(range(3), range(3))
    }
    assert len(set(orders.values())) == 9
    assert all(sorted(order) == list(range(SIZE)) for order in orders.values())
    again = SampleOrder(size=SIZE, seed=2, shuffle=True)
    assert tuple(again.permutation(1)) == orders[2, 1]


def test_order_takes_nothing_from_the_global_generators() -> None:
    """The order leaves torch's generator alone and does not depend on it."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = SampleOrder(size=SIZE, seed=SEED, shuffle=True).permutation(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = SampleOrder(size=SIZE, seed=SEED, shuffle=True).permutation(0)
    assert first.tolist() == second.tolist()


def test_held_out_order_is_the_datasets_own() -> None:
    """Without shuffling, samples come by index and start again after the last one."""
    layout = layout_named("one each")
    batches = lanes_of(layout, 1, micro=10, shuffle=False)
    found = [next(batches)["input_ids"].tolist() for _ in range(3)]
    assert found[2] == [[i, 0] for i in range(20, 24)] + [[i, 1] for i in range(6)]


def test_steps_cross_the_end_of_an_epoch() -> None:
    """A step that begins in one epoch and ends in the next takes the rest and then a new order."""
    layout = layout_named("one each")
    samples = seen(layout, 4, micro=9)["language"]
    assert sorted(samples[:SIZE]) == [(index, 0) for index in range(SIZE)]
    assert {epoch for _, epoch in samples[SIZE:]} == {1}
    assert len(set(samples)) == 36


def test_uneven_lanes_are_refused() -> None:
    """A step that leaves replicas unequal shares is refused with the numbers."""
    with pytest.raises(LayoutError, match=r"= 6 samples cannot be split evenly .* vision:dp=4"):
        rank_lanes(layout_named("fan-in"), 0, 3)


def test_empty_dataset_is_refused() -> None:
    """There is no order of no samples."""
    with pytest.raises(ValueError, match=r"^a dataset needs at least one sample, not 0\.$"):
        SampleOrder(size=0, seed=1, shuffle=True)


def test_collate_stacks_what_is_nested() -> None:
    """Nested dictionaries keep their shape; tensors get a new first axis."""
    samples = [{"a": {"b": torch.tensor([i, -i])}, "c": torch.tensor(i)} for i in range(3)]
    batch = collate(samples)
    assert batch["a"]["b"].tolist() == [[0, 0], [1, -1], [2, -2]]
    assert batch["c"].tolist() == [0, 1, 2]
