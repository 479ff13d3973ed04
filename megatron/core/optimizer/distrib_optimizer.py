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


@torch.no_grad()
def _copy_loaded(targets: dict[str, torch.Tensor], sources: dict[str, Any]) -> None:
    """Copy one parameter's loaded tensors over its main parameter and optimizer state.

    Local. In full precision the main parameter is a view of the model's, which requires grad. The
    step travels with the parameter groups and is set already; a source that names it as well holds
    the step of the fresh optimizer, which the default layout hands through the load.
    """
    for name, target in targets.items():
        if name == 'step':
            continue
        if isinstance(sources[name], torch.Tensor):
            target.copy_(sources[name])
