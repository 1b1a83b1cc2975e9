"""Readers for the store's sources."""
