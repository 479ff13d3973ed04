import os

from megatron.core.msc_utils import maybe_msc
from megatron.training import trusted_checkpoints


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


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """Return the iteration that a tracker names, or 0 and True for a release.

    Collective over the world where there is one: every rank reads, and the newest counts.

    Raises:
        CheckpointingException: it is missing, empty or names nothing; the same text on every rank.
    """
    return trusted_checkpoints.read_tracker(tracker_filename)


def cleanup_old_non_persistent_checkpoint(
    save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False
) -> None:
    """Remove all but the newest complete checkpoints of a directory; rank 0 does it.

    Every rank calls it; it is not collective. What cannot be removed is left with a warning.

    Args:
        save_dir: Where the iterations are.
        leave_ckpt_num: How many stay.
        do_async: Do it on a thread.
    """
    trusted_checkpoints.keep_newest(save_dir, leave_ckpt_num, on_thread=do_async)
