"""The MIMO model of a heterogeneous run and the builder that stock ``pretrain`` calls.

:class:`HeteroMimoConfig` is a stock ``ModelConfig``: ``setup_model_and_optimizer`` asks it for its
builder, and the builder returns the model with every module wrapped by Megatron's own
``prepare_existing_model_chunks_for_distributed_training`` under the module's own groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, override

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo import MimoModel
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_model_config
from megatron.training.models import ModelConfig
from megatron.training.models.base import ModelBuilder, compose_hooks
from megatron.training.models.dist_utils import (
    prepare_existing_model_chunks_for_distributed_training,
)

from examples.mimo.training.hetero.freeze import freeze
from examples.mimo.training.hetero.grad_sync import GradFinalizer
from examples.mimo.training.hetero.seeds import module_seed_offset, module_seeded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatron.core.process_groups_config import ProcessGroupCollection

    from examples.mimo.training.hetero.topology import Topology


@dataclass(kw_only=True)
class HeteroMimoConfig(ModelConfig):
    """Everything the builder needs; not serialized, since groups belong to one process."""

    builder: ClassVar[str] = "examples.mimo.training.hetero.model.HeteroMimoBuilder"

    topology: Topology
    language: ModelConfig
    """Stock configuration (GPT or hybrid) whose own builder makes the language module."""
    encoder_specs: Mapping[str, ModuleSpec]
    """Modality submodules by module name; their ``params`` hold ``config`` and groups."""
    special_token_ids: Mapping[str, int]
    """Placeholder token of each modality in ``input_ids``."""
    seed: int
    frozen: tuple[str, ...] = ()
    """Dotted paths of ``--freeze``, each starting with a module name."""


class HeteroMimoModel(MimoModel):
    """A :class:`MimoModel` that seeds each module and knows the groups of this rank.

    Attributes:
        pg_collection: groups of the module that speaks for this rank; the stock loop, logging and
            checkpointing read them.
        rng_state_key_prefix: namespace of this rank's random state in a checkpoint, one per module.
        seed_offset: what that module adds to ``--seed``; restarting its streams at a load needs it.
    """

    def __init__(self, config: HeteroMimoConfig) -> None:
        """Build the modules of this rank. Called on every rank."""
        self._hetero = config
        topology = config.topology
        language = topology.collections.get(MIMO_LANGUAGE_MODULE_KEY)
        super().__init__(
            MimoModelConfig(
                language_model_spec=ModuleSpec(
                    module=torch.nn.Module,
                    params={
                        "config": config.language.transformer,
                        "max_sequence_length": config.language.seq_length,
                    },
                ),
                modality_submodules_spec=dict(config.encoder_specs),
                special_token_ids=dict(config.special_token_ids),
                module_to_grid_map=topology.grids,
            ),
            cp_group=language.cp if language is not None else None,
            tp_group=language.tp if language is not None else None,
        )
        self.pg_collection = topology.collections[topology.primary]
        self.rng_state_key_prefix = f"{topology.primary}."
        self.seed_offset = module_seed_offset(topology.layout, topology.primary)

    def _initialize_submodules(self) -> None:
        """Build each encoder of this rank from its spec, seeded for itself."""
        for name in self.role.modality_module_names:
            stage = self.role.modules[name]
            spec = self.mimo_config.modality_submodules_spec[name]
            with self._seeded(name):
                self.modality_submodules[name] = spec.module.from_spec(
                    spec, is_first_stage=stage.is_first_stage, is_last_stage=stage.is_last_stage
                )

    def _initialize_language_model(self) -> None:
        """Build the language module with its stock builder, seeded as a standalone run is."""
        self.language_model = None
        if self.role.has_language_module:
            builder = self._hetero.language.get_builder_cls()(self._hetero.language)
            self.language_model = builder.build_model(
                self._hetero.topology.collections[MIMO_LANGUAGE_MODULE_KEY],
                pre_process=self.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY),
                post_process=self.role.is_last_stage(MIMO_LANGUAGE_MODULE_KEY),
            )

    def _seeded(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Seed for a module, unless it speaks for this rank: that one is seeded already."""
        topology = self._hetero.topology
        if name == topology.primary:
            return contextlib.nullcontext()
        offset = module_seed_offset(topology.layout, name)
        return module_seeded(self._hetero.seed, offset, topology.collections[name])

    def modules_by_name(self) -> dict[str, torch.nn.Module]:
        """Modules of this rank, wrapped or not, encoders first."""
        modules = dict(self.modality_submodules.items())
        if self.language_model is not None:
            modules[MIMO_LANGUAGE_MODULE_KEY] = self.language_model
        return modules

    @override
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the modules of this rank under keys that do not tell how they are wrapped.

        Called on every rank; not collective. A frozen module has no data-parallel wrapper and a
        full-precision one no half-precision wrapper, each of which adds ``module.`` to the keys: a
        module could not be frozen, or trained in another precision, from its checkpoint.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        bare = {}
        for name, module in self.modules_by_name().items():
            is_language = name == MIMO_LANGUAGE_MODULE_KEY
            own = prefix + ("language_model." if is_language else f"modality_submodules.{name}.")
            wrapped, inner = own, module
            while isinstance(inner, DistributedDataParallel | Float16Module):
                wrapped, inner = f"{wrapped}module.", inner.module
            bare[wrapped] = own
        apply_prefix_mapping(state, bare)
        return state

    def replace_module(self, name: str, module: torch.nn.Module) -> None:
        """Put a wrapped module in the place of the bare one."""
        if name == MIMO_LANGUAGE_MODULE_KEY:
            self.language_model = module
        else:
            self.modality_submodules[name] = module

    def wrapped_modules(self) -> dict[str, DistributedDataParallel]:
        """Modules of this rank that data parallelism wraps."""
        return {
            name: module
            for name, module in self.modules_by_name().items()
            if isinstance(module, DistributedDataParallel)
        }


class EncoderFloat16Module(Float16Module):
    """Half-precision wrapper whose output stays in half precision.

    Stock :class:`Float16Module` returns fp32 from a last stage, which suits a loss. An encoder's
    output goes over the bridge and into the language embeddings, both in ``params_dtype``.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the wrapped signature
        """Run the wrapped module in half precision."""
        return super().forward(*inputs, fp32_output=False, **kwargs)


class HeteroMimoBuilder(ModelBuilder[HeteroMimoModel, HeteroMimoConfig]):
    """Builds the model of this rank and wraps each module under its own groups."""

    @override
    def build_model(
        self,
        pg_collection: object = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HeteroMimoModel:
        """Build the bare model. Called on every rank; not collective."""
        if vp_stage is not None:
            msg = "a MIMO model has no virtual pipeline stages (--num-layers-per-virtual-...)."
            raise ValueError(msg)
        model = HeteroMimoModel(self._model_config)
        freeze(model.modules_by_name(), self._model_config.frozen)
        return model

    @override
    def build_distributed_models(
        self,
        pg_collection: object = None,
        *,
        ddp_config: DistributedDataParallelConfig | None = None,
        wrap_with_ddp: bool = True,
        mixed_precision_wrapper: Callable[..., torch.nn.Module] | None = Float16Module,
        **lifecycle: Any,
    ) -> list[HeteroMimoModel]:
        """Build the model and wrap every module of this rank.

        Called on every rank by stock ``setup_model_and_optimizer``; collective over each module's
        groups only. Returns a list of one model, as there are no virtual stages.

        Args:
            pg_collection: not used; the topology holds each module's groups.
            ddp_config: of which every module gets a copy of its own.
            wrap_with_ddp: without it a module is not wrapped in data parallelism.
            mixed_precision_wrapper: encoders get the one that keeps their output in half precision.
            lifecycle: what Megatron's ``prepare_existing_model_chunks_for_distributed_training``
                takes besides.

        Raises:
            ValueError: fully sharded data parallelism is asked for.
        """
        if lifecycle.pop("use_megatron_fsdp", False) or lifecycle.pop("use_torch_fsdp2", False):
            msg = "--use-megatron-fsdp and --use-torch-fsdp2 cannot wrap a MIMO model."
            raise ValueError(msg)
        (model,) = compose_hooks(self._model_config.pre_wrap_hooks)([self.build_model()])
        for name, module in model.modules_by_name().items():
            wrapper = mixed_precision_wrapper
            if wrapper is Float16Module and name != MIMO_LANGUAGE_MODULE_KEY:
                wrapper = EncoderFloat16Module
            (wrapped,) = prepare_existing_model_chunks_for_distributed_training(
                [module],
                get_model_config(module),
                self._collection(name),
                ddp_config=dataclasses.replace(ddp_config) if ddp_config is not None else None,
                wrap_with_ddp=wrap_with_ddp and _trains(module),
                mixed_precision_wrapper=wrapper,
                **lifecycle,
            )
            model.replace_module(name, wrapped)
        self._install_hooks(model)
        return compose_hooks(self._model_config.post_wrap_hooks)([model])

    def _collection(self, name: str) -> ProcessGroupCollection:
        return self._model_config.topology.collections[name]

    def _install_hooks(self, model: HeteroMimoModel) -> None:
        """Give the schedule the model's own synchronization in place of one module's."""
        config = model.config
        config.finalize_model_grads_func = GradFinalizer(self._model_config.topology)
        config.no_sync_func = model.no_sync


def _trains(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
