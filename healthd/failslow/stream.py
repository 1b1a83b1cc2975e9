"""Converts ranks' streams of operations to iteration times, and detects ranks that have stopped.

All functions are pure.

A hook between a job and NCCL records the type and time of each call (FALCON, arXiv 2410.12588, 2.2 step 1). If a rank's
last operation is the same in two observations, the rank has stopped (FALCON's released detector, control_plane).

The duration of a collective on a rank includes the wait for the last rank, so it is not the transfer time. If all ranks
of a group reported the same collective, the shortest duration is that of the last rank, which did not wait. This
duration is the transfer time. The rest of the other ranks' durations is waiting.
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
from healthd.failslow.period import Period, PeriodNotFound, find_period

MAX_NOTES = 3
STOPPED_ITERATIONS = 10
STOPPED_PAUSES = 3  # a rank has stopped if it is silent for this multiple of its longest pause so far
STOPPED_SECONDS = 10.0
STOPPED_SECONDS_DUMPED = 60.0  # for dumps; needed because not all ranks write their dumps at the same time


class StreamError(HealthdError):
    """A record of operations cannot be read or used. The message is one sentence that names the file and line."""


class Operation(NamedTuple):
    """One operation.

    Attributes:
        time_seconds: seconds since the epoch or any other time; NaN if not reported.
        size: size of the data, as text.
        sequence: number of the operation, equal on all ranks of its group; -1 if not reported.
        duration_seconds: NaN if not reported.
    """

    time_seconds: float
    name: str
    group: str = ""
    size: str = ""
    sequence: int = -1
    duration_seconds: float = math.nan


@dataclass(frozen=True, slots=True)
class Stream:
    """One rank's operations.

    Attributes:
        operations: in order of their start.
        group_ranks: number of ranks in each group.
        dumped: True if all operations were written at once, not continuously.
        source: the file's name in messages.
    """

    rank: str
    operations: tuple[Operation, ...]
    source: str
    node: str = ""
    group_ranks: Mapping[str, int] = field(default_factory=dict)
    dumped: bool = False


class FailStop(NamedTuple):
    """A rank that has stopped.

    Attributes:
        since: time of its last operation.
        evidence: a sentence without a full stop.
    """

    series: str
    since: float
    evidence: str


class StreamAnalysis(NamedTuple):
    """The result for all of a job's streams. `notes` are sentences without a full stop."""

    series: tuple[Series, ...]
    fail_stops: tuple[FailStop, ...]
    notes: tuple[str, ...]


def analyse_streams(streams: Sequence[Stream]) -> StreamAnalysis:
    """Analyse a job's streams.

    Raises StreamError if the streams show neither an iteration nor a rank that has stopped.
    """
    by_rank: dict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        by_rank[stream.rank].append(stream)
    stops = [stop for rank_streams in by_rank.values() for stop in _stopped_between(rank_streams)]
    ranks = [_join(rank_streams) for rank_streams in by_rank.values()]
    periods: dict[str, Period] = {}
    failures: dict[str, str] = {}
    for stream in ranks:
        try:
            periods[stream.rank] = find_stream_period(stream)
        except StreamError as error:
            failures[stream.rank] = str(error)
    stopped = {stop.series for stop in stops}
    stops += [stop for stop in _stopped_behind(ranks, periods) if stop.series not in stopped]
    series = [*_rank_series(ranks, periods)]
    if not series:
        series = _group_series(ranks)
    if not series and not stops:
        raise StreamError(next(iter(failures.values()), "no operation has a time"))
    notes = [f"rank {rank}: {text}" for rank, text in failures.items()][:MAX_NOTES]
    if len(failures) > MAX_NOTES:
        notes.append(f"and {len(failures) - MAX_NOTES:,} more ranks have no period")
    return StreamAnalysis(tuple(series), tuple(stops), tuple(notes))


def find_stream_period(stream: Stream) -> Period:
    """Find the period of a stream. Raises StreamError.

    Three kinds of names are tried for the operations: kind, group and size; kind and group; only the kind. The most
    detailed names with which the operations repeat are used. If they repeat with none of these, only the operations of
    the busiest group are used, because the order between groups may change.
    """
    timed = [operation for operation in stream.operations if not math.isnan(operation.time_seconds)]
    if stream.operations and not timed:
        raise StreamError(
            f"{stream.source}: its records have only the time of the dump and no event_trace_ts, so iterations are not "
            "visible (set NCCL_INSPECTOR_DUMP_VERBOSE=1)"
        )
    timed.sort(key=lambda operation: operation.time_seconds)
    groups = Counter(operation.group for operation in timed)
    busiest = min(groups, key=lambda group: -groups[group]) if groups else ""
    last: PeriodNotFound | None = None
    name_functions: tuple[Callable[[Operation], str], ...] = (
        lambda operation: f"{operation.name}\0{operation.group}\0{operation.size}",
        lambda operation: f"{operation.name}\0{operation.group}",
        lambda operation: operation.name,
    )
    for candidates, name in [
        *((timed, name) for name in name_functions),
        ([operation for operation in timed if operation.group == busiest], name_functions[2]),
    ]:
        try:
            return find_period(
                [name(operation) for operation in candidates], [operation.time_seconds for operation in candidates]
            )
        except PeriodNotFound as error:
            last = last or error
    raise StreamError(f"{stream.source}: {last}{_missing_text(stream)}")


def _missing_text(stream: Stream) -> str:
    """Return text about missing operations, which gaps in the sequence numbers show, or "" if there are none."""
    sequences: dict[tuple[str, str], list[int]] = defaultdict(list)
    for operation in stream.operations:
        if operation.sequence >= 0:
            sequences[operation.group, operation.name].append(operation.sequence)
    seen_count = sum(len(set(numbers)) for numbers in sequences.values())
    expected_count = sum(max(numbers) - min(numbers) + 1 for numbers in sequences.values())
    return (
        f"; {expected_count - seen_count:,} of {expected_count:,} operations are missing according to their sequence "
        "numbers"
        if expected_count > 1.1 * seen_count
        else ""
    )


def _join(streams: Sequence[Stream]) -> Stream:
    """Combine several files from one rank."""
    if len(streams) == 1:
        return streams[0]
    operations = sorted({item for stream in streams for item in stream.operations}, key=lambda item: item.time_seconds)
    ranks = {group: count for stream in streams for group, count in stream.group_ranks.items()}
    first = streams[0]
    return Stream(first.rank, tuple(operations), first.source, first.node, ranks, any(item.dumped for item in streams))


def _stopped_between(streams: Sequence[Stream]) -> Iterator[FailStop]:
    timed = [
        (max(candidate.operations, key=_operation_time), candidate) for candidate in streams if candidate.operations
    ]
    newest = max((last.time_seconds for last, _ in timed), default=math.nan)
    unchanged = [stream for last, stream in timed if last.time_seconds == newest]
    if len(unchanged) > 1:
        last = next(last for last, stream in timed if stream is unchanged[0])
        files = " and ".join(stream.source for stream in unchanged[:2])
        yield FailStop(unchanged[0].rank, newest, f"its last operation, {last.name}, is the same in {files}")


def _operation_time(operation: Operation) -> float:
    return -math.inf if math.isnan(operation.time_seconds) else operation.time_seconds


def _stopped_behind(ranks: Sequence[Stream], periods: Mapping[str, Period]) -> Iterator[FailStop]:
    """Yield ranks whose operations ended long before those of other ranks."""
    ends = {stream.rank: max(map(_operation_time, stream.operations), default=-math.inf) for stream in ranks}
    newest = max(ends.values(), default=-math.inf)
    usual = statistics.median([found.iteration_seconds for found in periods.values()] or [0.0])
    for stream in ranks:
        lag = newest - ends[stream.rank]
        if not math.isfinite(lag):
            continue
        times = sorted(map(_operation_time, stream.operations))
        pause = max((after - before for before, after in pairwise(times)), default=0.0)
        min_seconds = STOPPED_SECONDS_DUMPED if stream.dumped else STOPPED_SECONDS
        if lag > max(min_seconds, STOPPED_ITERATIONS * usual, STOPPED_PAUSES * pause):
            last = max(stream.operations, key=_operation_time)
            other_count = sum(end > ends[stream.rank] + lag / 2 for end in ends.values())
            yield FailStop(
                stream.rank,
                ends[stream.rank],
                f"its last operation, {last.name}, was {lag:,.1f} s before the last of "
                f"{plural(other_count, 'other rank')}",
            )


def _rank_series(ranks: Sequence[Stream], periods: Mapping[str, Period]) -> Iterator[Series]:
    """Yield a series for each rank that has a period.

    The index is the iteration number. Iterations that began at the same time have the same number on all ranks.
    """
    min_durations = _min_durations(ranks)
    clock = max((found.begin_seconds for found in periods.values()), key=len, default=())
    for stream in ranks:
        found = periods.get(stream.rank)
        if found is None:
            continue
        begins = found.begin_seconds
        index = _iteration_numbers(begins, clock, found.iteration_seconds)
        own, transfer = _communication(stream, begins, found.seconds, min_durations)
        busy = [value - spent for value, spent in zip(found.seconds, own, strict=True)] if own else []
        yield Series(
            stream.rank,
            found.seconds,
            index,
            label="rank",
            node=stream.node,
            busy=busy if busy and min(busy) > 0 and transfer else None,
            wait=[max(0.0, a - b) for a, b in zip(own, transfer, strict=True)] if transfer else None,
            transfer=transfer or None,
        )


def _iteration_numbers(begins: Sequence[float], clock: Sequence[float], iteration_seconds: float) -> list[float]:
    """Number a rank's iterations, ascending.

    Each gets the number of the nearest iteration of the `clock` rank, if one is near.
    """
    numbers: list[float] = []
    for begin in begins:
        at = bisect_left(clock, begin - iteration_seconds / 2)
        near = at < len(clock) and abs(clock[at] - begin) <= iteration_seconds / 2
        number = float(at) if near else numbers[-1] + 1 if numbers else 0.0
        numbers.append(max(number, numbers[-1] + 1) if numbers else number)
    return numbers


_Key = tuple[str, str, str, int]


def _operation_key(operation: Operation) -> _Key:
    return operation.group, operation.name, operation.size, operation.sequence


def _min_durations(ranks: Iterable[Stream]) -> dict[_Key, float]:
    """Return the smallest duration of each operation that all ranks in its group reported."""
    durations: dict[_Key, dict[str, float]] = defaultdict(dict)
    size: dict[str, int] = {}
    for stream in ranks:
        size.update(stream.group_ranks)
        for operation in stream.operations:
            if operation.sequence >= 0 and operation.duration_seconds > 0:
                durations[_operation_key(operation)][stream.rank] = operation.duration_seconds
    return {key: min(by_rank.values()) for key, by_rank in durations.items() if 1 < len(by_rank) == size.get(key[0], 0)}


def _communication(
    stream: Stream, begins: Sequence[float], seconds: Sequence[float], min_durations: Mapping[_Key, float]
) -> tuple[list[float], list[float]]:
    """Return the total duration of the operations in each iteration, and this duration without waiting.

    Both are empty if an iteration has no operation that all ranks reported.
    """
    operation_seconds, transfer = [0.0] * len(begins), [0.0] * len(begins)
    for operation in stream.operations:
        at = bisect_left(begins, math.nextafter(operation.time_seconds, math.inf)) - 1
        if at >= 0 and operation.time_seconds < begins[at] + seconds[at] and _operation_key(operation) in min_durations:
            operation_seconds[at] += operation.duration_seconds
            transfer[at] += min_durations[_operation_key(operation)]
    return (operation_seconds, transfer) if transfer and min(transfer) > 0 else ([], [])


def _group_series(ranks: Sequence[Stream]) -> list[Series]:
    """Return series for operations whose times are not reported.

    There is a series for each group, kind and size. Its values are the durations without waiting.

    Peers are groups with the same number of ranks and the same operations.
    """
    size = {group: count for stream in ranks for group, count in stream.group_ranks.items()}
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for (group, name, volume, sequence), seconds in _min_durations(ranks).items():
        found[group, name, volume].append((sequence, seconds))
    result = []
    for (group, name, volume), samples in sorted(found.items()):
        samples.sort()
        value = [seconds for _, seconds in samples]
        index = [float(sequence) for sequence, _ in samples]
        role = f"{name} of {volume} bytes in {size[group]} ranks"
        result.append(Series(group, value, index, label="communicator", group=role, transfer=value))
    return result
