"""Looks inside Megatron's distributed checkpoints, without ranks and without GPUs."""
