"""Repeats and gaps: ranges of numbers, compared with plain sets."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from healthd.events.parse import Key
from healthd.events.sequence import ReadSequences, Runs, StreamGap

A, B = Key("c1", "n1", "a"), Key("c1", "n1", "b")
SMALL = st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda run: (run[0], run[0] + run[1]))


def numbers(runs: object) -> set[int]:
    return {number for first, last in runs for number in range(first, last + 1)}  # type: ignore[attr-defined]


def test_a_line_is_new_once():
    seen = ReadSequences()
    assert [seen.is_new(A, seq) for seq in (1, 2, 2, 4, 1, 3)] == [True, True, False, True, False, True]
    assert seen.is_new(B, 1)
    assert list(seen.runs[A]) == [(1, 4)]


def test_a_hole_is_what_is_missing_between_two_lines():
    seen = ReadSequences()
    for seq in (5, 6, 9, 12):
        seen.is_new(A, seq)
    assert list(seen.gaps()) == [StreamGap(A, 7, 8), StreamGap(A, 10, 11)]
    seen.is_new(A, 7)
    seen.is_new(A, 8)
    assert list(seen.gaps()) == [StreamGap(A, 10, 11)]


def test_what_the_node_says_that_it_dropped_is_no_hole():
    seen = ReadSequences()
    for seq in (1, 10):
        seen.is_new(A, seq)
    seen.drop(A, 3, 5)
    assert list(seen.gaps()) == [StreamGap(A, 2, 2), StreamGap(A, 6, 9)]
    seen.drop(A, 0, 2**63 - 1)
    assert list(seen.gaps()) == []
    assert seen.is_new(A, 7), "a nonsensical range of a node loses no line"


def test_a_cluster_that_got_its_name_meanwhile_makes_no_hole_and_hides_none():
    seen, unnamed = ReadSequences(), Key("", "n1", "a")
    for seq in (1, 2):
        seen.is_new(unnamed, seq)
    for seq in (3, 5):
        seen.is_new(A, seq)
    assert list(seen.gaps()) == [StreamGap(A, 4, 4)]


@given(st.lists(SMALL, max_size=12), SMALL)
def test_runs_are_a_set_of_numbers(added, asked):
    runs, naive = Runs(added), numbers(added)
    assert numbers(runs) == naive
    assert {number for number in range(40) if number in runs} == naive
    assert numbers(runs.without(*asked)) == numbers([asked]) - naive
    assert numbers(runs.gaps()) == ({*range(min(naive), max(naive))} if naive else set()) - naive
    kept = list(runs)
    assert all(before + 1 < after for (_, before), (after, _) in pairwise(kept)), "no two runs are adjacent"


@given(st.lists(st.integers(0, 20)), st.lists(SMALL, max_size=4))
def test_holes_are_neither_seen_nor_dropped(seqs, dropped):
    seen = ReadSequences()
    news = [seq for seq in seqs if seen.is_new(A, seq)]
    assert news == list(dict.fromkeys(seqs))
    for run in dropped:
        seen.drop(A, *run)
    between = {*range(min(seqs), max(seqs))} if seqs else set()
    assert numbers((hole.first, hole.last) for hole in seen.gaps()) == between - set(seqs) - numbers(dropped)


def test_what_is_remembered_grows_with_streams_and_holes_and_not_with_lines():
    def size(keys: int, lines: range) -> int:
        tracemalloc.start()
        try:
            seen = ReadSequences()
            for number in range(keys):
                for seq in lines:
                    seen.is_new(Key("c1", "n1", f"{number:016x}"), seq)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert size(1, range(20_000)) < 2 << 10
    assert size(2_000, range(1)) < 2_000 * (1 << 10)
    assert size(1, range(0, 40_000, 2)) < 20_000 * 100
