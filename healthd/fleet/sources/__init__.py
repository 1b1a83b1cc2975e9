"""Readers of the sources of the store."""
