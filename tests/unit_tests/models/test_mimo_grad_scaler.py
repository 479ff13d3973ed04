"""Gradient scalers of a MIMO model in fp16: one overflow is everybody's."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_models import with_built
from tests.unit_tests.helpers.recorded_runs import scalers

pytestmark = pytest.mark.tier1

FP16 = (
    *("--train-iters", "4", "--fp16", "--initial-loss-scale", "1024"),
    *("--loss-scale-window", "2", "--hysteresis", "1"),
)
LAYOUTS = {
    "disjoint": ("vision", "language"),
    "colocated": ("vision:tp=2,colocated", "language:tp=2"),
    "frozen encoder": ("vision", "language"),
}


def scales_after(built: Any, overflows: list[str]) -> list[list[float]]:
    """Scale of every gradient scaler of this rank after steps in which one module overflows.

    Args:
        built: the model and its optimizer.
        overflows: for each step the module whose gradients are infinite, or none.
    """
    found = []
    for name in overflows:
        built.model.zero_grad_buffer()
        module = built.model.modules_by_name().get(name)
        if module is not None:
            for parameter in module.parameters():
                parameter.main_grad.fill_(float('inf'))
        success, *_ = built.optimizer.step()
        assert success is not bool(name)
        states = scalers(built.optimizer)
        found.append([float.fromhex(state.split(maxsplit=1)[0]) for state in states])
    return found


@pytest.mark.parametrize('optimizer', [(), ("--use-distributed-optimizer",)], ids=["", "dist"])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_scales_stay_equal(
    rank_pool: Callable[[int], RankPool], layout: str, optimizer: tuple[str, ...]
) -> None:
    """Whichever module overflows, all halve their scale, and all double it after two good steps."""
    modules = [word for module in LAYOUTS[layout] for word in ("--module", module)]
    frozen = ("--freeze", "vision") if layout == "frozen encoder" else ()
    overflows = ["language" if frozen else "vision", "", "language", "", ""]
    arguments = (*FP16, *optimizer, *modules, *frozen)
    expected = [512.0, 512.0, 256.0, 256.0, 512.0]
    for rank, steps in enumerate(rank_pool(2).run(with_built, scales_after, arguments, overflows)):
        scaled = [set(scales) for scales in steps]
        assert scaled == [set() if frozen and rank == 0 else {scale} for scale in expected]
