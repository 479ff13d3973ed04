"""Tier 0: what a patch's TOML file must say."""

import pytest

from tests.unit_tests.tools.patch_series.toy import BASE, UTILS, Toy
from tools.patch_series.record import with_fingerprints
from tools.patch_series.records import PatchSeriesError
from tools.patch_series.seam import Action

pytestmark = pytest.mark.tier0

GRAFT = f"[[graft]]\nfile = '{UTILS}'\nnames = ['half']\n"


def test_a_patch_is_read_whole(repository: Toy) -> None:
    """Files, grafts, seams and fingerprints arrive as written, patches in order."""
    seam = f"[[seam]]\nfile = '{UTILS}'\nwhere = 'twice'\nbefore = 'return'\ncode = 'x()'\n"
    repository.patch("0020-later", 'files = ["megatron/new/"]\n')
    repository.patch("0010-first", GRAFT + seam + f'[fingerprints."{BASE}"]\nkey = "value"\n')
    first, later = repository.series().patches
    assert (first.name, later.name) == ("0010-first", "0020-later")
    assert first.names_in(UTILS) == ("half",)
    ((key, item),) = first.seams_in(UTILS)
    assert (key, item.action, item.anchor) == (f"{UTILS}::twice#1", Action.BEFORE, "return")
    assert first.fingerprints == {BASE: {"key": "value"}}
    assert later.takes("megatron/new/a/b.py")
    assert not later.takes("megatron/newer.py")
    assert repository.series().version(BASE) == "1.2.3+mimo.2"


@pytest.mark.parametrize(
    ('name', 'body', 'message'),
    [
        ("1-short", GRAFT, "name a patch NNNN-some-slug.toml"),
        ("0001-a", "", "neither files nor a graft nor a seam"),
        ("0001-a", "grafts = 1\n", "unknown keys: grafts"),
        ("0001-a", "[[graft]]\nfile = 'a.py'\n", "a graft needs `file` and `names`"),
        ("0001-a", "[[graft]]\nfiles = 'a.py'\n", "a graft has unknown keys: files"),
        ("0001-a", "[[seam]]\nfile = 'a.py'\n", "one of replace, before, after"),
        ("0001-a", "[[seam]]\nfile = 'a.py'\nafter = 'x'\n", "a seam needs `where`"),
        ("0001-a", "title = 'twice'\n", "Cannot overwrite"),
    ],
)
def test_a_patch_that_says_too_little_is_refused(
    repository: Toy, name: str, body: str, message: str
) -> None:
    """With one sentence that names the file."""
    repository.patch(name, body)
    with pytest.raises(PatchSeriesError, match=f"{name}.toml: .*{message}"):
        repository.series()


def test_a_patch_must_say_why(repository: Toy) -> None:
    """An empty text is no text."""
    path = repository.patch("0001-a", GRAFT)
    path.write_text(path.read_text().replace("why = 'why'", "").replace('why = "why"', 'why = " "'))
    with pytest.raises(PatchSeriesError, match="`why` must say something"):
        repository.series()


def test_a_number_is_given_once(repository: Toy) -> None:
    """The order of the series is never in doubt."""
    repository.patch("0001-a", GRAFT)
    repository.patch("0001-b", GRAFT)
    with pytest.raises(PatchSeriesError, match="two patches have the number 0001"):
        repository.series()


def test_caches_and_hidden_files_are_no_part_of_the_tree(repository: Toy) -> None:
    """What editors and interpreters leave behind is not shipped."""
    for path in ("a.py", "__pycache__/a.pyc", ".hidden/a.py", ".a.swp", "data.json"):
        repository.write(f"megatron/core/{path}", "")
    assert sorted(repository.series().tree()) == ["megatron/core/a.py", "megatron/core/data.json"]


@pytest.mark.parametrize("after", ["", '\n[fingerprints."2"]\n"b" = "2"\n'])
def test_one_fingerprint_table_is_replaced(after: str) -> None:
    """Other text of the file stays, and writing it again changes nothing."""
    text = 'title = "a"\n\n[fingerprints."1"]\n"old" = "0"\n' + after
    new = with_fingerprints(text, "1", {"z": "1", "a": "2"})
    assert '"old"' not in new
    assert new.startswith('title = "a"\n')
    assert '[fingerprints."1"]\n"a" = "2"\n"z" = "1"\n' in new
    assert after in new
    assert with_fingerprints(new, "1", {"z": "1", "a": "2"}) == new
    assert "fingerprints.\"1\"" not in with_fingerprints(new, "1", {})
