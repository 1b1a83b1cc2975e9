"""Fail-slow detection: find what still runs, but slower than it should."""
