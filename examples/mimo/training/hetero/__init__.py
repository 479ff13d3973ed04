"""Training with one rank grid per module."""
