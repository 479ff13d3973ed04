import os

from megatron.core.msc_utils import maybe_msc


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    """Make the folder that a file is to be written into; local, on any rank.

    Args:
        filename: The file.
        check_parent: False says that ``filename`` is the directory of a distributed checkpoint.
            Nothing is made then: its writers make it, so that it appears when it is complete, and
            an error of making it is raised on every rank.
    """
    if check_parent:
        maybe_msc.os.makedirs(os.path.dirname(filename), exist_ok=True)
