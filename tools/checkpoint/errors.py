"""What the commands raise for users; ``main`` prints it without a traceback."""

from __future__ import annotations


class CheckpointError(Exception):
    """There is nothing to work on as asked: a wrong path, another format, a name that is not there."""

    exit_code = 2


class DamagedCheckpointError(CheckpointError):
    """The checkpoint is there, but something in it is missing or broken; names the file."""

    exit_code = 1
