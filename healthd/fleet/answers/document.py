"""Document of an answer, which `--json` prints as it is (docs/json.md), and how its values are written for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from healthd.common.errors import HealthdError

# Times are epoch seconds, durations seconds, shares 0 to 1; None: not known, or not defined. Never NaN.
Document = dict[str, Any]
Found = Callable[[Document], bool]

VERSION = 1  # of each document: a key is not renamed or removed without another


class Unanswerable(HealthdError):
    """The store lacks what the answer stands on: one sentence. Exit status 3."""


class WrongChoice(HealthdError):
    """What was asked for makes no sense, or nothing in the store is it: one sentence. Exit status 64."""


def head(
    name: str, from_time: int | None, to_time: int | None, chosen: Mapping[str, str], notes: Iterable[str]
) -> Document:
    """The first keys of each document. notes: sentences that say what limits the answer."""
    return {
        "answer": name,
        "version": VERSION,
        "from_time": from_time,
        "to_time": to_time,
        "filters": {key: value for key, value in chosen.items() if value},
        "notes": list(notes),
    }


def never(_: Document) -> bool:
    """`found` of an answer that only tells."""
    return False


def moment(seconds: int | None) -> str:
    """2026-11-01 12:00, UTC; "" for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def percent(value: float | None) -> str:
    """0.187 -> "18.7 %"; a share so small that it would be 0 has two digits that count."""
    if value is None:
        return "-"
    shown = 100 * value
    return f"{shown:.1f} %" if abs(shown) >= 0.05 or shown == 0 else f"{shown:.2g} %"


def number(value: float | None, digits: int = 3) -> str:
    """12,345 or 0.0123: whole from a thousand on, else so many digits that count; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-6:  # nine places would print zeros
        return f"{value:.1e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(places, 9)}f}"


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def span(seconds: float | None) -> str:
    """A duration: "35 s", "12 min", "5.3 h", "12 d"; "-" for None."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * length:
            return f"{number(seconds / length, 2)} {unit}"
    return f"{number(float(seconds), 2)} s"
