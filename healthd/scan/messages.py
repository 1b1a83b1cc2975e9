"""Extracts the messages from the lines of a log, in order. All functions are pure.

    blocks of lines -> candidate lines -> prefix stripped -> parsed, or taken from the cache

A repeated message is parsed only once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from msgspec.structs import replace

from healthd.agent.kernel_log import coalesce as coalescing
from healthd.agent.kernel_log import parse as kernel_parse
from healthd.agent.kernel_log.prefix import Stripped, strip_prefix
from healthd.agent.kernel_log.rules.network import CARD_DRIVERS
from healthd.common.model import Clears, Inventory, KernelEvent, Severity
from healthd.common.text import regex
from healthd.scan.candidates import candidates, rule_literals
from healthd.scan.continuation import PrecedingLines
from healthd.scan.lines import Block, Tally
from healthd.scan.prefixes import JSON, exported, prefix_width, stripped
from healthd.scan.quoted import find_dated_quote, find_quoted, restore_host

MESSAGES_BYTES = 4 << 20  # memory for cached messages, in bytes; cached lines get the same amount
MESSAGE_BYTES = 2000  # overhead per message, in bytes
SHARED_CACHE_SIZE = 1000  # maximum number of cached values that several messages share


class Meaning(NamedTuple):
    """Meaning of an event.

    Attributes:
        code, severity, clears: taken from the finding; without a finding: kind/code, INFO and None.
        part_names: the parts that the event names, and the parts above them; `part` is the displayed part.
    """

    code: str
    severity: Severity
    clears: Clears | None
    part_names: frozenset[str]
    part: str
    node: Inventory


@dataclass(slots=True, eq=False)
class Message:
    """The parsed content of all lines that have the same text.

    Attributes:
        event: the event without time, boot and count; `observed` is true if the text may be a user's (continuation.py,
            quoted.py).
        fault, part: coalescing.fault_key and coalescing.part_key, as strings because they are looked up for each line.
        name: key by which the next line of the event is found.
        judgement_key: everything in the event that can affect a check's result; the devices in `slots` also affect it.
    """

    event: KernelEvent
    fault: str
    part: str
    judgement_key: str
    slots: frozenset[str]
    device: tuple[str, str] | None  # the device's kind and the port above it (event.pci)
    name: tuple[str, bool]
    meaning: Meaning | None = None  # cached text; `middle` and `end` are used for --json
    middle: str = ""
    end: str = ""


class BoundedCache(dict[Any, Any]):
    """Cache that is emptied when it becomes too large."""

    __slots__ = ("most", "size")

    def __init__(self, max_size: int) -> None:
        self.most, self.size = max_size, 0

    def store(self, name: object, value: object, size: int) -> None:
        self.size += size
        if self.size > self.most:
            self.clear()
            self.size = size
        self[name] = value


_DRIVEN = regex(r"(nvidia|mlx[45]_core|bnxt_en|ice|i40e|ixgbe|nvme|nvidia-nvswitch\d*) [0-9a-f]{4,8}:")
_DRIVER_KINDS = {"nvidia": "gpu", "nvme": "nvme"}
_EVENT_KINDS = {"xid": "gpu", "sxid": "nvswitch", "mlx5": "nic", "nvme": "nvme"}


def make_message(event: KernelEvent) -> Message:
    kind = "gpu" if event.code == "fallen_off_bus" else _EVENT_KINDS.get(event.kind, "")
    if not kind and event.pci and (driver := _DRIVEN.match(event.text)):
        kind = "nvswitch" if driver[1].startswith("nvidia-nvswitch") else _DRIVER_KINDS.get(driver[1], "nic")
    shared = _shared(event.kind, event.code, event.pci, event.fields, event.observed, kind)
    return Message(event, *shared, (event.text, event.observed))


@functools.lru_cache(maxsize=SHARED_CACHE_SIZE)
def _shared(
    kind: str, code: str, pci: str, fields: tuple[tuple[str, str], ...], observed: bool, device_kind: str
) -> tuple[str, str, str, frozenset[str], tuple[str, str] | None]:
    """Return the fault, part, judgement_key, slots and device of a Message.

    Messages that differ only in their text share these values.
    """
    event = KernelEvent(kind, code, pci, fields=fields)
    reporter = event.field("reporter")
    return (
        repr((observed, coalescing.fault_key(event))),
        repr((observed, coalescing.part_key(event))),
        repr((kind, code, pci, fields, observed)),
        frozenset(map(slot, [pci, *(value for _, value in fields if ":" in value)])) - {""},
        (device_kind, reporter if reporter != pci else "") if pci else None,
    )


ParsedLine = tuple[int, "float | None", "float | None", str, int, Message]


def messages(blocks: Iterable[Block], now: float, tally: Tally) -> Generator[ParsedLine, None, None]:
    """Yield (number, uptime, epoch, host, lines, message) for each line with a message."""
    iterator = iter(blocks)
    beginning = next(iterator, None)
    if beginning is None:
        return
    reader = Reader(now)
    all_blocks = chain((beginning,), iterator)
    if beginning.text.startswith(EXPORTED):
        yield from reader.exported(all_blocks, tally)
    else:
        yield from reader.messages(all_blocks, tally)


EXPORTED = b"__CURSOR="  # journalctl -o export output begins with this


class Reader:
    """Reads the messages in a log, and parses each text only once. `now` is in epoch seconds and is used for dates
    without a year."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._texts = BoundedCache(MESSAGES_BYTES)
        self._lines = BoundedCache(MESSAGES_BYTES)

    def exported(self, blocks: Iterable[Block], tally: Tally) -> Iterator[ParsedLine]:
        for number, found in exported(blocks, tally):
            message = self._parse_text(found.text, rule_literals())
            if isinstance(message, Message):
                yield number, found.uptime, found.epoch, found.host, found.lines, message
            elif message is not None:
                tally.count_unrecognised(*message, number, found.lines)

    def messages(self, blocks: Iterable[Block], tally: Tally) -> Iterator[ParsedLine]:
        preceding, parse_line = PrecedingLines(functools.partial(prefix_width, now=self._now)), self._parse_line
        for number, begins, line, literals, repeats in candidates(blocks, tally, preceding):
            parsed = parse_line(line, literals)
            if parsed is None:
                continue
            if isinstance(parsed, Unrecognised):
                tally.count_unrecognised(*parsed, number, 1 + repeats.count(b"\n"))
                continue
            tally.kernel = True
            first = self._check_continuation(preceding, number, begins, line, parsed)
            yield (number, *first)
            if not repeats:
                continue
            repeat_lines = repeats[:-1].split(b"\n")
            last = parse_line(repeat_lines[-1], literals)
            if first is parsed and is_message(last) and parsed[2:] == last[2:] == (parsed[2], 1, parsed[4]):
                yield (number + len(repeat_lines), last[0], last[1], last[2], len(repeat_lines), last[4])
                continue
            for line in repeat_lines:
                number, begins = number + 1, begins + len(line) + 1
                parsed = parse_line(line, literals)
                if is_message(parsed):
                    yield (number, *self._check_continuation(preceding, number, begins, line, parsed))

    def _parse_line(self, line: bytes, literals: tuple[str, ...]) -> ParsedMessage | Unrecognised | None:
        parsed: ParsedMessage | Unrecognised | None
        if line in self._lines:
            parsed = self._lines[line]
            return parsed
        stripped_line = stripped(line, self._now)
        parsed, message = None, None
        if stripped_line is not None:
            text, uptime, epoch, host, count = stripped_line[:5]
            # Escaped text may contain literals that are not visible in the line itself.
            message = self._parse_text(text, rule_literals() if b"\\" in line else literals)
            parsed = (uptime, epoch, host, count, message) if isinstance(message, Message) else None
        parsed = parsed or _parse_quoted(line, stripped_line, self._now, self._message)
        if parsed is None and isinstance(message, Unrecognised):
            parsed = message
        # do not cache it: a line with the kernel's time is hardly ever repeated
        if not is_message(parsed) or parsed[0] is None:
            self._lines.store(line, parsed, len(line) + 300)
        return parsed

    def _check_continuation(
        self, preceding: PrecedingLines, number: int, begins: int, line: bytes, parsed: ParsedMessage
    ) -> ParsedMessage:
        head = None if line.startswith(JSON) or parsed[4].event.observed else preceding.head(number, begins, line)
        return parsed if head is None else _as_unproven(parsed, *_parse_head(head, self._now))

    def _message(self, text: str, literals: tuple[str, ...]) -> Message | None:
        message = self._parse_text(text, literals)
        return message if isinstance(message, Message) else None

    def _parse_text(self, text: str, literals: tuple[str, ...]) -> Message | Unrecognised | None:
        message: Message | Unrecognised | None
        if text in self._texts:
            message = self._texts[text]
            return message
        event = kernel_parse.parse(text, literals)
        if event is not None:
            message = make_message(event)
        else:
            driver = unrecognised_driver(text)
            message = Unrecognised(driver, text) if driver else None
        self._texts.store(text, message, len(text) + MESSAGE_BYTES)
        return message


ParsedMessage = tuple["float | None", "float | None", str, int, Message]  # ParsedLine without the line number


def is_message(parsed: ParsedMessage | Unrecognised | None) -> TypeGuard[ParsedMessage]:
    return parsed is not None and not isinstance(parsed, Unrecognised)


def _parse_quoted(
    line: bytes, found: Stripped | None, now: float, parse: Callable[[str, tuple[str, ...]], Message | None]
) -> ParsedMessage | None:
    """Return the message from a line in which a person or another program put text before the message (quoted.py)."""
    if found is None and line.startswith(JSON):
        return None
    text = line.decode("utf-8", "replace")
    if found is None and (written := restore_host(text)) is not None:
        found = strip_prefix(written, now)
        message = None if found is None else parse(found.text, rule_literals())
        return None if found is None or message is None else (found.uptime, found.epoch, found.host, 1, message)
    quotation = None
    if found is not None:
        quotation = find_quoted(found.text, by_programs=(found.uptime, found.epoch, found.host) == (None, None, ""))
    quotation = quotation or find_dated_quote(text)
    message = None if quotation is None else parse(quotation.text, rule_literals())
    if quotation is None or message is None:
        return None
    if found is None or not quotation.proven:
        return (None, None, "", 1, _unproven(message))
    return (found.uptime or quotation.uptime, found.epoch, found.host or quotation.host, 1, message)


# Some records of NVIDIA's driver have several lines ("NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: fallen off the bus and
# is not responding to commands."). The version in an API mismatch record comes from the client itself (rmapi).
_SEVERAL_LINES = regex(r"NVRM: (?!API mismatch)")


@functools.lru_cache(maxsize=256)
def _parse_head(head: bytes, now: float) -> tuple[Stripped | None, str]:
    """Return the message in a line, and the kind of its event."""
    found = stripped(head, now)
    event = None if found is None else kernel_parse.parse(found.text)
    return found, "" if event is None else event.kind


def _as_unproven(parsed: ParsedMessage, head: Stripped | None, kind: str) -> ParsedMessage:
    """Return the content of a line that seems to continue the record of `head`.

    It gets the time and host of `head` instead of its own. If its event has the same kind, the line is returned
    unchanged: it may be a separate record with the same time, or belong to the same record.
    """
    _, _, _, count, message = parsed
    if head is None:
        return (None, None, "", count, _unproven(message))
    if kind == message.event.kind:
        return parsed
    if _SEVERAL_LINES.match(head.text) and message.event.text.startswith("NVRM: "):
        return parsed
    return (head.uptime, head.epoch, head.host, count, _unproven(message))


@functools.lru_cache(maxsize=1000)
def _unproven(message: Message) -> Message:
    return make_message(replace(message.event, observed=True))


def slot(address: str) -> str:
    return address.partition(".")[0]


# --- lines that no rule recognises
#
# `healthd scan` counts lines from known drivers that no rule recognises, so that the result "no fault" does not hide an
# unknown fault. A driver is known if healthd has rules for it. NVIDIA's driver prints almost only errors, so each of
# its lines counts, except harmless lines in a list. The other drivers also report normal actions. Their lines count
# only if they contain a word for a problem ("failed", "timeout") and are not known to be harmless.


class Unrecognised(NamedTuple):
    """A line that no rule recognises, without its prefix. `driver` is the driver's usual name ("NVRM", "mlx5")."""

    driver: str
    text: str


_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
# Pairs of a driver and a pattern for the beginning of its lines. The first match counts.
_DRIVERS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (driver, regex(begins))
    for driver, begins in (
        ("NVRM", r"NVRM: "),
        ("nvidia", r"nvidia-(?:nvlink|nvswitch\d{0,3}|peermem|modeset|uvm)\b|nvidia " + _PCI),
        ("mlx5", r"mlx5_core\b|mlx5_ib\b|infiniband mlx5_"),
        ("mlx4", r"mlx4_(?:core|en|ib)\b"),
        ("network", rf"(?:{'|'.join((*CARD_DRIVERS, 'efa'))}) {_PCI}|infiniband \w"),
        ("NVMe", r"nvme (?:nvme\d|" + _PCI + ")|nvme\\d{1,5}(?:c\\d{1,5})?n\\d{1,9}: "),
        ("PCIe", rf"(?:pcieport|aer|pciehp|dpc) {_PCI}"),
        ("EDAC", r"EDAC "),
        ("machine check", r"mce: |(?:\{\d{1,10}\})?\[Hardware Error\]: "),
        ("IOMMU", r"DMAR: |(?:iommu ivhd\d{1,3}: )?AMD-Vi: |arm-smmu(?:-v3)? |[\w-]{1,32} " + _PCI + ": AMD-Vi: "),
        ("file system", r"(?:EXT[234]-fs|XFS|BTRFS|JBD2|F2FS-fs)[ :(]"),
        ("file server", r"(?:Lustre|LustreError|LNet|LNetError|CIFS|libceph|ceph|beegfs|NFS4?): "),
    )
)
_PROBLEM_WORDS = regex(
    r"(?i)\b(?:fail\w*|errors?|time(?:d|s)? ?-?outs?|fatal|lost|dead|locked|stuck|hung|hangs?|corrupt\w*|unable|cannot"
    r"|could ?n[o']t|can't|abort\w*|broken|not respond\w*|unresponsive|halt\w*|exception|violation|overrun|overflow\w*"
    r"|uncorrect\w*|degraded|crash\w*|panic\w*|unrecover\w*|bad state|UE)\b|Event logged \["
)
# Harmless lines: those that NVIDIA's driver prints while it starts and stops, and all but the first line of its
# multi-line messages.
_HARMLESS_NVRM = regex(
    r"NVRM: (?:GPU (?:at )?\S{7,24}:? (?:GPU-|GPU serial number is|GPU is on Board|has software scheduler"
    r"|is already bound to vfio-pci|PreserveVideoMemory)|GPU Board Serial Number|loading NVIDIA UNIX"
    r"|NVLink link training completed"
    r"|The NVIDIA GPU |\(PCI ID: |This can occur when |nouveau, rivafb|was loaded and obtained|obtained ownership"
    r"|installed in|nvidia\.ko because|System Processor \(GSP\)|has the version|the version |kernel module and all"
    r"|this kernel module|have the same version|make sure that|components have|A GPU crash dump has been"
    r"|nvidia-bug-report\.sh as root|the NVIDIA kernel module is unloaded"
    r"|nv(?:Assert|Check)\w{0,20}: [^\n]{0,40}Out of memory|_iovaspaceCreate"
    r"|os_(?:pci_init_handle|schedule): |failed to copy vbios|nvidia_frontend_open: |testIfDsm|CPUID: "
    r"|GPU\d{1,3} (?:kbifCacheVFInfo|gpuClearFbhubPoisonIntr)|Attempting to remove |Xid \(\d{1,4}, pid: )"
)
_HARMLESS = regex(
    # requests that some firmware does not support
    r"(?:mlx5_core[^\n]{0,80}|mlx5_)[^\n]{0,80}(?:ACCESS_REG|QUERY_\w{1,40})\b"
    r"|mlx5_core [^\n]{1,40}: (?:Failed to add post action rule|Successfully (?:un)?registered panic handler)"
    r"|EXT[234]-fs \([^)\n]{1,40}\): (?:VFS: Can't find|couldn't mount as|re-?mounted)"
    r"|EDAC \w{1,20}: Failed to register device with error -\d"
    r"|nvme \S{1,24}: Shutdown timeout set to|nvme nvme\d{1,5}: Does your device have a faulty"
    r"|pcieport [^\n]{1,40}: (?:AER|DPC): (?:enabled|error containment capabilities|broadcast)"
    r"|NFS: nfs_\w{1,40}: |[\w-]{1,24} [^\n]{1,40}: aer_inject: "
    r"|\{?[^\n]{0,24}\[Hardware Error\]: (?: *It has been corrected| *Error \d|  )"  # the body of a firmware record
)


def unrecognised_driver(text: str) -> str:
    """Return the driver of an unrecognised line that counts (see above), or "" for other lines.

    Args:
        text: the line without its prefix.
    """
    driver = next((name for name, begins in _DRIVERS if begins.match(text)), "")
    if not driver:
        return ""
    if driver == "NVRM":
        return "" if _HARMLESS_NVRM.match(text) else driver
    return driver if _PROBLEM_WORDS.search(text) and not _HARMLESS.match(text) else ""
