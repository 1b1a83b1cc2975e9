"""Fail-slow detection: find hardware or software that works, but too slowly."""
