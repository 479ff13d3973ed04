"""Metadata of a sharded state dictionary: whose group it names, and that nobody's is changed."""

import pytest

from megatron.core import parallel_state
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

pytestmark = pytest.mark.tier0


@pytest.fixture(autouse=True)
def global_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global data-parallel group, by name."""
    monkeypatch.setattr(parallel_state, 'get_data_parallel_group', lambda **_: "global")


def test_missing_group_is_named_in_a_copy() -> None:
    """The group that is filled in for one module does not reach the next one's description."""
    metadata = {'singleton_local_shards': False}
    assert ensure_metadata_has_dp_cp_group(metadata) == {
        'singleton_local_shards': False,
        'dp_cp_group': "global",
    }
    assert metadata == {'singleton_local_shards': False}


def test_given_group_stays() -> None:
    """A caller's own group is never replaced by the global one."""
    metadata = {'dp_cp_group': "own"}
    assert ensure_metadata_has_dp_cp_group(metadata) == {'dp_cp_group': "own"}
    assert metadata == {'dp_cp_group': "own"}


def test_no_metadata() -> None:
    """Without any metadata the global group is all there is."""
    assert ensure_metadata_has_dp_cp_group(None) == {'dp_cp_group': "global"}
