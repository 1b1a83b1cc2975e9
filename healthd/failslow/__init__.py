"""Fail-slow detection: finds hardware or software that works, but too slowly."""
