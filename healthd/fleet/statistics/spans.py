"""Time spans [begin, end) in epoch seconds, as sorted lists without overlapping or touching spans. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the union of these spans, which may be in any order. Spans that end before they begin are ignored."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def within(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the intersection of both lists."""
    found, at = [], 0
    for begin, end in spans:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            found.append((max(begin, others[here][0]), min(end, others[here][1])))
            here += 1
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the time in `spans` that is not in `others`."""
    found, at = [], 0
    for begin, end in spans:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if begin < others[here][0]:
                found.append((begin, others[here][0]))
            begin = max(begin, others[here][1])
            here += 1
        if begin < end:
            found.append((begin, end))
    return found


def seconds(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)
