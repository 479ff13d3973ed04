"""A made-up repository for each test that asks for one."""

from pathlib import Path

import pytest

from tests.unit_tests.tools.patch_series import toy


@pytest.fixture
def repository(tmp_path: Path) -> toy.Toy:
    """A made-up repository without patches."""
    return toy.make(tmp_path)
