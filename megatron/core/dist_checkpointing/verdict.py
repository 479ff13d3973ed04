"""One verdict for all ranks: what fails on one of them is raised on every one, with one text.

A rank that raises alone leaves the others waiting in their next collective for ever. So the local
work between two collectives goes into a section whose outcome the ranks share:

    with shared_verdict(f'write {path}'):
        ...  # only this rank's own work: no collective in here

The contract: every rank of the group enters the same sections in the same order, and the section
ends in a collective, so that it is a barrier as well. No rank may fail inside while another waits
for it there: the local work before a collective inside is a section of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.dist_checkpointing.core import CheckpointingException

_MOST_NAMED = 4


class SharedVerdictError(CheckpointingException):
    """What all ranks of a group raise together: who catches it knows that the others do, too."""

    def __init__(self, text: str, group: dist.ProcessGroup | None) -> None:
        """Keep the group next to the text."""
        super().__init__(text)
        self.group = group


def raise_everywhere(
    error: BaseException | None, doing: str, group: dist.ProcessGroup | None = None
) -> None:
    """Share what went wrong on any rank, and raise it on all of them.

    Collective over ``group``: every rank calls it once, with its own error or None. Without
    `torch.distributed` it is this process's own verdict.

    Args:
        error: What this rank's part failed with.
        doing: What the ranks were about, the start of the message: "write the checkpoint".
        group: The ranks that share the verdict; the world when it is None.

    Raises:
        SharedVerdictError: a `CheckpointingException` with the same text on every rank; caused by
            this rank's own error where it has one.
    """
    texts = gather_everywhere(None if error is None else describe(error), group)
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        text = f'cannot {doing}: {_summary(failed, len(texts))}'
        raise SharedVerdictError(text, group) from error


@contextmanager
def shared_verdict(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run this rank's part; then all ranks go on, or all raise what failed on any of them.

    Collective over ``group``, at its end; see the module's contract and `raise_everywhere`.

    Raises:
        SharedVerdictError: the same text on every rank. One of the same group raised inside, which
            all its ranks have therefore raised, passes through as it is.
    """
    error = None
    try:
        yield
    except (Exception, CheckpointException) as failure:  # the others have to know, whatever it is
        if isinstance(failure, SharedVerdictError) and failure.group is group:
            raise
        error = failure
    raise_everywhere(error, doing, group)


def call_everywhere[T](
    doing: str, function: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Return what this rank's ``function`` returns; a `shared_verdict` in one call.

    Collective over ``group``.

    Raises:
        SharedVerdictError: the same text on every rank.
    """
    with shared_verdict(doing, group):
        result = function()
    return result


def gather_everywhere[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in rank order; collective over ``group``."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_problem(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the problem of the first rank that has one; collective over ``group``.

    For a caller that raises an error of its own, then on every rank with the same text.
    """
    return next((text for text in gather_everywhere(problem, group) if text is not None), None)


def describe(error: BaseException) -> str:
    """Say what an exception says, in one line, with its type where that is needed."""
    if isinstance(error, CheckpointException):  # torch's, which holds one failure per rank
        return '; '.join(describe(failure) for failure, _ in error.failures.values())
    text = ' '.join(str(error).split())
    if isinstance(error, CheckpointingException | OSError) and text:
        return text
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def _summary(failed: dict[int, str], world_size: int) -> str:
    """Put the ranks' texts together: each text once, with the ranks that say it."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and len(failed) == world_size:
        return next(iter(by_text))
    parts = [f'{text} (rank {_numbers(ranks)})' for text, ranks in by_text.items()]
    more = len(parts) - _MOST_NAMED
    return '; '.join(parts[:_MOST_NAMED]) + (f'; and {more} more' if more > 0 else '')


def _numbers(ranks: list[int]) -> str:
    """Name a few ranks and count the others."""
    named = ', '.join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = len(ranks) - _MOST_NAMED
    return f'{named} and {more} more' if more > 0 else named
