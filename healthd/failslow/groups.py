"""Which series belong together, where nobody told: the gangs of a file, and in each the peers of one role. Pure.

A gang is synchronous: each iteration ends for all of its ranks with the same collective, so their iteration times move
together. Two series are of one gang if the signs of their changes from sample to sample agree in SAME_SIGNS of the
first SIGNS that both have; for noise of a normal distribution that is a correlation of 0.7 (agreement = 1/2 +
asin(rho) / pi). A gang of fewer than FEW must agree in FEW_SIGNS: of many series whose load varies together now and
then, two agree in as many as SAME_SIGNS. Where there is one gang, who tells how long it waits for others is of it too.
Who else moves with nobody is pooled with the others of that kind: workers that do not wait for each other (of a
parameter server), or whose measurements are too coarse to say.

Peers have one role: the same group where it was told, else about the same level at rest: sorted by level, a role ends
where the next is more than GAP times the one before. Levels stand for stage and volume (FALCON, arXiv 2410.12588,
compares groups of identical role and volume).

Limits: jobs that are not synchronous and lie in one file are not told apart but by their levels; two gangs in the same
rhythm are one; stages of about the same level are one role. --group tells.
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
MOST_GANGS = 256  # to compare with, so that 100,000 series are done in seconds


class Pool(NamedTuple):
    """members: positions in the series that were given, ascending. synchronous: they move together."""

    members: tuple[int, ...]
    synchronous: bool


def pools(series: Sequence[Series]) -> list[Pool]:
    """Each series is in one pool. In the order of their first members."""
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
    if len(found) == 1:  # who tells how long it waits for others is of a gang, and there is one
        found[0] += [one for one in alone if series[one].wait is not None]
        alone = [one for one in alone if series[one].wait is None]
    made = [Pool(tuple(sorted(gang)), True) for gang in found]
    return sorted(made + ([Pool(tuple(sorted(alone)), False)] if alone else []))


def roles(
    series: Sequence[Series], members: Sequence[int], level: Callable[[int], float | None]
) -> list[tuple[int, ...]]:
    """Peers of one role, each member in one. level: a member's time at rest, None if it has none (then its level is no
    reason to set it apart from the lowest)."""
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
    """An order that does not depend on the order in which series are given."""
    return series.name, series.group, series.node


_DIGITS = b"01".ljust(256, b"?")


class _Signs(NamedTuple):
    """Bits by place in time: whether a value is above the one before; where there is one at all."""

    up: int
    known: int


def _signs(series: Sequence[Series]) -> list[_Signs]:
    """Of the first SIGNS samples that all may have; by index where the series share one, so that a gap shifts nothing,
    else by position."""
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
    """A number with the bit n set if the byte n is 1; the others are 0."""
    return int(ones[::-1].translate(_DIGITS), 2) if ones else 0


def _alike(one: _Signs, other: _Signs, share: float = SAME_SIGNS) -> bool:
    both = one.known & other.known
    count = both.bit_count()
    if count < LEAST_SIGNS or ((one.up ^ other.up) & both).bit_count() > (1 - share) * count:
        return False
    # A series that never or always rises says nothing.
    return all(0.2 < (each.up & both).bit_count() / count < 0.8 for each in (one, other))
