"""Set the project up: interpreter, environment, pinned packages, patched megatron-core."""
