"""Tier 0: the flags that a CPU run is supplied with."""

import pytest

from megatron.training.cpu_device import CPU_ARGUMENTS, add_cpu_arguments

pytestmark = pytest.mark.tier0


def test_supplies_every_flag_after_the_users() -> None:
    """The user's words come first, then each flag once, with its value."""
    added = add_cpu_arguments(['--num-layers', '2'])
    assert added[:2] == ['--num-layers', '2']
    assert added[2:] == [token for argument in CPU_ARGUMENTS for token in argument.tokens]


@pytest.mark.parametrize('given', [['--transformer-impl', 'local'], ['--transformer-impl=local']])
def test_an_equal_flag_is_not_repeated(given: list[str]) -> None:
    """A flag that the user gave as the CPU needs it is left as it stands, in either spelling."""
    added = add_cpu_arguments(given)
    assert added[: len(given)] == given
    assert added[len(given) :].count('--transformer-impl') == 0


@pytest.mark.parametrize(
    'given',
    [
        ['--transformer-impl', 'transformer_engine'],
        ['--transformer-impl=transformer_engine'],
        ['--use-transformer-engine'],
    ],
)
def test_the_users_flag_wins_with_a_warning(given: list[str]) -> None:
    """A contradicting flag is kept, nothing is added against it, and one sentence says so."""
    with pytest.warns(UserWarning, match='is kept, but a CPU run needs --transformer-impl local'):
        added = add_cpu_arguments(given)
    assert 'local' not in added


def test_a_flag_that_needs_a_gpu_is_refused() -> None:
    """The sentence names the flag and the reason."""
    with pytest.raises(ValueError, match='--tp-comm-overlap does not work on the CPU'):
        add_cpu_arguments(['--tp-comm-overlap'])
