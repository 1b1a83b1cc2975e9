"""Tests of time spans, against sets of their seconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.statistics.spans import Span, intersect, merge, subtract, total_seconds

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def members(spans: list[Span]) -> set[int]:
    return {second for begin, end in spans for second in range(begin, end)}


@given(SPANS, SPANS)
def test_span_operations_match_sets_of_seconds(first: list[Span], second: list[Span]) -> None:
    merged_first, merged_second = merge(first), merge(second)
    assert members(merged_first) == members(first)
    assert members(intersect(merged_first, merged_second)) == members(first) & members(second)
    assert members(subtract(merged_first, merged_second)) == members(first) - members(second)


@given(SPANS, SPANS)
def test_span_operations_give_sorted_disjoint_spans(first: list[Span], second: list[Span]) -> None:
    merged_first, merged_second = merge(first), merge(second)
    for spans in (merged_first, intersect(merged_first, merged_second), subtract(merged_first, merged_second)):
        assert total_seconds(spans) == len(members(spans))
        assert spans == sorted(spans)
        assert all(begin < end for begin, end in spans)
    assert all(end < begin for (_, end), (begin, _) in pairwise(merged_first))
