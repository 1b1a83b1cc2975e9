"""Grouping of series without declared groups: the gangs of a file, and the peers of one role in each gang. Pure
functions.

A gang is synchronous: each iteration ends for all of its ranks with the same collective, so their iteration times move
together. Two series belong to one gang if the signs of their changes from sample to sample agree in MIN_AGREEMENT of
the first COMPARED_SIGNS that both have. For noise of a normal distribution, this is a correlation of 0.7 (agreement =
1/2 + asin(rho) / pi). A gang of fewer than SMALL_GANG ranks must agree in SMALL_GANG_AGREEMENT: among many series whose
load sometimes varies together, two can agree in MIN_AGREEMENT by chance. If there is one gang, series that report
waiting for other ranks also belong to it.

All other series form one pool: workers that do not wait for each other (parameter server), or series whose measurements
are too coarse.

Peers have one role: the same declared group, or about the same level at rest. Without declared groups, members are
sorted by level, and a role ends where the next level is more than LEVEL_GAP times the previous one. Levels stand for
stage and volume (FALCON, arXiv 2410.12588, compares groups of identical role and volume).

Limits: several jobs without synchronisation in one file are only separated by their levels. Two gangs with the same
rhythm become one. Stages of about the same level become one role. `--group` separates them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import gt
from typing import NamedTuple

from healthd.failslow.model import Series

SIGNS = 256
LEAST_SIGNS = 48
SAME_SIGNS = 0.75
FEW, FEW_SIGNS = 4, 0.85
GAP = 1.5
MOST_GANGS = 256  # compared with each series, so that 100,000 series take seconds


class Pool(NamedTuple):
    """Series that belong together. members: their indices, ascending. synchronous: they move together."""

    members: tuple[int, ...]
    synchronous: bool


def pools(series: Sequence[Series]) -> list[Pool]:
    """Return the pools, ordered by their first members. Each series is in one pool."""
    order = sorted(range(len(series)), key=lambda one: identity(series[one]))
    signs = _signs(series)
    gangs: list[list[int]] = []
    alone: list[int] = []
    for one in order:
        gang = next((gang for gang in gangs if _alike(signs[gang[0]], signs[one])), None)
        if gang is not None:
            gang.append(one)
        elif len(gangs) < MOST_GANGS:
            gangs.append([one])
        else:
            alone.append(one)
    found = []
    for gang in gangs:
        sure = len(gang) >= FEW or all(_alike(signs[gang[0]], signs[one], FEW_SIGNS) for one in gang[1:])
        if len(gang) > 1 and sure:
            found.append(gang)
        else:
            alone += gang
    if len(found) == 1:  # a series that reports waiting belongs to a gang, and there is only one
        found[0] += [one for one in alone if series[one].wait is not None]
        alone = [one for one in alone if series[one].wait is None]
    made = [Pool(tuple(sorted(gang)), True) for gang in found]
    return sorted(made + ([Pool(tuple(sorted(alone)), False)] if alone else []))


def roles(
    series: Sequence[Series], members: Sequence[int], level: Callable[[int], float | None]
) -> list[tuple[int, ...]]:
    """Return the members grouped by role; each member is in one group.

    Args:
        level: returns the time of a member at rest, or None. A member without a level stays with the lowest.
    """
    told: dict[str, list[int]] = defaultdict(list)
    for one in members:
        told[series[one].group].append(one)
    found = [tuple(sorted(some)) for group, some in told.items() if group]
    levels = sorted((level(one) or 0.0, one) for one in told.get("", ()))
    role: list[int] = []
    before = 0.0
    for now, one in levels:
        if role and before > 0 and now > before * GAP:
            found.append(tuple(sorted(role)))
            role = []
        role.append(one)
        before = now
    if role:
        found.append(tuple(sorted(role)))
    return sorted(found)


def identity(series: Series) -> tuple[str, str, str]:
    """Return a sort key that does not depend on the order in which series are given."""
    return series.name, series.group, series.node


_DIGITS = b"01".ljust(256, b"?")


class _Signs(NamedTuple):
    """Bit masks by time. rises: the value is above the previous one. present: there is a value."""

    up: int
    known: int


def _signs(series: Sequence[Series]) -> list[_Signs]:
    """Return the signs of the first COMPARED_SIGNS samples that all series can have.

    Samples are aligned by index if the series share one, so that a gap shifts nothing. Otherwise they are aligned by
    position.
    """
    begin = max((one.index[0] for one in series if len(one.index)), default=0.0)
    stretches, times = [], set[float]()
    for one in series:
        end = one.starts[1] if len(one.starts) > 1 else len(one.value)
        first = bisect_left(one.index, begin, 0, end) + 1
        stretches.append(slice(first, max(first, min(first + SIGNS, end))))
        if len(times) <= 2 * SIGNS:
            times.update(one.index[stretches[-1]])
    ordered = sorted(times) if len(times) <= 2 * SIGNS else None
    places = {time: place for place, time in enumerate(ordered or ())}
    found = []
    for one, stretch in zip(series, stretches, strict=True):
        rises = bytes(map(gt, one.value[stretch], one.value[stretch.start - 1 : stretch.stop]))
        here = one.index[stretch]
        first = places[here[0]] if ordered is not None and len(here) else 0
        if ordered is None or ordered[first : first + len(here)] == list(here):
            found.append(_Signs(_bits(rises) << first, (1 << len(here)) - 1 << first))
            continue
        up = known = 0
        for time, rise in zip(here, rises, strict=True):
            known |= 1 << places[time]
            up |= rise << places[time]
        found.append(_Signs(up, known))
    return found


def _bits(ones: bytes) -> int:
    """Return a number with bit n set if byte n is 1. All other bytes are 0."""
    return int(ones[::-1].translate(_DIGITS), 2) if ones else 0


def _alike(one: _Signs, other: _Signs, share: float = SAME_SIGNS) -> bool:
    both = one.known & other.known
    count = both.bit_count()
    if count < LEAST_SIGNS or ((one.up ^ other.up) & both).bit_count() > (1 - share) * count:
        return False
    # A series that never or always rises carries no information.
    return all(0.2 < (each.up & both).bit_count() / count < 0.8 for each in (one, other))
