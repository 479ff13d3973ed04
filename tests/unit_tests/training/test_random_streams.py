"""The rule that says which random streams a rank of a changed layout continues."""

from types import SimpleNamespace

import pytest

from megatron.training.module_layout import compare_grids
from megatron.training.random_streams import Origin, saved_rank, sources_of, stream_key

pytestmark = pytest.mark.tier0

VISION = {'dp': 2}
LANGUAGE = {'tp': 2, 'offset': 2}


def origins(
    saved: dict[str, dict[str, int]], present: dict[str, dict[str, int]], per_rank: bool = True
) -> dict[str, tuple[Origin, str]]:
    """Answer of the rule for each module of ``present``."""
    changes = compare_grids(
        SimpleNamespace(module_layout=saved), SimpleNamespace(module_layout=present)
    )
    sources = sources_of(changes, per_rank=per_rank)
    return {name: (source.origin, source.why) for name, source in sources.items()}


def test_same_sizes_go_on() -> None:
    """A module of the same sizes goes on with its own streams, also on other ranks."""
    saved = {'vision': VISION, 'language': LANGUAGE}
    moved = {'vision': {**VISION, 'offset': 2}, 'language': {**LANGUAGE, 'offset': 0}}
    expected = {'vision': (Origin.OWN, ''), 'language': (Origin.OWN, '')}
    assert origins(saved, saved) == expected
    assert origins(saved, moved) == expected


@pytest.mark.parametrize('size', ['tp', 'pp', 'cp', 'ep', 'etp'])
def test_other_sizes_start_anew(size: str) -> None:
    """A change in any size but DP starts one module anew and leaves the other alone."""
    changed = {'vision': VISION, 'language': {**LANGUAGE, size: 4}}
    answer = origins({'vision': VISION, 'language': LANGUAGE}, changed)
    assert answer['vision'] == (Origin.OWN, '')
    before = LANGUAGE.get(size, 1)
    assert answer['language'] == (Origin.ANEW, f'{size} {before} -> 4')


def test_changed_replicas_take_turns() -> None:
    """Where DP alone has changed, a rank takes the streams of its place modulo the saved DP."""
    language = {'offset': 4}
    answer = origins(
        {'vision': VISION, 'language': language}, {'vision': {'dp': 4}, 'language': language}
    )
    assert answer['vision'] == (Origin.REPLICA, 'dp 2 -> 4')
    # dp 4, cp 2 from dp 2: (dp, cp) in order, CP varying faster.
    assert [saved_rank(rank, 2, 2) for rank in range(8)] == [
        *[(0, 0), (1, 0), (2, 0), (3, 0)],
        *[(0, 1), (1, 1), (2, 1), (3, 1)],
    ]
    assert [saved_rank(rank, 1, 4) for rank in range(2)] == [(0, 0), (1, 0)]


def test_shared_ranks_have_the_language_streams() -> None:
    """A colocated encoder has no streams of its own, and starts some when it moves out."""
    shared = {'vision': {'tp': 2}, 'language': {'tp': 2}}
    apart = {'vision': {'tp': 2}, 'language': LANGUAGE}
    assert origins(shared, shared) == {'language': (Origin.OWN, '')}
    assert origins(shared, apart) == {
        'vision': (Origin.ANEW, 'saved on the ranks of language'),
        'language': (Origin.OWN, ''),
    }
    assert origins(apart, shared) == {'language': (Origin.OWN, '')}
    assert origins({'language': {}}, apart)['vision'] == (Origin.ANEW, 'not in the checkpoint')


def test_older_checkpoints_have_one_stream_a_place() -> None:
    """Without streams of every rank, all ranks at a (PP, TP) place take what there is."""
    answer = origins({'language': {'dp': 2}}, {'language': {'dp': 4}}, per_rank=False)
    assert answer == {'language': (Origin.PLACE, 'older checkpoint')}
    answer = origins({'language': {'tp': 2}}, {'language': {}}, per_rank=False)
    assert answer == {'language': (Origin.ANEW, 'tp 2 -> 1')}


def test_keys() -> None:
    """The first rank of a place writes under stock's key, the others beside it."""
    assert stream_key('', 0) == 'rng_state'
    assert stream_key('vision.', 0) == 'vision.rng_state'
    assert stream_key('vision.', 3) == 'vision.rng_state.dp_cp_3'
