"""Tier 0: the PEP 517 hooks on this repository itself, and an installation into an empty venv."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.patch_series import backend, series, upstream

pytestmark = pytest.mark.tier0


@pytest.fixture(scope='module')
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    return folder / backend.build_wheel(str(folder))


def test_the_backend_is_the_one_that_pip_calls() -> None:
    """The project file names this module, and every hook that it has to have is there."""
    project = tomllib.loads((backend.ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == backend.__name__
    assert backend.get_requires_for_build_wheel() == []
    assert backend.get_requires_for_build_sdist() == []


def test_prepared_metadata_is_the_wheels(built: Path, tmp_path: Path) -> None:
    """The quick hook writes the same dist-info files, RECORD excepted."""
    folder = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if name.startswith(f"{folder}/")}
        prepared = {f"{folder}/{path.name}" for path in (tmp_path / folder).iterdir()}
        assert prepared == names - {f"{folder}/RECORD"}
        for name in prepared:
            assert (tmp_path / name).read_bytes() == archive.read(name)


@pytest.mark.parametrize(
    'hook', [backend.get_requires_for_build_editable, lambda: backend.build_editable("")]
)
def test_an_editable_install_says_what_to_do(hook: object) -> None:
    """There is no source folder that could be linked to."""
    assert callable(hook)
    with pytest.raises(SystemExit, match=r"run `pip install \.` again"):
        hook()


def test_the_source_archive_holds_what_a_build_needs(tmp_path: Path) -> None:
    """The tool, the series and the sparse fork, no upstream file and no build product."""
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        names = {member.partition("/")[2] for member in archive.getnames()}
    tree = set(series.load(backend.ROOT).tree())
    assert tree <= names
    needed = ("PKG-INFO", "pyproject.toml", "tools/patch_series/bases.toml")
    assert names.issuperset(needed)
    assert not [name for name in names if name.startswith((".venv", ".cache", "dist", "runs"))]
    assert {name for name in names if name.startswith("megatron/")} == tree


SHOW_VERSIONS = (
    "import importlib.metadata, importlib.util, pathlib, runpy\n"
    "core = pathlib.Path(importlib.util.find_spec('megatron.core').origin).parent\n"
    "info = runpy.run_path(str(core / 'package_info.py'))\n"
    "print(importlib.metadata.version('megatron-core'), info['__version__'])\n"
)


def versions(python: Path | str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the versions of the distribution and of the module, which needs no git for it."""
    shown = subprocess.run(
        [python, "-c", SHOW_VERSIONS],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "PATH": ""},
        cwd=folder,
    )
    return shown.stdout.split()


def plain_environment() -> dict[str, str]:
    """Return the environment without what would lead a Python to another one's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_an_empty_environment_gets_all_and_loses_all(built: Path, tmp_path: Path) -> None:
    """The wheel installs, both versions agree, and uninstalling leaves no file."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    python = venv / "bin/python"
    (site,) = venv.glob("lib/python3*/site-packages")
    before = set(site.rglob("*"))

    def pip(*arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", python, *arguments, "--quiet"]
        subprocess.run(command, check=True, timeout=300, env=plain_environment())

    pip("install", "--no-deps", "--no-index", built)
    default, _ = upstream.load_pins(backend.ROOT)
    assert (
        versions(python, tmp_path, plain_environment())
        == [series.load(backend.ROOT).version(default)] * 2
    )
    pip("uninstall", "--yes", "megatron-core")
    assert [path for path in site.rglob("*") if path not in before and path.is_file()] == []


def test_the_interpreters_own_installation_agrees(tmp_path: Path) -> None:
    """The package that these tests import was built from this tree."""
    default, _ = upstream.load_pins(backend.ROOT)
    expected = series.load(backend.ROOT).version(default)
    assert versions(sys.executable, tmp_path, dict(os.environ)) == [expected, expected]
