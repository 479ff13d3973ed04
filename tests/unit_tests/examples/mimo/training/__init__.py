"""Tests of the training of MIMO models."""
