"""Durations as text."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def duration(seconds: float) -> str:
    """Format a duration as a number and a unit: "0.02 s", "12 s", "3 min", "2 h", "4 days"."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.2f} s"
    if round(seconds) < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if round(seconds) < 2 * HOUR:
        return f"{int(seconds // MINUTE)} min"
    if seconds < 2 * DAY:
        return f"{int(seconds // HOUR)} h"
    return f"{int(seconds // DAY)} days"
