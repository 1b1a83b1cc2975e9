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


def test_is_new_is_true_once_per_number():
    sequences = ReadSequences()
    assert [sequences.is_new(A, seq) for seq in (1, 2, 2, 4, 1, 3)] == [True, True, False, True, False, True]
    assert sequences.is_new(B, 1)
    assert list(sequences.runs[A]) == [(1, 4)]


def test_gaps_are_missing_numbers_between_lines():
    sequences = ReadSequences()
    for seq in (5, 6, 9, 12):
        sequences.is_new(A, seq)
    assert list(sequences.gaps()) == [StreamGap(A, 7, 8), StreamGap(A, 10, 11)]
    sequences.is_new(A, 7)
    sequences.is_new(A, 8)
    assert list(sequences.gaps()) == [StreamGap(A, 10, 11)]


def test_numbers_dropped_by_the_node_are_no_gap():
    sequences = ReadSequences()
    for seq in (1, 10):
        sequences.is_new(A, seq)
    sequences.drop(A, 3, 5)
    assert list(sequences.gaps()) == [StreamGap(A, 2, 2), StreamGap(A, 6, 9)]
    sequences.drop(A, 0, 2**63 - 1)
    assert list(sequences.gaps()) == []
    assert sequences.is_new(A, 7), "a nonsensical range of a node loses no line"


def test_cluster_name_added_later_makes_and_hides_no_gap():
    sequences, unnamed = ReadSequences(), Key("", "n1", "a")
    for seq in (1, 2):
        sequences.is_new(unnamed, seq)
    for seq in (3, 5):
        sequences.is_new(A, seq)
    assert list(sequences.gaps()) == [StreamGap(A, 4, 4)]


@given(st.lists(SMALL, max_size=12), SMALL)
def test_runs_behave_like_a_set_of_numbers(added, queried_run):
    runs, naive = Runs(added), numbers(added)
    assert numbers(runs) == naive
    assert {number for number in range(40) if number in runs} == naive
    assert numbers(runs.without(*queried_run)) == numbers([queried_run]) - naive
    assert numbers(runs.gaps()) == ({*range(min(naive), max(naive))} if naive else set()) - naive
    stored = list(runs)
    assert all(before + 1 < after for (_, before), (after, _) in pairwise(stored)), "no two runs are adjacent"


@given(st.lists(st.integers(0, 20)), st.lists(SMALL, max_size=4))
def test_gaps_are_neither_read_nor_dropped(seqs, dropped):
    sequences = ReadSequences()
    new_seqs = [seq for seq in seqs if sequences.is_new(A, seq)]
    assert new_seqs == list(dict.fromkeys(seqs))
    for run in dropped:
        sequences.drop(A, *run)
    between = {*range(min(seqs), max(seqs))} if seqs else set()
    assert numbers((hole.first, hole.last) for hole in sequences.gaps()) == between - set(seqs) - numbers(dropped)


def test_sequences_need_memory_for_streams_and_gaps_not_for_lines():
    def size(keys: int, lines: range) -> int:
        tracemalloc.start()
        try:
            sequences = ReadSequences()
            for number in range(keys):
                for seq in lines:
                    sequences.is_new(Key("c1", "n1", f"{number:016x}"), seq)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert size(1, range(20_000)) < 2 << 10
    assert size(2_000, range(1)) < 2_000 * (1 << 10)
    assert size(1, range(0, 40_000, 2)) < 20_000 * 100
