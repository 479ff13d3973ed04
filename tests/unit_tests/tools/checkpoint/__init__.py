"""Tests of the tools that look inside checkpoints."""
