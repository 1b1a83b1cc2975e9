"""Fail-slow: what still runs, but slower than it should. Pure, but for the readers."""
