"""Tests of what the sparse fork adds to ``megatron/training``."""
