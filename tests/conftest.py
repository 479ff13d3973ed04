"""The option ``--tier``; it stands here because pytest reads this file before it reads options."""

import pytest

from tests.unit_tests.helpers.tiers import add_tier_option


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tier``."""
    add_tier_option(parser)
