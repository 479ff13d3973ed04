"""Groups of a tensor's checkpoint description: both given, both global, or refused."""

from contextlib import suppress

import torch


def _checkpoint_groups(
    key: str,
    tp_group: torch.distributed.ProcessGroup | None,
    dp_cp_group: torch.distributed.ProcessGroup | None,
) -> tuple[torch.distributed.ProcessGroup, torch.distributed.ProcessGroup]:
    """Return both groups that say which rank writes what; one not given is the global one.

    Not collective. A group that is missing must not count as one of a single rank: all ranks of
    the real one would then claim to be the first and to write.

    Args:
        key: what is described, for the message.
        tp_group: the module's tensor-parallel group.
        dp_cp_group: the caller's data-parallel group with context parallelism.

    Raises:
        ValueError: a group was not given and there is no global one.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = {'tp': tp_group, 'dp_cp': dp_cp_group}
    for name in [name for name, group in groups.items() if group is None]:
        with suppress(AssertionError):  # that there is no global one, which some getters return
            groups[name] = getattr(ProcessGroupCollection.use_mpu_process_groups([name]), name)
    unknown = [name for name, group in groups.items() if group is None]
    if unknown:
        raise ValueError(
            f"checkpoint of '{key}': no {' and no '.join(unknown)} group was given, and without "
            "initialize_model_parallel there is no global one"
        )
    return groups['tp'], groups['dp_cp']
