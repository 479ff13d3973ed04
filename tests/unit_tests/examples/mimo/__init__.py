"""Tests of the training of MIMO models on rank grids of their own."""
