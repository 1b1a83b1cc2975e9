"""Builds an answer's document, which `--json` prints unchanged (docs/json.md), and formats its values for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from healthd.common.errors import HealthdError

# Times are epoch seconds, durations seconds, shares 0 to 1; None means unknown or undefined. NaN never occurs.
Document = dict[str, Any]
FindingsPredicate = Callable[[Document], bool]

VERSION = 1  # version of all documents; incremented when a key is renamed or removed


class Unanswerable(HealthdError):
    """The store lacks data that the answer needs. The exit status is 3."""


class WrongChoice(HealthdError):
    """The request is invalid or matches nothing in the store. The exit status is 64."""


def head(
    name: str, from_time: int | None, to_time: int | None, chosen: Mapping[str, str], notes: Iterable[str]
) -> Document:
    """Return the first keys of each document.

    Args:
        notes: sentences about the answer's limits.
    """
    return {
        "answer": name,
        "version": VERSION,
        "from_time": from_time,
        "to_time": to_time,
        "filters": {key: value for key, value in chosen.items() if value},
        "notes": list(notes),
    }


def no_findings(_: Document) -> bool:
    """Return False. This is the `has_findings` of answers that have no findings."""
    return False


def format_time(seconds: int | None) -> str:
    """Format a time as "2026-11-01 12:00" (UTC), or "" for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def share(part: float, whole: float) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None


def percent(value: float | None) -> str:
    """Format 0.187 as "18.7 %". A share that would round to 0.0 gets two significant digits."""
    if value is None:
        return "-"
    percentage = 100 * value
    return f"{percentage:.1f} %" if abs(percentage) >= 0.05 or percentage == 0 else f"{percentage:.2g} %"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number, such as 12,345 or 0.0123, or return "-" for None.

    Numbers from 1,000 are rounded to whole numbers. Smaller numbers have `digits` significant digits.
    """
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-6:  # nine decimals would print zeros
        return f"{value:.1e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(decimals, 9)}f}"


def join_limited(names: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first names, and add the number of the remaining ones: "a, b and 3 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def format_duration(seconds: float | None) -> str:
    """Format a duration as "35 s", "12 min", "5.3 h" or "12 d"; "-" for None."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length:
            return f"{number(seconds / length, 2)} {unit}"
    return f"{number(float(seconds), 2)} s"
