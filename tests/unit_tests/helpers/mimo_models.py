"""A MIMO model inside a test's ranks, built as a run builds it but not trained."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock

from tests.unit_tests.helpers.mimo_runs import COMMON

# Getters that name no process group; the buffer is what one of our patches is about.
NO_GROUP = ("get_global_memory_buffer", "get_nccl_options")


@dataclass(frozen=True, kw_only=True)
class Built:
    """What stock ``pretrain`` would train with, after model and optimizer are set up."""

    args: Any
    model: Any
    """The one `HeteroMimoModel` of this rank, its modules wrapped."""
    optimizer: Any
    scheduler: Any
    datasets: Any
    forward_step: Any

    def checkpoint_groups(self) -> dict[str, Any]:
        """Arguments with which the stock loop passes a model's groups to save and load."""
        groups = self.model.pg_collection
        return {
            "tp_group": groups.tp,
            "pp_group": groups.pp,
            "dp_group": groups.dp,
            "dp_cp_group": groups.dp_cp_gtp_remat,
            "expt_dp_group": groups.expt_dp,
            "rng_state_key_prefix": self.model.rng_state_key_prefix,
        }

    def sharded_state_dict(self) -> dict[str, Any]:
        """Sharded state of model and optimizer, as the stock save asks for it. Not collective."""
        from megatron.training import checkpointing

        metadata = checkpointing._build_sharded_state_dict_metadata(
            self.args, dp_cp_group=self.model.pg_collection.dp_cp_gtp_remat
        )
        state = {"model": self.model.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata)
        return state


def with_built(function: Callable[..., Any], arguments: Sequence[str], *rest: Any) -> Any:
    """Build a run up to its first iteration and return ``function(built, *rest)``.

    Collective over the ranks of the test. The way there is the run's own, ``--load`` included; its
    hand-over to stock ``pretrain`` is where this function steps in.
    """
    from examples.mimo import train_hetero
    from examples.mimo.training.hetero import loop
    from examples.mimo.training.hetero.args import parse_hetero_arguments
    from megatron.training import training

    answers = []

    def instead_of_training(
        container: Any, datasets: Any, model_type: Any, forward_step: Any, **kwargs: Any
    ) -> None:
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            model_type, cfg_container=container, pg_collection=kwargs["pg_collection"]
        )
        built = Built(
            args=args,
            model=model[0],
            optimizer=optimizer,
            scheduler=scheduler,
            datasets=datasets,
            forward_step=forward_step,
        )
        answers.append(function(built, *rest))

    argv = [*COMMON, "--device", "cpu", *arguments]
    with (
        mock.patch.object(sys, 'argv', ['train', *argv]),
        mock.patch.object(loop, 'pretrain', instead_of_training),
    ):
        config, stock = parse_hetero_arguments(argv)
        args = train_hetero.prepare(config, stock)
        loop.train(config, args)
    return answers[0]


@contextmanager
def global_groups_refused(*allowed: str) -> Iterator[None]:
    """Make every getter of ``parallel_state`` raise, also for modules that imported it by name.

    Local to the process. The getters' code is exchanged, not their names.

    Args:
        allowed: getters that may be asked.
    """
    from megatron.core import parallel_state

    def refused(*_: Any, **__: Any) -> None:
        """Stand in for every getter; runs among the getter's own globals."""
        raise RuntimeError("a global process group was asked for")

    getters = [
        getter
        for name, getter in vars(parallel_state).items()
        if isinstance(getter, FunctionType)
        and getter.__module__ == parallel_state.__name__
        and name.startswith("get_")
        and name not in (*NO_GROUP, *allowed)
    ]
    codes = [getter.__code__ for getter in getters]
    try:
        for getter in getters:
            getter.__code__ = refused.__code__
        yield
    finally:
        for getter, code in zip(getters, codes, strict=True):
            getter.__code__ = code
