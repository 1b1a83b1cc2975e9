"""Join the lines about one fault into one event, at a bounded cost even in a storm (one Xid 95 produced 800,000
lines).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.kernel_log.parse import RULES
from healthd.agent.kernel_log.rules.rule import DETAIL, FURTHER, PARTS, SM
from healthd.common.model import KernelEvent

WITHIN_SECONDS = 5.0
KEPT_SECONDS = 48 * 3600.0  # the longest window that a check uses is 24 h

# An application error raises exceptions on most of a GPU's processors. A broken processor raises them only on itself.
# If an event names more processors than this, none of them is reported.
MAX_SMS = 8
EVERYWHERE = "many"

# Field of events from NVML instead of a line (gpu_events.py). Such an event has no details, so a line about the same
# fault replaces it. It occurred at any time between its `time` and its `last_time`.
SOURCE, NVML = "source", "nvml"

Key = tuple[object, ...]


@functools.cache
def varying_fields(kind: str) -> frozenset[str]:
    """Return the fields that may differ between two lines about one fault.

    These are the fields that the kind's rules declare, and "job", which with_jobs() may add to any event.
    """
    return frozenset({"job"}).union(*(rule.varies for rule in RULES if rule.kind == kind))


def fault_key(event: KernelEvent) -> Key:
    """Return the properties that all lines about a fault share: kind, code, part, boot, and all fields that do not
    vary."""
    varying = varying_fields(event.kind)
    fields = tuple(item for item in event.fields if item[0] not in varying)
    return (event.boot_id, event.kind, event.code, event.pci, fields)


def coalesce(event: KernelEvent, new: KernelEvent, within_seconds: float = WITHIN_SECONDS) -> KernelEvent | None:
    """Return `event` with `new` added to it, or None if `new` is about another fault."""
    if is_from_nvml(event) or is_from_nvml(new):
        return _coalesce_with_nvml(event, new, within_seconds)
    details = is_detail(event) + is_detail(new)
    if (event.history, event.observed) != (new.history, new.observed):
        return None
    if part_key(event) != part_key(new) if details == 1 else fault_key(event) != fault_key(new):
        return None
    if not -within_seconds <= new.time - event.last_time <= within_seconds or _record_number(event) != _record_number(
        new
    ):
        return None
    last_time = max(event.last_time, new.last_time)
    fault, other = (new, event) if details == 1 and is_detail(event) else (event, new)
    field_names = {name for name, _ in fault.fields}
    varying = varying_fields(fault.kind)
    added_fields = tuple(item for item in other.fields if item[0] in varying and item[0] not in field_names)
    processors = _merged_processors(event, new)
    if fault is new and fault.kind == "oops":
        added_fields = ()  # a location before the oops belongs to a WARNING; an oops prints its own location afterwards
    return replace(
        fault,
        time=event.time,
        last_time=last_time,
        lines=fault.lines if (FURTHER, "true") in other.fields else event.lines + new.lines,
        sequence=event.sequence,
        fields=(*(processors if item[0] == SM else item for item in fault.fields), *added_fields),
    )


def _coalesce_with_nvml(event: KernelEvent, new: KernelEvent, within_seconds: float) -> KernelEvent | None:
    """Join two events of which at least one is from NVML, or return None. Only lines are counted as lines."""
    if (event.history, event.observed) != (new.history, new.observed) or code_key(event) != code_key(new):
        return None
    if not is_at_same_time(event, new, within_seconds):
        return None
    if is_from_nvml(event) and not is_from_nvml(new):  # only the line has the exact time
        job = tuple(item for item in event.fields if item[0] == "job" and not new.field("job"))
        return replace(new, sequence=event.sequence, fields=(*new.fields, *job))
    return replace(event, last_time=max(event.last_time, new.last_time))


def is_at_same_time(one: KernelEvent, other: KernelEvent, within_seconds: float) -> bool:
    """Return True if the periods of two events overlap, or are at most `within_seconds` apart."""
    return one.time - within_seconds <= other.last_time and other.time <= one.last_time + within_seconds


def is_from_nvml(event: KernelEvent) -> bool:
    return (SOURCE, NVML) in event.fields


def code_key(event: KernelEvent) -> Key:
    """Return the properties that NVML's event and the line about the same fault share."""
    return (event.boot_id, event.kind, event.code, event.pci)


def _merged_processors(event: KernelEvent, new: KernelEvent) -> tuple[str, str]:
    """Return a field that lists the processors from both lines."""
    named = list(dict.fromkeys((*event.field(SM).split(), *new.field(SM).split())))
    return SM, EVERYWHERE if EVERYWHERE in named or len(named) > MAX_SMS else " ".join(named)


def is_detail(event: KernelEvent) -> bool:
    return event.code == DETAIL or (FURTHER, "true") in event.fields


def part_key(event: KernelEvent) -> Key:
    """Return the properties that a detail shares with its fault. For SXids, this includes the code."""
    named = tuple(item for item in event.fields if item[0] in PARTS)
    return (event.boot_id, event.kind, event.pci, event.code if event.kind == "sxid" else "", named)


def _record_number(event: KernelEvent) -> str:
    """Return the number of a firmware error record ("{2}[Hardware Error]: ..."). Each record is a separate fault."""
    return next((value for name, value in event.fields if name == "record"), "")


def coalesce_events(
    recent: tuple[KernelEvent, ...],
    incoming: Sequence[KernelEvent],
    next_sequence: int,
    keep_seconds: float = KEPT_SECONDS,
) -> tuple[tuple[KernelEvent, ...], tuple[int, ...], int]:
    """Return (recent events, sequence numbers of new or extended events, next sequence number) with `incoming` added.

    Only a fault's newest event can grow, so the cost is linear. A new event is kept regardless of its age. For example,
    after a weekend without healthd, faults from Friday and Sunday are read together, and each must be evaluated once.
    All new events are kept. The caller first evaluates them all and then drops those beyond its limit (limit_events()).
    """
    events = list(recent)
    has_nvml = any(map(is_from_nvml, recent)) or any(map(is_from_nvml, incoming))
    newest = {fault_key(event): index for index, event in enumerate(events)}
    newest_by_part = {part_key(event): index for index, event in enumerate(events)}
    newest_by_code = {code_key(event): index for index, event in enumerate(events)} if has_nvml else {}
    touched: dict[int, None] = {}
    for new in incoming:
        by_code = newest_by_code.get(code_key(new)) if has_nvml else None
        for index in (newest.get(fault_key(new)), newest_by_part.get(part_key(new)), by_code):
            if index is not None and (grown := coalesce(events[index], new)) is not None:
                events[index] = grown
                break
        else:
            index = len(events)
            events.append(replace(new, sequence=next_sequence))
            next_sequence += 1
        newest[fault_key(events[index])] = newest_by_part[part_key(new)] = index
        if has_nvml:
            newest_by_code[code_key(new)] = index
        touched[events[index].sequence] = None
    oldest = max((event.last_time for event in events), default=0.0) - keep_seconds
    remaining = tuple(event for event in events if event.last_time >= oldest or event.sequence in touched)
    return remaining, tuple(touched), next_sequence


def with_jobs(events: Iterable[KernelEvent], jobs: Mapping[int, str]) -> tuple[KernelEvent, ...]:
    """Return `events` with the field "job" set from `jobs`, which maps sequence numbers to jobs."""
    return tuple(
        replace(event, fields=(*event.fields, ("job", jobs[event.sequence]))) if event.sequence in jobs else event
        for event in events
    )


def limit_events(
    events: tuple[KernelEvent, ...], limit: int, protected: Container[int] = ()
) -> tuple[KernelEvent, ...]:
    """Return at most `limit` of the events, all of which must have been evaluated.

    The most frequent fault loses its oldest events first. A storm therefore never displaces another fault, unless there
    are more faults than `limit`. In that case, events in `protected` (sequence numbers of events that caused a drain)
    have priority.
    """
    if len(events) <= limit:
        return events
    allowed = _fair_share(Counter(fault_key(event) for event in events), limit)
    counts: Counter[Key] = Counter()
    kept = []
    for event in reversed(events):
        counts[fault_key(event)] += 1
        if counts[fault_key(event)] <= allowed:
            kept.append(event)
    kept = sorted(kept, key=lambda event: event.sequence not in protected)[:limit]  # stable sort: the newest first
    return tuple(sorted(kept, key=lambda event: event.sequence))


def _fair_share(counts: Counter[Key], limit: int) -> int:
    """Return the number of events that each fault may keep (at least one) if all faults may keep at most `limit` in
    total.
    """
    room, largest = limit, 0
    sizes = sorted(counts.values())
    for index, size in enumerate(sizes):
        share = room // (len(sizes) - index)
        if size > share:
            return max(1, share)
        room -= size
        largest = size
    return max(1, largest)
