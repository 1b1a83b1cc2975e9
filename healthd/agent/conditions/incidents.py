"""Incidents: kernel events within a minute that name the same part or a part above it. All functions are pure.

If a GPU falls off the bus, the log shows a PCIe error at the port above it, an Xid 79, "fallen off the bus" and a slot
without a link. If an NVMe disk fails, it shows a controller failure, I/O errors, and a read-only file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from healthd.common.model import Condition, ConditionKey, Inventory, KernelEvent
from healthd.common.text import is_decimal, regex

GAP_SECONDS = 60.0  # an incident ends after this time without a line about its parts
INDEX_SECONDS = 5.0  # a line with only a GPU's index belongs to the only GPU that had a fault this shortly before

# Fields that name a part or the port above it, in addition to the event's address.
_NAMES = ("device", "disk", "controller", "netdev", "ibdev", "interface", "server", "link_partner")
_ADDRESSES = ("reporter", "port", "upstream", "parent", "source", "bridge")
_NUMBERED = {"slot": "slot", "cpu": "CPU", "gpu": "GPU", "gpu_index": "GPU"}
_FABRIC = "NVLink fabric"  # NVSwitches and the GPUs behind them fail together
_DISK = regex(r"(nvme\d+)(?:c\d+)?n\d+(?:p\d+)?|([shv]d[a-z]+)\d*|((?:md|mmcblk)\d+)p\d+")
_GPU_KINDS = ("xid", "gpu_fallen_off_bus", "gsp", "nvlink", "rc_watchdog", "gpu_event")


class Span(NamedTuple):
    """An incident's parts, and its last line's time in seconds (on any clock)."""

    parts: frozenset[str]
    last: float


def parts(event: KernelEvent, node: Inventory | None = None) -> frozenset[str]:
    """Return an event's parts: devices without function, disks without partition, and the port above. The result is
    never empty."""
    fields = dict(event.fields)
    found = {_device(event.pci)} if event.pci else set()
    found |= {_device(fields[name]) for name in _ADDRESSES if ":" in fields.get(name, "")}
    found |= {disk(fields[name]) for name in _NAMES if fields.get(name)}
    found |= {f"{label}{fields[name]}" for name, label in _NUMBERED.items() if fields.get(name)}
    if event.kind in ("sxid", "nvlink") or (event.kind == "xid" and event.code in ("74", *map(str, range(144, 151)))):
        found.add(_FABRIC)
    for device in node.devices if node is not None else ():
        if device.upstream and _device(device.pci) in found:
            found.add(_device(device.upstream))
    return frozenset(found or {event.kind})


def _device(address: str) -> str:
    """Return the address without its function: "0000:1b:00.0" -> "0000:1b:00". All functions of a device are lost at
    once.
    """
    return address.partition(".")[0]


def disk(name: str) -> str:
    """Return the disk that contains a partition ("nvme0n1p2" -> "nvme0", "sda3" -> "sda"). Other names are
    unchanged.
    """
    match = _DISK.fullmatch(name)
    return next((word for word in match.groups() if word), name) if match else name


def matching_spans(spans: Sequence[Span], event: KernelEvent, event_parts: frozenset[str], time: float) -> list[int]:
    """Return the indices of the incidents that a new event belongs to. The event merges several incidents into one."""
    found = [
        index for index, span in enumerate(spans) if span.parts & event_parts and abs(time - span.last) <= GAP_SECONDS
    ]
    if found or not may_join_by_index(event):
        return found
    # The driver's GPU index does not reveal the address, so assume the GPU that has a fault at that time.
    nearby = [
        index
        for index, span in enumerate(spans)
        if abs(time - span.last) <= INDEX_SECONDS
        and (all(map(_is_index, span.parts)) if event.pci else any(":" in part for part in span.parts))
    ]
    return nearby if len(nearby) == 1 else []


def may_join_by_index(event: KernelEvent) -> bool:
    """Return True if an event may belong to an incident that names none of its parts."""
    return event.kind in _GPU_KINDS


def _is_index(part: str) -> bool:
    return part.startswith("GPU") and is_decimal(part[3:])


def group(events: Iterable[KernelEvent], node: Inventory | None = None) -> list[list[KernelEvent]]:
    """Return one machine's incidents. Each is a list of events in chronological order, so the first cause comes
    first."""
    finished: list[list[KernelEvent]] = []
    spans: list[Span] = []
    groups: list[list[KernelEvent]] = []
    for event in sorted(events, key=_order):
        for index in reversed(range(len(spans))):
            if event.time - spans[index].last > GAP_SECONDS:
                finished.append(groups.pop(index))
                del spans[index]
        event_parts = parts(event, node)
        group_events, last = [event], event.last_time
        for index in reversed(matching_spans(spans, event, event_parts, event.time)):
            span = spans.pop(index)
            event_parts, last = event_parts | span.parts, max(last, span.last)
            group_events = groups.pop(index) + group_events
        spans.append(Span(event_parts, last))
        groups.append(sorted(group_events, key=_order))
    return sorted(finished + groups, key=lambda members: _order(members[0]))


def causes(
    conditions: Iterable[Condition], events: Sequence[KernelEvent], node: Inventory | None = None
) -> dict[ConditionKey, ConditionKey]:
    """Return a dict that maps each condition, except the first in its incident, to that first condition.

    Only conditions whose newest event is in `events` are considered.
    """
    by_sequence: dict[int, list[Condition]] = {}
    for condition in conditions:
        if condition.last_sequence:
            by_sequence.setdefault(condition.last_sequence, []).append(condition)
    found: dict[ConditionKey, ConditionKey] = {}
    for members in group(events, node):
        related = [condition for event in members for condition in by_sequence.get(event.sequence, ())]
        first = min(related, key=lambda condition: (condition.first_seen, -condition.severity), default=None)
        if first is not None:
            found |= {c.key: first.key for c in related if c is not first}
    return found


def _order(event: KernelEvent) -> tuple[float, int]:
    return event.time, event.sequence
