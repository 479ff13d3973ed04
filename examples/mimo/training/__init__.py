"""Training loops of MIMO models."""
