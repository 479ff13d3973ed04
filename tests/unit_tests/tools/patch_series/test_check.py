"""Tier 0: claims, fingerprints, drift with its three texts, and what is droppable."""

import dataclasses

import pytest

from tests.unit_tests.tools.patch_series.toy import BASE, UPSTREAM, UTILS, Toy
from tools.patch_series import check, record, report, upstream
from tools.patch_series.records import Kind, Problem

pytestmark = pytest.mark.tier0

OURS = "'''Ours.'''\n\n\ndef half(number):\n    return 0.5 * number\n"
GRAFT = f"[[graft]]\nfile = '{UTILS}'\nnames = ['half']\n"
SEAM = (
    f"[[seam]]\nfile = '{UTILS}'\nwhere = 'Counter.add'\nreplace = 'self.count += number'\n"
    "code = 'self.count = added(self, number)'\n"
)


def problems(toy: Toy, tree: upstream.Upstream | None = None) -> tuple[Problem, ...]:
    """Check the series against the base, or against another tree."""
    base = toy.base()
    return check.check(toy.series(), tree or base, BASE, lambda _: base).problems


def prepared(toy: Toy, body: str = GRAFT + SEAM, ours: str = OURS) -> None:
    """Make a recorded series of one patch."""
    toy.write(UTILS, ours)
    toy.patch("0001-a", body)
    record.record(toy.series(), toy.base(), [])


def changed(toy: Toy, old: str, new: str, path: str = UTILS) -> upstream.Upstream:
    """Return the base with one text changed."""
    files = {name: text.encode() for name, text in UPSTREAM.items()}
    assert files[path].count(old.encode()) == 1
    files[path] = files[path].replace(old.encode(), new.encode())
    return dataclasses.replace(toy.base(), label="another tree", files=files)


def test_a_recorded_series_has_no_problems(repository: Toy) -> None:
    """And recording it again writes nothing."""
    prepared(repository)
    assert problems(repository) == ()
    (again,) = record.record(repository.series(), repository.base(), ["0001"])
    assert (again.count, again.changed) == (2, False)


@pytest.mark.parametrize(
    ('old', 'new', 'theirs'),
    [
        ("return number / 2", "return number // 2", "return number // 2"),
        ("def half(number)", "def half(value)", "def half(value)"),
        ("def half(number)", "# Why.\ndef half(number)", "# Why."),
        ("self.count += number", "self.count += nunber", "self.count += nunber"),
        ("def half(number):\n    return number / 2\n", "", "(not there)"),
        ("class Counter:", "class Counters:", "upstream has 0 definitions of `Counter.add`"),
    ],
)
def test_drift_shows_base_ours_and_theirs(repository: Toy, old: str, new: str, theirs: str) -> None:
    """One changed character under a patch is one problem, and it stops a build."""
    prepared(repository)
    (problem,) = problems(repository, changed(repository, old, new))
    assert problem.kind is Kind.DRIFT
    assert problem.stops_build
    assert problem.texts is not None
    assert theirs in problem.texts.theirs
    assert problem.texts.base in UPSTREAM[UTILS].replace("        ", "")
    assert problem.texts.ours.strip() in OURS + SEAM
    shown = report.problems_text([problem])
    for text in (problem.texts.base, problem.texts.ours, problem.texts.theirs):
        assert text in shown


def test_a_change_elsewhere_is_no_drift(repository: Toy) -> None:
    """Only what a patch replaces is watched."""
    prepared(repository)
    assert problems(repository, changed(repository, "number * 2", "2 * number")) == ()
    moved = changed(repository, "        return self.count\n", "        return int(self.count)\n")
    assert problems(repository, moved) == ()


def test_a_name_that_upstream_gains_is_drift(repository: Toy) -> None:
    """We only added it, so nobody has read what would be replaced now."""
    ours = OURS + "\n\ndef third(number):\n    return number / 3\n"
    prepared(repository, GRAFT.replace("'half'", "'half', 'third'"), ours)
    assert problems(repository) == ()
    gained = changed(repository, "class Counter", "def third(n):\n    return n\n\n\nclass Counter")
    (problem,) = problems(repository, gained)
    assert problem.kind is Kind.DRIFT
    assert problem.texts is not None
    assert problem.texts.base == "(not there)\n"


@pytest.mark.parametrize(
    ('body', 'how'),
    [
        ("return number / 2", "letter for letter"),
        ("return (number /\n            2)  # half", "apart from formatting and comments"),
    ],
)
def test_a_graft_that_upstream_has_is_droppable(repository: Toy, body: str, how: str) -> None:
    """It is reported, and does not stop a build."""
    prepared(repository, GRAFT, f"def half(number):\n    {body}\n")
    (problem,) = problems(repository)
    assert (problem.kind, problem.stops_build) == (Kind.DROPPABLE, False)
    assert problem.message == f"upstream has this already ({how}): drop it"


def test_a_seam_that_upstream_has_is_droppable(repository: Toy) -> None:
    """Also where its anchor is gone by now."""
    prepared(repository, SEAM, ours="")
    (repository.root / UTILS).unlink()
    merged = changed(repository, "self.count += number", "self.count = added(self, number)")
    found = problems(repository, merged)
    assert [problem.kind for problem in found] == [Kind.DROPPABLE]


def test_without_fingerprints_nothing_is_built(repository: Toy) -> None:
    """The message says which command writes them."""
    repository.write(UTILS, OURS)
    repository.patch("0001-a", GRAFT + SEAM)
    found = problems(repository)
    assert [problem.kind for problem in found] == [Kind.UNRECORDED, Kind.UNRECORDED]
    assert all("run `record`" in problem.message and problem.stops_build for problem in found)


def test_a_seam_without_a_place_says_so_before_it_is_recorded(repository: Toy) -> None:
    """The anchor is what has to be mended, not the fingerprint."""
    repository.patch("0001-a", SEAM.replace("self.count += number", "self.count += 1"))
    (problem,) = problems(repository)
    assert problem.kind is Kind.SEAM
    assert "the anchor `self.count += 1` matches 0 statements" in problem.message
    (done,) = record.record(repository.series(), repository.base(), [])
    assert done.count == 0


NEW = "megatron/core/new.py"


@pytest.mark.parametrize(
    ('patches', 'files', 'where', 'message'),
    [
        ([SEAM], {UTILS: OURS}, f"{UTILS}::half", "claimed by no patch"),
        ([GRAFT, GRAFT], {UTILS: OURS}, f"{UTILS}::half", "claimed by 2 patches: 0001-a, 0002-a"),
        ([GRAFT], {}, UTILS, "a file that the sparse tree does not have"),
        ([GRAFT.replace("half", "hal")], {UTILS: OURS}, f"{UTILS}::hal", "does not have"),
        ([GRAFT], {UTILS: OURS, NEW: ""}, NEW, "claimed by no patch"),
        ([f"files = ['{UTILS}']\n"], {UTILS: OURS}, UTILS, "upstream has this file"),
        ([f"files = ['{NEW}']\n"], {}, NEW, "claims a file that the sparse tree does not"),
        ([GRAFT.replace(UTILS, NEW)], {NEW: "x = 1\n"}, NEW, "claim the whole file under `files`"),
        (
            [GRAFT + SEAM.replace("Counter.add", "half").replace("self.count += number", "return")],
            {UTILS: OURS},
            f"{UTILS}::half",
            "a seam in a definition that the series replaces",
        ),
        (
            ["files = ['megatron/core/__init__.py']\n"],
            {"megatron/core/__init__.py": "x = 1\n"},
            "megatron/core/__init__.py",
            "would hide the installed package",
        ),
        (
            [GRAFT],
            {UTILS: OURS + "\n\nclass Counter(dict):\n    pass\n"},
            f"{UTILS}::Counter.<header>",
            "decorators, bases or keywords are not upstream's",
        ),
    ],
)
def test_every_definition_belongs_to_exactly_one_patch(
    repository: Toy, patches: list[str], files: dict[str, str], where: str, message: str
) -> None:
    """What is unclaimed, claimed twice or not there is named and stops the build."""
    for path, text in files.items():
        repository.write(path, text)
    for number, body in enumerate(patches, start=1):
        repository.patch(f"{number:04}-a", body)
    found = [item for item in problems(repository) if item.where == where]
    assert any(message in item.message and item.stops_build for item in found), found


def test_figures_of_what_is_carried(repository: Toy) -> None:
    """A replaced definition counts the lines that are still upstream's."""
    prepared(repository)
    base = repository.base()
    outcome = check.check(repository.series(), base, BASE, lambda _: base)
    carried = report.carried(repository.series(), base, outcome)
    assert (carried.unchanged, carried.replaced, carried.grafted) == (1, 2, 3)
    assert carried.text().startswith("1 of 3 grafted lines are upstream's, unchanged (33.3%)")
