"""Tests of the data of MIMO runs."""
