"""Parses and formats ISO 8601 times, with "T" or a space. All functions are pure."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from healthd.common.text import regex

_ISO = regex(r"(\d{4})-(\d\d)-(\d\d)(?:([T ])(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?(Z|[+-]\d\d:?(?:\d\d)?)?)?")
_EPOCH = datetime(1970, 1, 1)
_MICROSECONDS = 6  # number of decimals that a float with seconds since 1970 can represent


class TimeStyle(NamedTuple):
    """The format of a time: "T" or " " before the hour, digits in the second's fraction, zone ("Z", "+01:00", "")."""

    separator: str
    digits: int
    zone: str


def parse_seconds(text: str) -> float | None:
    """Parse an ISO 8601 date and time to seconds since 1970 (UTC without a zone). Return None for other text."""
    parts = _ISO.fullmatch(text.strip())
    if parts is None:
        return None
    year, month, day, _, hour, minute, second, fraction, zone = parts.groups()
    try:
        whole = datetime(int(year), int(month), int(day), int(hour or 0), int(minute or 0), min(int(second or 0), 59))
    except ValueError:
        return None
    leap = int(second or 0) - whole.second  # 23:59:60, and invalid seconds
    if leap > 1:
        return None
    since = whole - _EPOCH
    return since.days * 86400 + since.seconds + leap + float(f"0.{fraction or 0}") - offset(zone or "")


def units_per_second(first: float, last: float) -> float | None:
    """Return the unit of times since 1970: 1 for seconds, 1000 for ms, and so on for us and ns.

    Return None if the numbers are not times. Only times from 2001 to 2286 are accepted, so the magnitude shows the
    unit.
    """
    return next((unit for unit in (1.0, 1e3, 1e6, 1e9) if 1e9 * unit <= first <= last < 1e10 * unit), None)


def detect_style(text: str) -> TimeStyle | None:
    """Return the format of an ISO 8601 time, or None for other text."""
    parts = _ISO.fullmatch(text.strip())
    if parts is None or parse_seconds(text) is None:
        return None
    return TimeStyle(parts[4] or "", len(parts[8] or ""), parts[9] or "")


def format_time(since: float, time_style: TimeStyle) -> str:
    """Format a time in the format of its column, with at most microseconds."""
    digits = min(time_style.digits, _MICROSECONDS)
    try:
        micro = round(round(since + offset(time_style.zone), digits) * 1_000_000)
        moment = datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=micro)
    except (OverflowError, ValueError):
        return str(since)
    day = f"{moment.year:04}-{moment.month:02}-{moment.day:02}"
    if not time_style.separator:
        return day
    fraction = f".{moment.microsecond:06}"[: digits + 1] if digits else ""
    return (
        f"{day}{time_style.separator}{moment.hour:02}:{moment.minute:02}:{moment.second:02}{fraction}{time_style.zone}"
    )


def offset(zone: str) -> int:
    """Return a zone's offset in seconds east of UTC."""
    numbers = zone[1:].replace(":", "")
    if not numbers:
        return 0
    east = int(numbers[:2]) * 3600 + int(numbers[2:] or 0) * 60
    return -east if zone[0] == "-" else east
