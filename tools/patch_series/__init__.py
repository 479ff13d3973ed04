"""Turn the sparse fork under `megatron/` into a complete, installable Megatron Core."""
