"""Tier 0: the wheel's files, RECORD and METADATA; all or nothing; the same bytes every time."""

import base64
import csv
import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.unit_tests.tools.patch_series.toy import BASE, UPSTREAM, UTILS, Toy, make
from tools.patch_series import record, upstream, wheel
from tools.patch_series.records import PatchSeriesError

pytestmark = pytest.mark.tier0

VERSION = f"{BASE}+mimo.2"
PATCHED_INFO = f"megatron_core-{VERSION}.dist-info"
VERSION_SEAM = (
    "[[seam]]\nfile = 'megatron/core/package_info.py'\nwhere = '<module>'\n"
    "replace = \"__version__ = f'{MAJOR}.{MINOR}.{PATCH}'\"\ncode = \"__version__ = '@VERSION@'\"\n"
)


@pytest.fixture
def patched(repository: Toy) -> Toy:
    """A repository with two patches: the version, and a graft with two whole files."""
    repository.write(UTILS, "'''Ours.'''\n\n\ndef half(number):\n    return 0.5 * number\n")
    repository.write("megatron/core/extra/__init__.py", "VALUE = 1\n")
    repository.write("megatron/core/extra/table.json", "{}\n")
    repository.patch("0001-version", VERSION_SEAM)
    body = f"files = ['megatron/core/extra/']\n[[graft]]\nfile = '{UTILS}'\nnames = ['half']\n"
    repository.patch("0002-half", body)
    record.record(repository.series(), repository.base(), [])
    return repository


def build(toy: Toy, folder: str = "dist") -> Path:
    """Build a wheel that has to succeed."""
    built = wheel.build(toy.series(), toy.root / folder)
    assert built.problems == ()
    assert built.wheel is not None
    return built.wheel


def test_the_wheel_holds_the_patched_tree(patched: Toy) -> None:
    """Grafted, sewn and whole files, and everything else as the base has it."""
    path = build(patched)
    assert path.name.startswith(f"megatron_core-{VERSION}-cp3")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert files[UTILS] == UPSTREAM[UTILS].replace("number / 2", "0.5 * number")
    assert f"__version__ = '{VERSION}'\n" in files["megatron/core/package_info.py"]
    assert files["megatron/core/extra/__init__.py"] == "VALUE = 1\n"
    assert files["megatron/core/extra/table.json"] == "{}\n"
    assert files["megatron/core/__init__.py"] == UPSTREAM["megatron/core/__init__.py"]
    assert {name.partition("/")[0] for name in files} == {"megatron", PATCHED_INFO}


def test_record_names_every_file_with_its_hash_and_size(patched: Toy) -> None:
    """Computed here in another way than the tool does."""
    with zipfile.ZipFile(build(patched)) as archive:
        text = archive.read(f"{PATCHED_INFO}/RECORD").decode()
        rows = {name: (digest, size) for name, digest, size in csv.reader(text.splitlines())}
        assert rows.keys() == set(archive.namelist())
        for name in set(rows) - {f"{PATCHED_INFO}/RECORD"}:
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert rows[name] == (f"sha256={expected}", str(len(data)))
        assert rows[f"{PATCHED_INFO}/RECORD"] == ("", "")


def test_metadata_says_what_is_installed(patched: Toy) -> None:
    """Version, summary and further requirements are ours, the rest is the base's."""
    with zipfile.ZipFile(build(patched)) as archive:
        metadata = Parser().parsestr(archive.read(f"{PATCHED_INFO}/METADATA").decode())
        assert b"Generator: patch_series\n" in archive.read(f"{PATCHED_INFO}/WHEEL")
    assert metadata["Version"] == VERSION
    assert metadata["Summary"] == "A patched base"
    assert metadata.get_all("Provides-Extra") == ["dev", "plot"]
    assert metadata.get_all("Requires-Dist") == [
        "numpy",
        "psutil>=5.9",
        'matplotlib>=3; extra == "plot"',
        "pillow; (python_version < '4') and extra == \"plot\"",
    ]
    assert metadata.get_payload() == "A description.\n"


def test_the_same_tree_gives_the_same_bytes(patched: Toy, tmp_path: Path) -> None:
    """Whatever the time, the modes and the hash seed; fixed times and modes in the archive."""
    first = build(patched, "one")
    for path in (patched.root / "megatron").rglob("*"):
        os.utime(path, (1, 1))
    (patched.root / UTILS).chmod(0o600)
    code = (
        "import sys; from pathlib import Path; from tools.patch_series import series, wheel; "
        "wheel.build(series.load(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(patched.root), str(tmp_path / "two")]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, timeout=60, env=environment, cwd=Path(__file__).parents[4])
    assert (tmp_path / "two" / first.name).read_bytes() == first.read_bytes()
    with zipfile.ZipFile(first) as archive:
        for entry in archive.infolist():
            assert entry.date_time == (1980, 1, 1, 0, 0, 0)
            assert entry.external_attr >> 16 == stat.S_IFREG | 0o644


def test_nothing_is_written_where_a_patch_does_not_apply(patched: Toy) -> None:
    """An earlier wheel stays as it was."""
    before = build(patched).read_bytes()
    patched.write(UTILS, "'''Ours.'''\n\n\ndef half(number):\n    return 1\n\n\nEXTRA = 1\n")
    built = wheel.build(patched.series(), patched.root / "dist")
    assert built.wheel is None
    assert [problem.where for problem in built.problems] == [f"{UTILS}::EXTRA"]
    (left,) = (patched.root / "dist").iterdir()
    assert left.read_bytes() == before


def test_a_base_wheel_with_another_hash_is_fetched_anew(
    patched: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file in the cache is replaced; what arrives damaged is refused and not kept."""
    pin = upstream.pin_for(patched.root)
    cached = upstream.cached_wheel(patched.root, pin)
    good = cached.read_bytes()
    cached.write_bytes(good[:-1])
    arriving = good

    def fetch(_: upstream.Pin, folder: Path) -> Path:
        (folder / pin.file).write_bytes(arriving)
        return folder / pin.file

    monkeypatch.setattr(upstream, "_fetch", fetch)
    assert upstream.cached_wheel(patched.root, pin).read_bytes() == good
    cached.unlink()
    arriving = good[:-1]
    with pytest.raises(PatchSeriesError, match="is pinned"):
        upstream.cached_wheel(patched.root, pin)
    assert list(cached.parent.iterdir()) == []


def test_another_interpreter_is_answered_with_what_is_pinned(tmp_path: Path) -> None:
    """One sentence, with the tags that have a wheel."""
    toy = make(tmp_path)
    with pytest.raises(
        PatchSeriesError, match=rf"for cp27-win32 \(pinned: {upstream.current_tag()}"
    ):
        upstream.pin_for(toy.root, tag="cp27-win32")


def test_a_failing_download_says_what_to_do(patched: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index to ask there is one sentence and no half-written file."""
    pin = upstream.pin_for(patched.root)
    (patched.root / ".cache/patch_series" / pin.file).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(patched.root))
    with pytest.raises(PatchSeriesError, match=r"could not be fetched .* check the network"):
        upstream.cached_wheel(patched.root, pin)
    assert list((patched.root / ".cache/patch_series").iterdir()) == []
