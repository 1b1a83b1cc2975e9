"""Lines of each stream that were read, to detect repeats and gaps. Pure.

A writer that was killed, and every lossless transport, writes some lines twice. A line is identified by (cluster, node,
stream_id, seq). Memory grows with the streams and with their gaps, not with the lines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from healthd.events.parse import Key


class Runs:
    """Integers as ranges without gaps: [(1, 5), (8, 8)]."""

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
        """Add every number from `first` to `last`, both included."""
        begin = bisect_left(self._last, first - 1)  # the first range that it touches ...
        end = bisect_right(self._first, last + 1)  # ... and the one after the last
        if begin < end:
            first, last = min(first, self._first[begin]), max(last, self._last[end - 1])
        self._first[begin:end] = [first]
        self._last[begin:end] = [last]

    def without(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of numbers from `first` to `last` that are not included."""
        for at in range(bisect_left(self._last, first), bisect_right(self._first, last)):
            if first < self._first[at]:
                yield first, self._first[at] - 1
            first = self._last[at] + 1
        if first <= last:
            yield first, last

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Return the ranges of numbers between the included ones."""
        return ((last + 1, first - 1) for last, first in zip(self._last, self._first[1:], strict=False))


class StreamGap(NamedTuple):
    """Missing lines between two present ones."""

    key: Key
    first: int
    last: int


class ReadSequences:
    """Lines that were read. `runs`: the numbers of the lines of each stream; `dropped`: those that the node reports as
    dropped.

    Both can be saved and continued later.
    """

    def __init__(self) -> None:
        self.runs: dict[Key, Runs] = {}
        self.dropped: dict[Key, Runs] = {}

    def is_new(self, key: Key, seq: int) -> bool:
        """Record this line and return True if it was not read before."""
        runs = self.runs.setdefault(key, Runs())
        if seq in runs:
            return False
        runs.add(seq, seq)
        return True

    def drop(self, key: Key, first: int, last: int) -> None:
        """Record lines that the node reports as dropped."""
        self.dropped.setdefault(key, Runs()).add(first, last)

    def gaps(self) -> Iterator[StreamGap]:
        """Yield lines that are lost or not yet delivered: missing inside a stream, and not dropped by the node.

        Lines before the first one are no gap: their file was rotated away. A stream_id belongs to one node, so a new
        name of its cluster makes no gap either.
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
