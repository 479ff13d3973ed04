"""Forward step and loss of a MIMO run, as the stock schedules call them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from examples.mimo.training.hetero.model import HeteroMimoModel

Batch = dict[str, Any]


class ForwardStep:
    """The ``forward_step_func`` of a run: takes a microbatch of this rank through the model."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Keep where tensors go and in which type floating-point encoder inputs enter."""
        self._device = device
        self._dtype = dtype

    def __call__(
        self, data_iterator: Iterator[Batch], model: HeteroMimoModel
    ) -> tuple[Any, Callable[..., Any]]:
        """Run this rank's part of the model on the next microbatch.

        Called by the schedule on every rank. Returns what the rank's stage produces (a dictionary of
        tensors by module, or the per-token losses on the last stage) and the loss function.
        """
        batch = self.move(next(data_iterator))
        output, loss_mask = model(**batch)
        return output, partial(token_loss, loss_mask)

    def move(self, value: Any, key: str = "") -> Any:  # noqa: ANN401 - a nested batch
        """Copy a nested batch to the device; encoder inputs also to the parameters' type."""
        if isinstance(value, dict):
            return {name: self.move(item, key or name) for name, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        cast = key == "modality_inputs" and value.is_floating_point()
        return value.to(self._device, self._dtype if cast else None, non_blocking=True)


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the masked per-token losses, the number of tokens and what to log.

    Args:
        loss_mask: ``[batch, sequence]``, 1 where a token counts.
        losses: per-token cross entropy of the same shape.

    Returns:
        The summed loss (scalar), the token count (int scalar) and ``{"lm loss": [sum, count]}``,
        Megatron's convention for per-token loss. Runs on the language module's last stage only.
    """
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    if args.check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    tokens = mask.sum().to(torch.int)
    report = torch.stack([loss.detach(), tokens.to(loss.dtype)])
    return loss, tokens, {"lm loss": report}
