"""Recognises text that people and programs put before a quoted kernel line. Only `healthd scan` uses it.

All functions are pure.

Formats, each from a real post:

    diff:371;NVRM: Xid (PCI:0000:37:00): 95, ...                      a server vendor's fault ticket
    [ 140.054924 ] NVRM: Xid (PCI:0000:01:00): 61, ...                typed from a photograph of a screen
    2026-10-04T14:16:55+03:00 <pc> kernel: NVRM: Xid (...): 69, ...   host name masked by the poster
    [Sun Dec  1 14:54:40 2024] node17 kernel: mlx5_core 0000:5c:00.0: ...          gpud's tests
    [gpu-health] [CRITICAL] GPU-1234: XID: NVRM: Xid (PCI:0000:c6:00): 79, ...     another program's log
    2024-01-01 00:00:00,000 INFO monitor: NVRM: Xid (PCI:0000:3b:00): 79, ...      another program, Python's logging

The last two formats prove what the program wrote, but not what the kernel wrote: the line does not show where the
program got the message.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from healthd.common.text import regex

MAX_PREFIX_LENGTH = 240  # maximum length of another program's prefix
MAX_PIECES = 4

# Beginnings of lines that only the kernel prints: driver names with an address, and the kernel's own messages in their
# exact format.
_ONLY_KERNEL = (
    r"NVRM: |nvidia-nvswitch\d{1,3}: |nvidia-nvlink: |nvidia-modeset: |Linux version \d{1,2}\.\d"
    r"|(?:pci|pcieport|nvidia|mlx[45]_core|nvme|efa|bnxt_en|ixgbe|i40e|ice|ahci|megaraid_sas|mpt3sas) [0-9a-f]{4,8}:"
    r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?: \w{1,15})?: |BIOS-e820: \[mem 0x|(?:BIOS|EFI)-provided physical RAM map:"
    r"|EXT[234]-fs (?:error |warning |\()|XFS \([\w-]{1,32}\): |BTRFS (?:error|warning|info|critical) \(device "
    r"|EDAC MC\d{1,2}: |mce: \[Hardware Error\]: |\{\d{1,6}\}\[Hardware Error\]: |nvme nvme\d{1,3}: "
    r"|sd \d{1,4}:\d{1,4}:\d{1,4}:\d{1,8}: \[|usb \d{1,3}-\d|(?:blk_update_request: |Buffer )?I/O error, dev \w{1,32}, "
    r"|audit: type=\d{4} audit\(|oom-kill:constraint=|Memory cgroup out of memory: |RIP: 00\d\d:|Modules linked in: "
    r"|watchdog: BUG: soft lockup - |DMAR: (?:DRHD: |\[)|AMD-Vi: Event logged \[|arm-smmu-v3 [\w.-]{1,40}: "
    r"|INFO: task .{1,40}:\d{1,10} blocked for more than |rcu: INFO: "
)
_BEGINS = regex(_ONLY_KERNEL)
_UPTIME = regex(r"\[ {0,12}([0-9]{1,10}\.[0-9]{1,9}) {1,4}\] ?")
_TICKET = regex(r"[A-Za-z0-9_]{1,40}:[0-9]{1,10};")
_MASKED_HOST = regex(r"<([A-Za-z0-9_.-]{1,255})> (?=kernel: )")
_HOST = regex(r"<([A-Za-z0-9_.-]{1,255})> |([A-Za-z0-9_.-]{1,255}) (?=kernel: )")
_TAG = regex(r"kernel: ")
LEVEL = r"(?:DEBUG|INFO|NOTICE|WARN|WARNING|ERR|ERROR|CRIT|CRITICAL|FATAL)"
# Beginnings of other programs' log lines: levels or times in brackets, a named level, or klog's format.
_LOG_PREFIX = regex(
    r"(?:\[[^\[\]]{1,40}\] ?){1,4}(?:[^\[\]:]{1,60}: ){0,3}"
    rf"|[^\n]{{0,100}}\b{LEVEL}\b[^\n]{{0,160}}?(?:[:\]|;] ?| - )"
    r"|[IWEF][0-9]{4} [0-9:.]{8,15} {1,8}[0-9]{1,10} [A-Za-z0-9_./-]{1,60}:[0-9]{1,6}\] "
    r"|[^\n]{0,100}\blevel=\"?\w{1,10}\"? [^\n]{0,100}?\bmsg=\"?"
)
# A line with a date that the program itself wrote. Such a date has a blank before the time, where syslog daemons write
# a "T", or is directly followed by a level. A syslog daemon's date is followed by the host and by a program name, which
# any user can choose.
_OWN_DATE = regex(
    r"\d{4}-\d\d-\d\d(?: \d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[ |:,-]{1,4}"
    rf"(?=(?:[\w.()-]{{1,40}}[ |:,-]{{1,4}}){{0,2}}\[?{LEVEL}\b)"
    rf"|T\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?(?:Z|[+-]\d\d:?\d\d)?[ |:,-]{{1,4}}(?=\[?{LEVEL}\b))"
)
_STAMP = regex(r"\[ {0,12}[0-9]{1,10}\.[0-9]{1,9} ?\] $")

_BEGINS_IN_BYTES = re.compile(
    rb"(?:[A-Za-z0-9_]{1,40}:[0-9]{1,10};|\[ {0,12}[0-9]{1,10}\.[0-9]{1,9} {1,4}\] "
    rb"|<[A-Za-z0-9_.-]{1,255}> (?:kernel: )?){0,3}(?:" + _ONLY_KERNEL.encode() + rb")"
)


class Quoted(NamedTuple):
    """The kernel message in a line.

    Attributes:
        uptime, host: as quoted.
        proven: False if the line is from another program's log; True if it was posted as the kernel's own line.
    """

    text: str
    uptime: float | None = None
    host: str = ""
    proven: bool = True


def begins_as_the_kernels(line: bytes) -> bool:
    """Return True if the line begins in a way that only a kernel line can.

    Such a line proves that a log without prefixes is a kernel log.
    """
    return _BEGINS_IN_BYTES.match(line) is not None


def restore_host(line: str) -> str | None:
    """Return a dated line with "<host> kernel: " replaced by "host kernel: ", or None if it contains no such text."""
    named = _MASKED_HOST.search(line, 0, MAX_PREFIX_LENGTH)
    return f"{line[: named.start()]}{named[1]} {line[named.end() :]}" if named else None


def find_quoted(text: str, by_programs: bool) -> Quoted | None:
    """Return `text` without the prefix before the kernel message, or None if the prefix is unknown.

    Args:
        by_programs: True if the line may come from another program's log. It must be False for a line with the kernel's
            time, because a user may have written the rest of its text.
    """
    remainder, uptime, host = text, None, ""
    for _ in range(MAX_PIECES):
        if found := _UPTIME.match(remainder):
            uptime = float(found[1])
        elif found := _HOST.match(remainder):
            host = found[1] or found[2]
        elif not (found := _TICKET.match(remainder) or _TAG.match(remainder)):
            break
        remainder = remainder[found.end() :]
    if _BEGINS.match(remainder):
        return Quoted(remainder, uptime, host) if remainder != text else None
    return _program_quote(text) if by_programs else None


def find_dated_quote(line: str) -> Quoted | None:
    """Return the message quoted in a log line that another program wrote and dated."""
    date = _OWN_DATE.match(line)
    return _program_quote(line[date.end() :]) if date else None


def _program_quote(text: str) -> Quoted | None:
    begins = next((found.start() for found in _BEGINS.finditer(text, 0, MAX_PREFIX_LENGTH + 200)), 0)
    before = _STAMP.sub("", text[:begins]) if 0 < begins <= MAX_PREFIX_LENGTH else ""
    return Quoted(text[begins:], proven=False) if before and _LOG_PREFIX.fullmatch(before) else None
