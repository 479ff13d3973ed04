"""A vision-language model: CLIP-style ViT, MLP projection, GPT.

The language model is stock ``GPTModelConfig`` from the stock flags. Every other module of the
layout, whatever its name, is a vision tower of its own: Megatron's ``CLIPViTModel`` with Megatron's
``MultimodalProjector``, sized by ``--vision-*``.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from examples.mimo.training.hetero.layout import LANGUAGE, Layout, LayoutError, ModuleGrid

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models import GPTModelConfig

ENCODER = "clip_encoder"
"""Key of the tower inside an encoder module and of its inputs in ``modality_inputs``."""

DEFAULT_ARGUMENTS = (
    *("--num-layers", "6", "--hidden-size", "128", "--num-attention-heads", "8"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "256"),
    *("--tokenizer-type", "NullTokenizer", "--micro-batch-size", "2"),
    *("--train-iters", "10", "--lr", "1e-3", "--eval-iters", "0"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the vision tower's sizes."""
    group = parser.add_argument_group(title="vision tower")
    group.add_argument("--vision-num-layers", type=int, default=2)
    group.add_argument("--vision-hidden-size", type=int, default=64)
    group.add_argument("--vision-num-attention-heads", type=int, default=4)
    group.add_argument("--image-size", type=int, default=8, help="height and width in pixels")
    group.add_argument("--image-patch-size", type=int, default=2, help="patch side in pixels")


def image_tokens(args: argparse.Namespace) -> int:
    """Number of tokens that one image becomes."""
    return (args.image_size // args.image_patch_size) ** 2


def check(args: argparse.Namespace, layout: Layout) -> None:
    """Refuse sizes that cannot be split as the layout asks.

    Raises:
        LayoutError: one sentence with the flags and the numbers.
    """
    language = layout.language
    for grid in layout.encoders:
        if grid.pp > 1:
            msg = f"--module {grid.name}:pp={grid.pp} must be 1: the tower is a single stage."
            raise LayoutError(msg)
        _must_divide(grid, "--vision-num-attention-heads", args.vision_num_attention_heads)
    _check_images(args, layout)
    _must_divide(language, "--num-attention-heads", args.num_attention_heads)
    if args.num_layers % language.pp:
        msg = (
            f"--num-layers {args.num_layers} cannot be split evenly over --module "
            f"{LANGUAGE}:pp={language.pp}."
        )
        raise LayoutError(msg)
    if language.cp > 1 and args.transformer_impl == "local":
        msg = (
            f"--module {LANGUAGE}:cp={language.cp} needs --transformer-impl transformer_engine: "
            "local attention has no context parallelism."
        )
        raise LayoutError(msg)


def _check_images(args: argparse.Namespace, layout: Layout) -> None:
    """Images become whole patches, and text follows them in a sequence."""
    size, patch = args.image_size, args.image_patch_size
    if patch < 1 or size < patch or size % patch:
        msg = f"--image-size {size} is not a multiple of --image-patch-size {patch}."
        raise LayoutError(msg)
    encoders = len(layout.encoders)
    if encoders and args.seq_length <= encoders * image_tokens(args):
        each = "an image" if encoders == 1 else f"each of {encoders} images"
        msg = (
            f"--seq-length {args.seq_length} leaves no text behind the {image_tokens(args)} tokens "
            f"of {each} (--image-size {size} --image-patch-size {patch})."
        )
        raise LayoutError(msg)


def _must_divide(grid: ModuleGrid, flag: str, value: int) -> None:
    if value % grid.tp:
        msg = f"{flag} {value} cannot be split evenly over --module {grid.name}:tp={grid.tp}."
        raise LayoutError(msg)


def language_config(args: argparse.Namespace) -> GPTModelConfig:
    """Stock GPT configuration; MIMO scatters the merged embeddings, not the text ones."""
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    config.scatter_embedding_sequence_parallel = False
    return config


def special_token_ids(args: argparse.Namespace, layout: Layout) -> dict[str, int]:
    """The last tokens of the vocabulary stand for pieces of images, the last for the first module."""
    return {grid.name: args.vocab_size - 1 - n for n, grid in enumerate(layout.encoders)}


def encoder_specs(
    args: argparse.Namespace, groups: Mapping[str, ProcessGroupCollection | None]
) -> dict[str, ModuleSpec]:
    """Vision tower and projection of every module but the language module."""
    return {
        name: _encoder_spec(args, collection)
        for name, collection in groups.items()
        if name != LANGUAGE
    }


def _encoder_spec(
    args: argparse.Namespace, collection: ProcessGroupCollection | None
) -> ModuleSpec:
    """Vision tower and projection of one module, under its own groups where it is hosted."""
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
    )

    from examples.mimo.model_providers._submodules import HeteroVisionSubmodules

    language = core_transformer_config_from_args(args)
    tower = _tower_config(args, language, collection)
    projection = copy.deepcopy(language)
    projection.tensor_model_parallel_size = tower.tensor_model_parallel_size
    projection.sequence_parallel = False
    return ModuleSpec(
        module=HeteroVisionSubmodules,
        params={"config": tower, "pg_collection": collection},
        submodules={
            "encoders": {ENCODER: _tower_spec(args, tower, collection)},
            "input_projections": [_projection_spec(args, projection, collection)],
        },
    )


def _tower_spec(
    args: argparse.Namespace, config: TransformerConfig, collection: ProcessGroupCollection | None
) -> ModuleSpec:
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    from examples.mimo.model_providers._submodules import vit_layer_spec, vit_norm

    use_te = args.transformer_impl == "transformer_engine"
    return ModuleSpec(
        module=CLIPViTModel,
        params={
            "transformer_config": config,
            "transformer_layer_spec": vit_layer_spec(use_te=use_te),
            "ln_pre_impl": vit_norm(use_te=use_te),
            "add_class_token": False,
            "class_token_len": 0,
            "patch_dim": args.image_patch_size,
            "img_h": args.image_size,
            "img_w": args.image_size,
            "pg_collection": collection,
        },
    )


def _projection_spec(
    args: argparse.Namespace, config: TransformerConfig, collection: ProcessGroupCollection | None
) -> ModuleSpec:
    from megatron.core.models.vision.multimodal_projector import (
        MultimodalProjector,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from examples.mimo.model_providers._submodules import mlp_submodules

    return ModuleSpec(
        module=MultimodalProjector,
        params={
            "config": config,
            "submodules": mlp_submodules(use_te=args.transformer_impl == "transformer_engine"),
            "projector_type": "mlp",
            "input_size": args.vision_hidden_size,
            "pg_collection": collection,
        },
    )


def _tower_config(
    args: argparse.Namespace,
    language: TransformerConfig,
    collection: ProcessGroupCollection | None,
) -> TransformerConfig:
    """Transformer configuration of the vision tower: the run's precision, its own sizes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=args.vision_num_layers,
        hidden_size=args.vision_hidden_size,
        num_attention_heads=args.vision_num_attention_heads,
        tensor_model_parallel_size=collection.tp.size() if collection is not None else 1,
        params_dtype=language.params_dtype,
        pipeline_dtype=language.pipeline_dtype,
        bf16=language.bf16,
        fp16=language.fp16,
        init_method_std=language.init_method_std,
        perform_initialization=language.perform_initialization,
        hidden_dropout=language.hidden_dropout,
        attention_dropout=language.attention_dropout,
        attention_backend=language.attention_backend,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=language.gradient_accumulation_fusion,
        masked_softmax_fusion=language.masked_softmax_fusion,
        persist_layer_norm=language.persist_layer_norm,
        bias_dropout_fusion=language.bias_dropout_fusion,
        apply_rope_fusion=False,
        deterministic_mode=language.deterministic_mode,
    )
