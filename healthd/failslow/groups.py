"""Finds the gangs in a file, and the peers with the same role in each gang, if no groups are declared.

All functions are pure.

The ranks of a gang are synchronous: each iteration ends with the same collective, so their iteration times rise and
fall together. To compare two series, this module takes the signs of their sample-to-sample changes, the first
COMPARED_SIGNS that both have. The series belong to one gang if a share of MIN_AGREEMENT of these signs agrees. For
normally distributed noise, this is a correlation of 0.7 (agreement = 1/2 + asin(rho) / pi). A gang with fewer than
SMALL_GANG ranks must agree in a share of SMALL_GANG_AGREEMENT: among many series whose load sometimes varies together,
two series can reach MIN_AGREEMENT by chance. If there is only one gang, series that report waiting for other ranks also
belong to it.

All other series form one pool. They are workers that do not wait for each other (parameter server), or their
measurements are too coarse.

Peers have the same role: they are in the same declared group or have about the same healthy level. Without declared
groups, members are sorted by level, and a new role begins where a level is more than LEVEL_GAP times the previous one.
The level represents the stage and volume (FALCON, arXiv 2410.12588, compares groups of identical role and volume).

Limits: if a file contains several jobs without synchronisation, only their levels separate them. Two gangs with the
same rhythm become one gang. Stages with about the same level become one role. `--group` separates all of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import gt
from typing import NamedTuple

from healthd.failslow.model import Series

COMPARED_SIGNS = 256
MIN_SIGNS = 48
MIN_AGREEMENT = 0.75
SMALL_GANG, SMALL_GANG_AGREEMENT = 4, 0.85
LEVEL_GAP = 1.5
MAX_GANGS = 256  # a series is compared with at most this many gangs, so that 100,000 series take only seconds


class Pool(NamedTuple):
    """Series that belong together.

    Attributes:
        members: their indices, ascending.
        synchronous: True if their times rise and fall together.
    """

    members: tuple[int, ...]
    synchronous: bool


def find_pools(series: Sequence[Series]) -> list[Pool]:
    """Return the pools, ordered by their first members. Each series is in one pool."""
    order = sorted(range(len(series)), key=lambda member: sort_key(series[member]))
    signs = _change_signs(series)
    gangs: list[list[int]] = []
    unmatched: list[int] = []
    for member in order:
        gang = next((gang for gang in gangs if _agree(signs[gang[0]], signs[member])), None)
        if gang is not None:
            gang.append(member)
        elif len(gangs) < MAX_GANGS:
            gangs.append([member])
        else:
            unmatched.append(member)
    found = []
    for gang in gangs:
        is_certain = len(gang) >= SMALL_GANG or all(
            _agree(signs[gang[0]], signs[member], SMALL_GANG_AGREEMENT) for member in gang[1:]
        )
        if len(gang) > 1 and is_certain:
            found.append(gang)
        else:
            unmatched += gang
    if len(found) == 1:  # a series that reports waiting belongs to a gang, and there is only one gang
        found[0] += [member for member in unmatched if series[member].wait is not None]
        unmatched = [member for member in unmatched if series[member].wait is None]
    result = [Pool(tuple(sorted(gang)), True) for gang in found]
    return sorted(result + ([Pool(tuple(sorted(unmatched)), False)] if unmatched else []))


def find_roles(
    series: Sequence[Series], members: Sequence[int], level: Callable[[int], float | None]
) -> list[tuple[int, ...]]:
    """Return the members grouped by role. Each member is in exactly one group.

    Args:
        level: function that returns a member's healthy time, or None. A member without a level joins the lowest role.
    """
    by_group: dict[str, list[int]] = defaultdict(list)
    for member in members:
        by_group[series[member].group].append(member)
    found = [tuple(sorted(group_members)) for group, group_members in by_group.items() if group]
    levels = sorted((level(member) or 0.0, member) for member in by_group.get("", ()))
    role: list[int] = []
    previous_level = 0.0
    for member_level, member in levels:
        if role and previous_level > 0 and member_level > previous_level * LEVEL_GAP:
            found.append(tuple(sorted(role)))
            role = []
        role.append(member)
        previous_level = member_level
    if role:
        found.append(tuple(sorted(role)))
    return sorted(found)


def sort_key(series: Series) -> tuple[str, str, str]:
    """Return a sort key that does not depend on the order in which series are given."""
    return series.name, series.group, series.node


_DIGITS = b"01".ljust(256, b"?")


class _Signs(NamedTuple):
    """Bit masks by time.

    Attributes:
        rises: the value is above the previous one.
        present: there is a value.
    """

    rises: int
    present: int


def _change_signs(series: Sequence[Series]) -> list[_Signs]:
    """Return the signs of the first COMPARED_SIGNS changes that all series can have.

    If the series share an index, samples are aligned by this index, so that a gap in one series does not shift its
    later samples. Otherwise, samples are aligned by position.
    """
    begin = max((item.index[0] for item in series if len(item.index)), default=0.0)
    slices, times = [], set[float]()
    for item in series:
        end = item.starts[1] if len(item.starts) > 1 else len(item.value)
        first = bisect_left(item.index, begin, 0, end) + 1
        slices.append(slice(first, max(first, min(first + COMPARED_SIGNS, end))))
        if len(times) <= 2 * COMPARED_SIGNS:
            times.update(item.index[slices[-1]])
    ordered = sorted(times) if len(times) <= 2 * COMPARED_SIGNS else None
    bit_by_time = {time: bit for bit, time in enumerate(ordered or ())}
    found = []
    for item, window in zip(series, slices, strict=True):
        rises = bytes(map(gt, item.value[window], item.value[window.start - 1 : window.stop]))
        item_times = item.index[window]
        first = bit_by_time[item_times[0]] if ordered is not None and len(item_times) else 0
        if ordered is None or ordered[first : first + len(item_times)] == list(item_times):
            found.append(_Signs(_bits(rises) << first, (1 << len(item_times)) - 1 << first))
            continue
        rise_bits = present_bits = 0
        for time, rise in zip(item_times, rises, strict=True):
            present_bits |= 1 << bit_by_time[time]
            rise_bits |= rise << bit_by_time[time]
        found.append(_Signs(rise_bits, present_bits))
    return found


def _bits(flags: bytes) -> int:
    """Return a number with bit n set if byte n is 1. All other bytes are 0."""
    return int(flags[::-1].translate(_DIGITS), 2) if flags else 0


def _agree(first: _Signs, second: _Signs, share: float = MIN_AGREEMENT) -> bool:
    common = first.present & second.present
    count = common.bit_count()
    if count < MIN_SIGNS or ((first.rises ^ second.rises) & common).bit_count() > (1 - share) * count:
        return False
    # A series that never or always rises carries no information.
    return all(0.2 < (signs.rises & common).bit_count() / count < 0.8 for signs in (first, second))
