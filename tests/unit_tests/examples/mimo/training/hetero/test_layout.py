"""The layout of modules over ranks: placement, coordinates, and what is refused."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from examples.mimo.training.hetero.layout import Layout, LayoutError, ModuleGrid
from megatron.core.hyper_comm_grid import HyperCommGrid

pytestmark = pytest.mark.tier0

SYNTAX = "NAME:tp=1,pp=1,dp=1,cp=1,ep=1,etp=1,offset=0 or NAME:tp=1,colocated"
DIMENSIONS = ("tp", "cp", "dp", "pp")


def place(world_size: int, *options: str) -> dict[str, tuple[int, int, int]]:
    """Offset, size and dp of every module of a layout."""
    layout = Layout.from_options(options, world_size)
    return {grid.name: (grid.offset, grid.size, grid.dp) for grid in layout.grids}


PLACEMENTS: dict[str, tuple[int, tuple[str, ...], dict[str, tuple[int, int, int]]]] = {
    "language alone takes all ranks": (6, ("language:tp=2",), {"language": (0, 6, 3)}),
    "one process": (1, ("language",), {"language": (0, 1, 1)}),
    "an encoder's dp is 1": (
        4,
        ("vision:tp=2", "language"),
        {"vision": (0, 2, 1), "language": (2, 2, 2)},
    ),
    "language dp is what is left": (
        8,
        ("vision:dp=2", "language:tp=2,pp=3"),
        {"vision": (0, 2, 2), "language": (2, 6, 1)},
    ),
    "three modules in order": (
        8,
        ("vision:tp=2", "audio:dp=2", "language:tp=2"),
        {"vision": (0, 2, 1), "audio": (2, 2, 2), "language": (4, 4, 2)},
    ),
    "offsets reverse the order of the options": (
        4,
        ("language:offset=2", "vision:dp=2,offset=0"),
        {"language": (2, 2, 2), "vision": (0, 2, 2)},
    ),
    "an offset counts among the ranks that are taken": (
        4,
        ("vision:dp=2,offset=0", "language"),
        {"vision": (0, 2, 2), "language": (2, 2, 2)},
    ),
    "colocated dp fills the language ranks": (
        4,
        ("vision:colocated", "language:tp=2"),
        {"vision": (0, 4, 4), "language": (0, 4, 2)},
    ),
    "colocated encoder listed last": (
        4,
        ("language:tp=4", "vision:tp=2,colocated"),
        {"language": (0, 4, 1), "vision": (0, 4, 2)},
    ),
}


@pytest.mark.parametrize('case', PLACEMENTS)
def test_placement(case: str) -> None:
    """Options that leave sizes open are filled in as the help says."""
    world_size, options, expected = PLACEMENTS[case]
    assert place(world_size, *options) == expected


def test_expert_sizes_follow_the_dense_ones() -> None:
    """The expert tensor size defaults to tp, and experts share all dense ranks."""
    default = Layout.from_options(["language:tp=2,ep=2"], 4).language
    assert (default.etp, default.ep, default.expert_dp) == (2, 2, 1)
    split = Layout.from_options(["language:tp=2,ep=2,etp=1,pp=2"], 8).language
    assert (split.etp, split.ep, split.expert_dp) == (1, 2, 2)


def test_ranks_know_their_modules() -> None:
    """A rank hosts one module of a disjoint layout and all modules of a colocated one."""
    disjoint = Layout.from_options(["vision:dp=2", "language:tp=2"], 4)
    assert [disjoint.modules_of(rank) for rank in range(4)] == [("vision",)] * 2 + [
        ("language",)
    ] * 2
    assert not disjoint.colocated
    shared = Layout.from_options(["vision:colocated", "language:tp=2"], 2)
    assert [shared.modules_of(rank) for rank in range(2)] == [("vision", "language")] * 2
    assert shared.colocated
    assert [grid.name for grid in shared.encoders] == ["vision"]


def test_record_rebuilds_the_layout() -> None:
    """What a checkpoint keeps of a layout says everything about it, as plain values."""
    layout = Layout.from_options(["vision:dp=2,tp=2", "language:tp=2,pp=2,ep=1"], 8)
    record = json.loads(json.dumps(layout.record()))
    assert list(record) == ["vision", "language"]
    grids = tuple(ModuleGrid(name=name, **sizes) for name, sizes in record.items())
    assert Layout(grids=grids, world_size=8) == layout


def test_samples_per_lane() -> None:
    """Every module splits the samples of one step over its own replicas."""
    layout = Layout.from_options(["vision:dp=4", "language:dp=2"], 6)
    assert layout.samples_per_lane("language", 2) == 2
    assert layout.samples_per_lane("vision", 2) == 1
    with pytest.raises(LayoutError) as refusal:
        layout.samples_per_lane("vision", 3)
    assert str(refusal.value) == (
        "--micro-batch-size 3 times language dp 2 = 6 samples cannot be split evenly over "
        "--module vision:dp=4."
    )


def grids() -> st.SearchStrategy[ModuleGrid]:
    """Grids of up to 4 x 3 x 4 x 3 ranks at any offset, with experts over the dense ranks."""

    def with_experts(sizes: dict[str, int], choice: int) -> ModuleGrid:
        dense = sizes["tp"] * sizes["cp"] * sizes["dp"]
        pairs = [(e, t) for e, t in product(range(1, dense + 1), repeat=2) if dense % (e * t) == 0]
        ep, etp = pairs[choice % len(pairs)]
        return ModuleGrid(name="language", ep=ep, etp=etp, **sizes)

    sizes = st.fixed_dictionaries(
        {
            "tp": st.integers(1, 4),
            "cp": st.integers(1, 3),
            "dp": st.integers(1, 4),
            "pp": st.integers(1, 3),
            "offset": st.integers(0, 5),
        }
    )
    return st.builds(with_experts, sizes, st.integers(0, 100))


def hyper_grid(grid: ModuleGrid) -> HyperCommGrid:
    """Megatron's own grid of the same sizes; knows the ranks without creating groups."""
    made = HyperCommGrid(
        shape=[grid.tp, grid.cp, grid.dp, grid.pp],
        dim_names=list(DIMENSIONS),
        rank_offset=grid.offset,
    )
    made.register_view(
        "expert",
        shape=[grid.etp, grid.ep, grid.expert_dp, grid.pp],
        dim_names=["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    return made


@pytest.fixture
def big_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `HyperCommGrid` take ranks of a world as large as it likes."""
    monkeypatch.setenv("WORLD_SIZE", "1000")


def lines(grid: ModuleGrid, dimension: str) -> list[list[int]]:
    """Group a grid's ranks that differ in one coordinate only, by our coordinates."""
    groups: dict[Any, list[int]] = {}
    for rank in grid.ranks:
        where = grid.coordinates(rank)
        key = tuple(where[other] for other in DIMENSIONS if other != dimension)
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


@pytest.mark.usefixtures("big_world")
@given(grid=grids())
@settings(max_examples=200, deadline=None)
def test_coordinates_are_megatrons(grid: ModuleGrid) -> None:
    """Coordinates are unique, and ranks that differ in one of them form Megatron's groups."""
    places = [tuple(grid.coordinates(rank)[key] for key in DIMENSIONS) for rank in grid.ranks]
    sizes = [range(getattr(grid, key)) for key in DIMENSIONS]
    assert sorted(places) == sorted(product(*sizes))
    theirs = hyper_grid(grid)
    for dimension in DIMENSIONS:
        assert lines(grid, dimension) == sorted(theirs.get_rank_enum(dimension))


@pytest.mark.usefixtures("big_world")
@given(grid=grids())
@settings(max_examples=200, deadline=None)
def test_expert_coordinate_is_megatrons(grid: ModuleGrid) -> None:
    """A rank's expert coordinate is its place in its expert-parallel group."""
    for group in hyper_grid(grid).get_rank_enum("ep", view="expert"):
        assert [grid.coordinates(rank)["ep"] for rank in group] == list(range(grid.ep))


WRONG: list[tuple[int, tuple[str, ...], str]] = [
    (1, (), f"--module is missing: give at least one, as {SYNTAX}."),
    (0, ("language",), "--world-size 0 must be at least 1."),
    (1, (":tp=2",), f"--module ':tp=2' does not start with a module name; write {SYNTAX}."),
    (1, ("2b:tp=2",), f"--module '2b:tp=2' does not start with a module name; write {SYNTAX}."),
    (
        2,
        ("language:tensor=2",),
        (
            "--module language: unknown key 'tensor'; known are tp, pp, dp, cp, ep, etp, offset, "
            "colocated."
        ),
    ),
    (2, ("language:tp=2,tp=1",), "--module language: tp is given twice."),
    (2, ("language:tp=two",), "--module language:tp=two is not a whole number."),
    (2, ("language:tp",), "--module language:tp= is not a whole number."),
    (2, ("language:tp=0",), "--module language:tp=0 must be at least 1."),
    (2, ("language:dp=0",), "--module language:dp=0 must be at least 1."),
    (2, ("vision:dp=-1", "language"), "--module vision:dp=-1 must be at least 1."),
    (2, ("language:ep=0",), "--module language:ep=0 must be at least 1."),
    (2, ("language:offset=-1",), "--module language:offset=-1 must not be negative."),
    (
        2,
        ("language:tp=2,ep=4",),
        (
            "--module language: etp*ep = 2*4 must divide tp*cp*dp = 2*1*1 = 2, since experts share "
            "the dense ranks (etp defaults to tp)."
        ),
    ),
    (
        2,
        ("vision", "vision", "language"),
        "--module vision is given 2 times; a module has one grid.",
    ),
    (
        2,
        ("vision", "audio"),
        "--module language:... is missing; the modules given are vision, audio.",
    ),
    (
        4,
        ("language:tp=4,colocated",),
        "--module language:colocated: write colocated at the encoders, not at the language.",
    ),
    (
        4,
        ("vision:colocated", "audio", "language"),
        (
            "--module vision is colocated but audio is not; either all encoders share the language "
            "ranks or none does."
        ),
    ),
    (
        4,
        ("vision:colocated", "language:pp=2"),
        "--module language:pp=2 must be 1 in a colocated layout.",
    ),
    (
        4,
        ("vision:colocated,pp=2", "language"),
        "--module vision:pp=2 must be 1 in a colocated layout.",
    ),
    (
        4,
        ("vision:tp=2,dp=1,colocated", "language"),
        (
            "--module vision (colocated) has tp*cp*dp = 2*1*1 = 2 ranks, but the language module "
            "that it shares has 4."
        ),
    ),
    (
        6,
        ("vision:tp=2,colocated", "language:tp=3"),
        "--module vision:dp=3 and language:dp=2: one must be a multiple of the other.",
    ),
    (
        2,
        ("vision:colocated,offset=1", "language"),
        (
            "--module vision:colocated,offset=1: a colocated module has the offset of the language "
            "module; leave one of the two out."
        ),
    ),
    (
        4,
        ("vision:dp=2", "language:tp=4"),
        "--module options need 6 ranks (vision 0-1, language 2-5), but the world size is 4.",
    ),
    (
        4,
        ("vision", "language:tp=2"),
        (
            "rank 3 of 4 hosts no module (vision 0-0, language 1-2); adjust dp or offset of the "
            "--module options or the number of processes."
        ),
    ),
    (
        3,
        ("vision", "language:dp=1,offset=2"),
        (
            "rank 1 of 3 hosts no module (vision 0-0, language 2-2); adjust dp or offset of the "
            "--module options or the number of processes."
        ),
    ),
    (
        2,
        ("vision:offset=1", "language:dp=2,offset=0"),
        (
            "--module vision and language both claim rank 1; give them disjoint ranks, or mark "
            "every encoder colocated."
        ),
    ),
    (
        1,
        ("vision:offset=0", "language:offset=0"),
        (
            "--module vision and language both claim rank 0; give them disjoint ranks, or mark "
            "every encoder colocated."
        ),
    ),
    (
        2,
        ("language:dp=1", "vision"),
        (
            "--module language ends at rank 0 of 2; give it last (or a higher offset), since "
            "Megatron logs the loss from the last rank."
        ),
    ),
    (
        4,
        ("vision:cp=2", "language"),
        (
            "--module vision:cp=2 must be 1 between disjoint modules: the bridge does not split "
            "sequences."
        ),
    ),
    (
        3,
        ("vision", "language:cp=2"),
        (
            "--module language:cp=2 must be 1 between disjoint modules: the bridge does not split "
            "sequences."
        ),
    ),
    (
        5,
        ("vision:dp=2", "language:dp=3"),
        "--module vision:dp=2 and language:dp=3: one must be a multiple of the other.",
    ),
]


@pytest.mark.parametrize(("world_size", "options", "sentence"), WRONG)
def test_wrong_layouts(world_size: int, options: tuple[str, ...], sentence: str) -> None:
    """What cannot work is refused with one sentence that names the flag and the numbers."""
    with pytest.raises(LayoutError) as refusal:
        Layout.from_options(options, world_size)
    assert str(refusal.value) == sentence


def test_wrong_layouts_are_many() -> None:
    """Every wrong layout has a sentence of its own."""
    sentences = [sentence for _, _, sentence in WRONG]
    assert len(set(sentences)) == len(sentences) >= 16


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    world_size=st.integers(1, 12),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), max_size=2),
    language=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_accepted_layouts_cover_the_world_once(
    world_size: int, sizes: list[tuple[int, int, int]], language: tuple[int, int]
) -> None:
    """A disjoint layout that is accepted gives every rank exactly one module and divisible dp."""
    options = [f"e{number}:tp={tp},pp={pp},dp={dp}" for number, (tp, pp, dp) in enumerate(sizes)]
    options.append(f"language:tp={language[0]},pp={language[1]}")
    try:
        layout = Layout.from_options(options, world_size)
    except LayoutError:
        reject()
    assert [len(layout.modules_of(rank)) for rank in range(world_size)] == [1] * world_size
    for grid in layout.encoders:
        larger, smaller = sorted((grid.dp, layout.language.dp), reverse=True)
        assert larger % smaller == 0
