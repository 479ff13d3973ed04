"""The in-tree PEP 517 backend: `pip install .` installs the patched Megatron Core."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tools.patch_series import report, series, upstream, wheel
from tools.patch_series.records import PatchSeriesError

ROOT = Path(__file__).resolve().parents[2]
EDITABLE = (
    "megatron-core is grafted from a base wheel, so there is no source folder to link to: "
    "run `pip install .` again after a change (seconds), without -e"
)

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517: everything needed is in `build-system.requires`."""
    del config_settings
    return []


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """PEP 517: a source archive needs nothing."""
    del config_settings
    return []


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660: say at the first hook that there is no editable install."""
    del config_settings
    sys.exit(EDITABLE)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660: refuse, and say what to do."""
    del wheel_directory, config_settings, metadata_directory
    sys.exit(EDITABLE)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """PEP 517: write the dist-info folder, without RECORD and without grafting."""
    del config_settings
    try:
        ours = series.load(ROOT)
        files = wheel.dist_info(ours, upstream.open_base(ROOT))
    except PatchSeriesError as error:
        sys.exit(f"patch_series: {error}")
    for path, data in files.items():
        target = Path(metadata_directory) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return next(iter(files)).partition("/")[0]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 517: build the patched wheel; on drift or any other problem nothing is written."""
    del config_settings, metadata_directory
    try:
        built = wheel.build(series.load(ROOT), Path(wheel_directory))
    except PatchSeriesError as error:
        sys.exit(f"patch_series: {error}")
    if built.wheel is None:
        sys.exit(report.problems_text(built.problems))
    return built.wheel.name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517: pack the repository's own files; upstream's are fetched when it is built."""
    del config_settings
    try:
        ours = series.load(ROOT)
        default, _ = upstream.load_pins(ROOT)
        info = wheel.metadata(ours, upstream.open_any_base(ROOT, default))
    except PatchSeriesError as error:
        sys.exit(f"patch_series: {error}")
    folder = f"{wheel.DISTRIBUTION}-{ours.version(default)}"
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in _own_files()}
    files["PKG-INFO"] = info.encode()
    packed = _tar({f"{folder}/{path}": data for path, data in files.items()})
    target = Path(sdist_directory) / f"{folder}.tar.gz"
    target.write_bytes(packed)
    return target.name


def _own_files() -> list[Path]:
    """Return what git would commit; in an unpacked source archive that is everything."""
    if not (ROOT / ".git").exists():
        return [path for path in ROOT.rglob("*") if path.is_file() and ".cache" not in path.parts]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def _tar(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size = len(files[path])
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(files[path]))
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as stream:
        stream.write(raw.getvalue())
    return out.getvalue()
