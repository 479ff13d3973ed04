"""Tests of what a heterogeneous run is made of."""
