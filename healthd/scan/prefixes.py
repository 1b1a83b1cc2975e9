"""Removes prefixes from log lines, and reads journalctl's formats. All functions are pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from healthd.agent.kernel_log.prefix import Stripped, parse_date, strip_prefix
from healthd.common.text import is_decimal
from healthd.scan.lines import Block, Tally

JSON = (b'{"', b'{ "')

# Prefixes of syslog daemons and dmesg, from which most lines in a storm come. strip_prefix handles all other prefixes.
_USUAL = re.compile(
    rb"(?:([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:|(\d{4}-\d\d-\d\dT)\d\d:\d\d:)(\d\d)(?(2)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)) "
    rb"([\w.-]{1,64}) kernel: )?"
    rb"(?:\[ {0,12}(\d{1,10}\.\d{6})\] )?"
    rb"(?![\[\s]|message repeated |[\w.-]{1,255}: (?:[\[<\d]|[A-Z][a-z]{2} [ \d]|kern))"
)


def stripped(line: bytes, now: float) -> Stripped | None:
    """Strip the prefix like strip_prefix, but faster if many lines have the same date.

    This also reads lines from journalctl -o json.
    """
    usual = _USUAL.match(line)
    if usual is not None and (begins := usual.end()) and line.find(b"kernel:", begins) < 0 and b"\x1b" not in line:
        minute, _, second, fraction, zone, host, uptime = usual.groups()
        return Stripped(
            line[begins:].decode("utf-8", "replace").strip(),
            None if uptime is None else float(uptime),
            None if minute is None else _epoch(minute, second, fraction, zone, now),
            "" if host is None else host.decode("ascii"),
        )
    if line.startswith(JSON):
        return _journal_entry(line)
    return strip_prefix(line.decode("utf-8", "replace"), now)


def _epoch(minute: bytes, second: bytes, fraction: bytes | None, zone: bytes | None, now: float) -> float | None:
    """Return the epoch seconds for a date.

    The minute is cached, because neighbouring lines are usually from the same minute.
    """
    begins = _minute(minute + b"00" + (zone or b""), now)
    if begins is None or second > b"60":
        return None
    return begins + int(second) + (float(b"0" + fraction) if fraction else 0.0)


@functools.lru_cache(maxsize=64)
def _minute(date: bytes, now: float) -> float | None:
    """Return the epoch seconds for a minute, from the cached start of its day.

    Args:
        date: the start of the minute.
    """
    day, hour, minute, suffix = _DAY.fullmatch(date).groups()  # type: ignore[union-attr]
    begins = _day_start(day, suffix, now) if hour < b"24" and minute < b"60" else None
    return parse_date(date.decode("ascii"), now) if begins is None else begins + 3600 * int(hour) + 60 * int(minute)


_DAY = re.compile(rb"(.*)(\d\d):(\d\d)(:00(?:Z|[+-]\d\d:\d\d)?)")
_LAST_MINUTE = (24 * 60 - 1) * 60


@functools.lru_cache(maxsize=64)
def _day_start(day: bytes, suffix: bytes, now: float) -> float | None:
    """Return the epoch seconds for the start of a day, or None if the day is irregular.

    A day is regular if its last minute begins 23:59 hours later. On other days, the clock is changed for summer time,
    or dates without a year switch to the previous year.
    """
    first, last = (parse_date((day + minute + suffix).decode("ascii"), now) for minute in (b"00:00", b"23:59"))
    return first if first is not None and last is not None and last - first == _LAST_MINUTE else None


def _journal_entry(line: bytes) -> Stripped | None:
    """Parse a line from journalctl -o json, as agent/kernel_log/journal.py does for the journal itself."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parse_entry(entry) if isinstance(entry, dict) else None


def parse_entry(entry: dict[str, Any]) -> Stripped | None:
    """Return a journal entry's fields as a kernel message, or None if the kernel did not write it."""
    message = entry.get("MESSAGE")
    if isinstance(message, list) and all(isinstance(item, int) and 0 <= item < 256 for item in message):
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str) or entry.get("_TRANSPORT") != "kernel":
        return None
    if str(entry.get("SYSLOG_FACILITY", "0")) != "0" or entry.get("SYSLOG_IDENTIFIER", "kernel") != "kernel":
        return None
    received, written = _usec(entry.get("__REALTIME_TIMESTAMP")), _usec(entry.get("_SOURCE_MONOTONIC_TIMESTAMP"))
    epoch = None if received is None else received / 1e6
    late = _usec(entry.get("__MONOTONIC_TIMESTAMP"))
    if epoch is not None and late is not None and written is not None:
        epoch -= max(0, late - written) / 1e6
    uptime = None if written is None else written / 1e6
    host = entry.get("_HOSTNAME", "")
    return Stripped(message.strip(), uptime, epoch, host if isinstance(host, str) else "")


def _usec(value: object) -> int | None:
    return int(value) if isinstance(value, str) and is_decimal(value) and len(value) < 20 else None


_EXPORTED = (b"MESSAGE=", b"_TRANSPORT=", b"SYSLOG_", b"_HOSTNAME=", b"__", b"_SOURCE_")


def exported(blocks: Iterable[Block], tally: Tally) -> Iterator[tuple[int, Stripped]]:
    """Yield the kernel's entries from journalctl -o export. Only the first line of each message is read."""
    entry: dict[str, Any] = {}
    number, binary = 0, False
    for block in blocks:
        tally.lines = block.last
        for line_number, line in enumerate(block.lines, block.first):
            if binary:
                entry["MESSAGE"], number, binary = line[8:].decode("utf-8", "replace"), line_number, False
            elif line.startswith(_EXPORTED):
                name, _, value = line.decode("utf-8", "replace").partition("=")
                entry[name] = value
                number = line_number if name == "MESSAGE" else number
            elif line == b"MESSAGE":
                binary = True
            elif not line:
                if (found := parse_entry(entry)) is not None:
                    tally.kernel = True
                    yield number, found
                entry = {}
    if (found := parse_entry(entry)) is not None:
        tally.kernel = True
        yield number, found


def prefix_width(line: bytes, now: float) -> int | None:
    """Return the number of columns before a line's text: 0 without a prefix, None if another program wrote the line."""
    found = stripped(line, now)
    if found is None:
        return None
    text = line.decode("utf-8", "replace")
    prefix = len(text.strip()) - len(found.text)
    return len(text) - len(text.lstrip()) + prefix if prefix > 0 else 0
