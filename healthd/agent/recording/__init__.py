"""Recordings of a node: all inputs of the checks in one file that can be replayed."""
