"""Pack the patched tree as a wheel: right METADATA and RECORD, the same bytes every time."""

from __future__ import annotations

import csv
import io
import re
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.patch_series import check, digest, upstream
from tools.patch_series.records import PatchSeriesError, Problem
from tools.patch_series.series import Series

DISTRIBUTION = "megatron_core"
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A wheel that was written, or the problems for which nothing was written."""

    wheel: Path | None
    version: str
    problems: tuple[Problem, ...]


def contents(
    series: Series, base: upstream.Upstream
) -> tuple[dict[str, bytes], tuple[Problem, ...]]:
    """Return every file of the wheel, or no files and the problems in the way."""

    def open_base(version: str) -> upstream.Upstream:
        return base if version == base.version else upstream.open_any_base(series.root, version)

    report = check.check(series, base, base.version, open_base)
    if report.blocking:
        return {}, report.problems
    files = {path: data for path, data in base.files.items() if ".dist-info/" not in path}
    files |= report.composed.changed
    files |= dist_info(series, base)
    record = f"{info_folder(series, base)}/RECORD"
    files[record] = _record(files, record)
    return files, report.problems


def info_folder(series: Series, base: upstream.Upstream) -> str:
    """Return the name of the dist-info folder."""
    return f"{DISTRIBUTION}-{series.version(base.version)}.dist-info"


def dist_info(series: Series, base: upstream.Upstream) -> dict[str, bytes]:
    """Return the files of the dist-info folder, except RECORD."""
    folder = info_folder(series, base)
    kept = [path for path in base.files if ".dist-info/" in path]
    files = {f"{folder}/{path.partition('/')[2]}": base.files[path] for path in kept}
    files.pop(f"{folder}/RECORD", None)
    files[f"{folder}/METADATA"] = metadata(series, base).encode()
    files[f"{folder}/WHEEL"] = re.sub(
        r"(?m)^Generator: .*$", "Generator: patch_series", base.metadata("WHEEL")
    ).encode()
    names = [patch.name for patch in series.patches]
    files[f"{folder}/{digest.STAMP}"] = digest.stamp(series.root, base.version, names)
    return files


def metadata(series: Series, base: upstream.Upstream) -> str:
    """Return upstream's metadata with our version, summary and further requirements."""
    project = tomllib.loads((series.root / "pyproject.toml").read_text(encoding="utf-8"))
    ours = project["project"]
    head, _, description = base.metadata("METADATA").partition("\n\n")
    lines = []
    for line in head.splitlines():
        if line.startswith("Version: "):
            lines.append(f"Version: {series.version(base.version)}")
        elif line.startswith("Summary: "):
            lines.append(f"Summary: {ours['description']}")
        else:
            lines.append(line)
    lines.extend(_requirements(project, lines))
    return "\n".join(lines) + "\n\n" + description


def _requirements(project: dict[str, Any], lines: list[str]) -> list[str]:
    added = [f"Requires-Dist: {item}" for item in extra_requirements(project)]
    extras = project["project"].get("optional-dependencies", {})
    for extra, items in extras.items():
        if f"Provides-Extra: {extra}" not in lines:
            added.append(f"Provides-Extra: {extra}")
        for item in items:
            name, _, marker = item.partition(";")
            both = f"({marker.strip()}) and " if marker else ""
            added.append(f'Requires-Dist: {name.strip()}; {both}extra == "{extra}"')
    return added


def extra_requirements(project: dict[str, Any]) -> list[str]:
    """Return what upstream's code imports but its wheel forgets to declare."""
    table = project.get("tool", {}).get("patch_series", {})
    return list(table.get("dependencies", ()))


def _record(files: dict[str, bytes], record: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for path in sorted(files):
        writer.writerow([path, digest.record_hash(files[path]), len(files[path])])
    writer.writerow([record, "", ""])
    return out.getvalue().encode()


def file_name(series: Series, base: upstream.Upstream, pin: upstream.Pin) -> str:
    """Return the wheel's file name, with the tags of the base wheel."""
    tags = pin.file.removesuffix(".whl").split("-", 2)[2]
    return f"{DISTRIBUTION}-{series.version(base.version)}-{tags}.whl"


def build(
    series: Series, output: Path, *, base: str | None = None, tag: str | None = None
) -> Built:
    """Build a wheel into a folder; the file appears whole or not at all."""
    pin = upstream.pin_for(series.root, base, tag)
    tree = upstream.open_base(series.root, pin.base, pin.tag)
    files, problems = contents(series, tree)
    version = series.version(tree.version)
    if not files:
        return Built(wheel=None, version=version, problems=problems)
    target = output / file_name(series, tree, pin)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as folder:
            part = Path(folder) / target.name
            part.write_bytes(pack(files))
            part.replace(target)
    except OSError as error:
        raise PatchSeriesError(f"the wheel cannot be written to {output}: {error}") from error
    return Built(wheel=target, version=version, problems=problems)


def pack(files: dict[str, bytes]) -> bytes:
    """Zip files in sorted order, the dist-info folder last, with fixed times and modes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(path, date_time=_DATE)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[path])
    return out.getvalue()
