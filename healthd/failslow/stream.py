"""Operations of ranks: conversion of their streams to iteration times, and detection of ranks that have stopped. Pure
functions.

A hook between a job and NCCL records the type and time of each call (FALCON, arXiv 2410.12588, 2.2 step 1). A rank
whose last operation stays the same between two observations is a fail-stop (FALCON's released detector, control_plane).

The duration of a collective on a rank includes the wait for the last rank, so it is not the transfer time. If all ranks
of a group reported the same collective, the smallest of their times belongs to the last rank, which did not wait: this
is the transfer time. The rest of the other ranks' time is their wait.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.page import plural
from healthd.failslow.model import Series
from healthd.failslow.period import NoPeriod, Period, period

MOST_NOTES = 3
STANDS_ITERATIONS = 10
STANDS_PAUSES = 3  # times its longest pause so far
STANDS_SECONDS = 10.0
STANDS_SECONDS_DUMPED = 60.0  # for dumps: not all ranks dump at the same time


class StreamError(HealthdError):
    """A record of operations that cannot be read or used. The message is one sentence with file and line."""


class Operation(NamedTuple):
    """One operation.

    time_seconds: since the epoch or any other time; NaN if not reported. size: of its data, as text. sequence: number
    of the operation, the same on all ranks of its group; -1 if not reported. duration_seconds: NaN if not reported.
    """

    time_seconds: float
    name: str
    group: str = ""
    size: str = ""
    sequence: int = -1
    duration_seconds: float = math.nan


@dataclass(frozen=True, slots=True)
class Stream:
    """Operations of one rank.

    operations: in the order of their begin. group_ranks: number of ranks of each group. dumped: written at one time,
    not continuously. source: the file's name in messages.
    """

    rank: str
    operations: tuple[Operation, ...]
    source: str
    node: str = ""
    group_ranks: Mapping[str, int] = field(default_factory=dict)
    dumped: bool = False


class FailStop(NamedTuple):
    """A rank that has stopped. since: time of its last operation. evidence: a sentence without a full stop."""

    series: str
    since: float
    evidence: str


class Gathered(NamedTuple):
    """Result for all streams of a job. notes: sentences without a full stop."""

    series: tuple[Series, ...]
    fail_stops: tuple[FailStop, ...]
    notes: tuple[str, ...]


def gathered(streams: Sequence[Stream]) -> Gathered:
    """Analyse the streams of a job.

    Raises StreamError if they show neither an iteration nor a rank that has stopped.
    """
    by_rank: dict[str, list[Stream]] = defaultdict(list)
    for one in streams:
        by_rank[one.rank].append(one)
    stops = [stop for several in by_rank.values() for stop in _still_between(several)]
    ranks = [_joined(several) for several in by_rank.values()]
    periods: dict[str, Period] = {}
    why: dict[str, str] = {}
    for one in ranks:
        try:
            periods[one.rank] = period_of(one)
        except StreamError as error:
            why[one.rank] = str(error)
    known = {stop.series for stop in stops}
    stops += [stop for stop in _left_behind(ranks, periods) if stop.series not in known]
    series = [*_series(ranks, periods)]
    if not series:
        series = _by_group(ranks)
    if not series and not stops:
        raise StreamError(next(iter(why.values()), "no operation has a time"))
    notes = [f"rank {rank}: {text}" for rank, text in why.items()][:MOST_NOTES]
    if len(why) > MOST_NOTES:
        notes.append(f"and {len(why) - MOST_NOTES:,} more ranks have no period")
    return Gathered(tuple(series), tuple(stops), tuple(notes))


def period_of(stream: Stream) -> Period:
    """Find the period of a stream. Raises StreamError.

    Use the finest name of the operations that repeats: kind, group and size; kind and group; kind; then only the
    operations of the busiest group, because the order between groups may change.
    """
    told = [one for one in stream.operations if not math.isnan(one.time_seconds)]
    if stream.operations and not told:
        raise StreamError(
            f"{stream.source}: its records have only the time of the dump, no event_trace_ts, so iterations are not "
            "visible (set NCCL_INSPECTOR_DUMP_VERBOSE=1)"
        )
    told.sort(key=lambda one: one.time_seconds)
    groups = Counter(one.group for one in told)
    busiest = min(groups, key=lambda group: -groups[group]) if groups else ""
    last: NoPeriod | None = None
    named: tuple[Callable[[Operation], str], ...] = (
        lambda one: f"{one.name}\0{one.group}\0{one.size}",
        lambda one: f"{one.name}\0{one.group}",
        lambda one: one.name,
    )
    for some, name in [*((told, name) for name in named), ([one for one in told if one.group == busiest], named[2])]:
        try:
            return period([name(one) for one in some], [one.time_seconds for one in some])
        except NoPeriod as error:
            last = last or error
    raise StreamError(f"{stream.source}: {last}{_lost(stream)}")


def _lost(stream: Stream) -> str:
    """Return a text about operations that are missing by their sequence numbers, or ""."""
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in stream.operations:
        if one.sequence >= 0:
            seen[one.group, one.name].append(one.sequence)
    there = sum(len(set(numbers)) for numbers in seen.values())
    whole = sum(max(numbers) - min(numbers) + 1 for numbers in seen.values())
    return f"; {whole - there:,} of {whole:,} operations are missing by sequence number" if whole > 1.1 * there else ""


def _joined(several: Sequence[Stream]) -> Stream:
    """Combine several files of one rank."""
    if len(several) == 1:
        return several[0]
    every = sorted({one for stream in several for one in stream.operations}, key=lambda one: one.time_seconds)
    ranks = {group: count for stream in several for group, count in stream.group_ranks.items()}
    first = several[0]
    return Stream(first.rank, tuple(every), first.source, first.node, ranks, any(one.dumped for one in several))


def _still_between(several: Sequence[Stream]) -> Iterator[FailStop]:
    timed = [(max(one.operations, key=_when), one) for one in several if one.operations]
    newest = max((last.time_seconds for last, _ in timed), default=math.nan)
    same = [stream for last, stream in timed if last.time_seconds == newest]
    if len(same) > 1:
        last = next(last for last, stream in timed if stream is same[0])
        files = " and ".join(stream.source for stream in same[:2])
        yield FailStop(same[0].rank, newest, f"its last operation, {last.name}, is the same in {files}")


def _when(one: Operation) -> float:
    return -math.inf if math.isnan(one.time_seconds) else one.time_seconds


def _left_behind(ranks: Sequence[Stream], periods: Mapping[str, Period]) -> Iterator[FailStop]:
    """Yield ranks whose operations ended long before those of other ranks."""
    ends = {one.rank: max(map(_when, one.operations), default=-math.inf) for one in ranks}
    newest = max(ends.values(), default=-math.inf)
    usual = statistics.median([found.iteration_seconds for found in periods.values()] or [0.0])
    for one in ranks:
        behind = newest - ends[one.rank]
        if not math.isfinite(behind):
            continue
        times = sorted(map(_when, one.operations))
        pause = max((after - before for before, after in pairwise(times)), default=0.0)
        least = STANDS_SECONDS_DUMPED if one.dumped else STANDS_SECONDS
        if behind > max(least, STANDS_ITERATIONS * usual, STANDS_PAUSES * pause):
            last = max(one.operations, key=_when)
            others = sum(end > ends[one.rank] + behind / 2 for end in ends.values())
            yield FailStop(
                one.rank,
                ends[one.rank],
                f"its last operation, {last.name}, was {behind:,.1f} s before the last of "
                f"{plural(others, 'other rank')}",
            )


def _series(ranks: Sequence[Stream], periods: Mapping[str, Period]) -> Iterator[Series]:
    """Yield a series for each rank with a period.

    The index is the number of the iteration, the same on all ranks for iterations that began at the same time.
    """
    least = _least(ranks)
    clock = max((found.begin_seconds for found in periods.values()), key=len, default=())
    for one in ranks:
        found = periods.get(one.rank)
        if found is None:
            continue
        begins = found.begin_seconds
        index = _numbered(begins, clock, found.iteration_seconds)
        own, transfer = _communication(one, begins, found.seconds, least)
        busy = [value - spent for value, spent in zip(found.seconds, own, strict=True)] if own else []
        yield Series(
            one.rank,
            found.seconds,
            index,
            kind_of="rank",
            node=one.node,
            busy=busy if busy and min(busy) > 0 and transfer else None,
            wait=[max(0.0, a - b) for a, b in zip(own, transfer, strict=True)] if transfer else None,
            transfer=transfer or None,
        )


def _numbered(begins: Sequence[float], clock: Sequence[float], iteration_seconds: float) -> list[float]:
    """Return ascending iteration numbers: that of the clock's nearest iteration, if one is near."""
    numbers: list[float] = []
    for begin in begins:
        at = bisect_left(clock, begin - iteration_seconds / 2)
        near = at < len(clock) and abs(clock[at] - begin) <= iteration_seconds / 2
        number = float(at) if near else numbers[-1] + 1 if numbers else 0.0
        numbers.append(max(number, numbers[-1] + 1) if numbers else number)
    return numbers


_Key = tuple[str, str, str, int]


def _key(one: Operation) -> _Key:
    return one.group, one.name, one.size, one.sequence


def _least(ranks: Iterable[Stream]) -> dict[_Key, float]:
    """Return the smallest duration of each operation that all ranks of its group reported."""
    told: dict[_Key, dict[str, float]] = defaultdict(dict)
    size: dict[str, int] = {}
    for stream in ranks:
        size.update(stream.group_ranks)
        for one in stream.operations:
            if one.sequence >= 0 and one.duration_seconds > 0:
                told[_key(one)][stream.rank] = one.duration_seconds
    return {key: min(of.values()) for key, of in told.items() if 1 < len(of) == size.get(key[0], 0)}


def _communication(
    stream: Stream, begins: Sequence[float], seconds: Sequence[float], least: Mapping[_Key, float]
) -> tuple[list[float], list[float]]:
    """Return the duration of each iteration's operations, and their duration without waiting.

    Both are empty if an iteration has no operation that all ranks reported.
    """
    own, transfer = [0.0] * len(begins), [0.0] * len(begins)
    for one in stream.operations:
        at = bisect_left(begins, math.nextafter(one.time_seconds, math.inf)) - 1
        if at >= 0 and one.time_seconds < begins[at] + seconds[at] and _key(one) in least:
            own[at] += one.duration_seconds
            transfer[at] += least[_key(one)]
    return (own, transfer) if transfer and min(transfer) > 0 else ([], [])


def _by_group(ranks: Sequence[Stream]) -> list[Series]:
    """Return series of operations without times: the duration without waiting, by group, kind and size.

    Peers are groups with the same number of ranks and the same operations.
    """
    size = {group: count for stream in ranks for group, count in stream.group_ranks.items()}
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for (group, name, volume, sequence), seconds in _least(ranks).items():
        found[group, name, volume].append((sequence, seconds))
    made = []
    for (group, name, volume), samples in sorted(found.items()):
        samples.sort()
        value = [seconds for _, seconds in samples]
        index = [float(sequence) for sequence, _ in samples]
        role = f"{name} of {volume} bytes in {size[group]} ranks"
        made.append(Series(group, value, index, kind_of="communicator", group=role, transfer=value))
    return made
