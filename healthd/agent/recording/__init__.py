"""Recordings of a node: what the checks read, as one file that can be replayed."""
