"""What a flag of a checkpoint costs, where its help did not say it."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints."""

    dist_ckpt_optim_fully_reshardable: bool = field(
        default=False,
        metadata={
            "argparse_meta": {
                "help": "save the distributed optimizer so that it can be loaded under any TP, PP, "
                "EP and DP, not only other DP. Unpatched, this gathers at save time and can run "
                "out of memory on GPUs under 80 GB; here every rank writes its own part in place"
            }
        },
    )
