"""Time spans [begin, end) in epoch seconds, in sorted lists. Spans in a list do not overlap or touch.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def merge(spans: Iterable[Span]) -> list[Span]:
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


def intersect(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the intersection of the two lists."""
    found, first_other = [], 0
    for begin, end in spans:
        while first_other < len(others) and others[first_other][1] <= begin:
            first_other += 1
        other_index = first_other
        while other_index < len(others) and others[other_index][0] < end:
            found.append((max(begin, others[other_index][0]), min(end, others[other_index][1])))
            other_index += 1
    return found


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the time in `spans` that is not in `others`."""
    found, first_other = [], 0
    for begin, end in spans:
        while first_other < len(others) and others[first_other][1] <= begin:
            first_other += 1
        other_index = first_other
        while other_index < len(others) and others[other_index][0] < end:
            if begin < others[other_index][0]:
                found.append((begin, others[other_index][0]))
            begin = max(begin, others[other_index][1])
            other_index += 1
        if begin < end:
            found.append((begin, end))
    return found


def total_seconds(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)
