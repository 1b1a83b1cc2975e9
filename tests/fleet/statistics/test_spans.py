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
def test_stretches_are_joined_cut_and_left_out_as_their_seconds_are(one: list[Span], other: list[Span]) -> None:
    these, those = merge(one), merge(other)
    assert members(these) == members(one)
    assert members(intersect(these, those)) == members(one) & members(other)
    assert members(subtract(these, those)) == members(one) - members(other)


@given(SPANS, SPANS)
def test_what_comes_of_them_is_sorted_and_each_second_is_in_one_alone(one: list[Span], other: list[Span]) -> None:
    these, those = merge(one), merge(other)
    for spans in (these, intersect(these, those), subtract(these, those)):
        assert total_seconds(spans) == len(members(spans))
        assert spans == sorted(spans)
        assert all(begin < end for begin, end in spans)
    assert all(end < begin for (_, end), (begin, _) in pairwise(these))
