"""Finds series that were slower than their peers from the first sample to the last. All functions are pure.

The detector compares a series with its own past, so it cannot detect slowness that was present from the start. This
module detects such slowness by comparing a series with peers that have the same work. It compares:

- Ranks of one declared group (a pipeline stage) with at least MIN_PEERS ranks. A rank is slow if its time is LIMIT
  times the median of the others, and if the difference is at least MIN_STANDARD_ERRORS deviations of the others.
- Ranks that report their own time but no group. At most one rank is named: it takes SINGLE_LIMIT times as long as any
  other rank, while the others agree within SIMILAR_LIMIT. A whole stage has several such ranks, and a rank with extra
  work differs by less.

Workers that do not wait for each other and have no declared group are not compared: they may have different GPUs or
shards. In Alibaba's public trace, they differ by a factor of four. Sometimes the slowest member of a group takes more
than LIMIT times as long as the fastest, but no member can be named, because half of the group is slow or the times are
spread evenly. Such a group is not counted as compared.

The compared time is each series' own time: the value without waiting, or the busy time. For workers that report
neither, it is the value itself. In a synchronous job, the value proves nothing, because it is the same for all ranks.

The time that all series cover is divided into up to PARTS parts. A series is slow throughout if it is slow in the first
part and in all other parts but one.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from healthd.common.page import plural
from healthd.failslow import windows
from healthd.failslow.groups import find_pools
from healthd.failslow.model import Series, SlowThroughout
from healthd.failslow.outliers import MIN_PEERS, MIN_STANDARD_ERRORS

LIMIT = 1.2
SINGLE_LIMIT, SIMILAR_LIMIT = 1.5, 1.15
PARTS, MIN_PART_SAMPLES = 8, 5  # maximum number of parts; minimum number of samples in each part
MIN_SAMPLES = 20  # minimum number of samples in a series, as in readers/table.py
MIN_SPREAD = 0.02


class Comparison(NamedTuple):
    """The result of the comparison with peers.

    Attributes:
        slow: the series that are slower throughout.
        compared_count: number of series that had peers.
        skipped: maps each reason to the number of series that were not compared for this reason. Series that are too
            short are not included, because their reader reports them.
    """

    slow: tuple[SlowThroughout, ...]
    compared_count: int
    skipped: dict[str, int]


NO_PEERS = "their group has fewer than four series with 20 or more samples"
NO_GROUP = "no groups of peers with the same work are declared (--group)"
NO_OVERLAP = "their samples have different times or regimes"
ONLY_ITERATIONS = "only whole iterations are reported, and they take equally long on all ranks that wait for each other"


class _Role(NamedTuple):
    members: tuple[int, ...]
    is_declared: bool  # True if the file names the group


class _MixedGroup(NamedTuple):
    """A group whose members differ by more than LIMIT but in which no member is named.

    `ratio` is the slowest member's time divided by the fastest member's.
    """

    ratio: float
    group: str
    member_count: int


def compare_with_peers(series: Sequence[Series]) -> Comparison:
    """Return the series that are slower than their peers throughout, and the number of series without a comparison."""
    skipped: Counter[str] = Counter()
    usable = [at for at, item in enumerate(series) if len(item.value) >= MIN_SAMPLES]
    slow: list[SlowThroughout] = []
    mixed: list[_MixedGroup] = []
    compared_count = 0
    for role in _roles(series, usable, skipped):
        if len(role.members) < MIN_PEERS:
            skipped[NO_PEERS if role.is_declared else NO_GROUP] += len(role.members)
            continue
        own = [_own_times(series[item]) for item in role.members]
        measure = _common_measure(own)
        times = [
            series[item].value if measure == "iteration" else own_time[1]
            for item, own_time in zip(role.members, own, strict=True)
        ]
        if measure == "iteration" and _are_synchronous(series, role.members):
            skipped[ONLY_ITERATIONS] += len(role.members)
            continue
        parts = _parts([series[item] for item in role.members], times)
        if not parts:
            skipped[NO_OVERLAP] += len(role.members)
            continue
        found = _slow_members(series, role, measure, parts)
        if not found and (ratio := _largest_ratio(parts)) > LIMIT:
            mixed.append(_MixedGroup(ratio, series[role.members[0]].group, len(role.members)))
            continue
        compared_count += len(role.members)
        slow += found
    if mixed:
        skipped[_mixed_reason(mixed)] += sum(item.member_count for item in mixed)
    return Comparison(tuple(slow), compared_count, {reason: number for reason, number in skipped.items() if number})


def _largest_ratio(parts: Sequence[Sequence[float]]) -> float:
    """Return the slowest member's time divided by the fastest member's. A member's time is the median over its
    parts."""
    times: list[float] = [statistics.median(part_times) for part_times in zip(*parts, strict=True)]
    return max(times) / min(times)


def _mixed_reason(mixed: Sequence[_MixedGroup]) -> str:
    """Return the reason why these groups are not compared, with the name and ratio of the worst group."""
    worst = max(mixed, key=lambda group: group.ratio)
    name = f"ranks of group {worst.group}" if worst.group else "ranks without a group"
    more = len(mixed) - 1
    remainder = f" ({plural(more, 'more group')} by a smaller factor)" if more else ""
    return f"{name} differ by a factor of {worst.ratio:.1f}{remainder}; it is unknown which of these ranks are slow"


def _roles(series: Sequence[Series], candidates: Sequence[int], skipped: Counter[str]) -> list[_Role]:
    """Return the declared groups, and the gangs of ranks that report their own time but no group."""
    groups: dict[str, list[int]] = defaultdict(list)
    for member in candidates:
        groups[series[member].group].append(member)
    ungrouped = groups.pop("", [])
    found = [_Role(tuple(group_members), True) for _, group_members in sorted(groups.items())]
    timed = [member for member in ungrouped if series[member].wait is not None or series[member].busy is not None]
    skipped[NO_GROUP] += len(ungrouped) - len(timed)
    if timed:
        for pool in find_pools([series[member] for member in timed]):
            members = tuple(timed[member] for member in pool.members)
            if pool.synchronous or all(series[member].wait is not None for member in members):
                found.append(_Role(members, False))
            else:
                skipped[NO_GROUP] += len(members)
    return found


def _own_times(series: Series) -> tuple[str, Sequence[float]]:
    """Return the name and the samples of a rank's own time, or "" and no samples if the series does not report it."""
    if series.wait is not None:
        return "own", [value - wait for value, wait in zip(series.value, series.wait, strict=True)]
    return ("busy", series.busy) if series.busy is not None else ("", ())


def _common_measure(own: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return "own" or "busy" if all ranks report this measure, otherwise "iteration"."""
    names = {name for name, _ in own}
    return next(iter(names)) or "iteration" if len(names) == 1 else "iteration"


def _are_synchronous(series: Sequence[Series], members: Sequence[int]) -> bool:
    """Return True if the ranks may wait for each other: their iteration times are equal to within one percent."""
    levels = [statistics.median(series[member].value) for member in members]
    return max(levels) <= 1.01 * min(levels)


def _slow_members(
    series: Sequence[Series], role: _Role, measure: str, parts: Sequence[Sequence[float]]
) -> list[SlowThroughout]:
    slow_in = [_slow_in(part, role.is_declared) for part in parts]
    ordered = [sorted(part) for part in parts]
    found = []
    for at, member in enumerate(role.members):
        if at in slow_in[0] and sum(at in slow_set for slow_set in slow_in) >= len(parts) - (
            len(parts) > MIN_PART_SAMPLES
        ):
            time = statistics.median(part[at] for part in parts)
            peers_time = statistics.median(
                _median_without(values, part[at]) for values, part in zip(ordered, parts, strict=True)
            )
            subject = series[member]
            peers = len(role.members) - 1
            found.append(
                SlowThroughout(
                    subject.name,
                    subject.label,
                    subject.group,
                    subject.node,
                    measure,
                    time / peers_time,
                    time,
                    peers_time,
                    peers,
                )
            )
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them.

    The values are sorted only once, because sorting the rest again for each rank would take minutes.
    """
    removed, count = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[at + (at >= removed)] for at in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def _slow_in(part: Sequence[float], is_declared: bool) -> set[int]:
    """Return the positions of the slow members, given all members' medians in one part."""
    if not is_declared:
        *lower, second, largest = sorted(part)
        is_alone = largest >= SINGLE_LIMIT * second and second <= SIMILAR_LIMIT * (lower or [second])[0]
        return {list(part).index(largest)} if is_alone else set()
    logs = [math.log(value) for value in part]
    middle = statistics.median_high(logs)
    threshold = max(math.log(LIMIT), MIN_STANDARD_ERRORS * max(windows.robust_deviation(logs), MIN_SPREAD))
    return {at for at, value in enumerate(logs) if value - middle > threshold}


def _parts(members: Sequence[Series], times: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each series's median in each part of the time.

    Only samples of one regime are used, the most frequent one over all series. A part is omitted if any series has too
    few of these samples in it.
    """
    count = min(PARTS, min(len(series.value) for series in members) // MIN_PART_SAMPLES)
    edges = [_edges(series, members, count) for series in members]
    if not all(edges):
        return []
    found = []
    for nth in range(count):
        ranges = [range(*pair[nth : nth + 2]) for pair in edges]
        regime = _regime(members, ranges)
        medians = []
        for series, values, positions in zip(members, times, ranges, strict=True):
            samples = [
                values[at]
                for at in positions
                if (series.regimes is None or series.regimes[at] == regime) and values[at] > 0  # False for NaN
            ]
            if len(samples) < MIN_PART_SAMPLES - 2:
                break
            medians.append(statistics.median(samples))
        else:
            found.append(medians)
    return found if len(found) * 2 > count else []


def _edges(series: Series, members: Sequence[Series], count: int) -> list[int]:
    """Return the beginnings of the parts of `series` and the end of the last part, or [] without a common time.

    The series are split by their index. The borders are chosen so that each part has the same number of samples of the
    first series, because the index may have gaps that all series share. If a job restarted, the series are split by
    position instead.
    """
    length = len(series.value)
    if any(len(member.starts) > 1 for member in members):
        return [length * nth // count for nth in range(count + 1)]
    clock = members[0].index
    begin = bisect_left(clock, max(member.index[0] for member in members))
    end = bisect_right(clock, min(member.index[-1] for member in members))
    if end - begin < count:
        return []
    return [*(bisect_left(series.index, clock[begin + (end - begin) * nth // count]) for nth in range(count)), length]


def _regime(members: Sequence[Series], ranges: Sequence[range]) -> str:
    names: Counter[str] = Counter()
    for series, positions in zip(members, ranges, strict=True):
        if series.regimes is not None:
            names.update(series.regimes[at] for at in positions)
    return names.most_common(1)[0][0] if names else ""
