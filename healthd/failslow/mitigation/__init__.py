"""Remedies for a slow job: which one is worth its cost, when to apply it, and how."""
