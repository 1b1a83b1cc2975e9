"""Recordings of a node: all inputs to the checks, in one file that can be replayed."""
