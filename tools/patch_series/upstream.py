"""Upstream trees: the pinned wheels, fetched once and hash-checked, or any folder or wheel."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.patch_series.layout import BASES, CACHE
from tools.patch_series.records import PatchSeriesError

PROJECT = "megatron-core"
FETCH_TIMEOUT = 600
"""Seconds that one download of a base wheel (2.4 MB) may take."""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """An upstream tree held in memory: `megatron/...` paths, and the wheel's own metadata."""

    label: str
    version: str
    files: dict[str, bytes]

    def text(self, path: str) -> bytes | None:
        """Return the bytes of one file, None where upstream has no such file."""
        return self.files.get(path)

    def metadata(self, name: str) -> str:
        """Return one file of the wheel's dist-info folder."""
        for path, data in self.files.items():
            if path.endswith(f".dist-info/{name}"):
                return data.decode()
        raise PatchSeriesError(f"{self.label} has no dist-info/{name}")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One pinned base wheel."""

    base: str
    tag: str
    file: str
    sha256: str


def load_pins(root: Path) -> tuple[str, list[Pin]]:
    """Return the default base and all pinned wheels of `bases.toml`."""
    raw = tomllib.loads((root / BASES).read_text(encoding="utf-8"))
    default = raw.pop("default")
    pins = [
        Pin(base=base, tag=tag, file=entry["file"], sha256=entry["sha256"])
        for base, wheels in raw.items()
        for tag, entry in wheels.items()
    ]
    return default, pins


def current_tag() -> str:
    """Return this interpreter's tag, in the form that `bases.toml` uses."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{version}-{sysconfig.get_platform().replace('-', '_')}"


def pin_for(root: Path, base: str | None = None, tag: str | None = None) -> Pin:
    """Return the pinned wheel of a base (the default one) for an interpreter (this one)."""
    default, pins = load_pins(root)
    base, tag = base or default, tag or current_tag()
    for pin in pins:
        if (pin.base, pin.tag) == (base, tag):
            return pin
    known = ", ".join(sorted({pin.tag for pin in pins if pin.base == base})) or "none"
    raise PatchSeriesError(
        f"there is no pinned wheel of {PROJECT} {base} for {tag} (pinned: {known}); "
        "use one of these Pythons"
    )


def cached_wheel(root: Path, pin: Pin) -> Path:
    """Return the path of a pinned wheel in the cache, fetching it at first; the hash is checked."""
    cache = root / CACHE
    wheel = cache / pin.file
    if wheel.exists() and _sha256(wheel) == pin.sha256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fetched = _fetch(pin, Path(folder))
        found = _sha256(fetched)
        if found != pin.sha256:
            raise PatchSeriesError(f"{pin.file} has sha256 {found}, but {pin.sha256} is pinned")
        fetched.replace(wheel)
    return wheel


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(pin: Pin, folder: Path) -> Path:
    python, _, platform = pin.tag.partition("-")
    machine = platform.removeprefix("linux_")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PROJECT}=={pin.base} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python[2:]}"]
    command += [f"--platform=manylinux_2_{minor}_{machine}" for minor in (24, 28)]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    # The calling frontend may hold pip's options in the environment; they are not for this call.
    private = {"PIP_REQ_TRACKER", "PIP_BUILD_TRACKER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise PatchSeriesError(
            f"fetching {pin.file} took more than {FETCH_TIMEOUT} s; check the network"
        ) from error
    wheel = folder / pin.file
    if done.returncode or not wheel.exists():
        lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
        reason = lines[-1] if lines else f"pip left no {pin.file}"
        raise PatchSeriesError(
            f"the base wheel {pin.file} could not be fetched ({reason}); check the network, or "
            f"put the file into {CACHE}/ by hand"
        )
    return wheel


def open_base(root: Path, base: str | None = None, tag: str | None = None) -> Upstream:
    """Open the pinned wheel of a base, fetching it where needed."""
    pin = pin_for(root, base, tag)
    return read_wheel(cached_wheel(root, pin), f"{PROJECT} {pin.base}")


def open_any_base(root: Path, base: str) -> Upstream:
    """Open a wheel of a base for its Python files, which are the same for all interpreters."""
    _, pins = load_pins(root)
    tags = [pin.tag for pin in pins if pin.base == base]
    tag = current_tag()
    return open_base(root, base, tag if tag in tags or not tags else tags[0])


def read_wheel(path: Path, label: str | None = None) -> Upstream:
    """Read a whole wheel into memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            files = {name: archive.read(name) for name in names}
    except (OSError, zipfile.BadZipFile) as error:
        raise PatchSeriesError(f"{path} cannot be read as a wheel: {error}") from error
    label = label or str(path)
    return Upstream(label=label, version=_version(files, label), files=files)


def read_path(path: Path) -> Upstream:
    """Read an upstream tree from a wheel, a checkout or a folder that holds `megatron/`."""
    if path.is_file():
        return read_wheel(path)
    top = path / "megatron"
    if not top.is_dir():
        raise PatchSeriesError(f"{path} is neither a wheel nor a folder that holds megatron/")
    files = {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(top.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    return Upstream(label=str(path), version=_version(files, str(path)), files=files)


def _version(files: dict[str, bytes], label: str) -> str:
    """Read the release from the tree itself, which every form of upstream has."""
    text = files.get("megatron/core/package_info.py", b"").decode()
    parts = [
        re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")
    ]
    if not all(parts):
        raise PatchSeriesError(f"{label} has no megatron/core/package_info.py with a version")
    if "+mimo." in text:
        raise PatchSeriesError(f"{label} is patched already; give an upstream tree or wheel")
    return ".".join(part.group(1) for part in parts if part)
