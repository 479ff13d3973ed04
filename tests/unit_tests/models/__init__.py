"""Tests of models, by upstream's paths."""
