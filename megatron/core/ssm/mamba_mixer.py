"""The gated norm of a Mamba mixer is described by its mixer's own group."""

from megatron.core.ssm.mamba_mixer import RMSNormGated
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class ExtendedRMSNorm(RMSNormGated):
    """Gated RMSNorm over the heads of this tensor-parallel rank."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Describe the weight, of which each tensor-parallel rank holds its part of axis 0.

        Not collective. The tensor-parallel group is ``tp_group``, which the mixer sets; the
        data-parallel one is the caller's.

        Raises:
            ValueError: one of the two is missing.
        """
        tp_group = getattr(self, 'tp_group', None)
        dp_cp_group = (metadata or {}).get('dp_cp_group')
        for name, group in {
            "its tp_group": tp_group,
            "metadata['dp_cp_group']": dp_cp_group,
        }.items():
            if group is None:
                raise ValueError(f"checkpoint of '{prefix}weight': {name} is not set")
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=dp_cp_group,
        )
