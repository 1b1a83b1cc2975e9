"""Parses times and durations as written by Slurm and by people, in whole seconds.

A time without a zone is interpreted in the zone that was given for its file. When summer time ends, an hour occurs
twice and is ambiguous. When summer time begins, an hour does not exist. Such times are rejected with a message and
never guessed.
"""

from __future__ import annotations

import datetime
import zoneinfo

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, redacted, regex

# sacct prints these for a missing time (src/common/parse_time.c, slurm_make_time_str). "N/A" comes from squeue.
NO_TIME = frozenset({"", "Unknown", "None", "N/A"})
MIN_SECONDS, MAX_SECONDS = 0, 4_102_444_800  # 1970 to 2100
# No cluster ran Slurm before this time: Slurm's first release was in 2002. Earlier times come from nodes with an empty
# clock battery, whose clocks start in 1970 or 2000. A time more than a day after the last ingest is a planned time, or
# comes from a clock that is ahead.
CLOCK_SET_SECONDS, CLOCK_AHEAD_SECONDS = 1_000_000_000, 86_400

_ISO = regex(r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d{1,9})?)?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?)?")
_EPOCH = regex(r"(\d{1,12})(?:\.\d{1,9})?")
# [days-]hours:minutes:seconds, minutes:seconds.thousandths, days-hours
_DURATION = regex(r"(?:(\d{1,7})-)?(\d{1,9})(?::(\d\d))?(?::(\d\d))?(?:\.\d{1,6})?")


class TimeError(HealthdError, ValueError):
    """The text is not a time, or the time is ambiguous."""


class NotATime(TimeError):
    """A text is not a time."""


def load_zone(name: str) -> datetime.tzinfo:
    """Return a zone from the tz database, or UTC, which needs no database. Raises TimeError."""
    if name == "UTC":
        return datetime.timezone.utc
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise TimeError(f"unknown time zone {name!r}") from error


def parse_seconds(text: str, default_zone: datetime.tzinfo | None = None) -> int | None:
    """Return seconds since the epoch, or None for 0 and for Slurm's words for "no time". Raises TimeError.

    Args:
        default_zone: zone for times without one.
    """
    text = text.strip()
    if text in NO_TIME:
        return None
    if epoch := _EPOCH.fullmatch(text):
        return _bounded(int(epoch[1]), text) or None
    found = _ISO.fullmatch(text)
    if found is None:
        raise NotATime(f"not a time: {redacted(text)}")
    year, month, day, hour, minute, second = (int(found[n] or 0) for n in range(1, 7))
    try:
        local = datetime.datetime(year, month, day, hour, minute, second)
    except ValueError as error:
        raise NotATime(f"not a time: {redacted(text)}") from error
    if found[7] in ("Z", "UTC"):
        return _bounded(_utc_seconds(local), text)
    if found[7]:
        sign = -1 if found[7][0] == "-" else 1
        offset = sign * (int(found[7][1:3]) * 3600 + int(found[7][-2:]) * 60)
        return _bounded(_utc_seconds(local) - offset, text)
    if default_zone is None:
        raise TimeError(f"a time without a zone: {redacted(text)}; add --timezone")
    return _bounded(_utc_seconds(local) - _offset(local, default_zone, text), text)


def _utc_seconds(local: datetime.datetime) -> int:
    return (local - datetime.datetime(1970, 1, 1)) // datetime.timedelta(seconds=1)


def _offset(local: datetime.datetime, local_zone: datetime.tzinfo, text: str) -> int:
    """Return the offset east of Greenwich in seconds. PEP 495: fold=0 and fold=1 differ for ambiguous times."""
    first, second = (local.replace(tzinfo=local_zone, fold=fold).utcoffset() for fold in (0, 1))
    assert first is not None
    assert second is not None
    if first > second:
        raise TimeError(f"{text} occurs twice in {local_zone}, when clocks are set back")
    if first < second:
        raise TimeError(f"{text} does not exist in {local_zone}, when clocks are set forward")
    return first // datetime.timedelta(seconds=1)


def _bounded(number: int, text: str) -> int:
    if not MIN_SECONDS <= number <= MAX_SECONDS:
        raise TimeError(f"a time before 1970 or after 2100: {redacted(text)}")
    return number


def parse_duration(text: str) -> int:
    """Return the seconds in "1-02:03:04", "02:03:04", "03:04.567" or "1-02". Raises TimeError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise TimeError(f"not a duration: {redacted(text)}")
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None:
        if len(numbers) == 1:  # a single number is ambiguous: some programs write minutes, others seconds
            raise TimeError(f"not a duration: {redacted(text)}")
        numbers = [0] * (3 - len(numbers)) + numbers
    hours, minutes, last_part = (*numbers, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + last_part


def parse_limit(text: str) -> int | None:
    """Return the seconds in a time limit given in minutes (TimelimitRaw), or None if unlimited. Raises TimeError."""
    text = text.strip()
    if text in ("", "UNLIMITED", "Partition_Limit"):
        return None
    if not is_decimal(text) or len(text) > 9:
        raise TimeError(f"not a number of minutes: {redacted(text)}")
    return int(text) * 60
