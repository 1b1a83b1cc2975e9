"""Remedies for a slow job: which remedy is worth its cost, and when and how to apply it."""
