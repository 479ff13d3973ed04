"""Tools of the repository, run with `python -m tools.NAME` from its root."""
