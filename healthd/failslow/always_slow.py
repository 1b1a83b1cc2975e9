"""Series that were slower than their peers from the first sample to the last. Pure functions.

The detector compares a series with its own past. It cannot detect slowness that was present from the start. Peers with
the same work can show it:

- Ranks of one declared group (a pipeline stage): at least MIN_PEERS ranks. The rank takes LIMIT times the median of the
  others, and the difference is at least MIN_STANDARD_ERRORS deviations of the others.
- Ranks that report their own time and no group: only a single rank that takes SINGLE_LIMIT times as long as any other,
  while the others agree within SIMILAR_LIMIT. Stages and a rank with extra work differ by less, or are not alone.

Workers without a declared group that do not wait for each other are not compared: they may have different GPUs or
shards. In the public trace of Alibaba they differ by a factor of four. A group also does not count as compared if its
slowest member takes more than LIMIT times as long as the fastest one and no member is named (half of a group is slow,
or times are spread evenly).

The compared time is each series' own time: the value without waiting, or its busy time. For workers that report
neither, it is the value. In a synchronous job the value shows nothing, because it is the same for all ranks.

"Throughout" means in the first of up to PARTS parts of the time that all series cover, and in all but one of the parts.
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
from healthd.failslow.groups import pools
from healthd.failslow.model import Series, SlowThroughout
from healthd.failslow.outliers import CLEAR, FEWEST

LIMIT = 1.2
ALONE, ALIKE = 1.5, 1.15
PARTS, LEAST = 8, 5  # number of parts; samples of each part
FEWEST_SAMPLES = 20  # per series, as in readers/table.py
LEAST_SPREAD = 0.02


class Compared(NamedTuple):
    """Result of the comparison with peers.

    slow: the series that are slower throughout. compared_count: how many series had peers to compare with. skipped: how
    many series were not compared, by reason. Series that are too short are not included, because their reader reports
    them.
    """

    slow: tuple[SlowThroughout, ...]
    number: int
    why: dict[str, int]


NO_PEERS = "their group has fewer than four series of 20 samples or more"
NO_GROUP = "no groups of peers with the same work are declared (--group)"
APART = "their samples have different times or regimes"
ONLY_WHOLE = "only whole iterations are reported, which are equally long for all ranks that wait for each other"


class _Role(NamedTuple):
    members: tuple[int, ...]
    told: bool  # the file names the group


class _Unlike(NamedTuple):
    """A group whose members differ by more than LIMIT although no member is named. ratio: slowest over fastest."""

    ratio: float
    group: str
    number: int


def compared(series: Sequence[Series]) -> Compared:
    """Return the series that are slower than their peers throughout, and how many were not compared."""
    why: Counter[str] = Counter()
    long = [at for at, one in enumerate(series) if len(one.value) >= FEWEST_SAMPLES]
    slow: list[SlowThroughout] = []
    unlike: list[_Unlike] = []
    count = 0
    for role in _roles(series, long, why):
        if len(role.members) < FEWEST:
            why[NO_PEERS if role.told else NO_GROUP] += len(role.members)
            continue
        own = [_own(series[one]) for one in role.members]
        measure = _measure(own)
        times = [
            series[one].value if measure == "iteration" else some[1]
            for one, some in zip(role.members, own, strict=True)
        ]
        if measure == "iteration" and _together(series, role.members):
            why[ONLY_WHOLE] += len(role.members)
            continue
        parts = _parts([series[one] for one in role.members], times)
        if not parts:
            why[APART] += len(role.members)
            continue
        found = _slow(series, role, measure, parts)
        if not found and (ratio := _largest_ratio(parts)) > LIMIT:
            unlike.append(_Unlike(ratio, series[role.members[0]].group, len(role.members)))
            continue
        count += len(role.members)
        slow += found
    if unlike:
        why[_differ(unlike)] += sum(one.number for one in unlike)
    return Compared(tuple(slow), count, {reason: number for reason, number in why.items() if number})


def _largest_ratio(parts: Sequence[Sequence[float]]) -> float:
    """Return the time of the slowest member divided by that of the fastest, each the median of its parts."""
    times: list[float] = [statistics.median(some) for some in zip(*parts, strict=True)]
    return max(times) / min(times)


def _differ(unlike: Sequence[_Unlike]) -> str:
    """Return the reason why these groups are not compared, with the name and the ratio of the worst group."""
    worst = max(unlike, key=lambda one: one.ratio)
    name = f"ranks of group {worst.group}" if worst.group else "ranks without a group"
    more = len(unlike) - 1
    others = f" ({plural(more, 'more group')} by a smaller factor)" if more else ""
    return f"{name} differ by {worst.ratio:.1f} x{others}; it is unknown which of these ranks are slow"


def _roles(series: Sequence[Series], among: Sequence[int], why: Counter[str]) -> list[_Role]:
    """Return the declared groups, and the gangs of ranks that report their own time and no group."""
    groups: dict[str, list[int]] = defaultdict(list)
    for one in among:
        groups[series[one].group].append(one)
    alone = groups.pop("", [])
    found = [_Role(tuple(some), True) for _, some in sorted(groups.items())]
    telling = [one for one in alone if series[one].wait is not None or series[one].busy is not None]
    why[NO_GROUP] += len(alone) - len(telling)
    if telling:
        for pool in pools([series[one] for one in telling]):
            members = tuple(telling[one] for one in pool.members)
            if pool.synchronous or all(series[one].wait is not None for one in members):
                found.append(_Role(members, False))
            else:
                why[NO_GROUP] += len(members)
    return found


def _own(series: Series) -> tuple[str, Sequence[float]]:
    """Return the name of a rank's own time and its samples, or "" and no samples if the series does not report it."""
    if series.wait is not None:
        return "own", [value - wait for value, wait in zip(series.value, series.wait, strict=True)]
    return ("busy", series.busy) if series.busy is not None else ("", ())


def _measure(own: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return the measure that all ranks report, "own" or "busy". Otherwise return "iteration"."""
    names = {name for name, _ in own}
    return next(iter(names)) or "iteration" if len(names) == 1 else "iteration"


def _together(series: Sequence[Series], members: Sequence[int]) -> bool:
    """Return True if the ranks may wait for each other: their iterations are equally long within one percent."""
    levels = [statistics.median(series[one].value) for one in members]
    return max(levels) <= 1.01 * min(levels)


def _slow(
    series: Sequence[Series], role: _Role, measure: str, parts: Sequence[Sequence[float]]
) -> list[SlowThroughout]:
    slow_in = [_slow_in(part, role.told) for part in parts]
    ordered = [sorted(part) for part in parts]
    found = []
    for at, one in enumerate(role.members):
        if at in slow_in[0] and sum(at in some for some in slow_in) >= len(parts) - (len(parts) > LEAST):
            now = statistics.median(part[at] for part in parts)
            others = statistics.median(
                _median_without(values, part[at]) for values, part in zip(ordered, parts, strict=True)
            )
            about = series[one]
            peers = len(role.members) - 1
            found.append(
                SlowThroughout(
                    about.name, about.kind_of, about.group, about.node, measure, now / others, now, others, peers
                )
            )
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one value. Sorting the others for each rank would take minutes."""
    left_out, count = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[at + (at >= left_out)] for at in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def _slow_in(part: Sequence[float], told: bool) -> set[int]:
    """Return the positions of the slow members among the medians of one part."""
    if not told:
        *others, second, most = sorted(part)
        alone = most >= ALONE * second and second <= ALIKE * (others or [second])[0]
        return {list(part).index(most)} if alone else set()
    logs = [math.log(one) for one in part]
    middle = statistics.median_high(logs)
    least = max(math.log(LIMIT), CLEAR * max(windows.spread(logs), LEAST_SPREAD))
    return {at for at, one in enumerate(logs) if one - middle > least}


def _parts(some: Sequence[Series], times: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the median of each series for each part of the time.

    Omit a part in which a series has too few samples of the most frequent regime of all series.
    """
    count = min(PARTS, min(len(one.value) for one in some) // LEAST)
    edges = [_edges(one, some, count) for one in some]
    if not all(edges):
        return []
    found = []
    for nth in range(count):
        stretches = [range(*pair[nth : nth + 2]) for pair in edges]
        regime = _regime(some, stretches)
        medians = []
        for one, values, stretch in zip(some, times, stretches, strict=True):
            here = [
                values[at]
                for at in stretch
                if (one.regimes is None or one.regimes[at] == regime) and values[at] > 0  # False for NaN
            ]
            if len(here) < LEAST - 2:
                break
            medians.append(statistics.median(here))
        else:
            found.append(medians)
    return found if len(found) * 2 > count else []


def _edges(one: Series, some: Sequence[Series], count: int) -> list[int]:
    """Return where the parts of `series` begin and the last one ends, or [] if the series have no time in common.

    Split by the index, into parts with equally many samples of the first series: an index may have gaps that all series
    share. If a job restarted, split by position.
    """
    length = len(one.value)
    if any(len(each.starts) > 1 for each in some):
        return [length * nth // count for nth in range(count + 1)]
    clock = some[0].index
    begin = bisect_left(clock, max(each.index[0] for each in some))
    end = bisect_right(clock, min(each.index[-1] for each in some))
    if end - begin < count:
        return []
    return [*(bisect_left(one.index, clock[begin + (end - begin) * nth // count]) for nth in range(count)), length]


def _regime(some: Sequence[Series], stretches: Sequence[range]) -> str:
    names: Counter[str] = Counter()
    for one, stretch in zip(some, stretches, strict=True):
        if one.regimes is not None:
            names.update(one.regimes[at] for at in stretch)
    return names.most_common(1)[0][0] if names else ""
