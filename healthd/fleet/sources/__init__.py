"""Readers of the store's sources."""
