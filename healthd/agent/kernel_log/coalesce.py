"""Joins lines of one fault into one event: pure, and bounded in a storm (one Xid 95 was 800,000 lines)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.kernel_log.parse import RULES
from healthd.agent.kernel_log.rules.rule import DETAIL, FURTHER, PARTS, SM
from healthd.common.model import KernelEvent

WITHIN_SECONDS = 5.0
KEEP_SECONDS = 48 * 3600.0  # the longest window that a rule asks for is 24 h

# An application error raises exceptions on most processors of a GPU, a broken processor only on its own: if an event
# names more processors than this, none of them is reported.
MOST_SMS = 8
EVERYWHERE = "many"

Key = tuple[object, ...]


@functools.cache
def varying_fields(kind: str) -> frozenset[str]:
    """Return the fields that may differ between two lines of one fault: those that a rule of the kind declares, and
    "job", which with_jobs() adds to any event.
    """
    return frozenset({"job"}).union(*(rule.varies for rule in RULES if rule.kind == kind))


def key(event: KernelEvent) -> Key:
    """Return the properties that lines of one fault share: kind, code, part, boot, and each field that does not
    vary.
    """
    varying = varying_fields(event.kind)
    fields = tuple(item for item in event.fields if item[0] not in varying)
    return (event.boot_id, event.kind, event.code, event.pci, fields)


def coalesce(event: KernelEvent, new: KernelEvent, within_seconds: float = WITHIN_SECONDS) -> KernelEvent | None:
    """Return `event` with `new` counted into it, or None if `new` is another fault."""
    details = is_detail(event) + is_detail(new)
    if (event.history, event.observed) != (new.history, new.observed):
        return None
    if part(event) != part(new) if details == 1 else key(event) != key(new):
        return None
    if not -within_seconds <= new.time - event.last_time <= within_seconds or _record(event) != _record(new):
        return None
    last_time = max(event.last_time, new.last_time)
    fault, other = (new, event) if details == 1 and is_detail(event) else (event, new)
    known = {name for name, _ in fault.fields}
    varying = varying_fields(fault.kind)
    learnt = tuple(item for item in other.fields if item[0] in varying and item[0] not in known)
    gathered = _gathered(event, new)
    if fault is new and fault.kind == "oops":
        learnt = ()  # a location before the oops belongs to a WARNING: an oops names its own below
    return replace(
        fault,
        time=event.time,
        last_time=last_time,
        lines=fault.lines if (FURTHER, "true") in other.fields else event.lines + new.lines,
        sequence=event.sequence,
        fields=(*(gathered if item[0] == SM else item for item in fault.fields), *learnt),
    )


def _gathered(event: KernelEvent, new: KernelEvent) -> tuple[str, str]:
    """Return the field with the processors of both lines."""
    named = list(dict.fromkeys((*event.field(SM).split(), *new.field(SM).split())))
    return SM, EVERYWHERE if EVERYWHERE in named or len(named) > MOST_SMS else " ".join(named)


def is_detail(event: KernelEvent) -> bool:
    return event.code == DETAIL or (FURTHER, "true") in event.fields


def part(event: KernelEvent) -> Key:
    """Return the properties that a detail shares with its fault. The details of an SXid also share its code."""
    named = tuple(item for item in event.fields if item[0] in PARTS)
    return (event.boot_id, event.kind, event.pci, event.code if event.kind == "sxid" else "", named)


def _record(event: KernelEvent) -> str:
    """Return the number of a firmware's error record ("{2}[Hardware Error]: ..."): each record is a separate fault."""
    return next((value for name, value in event.fields if name == "record"), "")


def coalesce_events(
    recent: tuple[KernelEvent, ...],
    incoming: Sequence[KernelEvent],
    next_sequence: int,
    keep_seconds: float = KEEP_SECONDS,
) -> tuple[tuple[KernelEvent, ...], tuple[int, ...], int]:
    """Add events. Returns (recent events, sequence numbers of new or extended events, next sequence number).

    Only the newest event of a fault can grow, so the cost is linear. A new event is kept regardless of its age: after a
    weekend without healthd, Friday's fault is read together with Sunday's and must be evaluated once. All new events
    are kept: the caller evaluates them all, and only then drops those beyond its limit (limit_events()).
    """
    events = list(recent)
    newest = {key(event): place for place, event in enumerate(events)}
    beside = {part(event): place for place, event in enumerate(events)}
    touched: dict[int, None] = {}
    for new in incoming:
        for place in (newest.get(key(new)), beside.get(part(new))):
            if place is not None and (grown := coalesce(events[place], new)) is not None:
                events[place] = grown
                break
        else:
            place = len(events)
            events.append(replace(new, sequence=next_sequence))
            next_sequence += 1
        newest[key(events[place])] = beside[part(new)] = place
        touched[events[place].sequence] = None
    oldest = max((event.last_time for event in events), default=0.0) - keep_seconds
    kept = tuple(event for event in events if event.last_time >= oldest or event.sequence in touched)
    return kept, tuple(touched), next_sequence


def with_jobs(events: Iterable[KernelEvent], jobs: Mapping[int, str]) -> tuple[KernelEvent, ...]:
    """Return `events` with the field "job" set from `jobs`, by sequence number."""
    return tuple(
        replace(event, fields=(*event.fields, ("job", jobs[event.sequence]))) if event.sequence in jobs else event
        for event in events
    )


def newest_of_each(events: tuple[KernelEvent, ...], most: int, behind: Container[int] = ()) -> tuple[KernelEvent, ...]:
    """Return at most `limit` of the events, which have been evaluated.

    The most frequent fault loses its oldest events first, so that a storm never drops another fault, unless there are
    more faults than `limit`. Then events in `protected` (sequence numbers behind conditions that drain) have priority.
    """
    if len(events) <= most:
        return events
    allowed = _level(Counter(key(event) for event in events), most)
    seen: Counter[Key] = Counter()
    kept = []
    for event in reversed(events):
        seen[key(event)] += 1
        if seen[key(event)] <= allowed:
            kept.append(event)
    kept = sorted(kept, key=lambda event: event.sequence not in behind)[:most]  # stable sort: the newest first
    return tuple(sorted(kept, key=lambda event: event.sequence))


def _level(counts: Counter[Key], most: int) -> int:
    """Return how many events each fault may keep (at least one) so that all faults together keep at most `limit`."""
    left, level = most, 0
    sizes = sorted(counts.values())
    for place, size in enumerate(sizes):
        share = left // (len(sizes) - place)
        if size > share:
            return max(1, share)
        left -= size
        level = size
    return max(1, level)
