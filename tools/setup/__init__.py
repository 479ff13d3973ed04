"""Set the project up from nothing: interpreter, environment, pinned packages, patched megatron-core."""
