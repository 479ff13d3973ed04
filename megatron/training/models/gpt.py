"""Layer specification of the stage that the caller's groups name."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec


def _default_layer_spec_of_stage(
    config: "GPTModelConfig", vp_stage: int | None, pg_collection: ProcessGroupCollection
) -> ModuleSpec:
    """Return the default layer specification for the pipeline stage of ``pg_collection``.

    Only a mixture of experts has layers that differ by stage. Its specification is made for the
    stage of the given group; every other one is :func:`default_layer_spec`'s.
    """
    transformer = config.transformer
    by_stage = (
        transformer.num_moe_experts is not None
        and transformer.transformer_impl != "inference_optimized"
        and transformer.experimental_attention_variant is None
        and not config.restore_modelopt_state
    )
    if not by_stage:
        return default_layer_spec(config, vp_stage)
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=transformer.transformer_impl == "transformer_engine",
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pg_collection.pp.rank(),
    )
