"""Tier 0: every Python file of the released base, through the parser and through the graft."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tools.patch_series import graft, sparse, syntax, upstream

pytestmark = pytest.mark.tier0

ROOT = Path(__file__).resolve().parents[4]
WORKERS = 2  # About 46 s of processor time in all.


@pytest.fixture(scope='module')
def files() -> dict[str, bytes]:
    """Every Python file of the pinned base wheel."""
    base = upstream.open_base(ROOT)
    return {path: data for path, data in base.files.items() if path.endswith(".py")}


def difference(path: str, source: bytes) -> tuple[int, str]:
    """Parse a file and graft its definitions onto it; return their number and what changed."""
    module = syntax.parse(source, path)
    if module.bytes != source:
        return 0, f"{path}: the parser changes it"
    index = syntax.index(module)
    single = [name for name, found in index.items() if len(found) == 1]
    ours = sparse.read(path, source, module)
    names = [entry.path for entry in ours.entries if entry.path in single]
    result = graft.graft(module, ours, names)
    if result.problems:
        return 0, f"{path}: {result.problems[0].message}"
    equal = result.module.bytes == source
    return len(names), "" if equal else f"{path}: the graft of itself changes it"


def test_every_upstream_file_survives_byte_for_byte(files: dict[str, bytes]) -> None:
    """Parsing and writing changes nothing, and neither does grafting a file onto itself."""
    assert len(files) > 500
    method = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, method) as pool:
        found = list(pool.map(difference, files.keys(), files.values(), chunksize=8))
    assert [text for _, text in found if text] == []
    assert sum(count for count, _ in found) > 5000
