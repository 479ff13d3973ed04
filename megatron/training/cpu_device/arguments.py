"""Megatron's own flags that a CPU run needs, supplied where the user did not decide."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CpuArgument:
    """One stock flag of a CPU run: how it is written, what contradicts it and why it is needed."""

    tokens: tuple[str, ...]
    contradictions: tuple[str, ...] = ()
    why: str

    @property
    def flag(self) -> str:
        """Return the option's name."""
        return self.tokens[0]


CPU_ARGUMENTS: tuple[CpuArgument, ...] = (
    CpuArgument(
        tokens=("--transformer-impl", "local"),
        contradictions=("--use-transformer-engine",),
        why="Transformer Engine's layers are GPU kernels",
    ),
    CpuArgument(tokens=("--attention-backend", "unfused"), why="fused attention is a GPU kernel"),
    CpuArgument(tokens=("--distributed-backend", "gloo"), why="NCCL needs GPUs"),
    CpuArgument(tokens=("--no-gradient-accumulation-fusion",), why="it is a GPU kernel"),
    CpuArgument(tokens=("--no-masked-softmax-fusion",), why="it is a GPU kernel"),
    CpuArgument(tokens=("--no-persist-layer-norm",), why="it is a GPU kernel"),
    CpuArgument(tokens=("--no-rope-fusion",), why="it is a GPU kernel"),
    CpuArgument(tokens=("--no-bias-swiglu-fusion",), why="it is compiled for a GPU"),
)

GPU_ONLY_FLAGS: dict[str, str] = {
    "--fp8-format": "8-bit training needs a GPU",
    "--fp4-format": "4-bit training needs a GPU",
    "--use-flash-attn": "flash attention is a GPU kernel",
    "--tp-comm-overlap": "it overlaps GPU kernels with user buffers",
    "--use-nccl-ub": "user buffers are NCCL's",
    "--moe-permute-fusion": "it is a GPU kernel",
    "--moe-enable-deepep": "it communicates between GPUs",
    "--enable-cuda-graph": "it records GPU work",
    "--external-cuda-graph": "it records GPU work",
    "--optimizer-cpu-offload": "the optimizer is on the CPU already",
}


def _given(argv: list[str]) -> dict[str, str | None]:
    """Return the options of a command line with the value that follows each, if any."""
    given: dict[str, str | None] = {}
    for position, token in enumerate(argv):
        if not token.startswith("--"):
            continue
        name, equals, value = token.partition("=")
        follower = argv[position + 1] if position + 1 < len(argv) else None
        has_value = follower is not None and not follower.startswith("--")
        given[name] = value if equals else (follower if has_value else None)
    return given


def add_cpu_arguments(argv: list[str]) -> list[str]:
    """Return ``argv`` with the flags that a CPU run needs appended.

    A flag that the user gave is left alone: with another value than the CPU needs it is warned
    about, for the run may fail on it.

    Raises:
        ValueError: When a flag cannot work without a GPU; the sentence names it.
    """
    given = _given(argv)
    for flag, why in GPU_ONLY_FLAGS.items():
        if flag in given:
            raise ValueError(f"{flag} does not work on the CPU: {why}; leave it out")
    added = list(argv)
    for argument in CPU_ARGUMENTS:
        against = [flag for flag in argument.contradictions if flag in given]
        if argument.flag in given:
            wanted = argument.tokens[1] if len(argument.tokens) > 1 else None
            if given[argument.flag] != wanted:
                against.append(f"{argument.flag} {given[argument.flag]}")
        if against:
            needed = " ".join(argument.tokens)
            warnings.warn(
                f"{against[0]} is kept, but a CPU run needs {needed}: {argument.why}", stacklevel=2
            )
        elif argument.flag not in given:
            added.extend(argument.tokens)
    return added
