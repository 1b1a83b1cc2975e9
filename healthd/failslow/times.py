"""Times as text: ISO 8601, as people and pandas write it. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from healthd.common.text import regex

_ISO = regex(r"(\d{4})-(\d\d)-(\d\d)(?:([T ])(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?(Z|[+-]\d\d:?(?:\d\d)?)?)?")
_EPOCH = datetime(1970, 1, 1)
_MICROSECONDS = 6  # what a number of seconds since 1970 can hold


class TimeStyle(NamedTuple):
    """How a time stood: "T" or " " before the hour, digits of a second's fraction, the zone ("Z", "+01:00", "")."""

    separator: str
    digits: int
    zone: str


def seconds(text: str) -> float | None:
    """Since 1970, of an ISO 8601 date and time; without a zone it is UTC. None if it is none."""
    parts = _ISO.fullmatch(text.strip())
    if parts is None:
        return None
    year, month, day, _, hour, minute, second, fraction, zone = parts.groups()
    try:
        whole = datetime(int(year), int(month), int(day), int(hour or 0), int(minute or 0), min(int(second or 0), 59))
    except ValueError:
        return None
    leap = int(second or 0) - whole.second  # 23:59:60, and what no second is
    if leap > 1:
        return None
    since = whole - _EPOCH
    return since.days * 86400 + since.seconds + leap + float(f"0.{fraction or 0}") - offset(zone or "")


def units_a_second(first: float, last: float) -> float | None:
    """Of numbers from first to last that are times since 1970: 1 if they are seconds, 1000 if ms, so also us and ns. A
    time is from 2001 to 2286, so that each size has one unit. None if they are no times."""
    return next((unit for unit in (1.0, 1e3, 1e6, 1e9) if 1e9 * unit <= first <= last < 1e10 * unit), None)


def style(text: str) -> TimeStyle | None:
    """How an ISO 8601 time is written; None if it is none."""
    parts = _ISO.fullmatch(text.strip())
    if parts is None or seconds(text) is None:
        return None
    return TimeStyle(parts[4] or "", len(parts[8] or ""), parts[9] or "")


def text(since: float, how: TimeStyle) -> str:
    """A time as the others of its column stood, to the microsecond at best."""
    digits = min(how.digits, _MICROSECONDS)
    try:
        micro = round(round(since + offset(how.zone), digits) * 1_000_000)
        then = datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=micro)
    except (OverflowError, ValueError):
        return str(since)
    day = f"{then.year:04}-{then.month:02}-{then.day:02}"
    if not how.separator:
        return day
    fraction = f".{then.microsecond:06}"[: digits + 1] if digits else ""
    return f"{day}{how.separator}{then.hour:02}:{then.minute:02}:{then.second:02}{fraction}{how.zone}"


def offset(zone: str) -> int:
    """Seconds east of UTC."""
    numbers = zone[1:].replace(":", "")
    if not numbers:
        return 0
    east = int(numbers[:2]) * 3600 + int(numbers[2:] or 0) * 60
    return -east if zone[0] == "-" else east
