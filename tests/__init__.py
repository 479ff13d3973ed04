"""Tests of everything in this repository."""
