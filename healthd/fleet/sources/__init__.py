"""Readers of the store's sources, one per file."""
