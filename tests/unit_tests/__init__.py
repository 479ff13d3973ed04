"""Unit tests; the folders mirror the paths that they test."""
