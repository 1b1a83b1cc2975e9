"""Remedies for a slow job: which one pays off, when, and how to apply it."""
