"""Which rank's failure is the one to show, and how it reads."""

import re
from collections.abc import Mapping, Sequence

from tests.unit_tests.helpers.rank_worker import Kind, Outcome

# What a rank says when it lost a peer: a consequence of somebody else's failure.
LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Connection refused"
    r"|Socket closed|remote process exited|NCCL communicator was aborted"
)


class RankFailedError(Exception):
    """One rank failed; the text holds its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        """Remember which rank it was."""
        super().__init__(text)
        self.rank = rank


class RanksTimedOutError(Exception):
    """The ranks did not finish in time; the text holds the stacks of those that were still busy."""

    def __init__(
        self, timeout: float, outcomes: Mapping[int, Outcome], stacks: Mapping[int, str]
    ) -> None:
        """Put the stacks together, rank by rank."""
        busy = ", ".join(map(str, sorted(stacks)))
        lines = [f"after {timeout:g} s rank(s) {busy} were still busy"]
        lines += [f"rank {number} had {outcome.kind.value}" for number, outcome in outcomes.items()]
        lines += [f"--- stacks of rank {n} ---\n{stacks[n] or '(none)'}" for n in sorted(stacks)]
        super().__init__("\n".join(lines))
        self.stacks = dict(stacks)


def first_failure(outcomes: Sequence[Outcome]) -> RankFailedError:
    """Return the failure that the others follow from, with one line on every other rank.

    A rank that only lost its peer, or was stopped, is a consequence; a rank that died without a
    word or raised anything else is a cause.
    """

    def weight(number: int) -> int:
        outcome = outcomes[number]
        if outcome.kind is Kind.DIED:
            return 1
        if outcome.kind is Kind.FAILED:
            return 2 if LOST_PEER.search(outcome.text) else 0
        return 3

    cause = min(range(len(outcomes)), key=lambda number: (weight(number), number))
    failure = outcomes[cause]
    lines = [f"rank {cause} of {len(outcomes)} failed: {failure.headline}"]
    if failure.text != failure.headline:
        lines.append(failure.text.rstrip())
    for number, outcome in enumerate(outcomes):
        if number != cause:
            lines.append(f"rank {number}: {_in_short(outcome)}")
    return RankFailedError(cause, "\n".join(lines))


def _in_short(outcome: Outcome) -> str:
    if outcome.kind is Kind.STOPPED:
        return "still busy, stopped"
    return f"{outcome.kind.value} {outcome.headline}".rstrip()
