"""What a load does with the schedule of learning rate and weight decay."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def load_scheduler(
    args: Namespace, scheduler: OptimizerParamScheduler | None, state_dict: Mapping[str, Any]
) -> None:
    """Load the schedule, or leave it at its start for ``--finetune`` and ``--no-load-scheduler``.

    Called by ``load_checkpoint`` on every rank, after the optimizer was loaded; not collective. The
    optimizer came with the rates of the step at which it was saved, so a schedule that starts anew
    puts its own first ones into every parameter group.

    Raises:
        ValueError: the checkpoint has no schedule.
    """
    if scheduler is None or args.finetune:
        return
    if getattr(args, 'no_load_scheduler', False):
        scheduler.step(0)
        return
    for key in ('lr_scheduler', 'opt_param_scheduler'):  # the first one is of long ago
        if key in state_dict:
            scheduler.load_state_dict(state_dict[key])
            return
    raise ValueError("the checkpoint has no schedule; --no-load-scheduler starts a new one")
