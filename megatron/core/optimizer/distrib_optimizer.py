from typing import Any

import torch


def _torch_steps(state: dict[int, dict[str, Any]]) -> list[float]:
    """Return the distinct step counts of a torch optimizer's state; one that never stepped has 0.

    Local. A load asks for the state's layout before the first step, when the state is empty.
    """
    return sorted({entry['step'].item() for entry in state.values()}) or [0.0]


def _set_torch_step(entry: dict[str, Any], step: torch.Tensor) -> None:
    """Give one parameter's state its own copy of the step, which torch increments in place.

    Local. One tensor for all parameters would be incremented once for each of them.
    """
    entry['step'] = step.clone()
