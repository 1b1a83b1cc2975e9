"""Prefixes of kernel messages, in records from /dev/kmsg and in log files. The functions are pure.

/dev/kmsg can be trusted, because its facility identifies a line's writer. In a file, any user who may write to syslog
can pretend to be the kernel (`logger -t kernel`). Only lines that name another program can be excluded.
"""

from __future__ import annotations

import functools
import re
import time
from typing import NamedTuple

from healthd.common.guard import KERNEL_LOG, drop, never_raises
from healthd.common.text import is_decimal, regex

KERNEL = 0  # syslog facility

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


class Record(NamedTuple):
    """One /dev/kmsg record. `usec` is the number of microseconds since boot on the kernel's log clock."""

    facility: int
    sequence: int
    usec: int
    text: str


class Stripped(NamedTuple):
    """A kernel message in a file.

    The line's time is `uptime`, in seconds since boot, or `epoch`. Both are None if the line has no time. `host` is the
    machine in the prefix, or "" if there is none. `lines` is the number of lines that this line represents. `unread` is
    True if healthd failed to parse the prefix; `text` is then the whole line.
    """

    text: str
    uptime: float | None = None
    epoch: float | None = None
    host: str = ""
    lines: int = 1
    unread: bool = False


_RECORD = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20})(?:,[^;\n]{0,256})?;([^\n]*)")  # Linux 3.5 did not write flags
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


@never_raises(KERNEL_LOG)
def parse_record(data: bytes) -> Record | None:
    r"""Parse b"4,123,456789,-;text\n KEY=value\n"; return None if `data` is not a record. \xNN is one byte."""
    match = _RECORD.match(data)
    if match is None:
        return None
    text = match[4]
    if b"\\x" in text:
        text = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), text)
    return Record(int(match[1]) >> 3, int(match[2]), int(match[3]), text.decode("utf-8", "replace"))


# [ 130.456250] [ T1946]     with the caller (CONFIG_PRINTK_CALLER)
_UPTIME = regex(r"\[ *(\d{1,10}(?:\.\d{1,9})?)\] ?(?:\[ *[TC]\d+\] ?)?")
# [Fri Aug 30 11:43:09 2024]      dmesg -T
_CTIME = regex(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\] ?")
# [2023-06-22 21:55:31.352446]    serial consoles; [...] elided in documents
# [May19 19:57] and [  +0.000127]    dmesg -H: a time that cannot be parsed
_CONSOLE = regex(
    r"\[(?:(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)|\.\.\."
    r"| *\+\d{1,10}\.\d{1,9}|[A-Z][a-z]{2} ?\d{1,2} \d\d:\d\d)\] ?"
)
# 2025-01-21T04:41:44,283302+00:00 text          dmesg --time-format=iso: with a comma, without host and tag
# 2026-10-03T05:56:38.1-04:00 host kernel: text  rsyslog, journalctl -o short-iso
_ISO = regex(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:([.,])(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))? +(?=\S)")
_LETTERS = "A-Za-z\u0080-\U0010ffff"  # in any script, because days and months are in the writer's language
# Mar 29 15:38:59 host kernel: text   (month in the writer's language: "mars", "12月"); journalctl may omit the host
_SYSLOG = regex(r"((?!\d+ )[0-9" + _LETTERS + r"]{2,6})\.? +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d{1,9})? +(?=\S)")
# Tue 2025-01-21 04:41:44.123456 UTC host kernel: text    journalctl -o short-full; with the name of the writer's zone
# Mon Jul 28 10:19:15 2025 kern.crit kernel: [ 7013.909286] text     logread
_FULL = regex("[" + _LETTERS + r"]{1,4}\.? (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?) ([\w+-]{1,8}) +(?=\S)")
_DAY = regex(r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4}) +(?=\S)")
_UNIX = regex(r"(\d{9,11}\.\d{1,9}) +(?=\S)")  # journalctl -o short-unix
_DATES = (_SYSLOG, _ISO, _UNIX, _FULL, _DAY)  # the line's writer follows these
# "host kernel: text" also occurs where the date was cut off. metalog writes "[kernel] text", and syslog-ng the hosts
# that a line passed through: "local@node17", "node17/relay".
_HOST_TAG = regex(r"(?:(?!kern\.)([\w.:@/-]{1,255}) +)?(?:kern\.\w{1,8} +)?(?:kernel: ?|\[kernel\] )")
# "Sep 18 20:07:01 NVRM: Xid ...": people remove host and "kernel:" from quoted logs. No user's line has this form: a
# line without a host (journalctl --no-hostname) has a pid, "NVRM[4711]: ", and a line without a pid has a host.
_WITHOUT_TAG = regex(_SYSLOG.pattern + "NVRM: ")
_RFC5424 = regex(r"<(\d{1,3})>1 (?=\d{4}-)")
_RFC5424_TAG = regex(r"(\S{1,255}) kernel \S{1,128} \S{1,32} (?:-|\[[^\]]{0,512}\]) ?")
_PRIORITY = regex(r"<(\d{1,3})>")
_FACILITY = regex(r"(\w{1,10}) *:\w{1,8} *: ")  # dmesg -x: "kern  :warn  : "
# talosctl dmesg: "10.5.0.3: kern:   alert: [2024-05-13T15:13:11.99476118Z]: text"
_TALOS = regex(r"(?:([\w.:-]{1,255}): )?(\w{1,10}): {1,8}\w{1,8}: \[(\d{4}-\d\d-\d\dT[\d:.]{8,18}Z)\]: ")
_COLOUR = regex(r"\x1b\[[\d;]{0,16}[A-Za-z]")  # dmesg --color, a serial console
# pdsh, clush: "node17: [14280.445220] text", and the same before the prefix of a log file
_COLLECTOR = regex(
    r"(?!kern(?:el)?:)([\w.-]{1,255}): (?=\[ *\d{1,10}\.\d{6}\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:"
    r"|<\d{1,3}>|\d{1,10},\d{1,20},\d{1,20},|\d{4}-\d\d-\d\dT\d\d:|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "
    r"|kern *:\w{1,8} *: )"
)
# An alert around a whole line: "Xid errors on instance: node17, Error: May 19 07:08:57 node17 kernel: [680.5] text"
_AROUND = regex(
    r"[\w ,:.-]{1,80}: (?=[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,255} kernel: \[ *\d{1,10}\.\d{6}\] )"
)


# rsyslog ($RepeatedMsgReduction), after the first: "Mar 29 15:38:59 host kernel: message repeated 3 times: [ text]"
_REPEATED = regex(r"message repeated (\d{1,7}) times: \[ ?(.*)\]$")


def strip_prefix(line: str, now: float, injected: bool = False) -> Stripped | None:
    """Return the kernel's message in a line from a log file, or None if another program wrote the line.

    `now` (epoch seconds) determines the year of a syslog date. With `injected`, lines with another facility's priority
    are accepted (drills and tests).
    """
    try:
        return _stripped(line, now, injected)
    except Exception as error:
        drop(KERNEL_LOG, error, line)
        return Stripped(line.strip(), unread=True)


def _stripped(line: str, now: float, injected: bool) -> Stripped | None:
    text = line.strip()
    if "\x1b" in text:
        text = _COLOUR.sub("", text).strip()
    host = ""
    if found := _TALOS.match(text):
        if found[2] != "kern" and not injected:
            return None
        return Stripped(text[found.end() :].strip(), epoch=_strip_date(f"{found[3]} -", now)[1], host=found[1] or "")
    if found := _COLLECTOR.match(text):
        host, text = found[1], text[found.end() :]
    elif (found := _AROUND.match(text)) and not any(pattern.match(text) for pattern in (_FACILITY, *_DATES)):
        text = text[found.end() :]
    if is_decimal(text[:1]) and ";" in text and (record := parse_record(text.encode("utf-8", "replace"))):
        admitted = injected or record.facility == KERNEL
        return Stripped(record.text, uptime=record.usec / 1e6, host=host) if admitted else None
    header = _RFC5424.match(text)
    priority = header or _PRIORITY.match(text)
    if priority is not None:
        if int(priority[1]) >> 3 != KERNEL and not injected:
            return None
        text = text[priority.end() :]
    if found := _FACILITY.match(text):
        if found[1] != "kern" and not injected:
            return None
        text = text[found.end() :]
    quoted = _WITHOUT_TAG.match(text) is not None
    text, epoch, dated = _strip_date(text, now)
    tag = (_RFC5424_TAG if header else _HOST_TAG).match(text)
    if tag is None and (header or (dated and not quoted)):
        return None
    if tag is not None:
        host, text = host or _host_name(tag), text[tag.end() :]
    if found := _COLLECTOR.match(text):
        host, text = host or found[1], text[found.end() :]
    lines = 1
    if tag is not None and (found := _REPEATED.match(text)):
        lines, text = max(1, int(found[1])), found[2]
    text, uptime, bracketed = _strip_brackets(text, now)
    if uptime is not None and (found := _HOST_TAG.match(text)):  # journalctl -o short-monotonic
        host, text = host or _host_name(found), text[found.end() :]
    return Stripped(text.strip(), uptime, bracketed or epoch, host, lines)


def _host_name(tag: re.Match[str]) -> str:
    """Return the host before the tag, or "" if it is "-" (RFC 5424's sign for no host)."""
    return (tag[1] or "").strip("-").rstrip(":") if tag.re.groups else ""


def parse_date(date: str, now: float) -> float | None:
    """Parse a date in a line prefix's format. Return epoch seconds, or None if it is not a date."""
    return _strip_date(f"{date} -", now)[1]


def _strip_date(text: str, now: float) -> tuple[str, float | None, bool]:
    """Return (rest, epoch seconds, whether the line's writer follows this date format)."""
    for pattern in _DATES:
        if found := pattern.match(text):
            has_writer = pattern is not _ISO or found[7] != ","
            return text[found.end() :], _epoch(pattern, found, now), has_writer
    return text, None, False


def _strip_brackets(text: str, now: float) -> tuple[str, float | None, float | None]:
    """Return (rest, uptime, epoch). A console collector may have put its own bracket before the kernel's."""
    uptime: float | None = None
    epoch: float | None = None
    for _ in range(3):
        if found := _UPTIME.match(text):
            uptime = float(found[1])
        elif found := _CTIME.match(text):
            epoch = _epoch(_CTIME, found, now) or epoch
        elif found := _CONSOLE.match(text):
            epoch = _epoch(_CONSOLE, found, now) or epoch
        else:
            break
        text = text[found.end() :]
    return text, uptime, epoch


def _epoch(pattern: re.Pattern[str], found: re.Match[str], now: float) -> float | None:
    """Return a matched date in epoch seconds, or None if it is invalid. Without a zone, it is local time."""
    try:
        if pattern is _UNIX:
            return float(found[1])
        if pattern is _SYSLOG:
            return _syslog_epoch(found, now)
        if pattern is _FULL:
            iso = _ISO.match(f"{found[1]}{'Z' if found[2] in ('UTC', 'GMT') else ''} -")
            return _iso_epoch(iso) if iso else None
        if pattern in (_CTIME, _DAY):
            month = MONTHS.index(found[1].lower()) + 1
            return _local(int(found[6]), month, int(found[2]), int(found[3]), int(found[4]), float(found[5]))
        if pattern is _CONSOLE:
            if found[1] is None:
                return None
            year, month, day, hour, minute = (int(word) for word in found.groups()[:5])
            return _local(year, month, day, hour, minute, float(found[6]))
        return _iso_epoch(found)
    except (ValueError, OverflowError):
        return None


def _syslog_epoch(found: re.Match[str], now: float) -> float:
    """Return a date without a year in epoch seconds. It is assumed to be the latest such date up to tomorrow."""
    month = MONTHS.index(found[1].lower()) + 1
    day, hour, minute, second = (int(word) for word in found.groups()[1:5])
    year = time.localtime(now).tm_year
    epoch = _local(year, month, day, hour, minute, float(second))
    return epoch if epoch <= now + 86400 else _local(year - 1, month, day, hour, minute, float(second))


def _iso_epoch(found: re.Match[str]) -> float:
    import calendar

    year, month, day, hour, minute, second = (int(word) for word in found.groups()[:6])
    fraction = float(f"0.{found[8]}") if found[8] else 0.0
    if not (found[9] or found[10]):
        return _local(year, month, day, hour, minute, second + fraction)
    _check(month, day, hour, minute, second)
    offset = (int(found[11]) * 3600 + int(found[12]) * 60) * (-1 if found[10] == "-" else 1) if found[10] else 0
    return calendar.timegm((year, month, day, hour, minute, second)) + fraction - offset


def _local(year: int, month: int, day: int, hour: int, minute: int, second: float) -> float:
    _check(month, day, hour, minute, second)
    return _minute(year, month, day, hour, minute) + second


@functools.lru_cache(maxsize=64)
def _minute(year: int, month: int, day: int, hour: int, minute: int) -> float:
    """Return a local minute in epoch seconds. The result is cached, because a storm's lines share a minute and mktime
    is slow.

    For an hour that occurs twice because the clock is set back, mktime uses the offset from its last call. The first
    call makes sure that this is always the first hour.
    """
    time.mktime((year, month, day, hour - 12, minute, 0, 0, 0, -1))
    return time.mktime((year, month, day, hour, minute, 0, 0, 0, -1))


def _check(month: int, day: int, hour: int, minute: int, second: float) -> None:
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        raise ValueError("no date")
