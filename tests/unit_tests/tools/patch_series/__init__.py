"""Tests of the patch series tool: all on small made-up trees, except where they say otherwise."""
