"""Count repeated lines before they are parsed, so that a storm of a million lines costs little.

Two Xids with the same head (GPU and code) report one fault, regardless of pid, channel or registers. Some codes are
followed by text that distinguishes faults (a link, a unit, a recovery action). Lines with these codes have no head
here. These Xids, and all SXids and PCI Express errors, therefore report one fault only if their lines are identical.
Every other line is read individually, because the order of lines matters if they report a state (a link is down, or up
again).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from healthd.common.text import regex

BULK_BYTES = 32 << 10  # a storm or a backlog; less data is read line by line

# Xid 74 and 144-150 name a link, 154 an action, and some Xids 13 a processor. agent/kernel_log/rules/nvidia.py stores
# these in fields.
_XID = (
    r"NVRM: Xid \(PCI:[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\): "
    r"(?:13,[^\n(]{0,120} on \(GPC \d{1,3}, TPC \d{1,3}[^\n)]{0,9}\)|(?!74,|14[4-9],|150,|154,)[1-9]\d{0,3},)"
)
_HEAD = regex(_XID)
_WHOLE = (
    rb"(?:NVRM: Xid \(PCI:[0-9A-Fa-f:]{7,16}\): (?:74|14[4-9]|150),|nvidia-nvswitch\d{1,3}: SXid \(PCI:"
    rb"|(?:pcieport|nvidia|mlx5_core|nvme) [0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: (?:AER: |PCIe Bus Error: |  ))"
)
# A file's line that certainly comes from the kernel: the text alone, or after dmesg's time, or after a date, a host and
# "kernel:" (syslog daemons write these formats; agent/kernel_log/prefix.py has more).
_LINE = re.compile(
    rb"^(?:(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.:+Z-]{0,24})"
    rb" [\w.-]{1,64} kernel: )?"
    rb"(?:\[ {0,6}\d{1,10}\.\d{6}\] )?(?:(" + _XID.encode() + rb")[^\n]*|(" + _WHOLE + rb"[^\n]*))\n",
    re.MULTILINE,
)


class Repeats(NamedTuple):
    """Repeated lines, and the rest.

    `first` contains (line, count) for each head, or for each group of identical lines. The line is the group's first
    complete line. `others` contains all other lines, in order.
    """

    first: list[tuple[bytes, int]]
    others: bytes


def fault_head(text: str) -> str:
    """Return the text that a message (without prefix) shares with all lines about the same fault.

    Return "" if only a parser can decide.
    """
    match = _HEAD.match(text)
    return match[0] if match is not None else ""


def count_repeats(lines: bytes) -> Repeats:
    """Count the repeats in complete log lines, in one pass of a regular expression (1 us per line)."""
    parts = _LINE.split(lines)  # text between repeats, a repeat's head or whole text, text between, ...
    counts = Counter(head or text for head, text in zip(parts[1::3], parts[2::3], strict=True))
    if not counts:
        return Repeats([], lines)
    first = []
    for repeat, count in counts.items():
        # The head may first occur in another program's line that quotes it. Only _LINE identifies the writer.
        offset = 0
        while True:
            start = lines.rfind(b"\n", 0, lines.index(repeat, offset)) + 1
            match = _LINE.match(lines, start)
            if match is not None and repeat in match.groups():
                break
            offset = lines.index(b"\n", start) + 1
        first.append((match[0][:-1], count))
    return Repeats(first, b"".join(parts[::3]))
