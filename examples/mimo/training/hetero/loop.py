"""Hand-over to Megatron's stock loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.module_reshard import ReshardError

from examples.mimo.data import get_data_provider
from examples.mimo.data.lanes import LaneBatches, MultimodalDataset, SampleOrder, rank_lanes
from examples.mimo.model_providers import get_model_provider
from examples.mimo.training.hetero.layout import LANGUAGE, SharedLayoutError
from examples.mimo.training.hetero.load_module import ModuleLoader
from examples.mimo.training.hetero.model import HeteroMimoConfig
from examples.mimo.training.hetero.runtime import HeteroRuntime, hetero_runtime
from examples.mimo.training.hetero.seeds import module_seed_offset, seed_module
from examples.mimo.training.hetero.step import ForwardStep

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from examples.mimo.data import DataSources
    from examples.mimo.training.hetero.args import HeteroConfig
    from examples.mimo.training.hetero.model import HeteroMimoModel

    ModelHook = Callable[[list[HeteroMimoModel]], list[HeteroMimoModel]]


def train(
    config: HeteroConfig, args: argparse.Namespace, post_wrap_hooks: Sequence[ModelHook] = ()
) -> None:
    """Train with stock ``pretrain``. Collective over the world: every rank calls it.

    Args:
        config: the heterogeneous part of the command line.
        args: the validated stock namespace, already Megatron's global one.
        post_wrap_hooks: called with the wrapped model before the optimizer is built, as those of a
            stock ``ModelConfig``.

    Raises:
        SharedLayoutError: on every rank, where a checkpoint cannot be loaded under this layout.
    """
    provider = get_model_provider(config.model_provider)
    language = provider.language_config(args)
    language.transformer.variable_seq_lengths = True  # the bridge exchanges shapes
    sources = get_data_provider(config.data_provider).datasets(args)
    with hetero_runtime(
        config.layout, language.transformer, args.distributed_timeout_minutes
    ) as runtime:
        seed_module(
            args.seed,
            module_seed_offset(config.layout, runtime.topology.primary),
            runtime.topology.collections[runtime.topology.primary],
        )
        groups = {name: runtime.topology.collections.get(name) for name in runtime.topology.grids}
        model = HeteroMimoConfig(
            topology=runtime.topology,
            language=language,
            encoder_specs=provider.encoder_specs(args, groups),
            special_token_ids=provider.special_token_ids(args, config.layout),
            seed=args.seed,
            frozen=config.freeze,
            post_wrap_hooks=[ModuleLoader(config.load_modules, args), *post_wrap_hooks],
        )
        with _refusals_for_users():
            pretrain(
                pretrain_cfg_container_from_args(args, model),
                DatasetsProvider(runtime, sources),
                ModelType.encoder_or_decoder,
                ForwardStep(runtime.device, args.params_dtype),
                non_loss_data_func=sources.answer_check and sources.answer_check(runtime),
                p2p_communicator=runtime.communicator,
                pg_collection=runtime.pg_collection,
                skip_model_parallel_init=True,
            )


@contextlib.contextmanager
def _refusals_for_users() -> Iterator[None]:
    """Let a checkpoint that this layout cannot load be the user's answer, not a traceback."""
    try:
        yield
    except ReshardError as error:
        raise SharedLayoutError(str(error)) from error


class DatasetsProvider:
    """The ``train_valid_test_dataset_provider`` of a run: batches by lane, already iterators."""

    is_distributed = True
    """Every rank builds its own, also those with tensor rank above 0 (stock loop convention)."""

    def __init__(self, runtime: HeteroRuntime, sources: DataSources) -> None:
        """Keep where this rank stands and what there is to read."""
        self._runtime = runtime
        self._sources = sources

    def __call__(
        self, num_samples: tuple[int, int | None, int]
    ) -> tuple[LaneBatches, LaneBatches | None, None]:
        """Return the training and validation batches of this rank from where the run stands.

        Called by the stock loop on every rank, after a checkpoint was loaded; not collective.
        """
        del num_samples  # the order is endless
        args = get_args()
        train = self._batches(
            self._sources.train, args.micro_batch_size, args.consumed_train_samples, shuffle=True
        )
        valid = None
        if args.eval_iters:
            valid = self._batches(
                self._sources.valid,
                args.eval_micro_batch_size,
                args.consumed_valid_samples,
                shuffle=False,
            )
        return train, valid, None

    def _batches(
        self, dataset: MultimodalDataset, micro_batch_size: int, consumed: int, *, shuffle: bool
    ) -> LaneBatches:
        layout = self._runtime.layout
        return LaneBatches(
            dataset=dataset,
            order=SampleOrder(size=len(dataset), seed=get_args().seed, shuffle=shuffle),
            lanes=rank_lanes(layout, self._runtime.topology.rank, micro_batch_size),
            step_size=micro_batch_size * layout[LANGUAGE].dp,
            consumed=consumed,
        )
