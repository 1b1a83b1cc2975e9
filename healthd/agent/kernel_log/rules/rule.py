"""Definitions that all families of kernel lines share: rules, addresses and events."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from healthd.common.model import KernelEvent
from healthd.common.text import regex

# Code for further lines about a fault. agent/kernel_log/coalesce.py adds them, with their fields (`bit`, `section`), to
# the nearby fault of the same kind and part.
DETAIL = "detail"
SM = "sm"  # a field: a GPU's processors, such as "7.7.0 7.7.1"
FURTHER = "further"  # a field: marks a further line that has the same code as its fault
# Fields that name a part in lines without a PCI address. A further line belongs to the fault with the same part.
PARTS = frozenset({"controller", "device", "port", "scsi", "server"})

# Maximum length of a message, at least the kernel's maximum for a record (kernel/printk/internal.h: PRINTKRB_RECORD_MAX
# is 1024 bytes; before Linux 6.3, LOG_LINE_MAX, which is less). Anything after that is not from the kernel.
MAX_TEXT = 1024

Build = Callable[[str, re.Match[str]], KernelEvent | None]
Groups = int | tuple[int, ...] | str


class Rule(NamedTuple):
    """One message format.

    literals texts; each matching message contains at least one of these. A message that contains no rule's literals is
             not parsed. Choose literals that are rare in a log: "Xid (", not "error"
    pattern  matched at the start of the message, because text inside the message may be a user's
    build    returns the event, or None if the message is irrelevant after all
    varies   fields that may differ between two lines about one fault; every other field identifies the fault. Lines of
             one kind are compared, so a field that one rule lists here may vary for all rules of its kind
    """

    kind: str
    literals: tuple[str, ...]
    pattern: re.Pattern[str]
    build: Build
    varies: tuple[str, ...] = ()


_ADDRESS = regex(r"(?:PCI:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}|00[0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.I)
PCI = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"  # a part of patterns; it has one group


@functools.lru_cache(maxsize=256)  # a log repeats the same few addresses
def pci_address(text: str) -> str:
    """Convert a PCI address from any driver's format to the format of sysfs: "PCI:0000:1B:00" -> "0000:1b:00.0".

    An Xid's address has no function: GPUs are function 0. The oldest drivers print bus:device with four digits for the
    bus ("0001:00"). Return "" if `text` is not an address (masked, truncated).
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    if int(device, 16) > 31:
        return ""
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


def event(
    kind: str,
    match: re.Match[str],
    code: str = "",
    pci: str = "",
    fields: Iterable[tuple[str, str | None]] = (),
    pid: int | None = None,
    process: str | None = None,
) -> KernelEvent:
    """Return the event for a line. `pci` has the line's format. Fields with the value None are omitted."""
    return KernelEvent(
        kind=kind,
        code=code,
        pci=pci_address(pci),
        text=match.string.rstrip()[:MAX_TEXT],
        pid=pid,
        process=process,
        fields=tuple([(name, value) for name, value in fields if value is not None]),
    )


def find_code(text: str, table: Iterable[tuple[re.Pattern[str], str]]) -> str:
    """Return the code of the first pattern that matches at the start of the text, or "" if none does."""
    return next((code for pattern, code in table if pattern.match(text)), "")


def event_builder(code: str, pci: Groups = "", **fields: Groups) -> Build:
    """Return a function that builds an event with this code. The address and fields come from the pattern's groups.

    A value of type Groups is a group's number, several numbers (the first group that matched is used), or constant
    text.
    """

    def build(kind: str, match: re.Match[str]) -> KernelEvent:
        found = [(name, _value(match, groups)) for name, groups in fields.items()]
        return event(kind, match, code, _value(match, pci) or "", found)

    return build


def _value(match: re.Match[str], groups: Groups) -> str | None:
    if isinstance(groups, str):
        return groups
    values = [match[number] for number in (groups if isinstance(groups, tuple) else (groups,))]
    return next(filter(None, values), values[-1])
