"""Lines of one fault are one event: pure, and bounded in a storm (one Xid 95 was 800,000 lines)."""

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

# An application's own mistake raises exceptions on most processors of a GPU, a broken one on its own: of an event that
# names more of them than this no one is told.
MOST_SMS = 8
EVERYWHERE = "many"

Key = tuple[object, ...]


@functools.cache
def varying_fields(kind: str) -> frozenset[str]:
    """Return the fields that may differ between two lines of one fault: those that a rule of the kind declares, and
    "job", which with_jobs() adds to any event."""
    return frozenset({"job"}).union(*(rule.varies for rule in RULES if rule.kind == kind))


def key(event: KernelEvent) -> Key:
    """What two lines must share to be one fault: kind, code, part, boot, and each field that does not vary."""
    varying = varying_fields(event.kind)
    fields = tuple(item for item in event.fields if item[0] not in varying)
    return (event.boot_id, event.kind, event.code, event.pci, fields)


def coalesce(event: KernelEvent, new: KernelEvent, within_seconds: float = WITHIN_SECONDS) -> KernelEvent | None:
    """`event` with `new` counted into it, None if `new` is a fault of its own."""
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
        learnt = ()  # a place named before the oops is a WARNING's: an oops names its own below
    return replace(
        fault,
        time=event.time,
        last_time=last_time,
        lines=fault.lines if (FURTHER, "true") in other.fields else event.lines + new.lines,
        sequence=event.sequence,
        fields=(*(gathered if item[0] == SM else item for item in fault.fields), *learnt),
    )


def _gathered(event: KernelEvent, new: KernelEvent) -> tuple[str, str]:
    """The processors that two lines of one fault name, together."""
    named = list(dict.fromkeys((*event.field(SM).split(), *new.field(SM).split())))
    return SM, EVERYWHERE if EVERYWHERE in named or len(named) > MOST_SMS else " ".join(named)


def is_detail(event: KernelEvent) -> bool:
    return event.code == DETAIL or (FURTHER, "true") in event.fields


def part(event: KernelEvent) -> Key:
    """What a detail shares with its fault. The details of an SXid also share its code."""
    named = tuple(item for item in event.fields if item[0] in PARTS)
    return (event.boot_id, event.kind, event.pci, event.code if event.kind == "sxid" else "", named)


def _record(event: KernelEvent) -> str:
    """The number of a firmware's error record ("{2}[Hardware Error]: ..."): each record is a fault of its own."""
    return next((value for name, value in event.fields if name == "record"), "")


def coalesce_events(
    recent: tuple[KernelEvent, ...],
    incoming: Sequence[KernelEvent],
    next_sequence: int,
    keep_seconds: float = KEEP_SECONDS,
) -> tuple[tuple[KernelEvent, ...], tuple[int, ...], int]:
    """(recent events, sequences of the events that are new or grew, next sequence).

    Only the newest event of a fault can grow, so this is linear. A new event is kept whatever its age: after a weekend
    without healthd, Friday's fault is read together with Sunday's and must be judged once. All new events are kept:
    the caller judges them all, and only then drops those beyond its bound (newest_of_each()).
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
    """`events` with these jobs, by sequence, in their field "job"."""
    return tuple(
        replace(event, fields=(*event.fields, ("job", jobs[event.sequence]))) if event.sequence in jobs else event
        for event in events
    )


def newest_of_each(events: tuple[KernelEvent, ...], most: int, behind: Container[int] = ()) -> tuple[KernelEvent, ...]:
    """At most `most` of the events, which have been judged. The most frequent fault loses its oldest events first: a
    storm never pushes out another fault, unless there are more faults than places. Of those, the ones `behind` what
    drains (their sequences) have a place first."""
    if len(events) <= most:
        return events
    allowed = _level(Counter(key(event) for event in events), most)
    seen: Counter[Key] = Counter()
    kept = []
    for event in reversed(events):
        seen[key(event)] += 1
        if seen[key(event)] <= allowed:
            kept.append(event)
    kept = sorted(kept, key=lambda event: event.sequence not in behind)[:most]  # stable: the newest first
    return tuple(sorted(kept, key=lambda event: event.sequence))


def _level(counts: Counter[Key], most: int) -> int:
    """How many events each fault may keep (at least one) so that all faults together keep at most `most`."""
    left, level = most, 0
    sizes = sorted(counts.values())
    for place, size in enumerate(sizes):
        share = left // (len(sizes) - place)
        if size > share:
            return max(1, share)
        left -= size
        level = size
    return max(1, level)
