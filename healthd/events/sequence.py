"""Record of the lines read from each stream, to detect repeats and gaps. All functions are pure.

A writer that was killed may write some lines twice, and so may any lossless transport. A line is identified by
(cluster, node, stream_id, seq). Memory grows with the number of streams and gaps, not with the number of lines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from healthd.events.parse import Key


class Runs:
    """Set of integers stored as ranges without gaps, such as [(1, 5), (8, 8)]."""

    __slots__ = ("_first", "_last")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._first, self._last, strict=True)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._first, number) - 1
        return at >= 0 and number <= self._last[at]

    def add(self, first: int, last: int) -> None:
        """Add all numbers from `first` to `last`, inclusive."""
        begin = bisect_left(self._last, first - 1)  # the first range that touches the new range ...
        end = bisect_right(self._first, last + 1)  # ... and the range after the last such range
        if begin < end:
            first, last = min(first, self._first[begin]), max(last, self._last[end - 1])
        self._first[begin:end] = [first]
        self._last[begin:end] = [last]

    def without(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of numbers from `first` to `last` that are not in the set."""
        for at in range(bisect_left(self._last, first), bisect_right(self._first, last)):
            if first < self._first[at]:
                yield first, self._first[at] - 1
            first = self._last[at] + 1
        if first <= last:
            yield first, last

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Return the ranges of missing numbers between the ranges in the set."""
        return ((last + 1, first - 1) for last, first in zip(self._last, self._first[1:], strict=False))


class StreamGap(NamedTuple):
    """Missing lines between two existing lines."""

    key: Key
    first: int
    last: int


class ReadSequences:
    """Line numbers that were read.

    `runs` are the numbers for each stream. `dropped` are the numbers that the node reports as dropped.

    Both can be saved and continued later.
    """

    def __init__(self) -> None:
        self.runs: dict[Key, Runs] = {}
        self.dropped: dict[Key, Runs] = {}

    def is_new(self, key: Key, seq: int) -> bool:
        """Record this line. Return True if the line was not read before."""
        runs = self.runs.setdefault(key, Runs())
        if seq in runs:
            return False
        runs.add(seq, seq)
        return True

    def drop(self, key: Key, first: int, last: int) -> None:
        """Record lines that the node reports as dropped."""
        self.dropped.setdefault(key, Runs()).add(first, last)

    def gaps(self) -> Iterator[StreamGap]:
        """Yield lines that are lost or not yet delivered.

        These lines are missing within a stream, and the node did not drop them.

        Missing lines before the first one are not a gap, because their file was rotated away. A stream_id belongs to
        one node, so a new cluster name does not cause a gap either.
        """
        names: dict[tuple[str, ...], Key] = {}
        runs: defaultdict[tuple[str, ...], Runs] = defaultdict(Runs)
        dropped: defaultdict[tuple[str, ...], Runs] = defaultdict(Runs)
        for found, merged in ((self.runs, runs), (self.dropped, dropped)):
            for key, numbers in found.items():
                names[key[1:]] = max(key, names.get(key[1:], key))
                for run in numbers:
                    merged[key[1:]].add(*run)
        for stream, numbers in runs.items():
            yield from (
                StreamGap(names[stream], *missing)
                for gap in numbers.gaps()
                for missing in dropped[stream].without(*gap)
            )
