"""Remedy S2: divides micro-batches so that the slowest data-parallel group finishes as early as possible.

All functions are pure.

FALCON (arXiv 2410.12588, S2) minimises the variance of m_i t_i, with sum m_i = M. The duration of an iteration is the
makespan, max(m_i t_i). In about 2 % of random cases, FALCON's rule misses the best makespan. This module therefore
first minimises the makespan, and then the variance among all divisions with this makespan. Both steps are exact:

- Makespan: each micro-batch goes to the group that finishes it first. Let T be the time with sum(T / t_i) = M. All
  micro-batches that finish by T can be assigned at once. Then fewer micro-batches than groups are left to assign.
- Variance: sum((x_i - mean)^2) is the minimum over c of sum((x_i - c)^2). For a given c, this sum is convex in each
  m_i, so moving single micro-batches between groups finds its optimum. With A = sum x_i^2 and B = sum x_i, the variance
  A - B^2 / n is concave. The best division is therefore a corner of the convex hull of all points (B, A), and each
  corner is optimal for some c. All corners between two known corners lie in the triangle below these two. The tip of
  the triangle bounds their value. If it is not better than the best known value, they are skipped (Eisner and Severance
  1976).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from healthd.common.errors import HealthdError

MAX_GROUPS = 10_000
MAX_MICRO_BATCHES = 1_000_000
MAX_TIME_RATIO = 1e6  # maximum ratio of the longest to the shortest time; a larger ratio indicates a wrong time
ROUNDING = 1e-14  # relative error in a sum of squares
TOLERANCE = 1e-9  # makespans are treated as equal up to this relative difference, because times are measured


class InvalidSplit(HealthdError):
    """The times or the number of micro-batches are invalid. The message is one sentence."""


class Split(NamedTuple):
    """A division of micro-batches.

    Attributes:
        micro_batches: number for each group, in the order of the times.
        makespan: time of the slowest group, in the unit of the times.
        even: the makespan of an even division, or of the most even one if there is a remainder.
    """

    micro_batches: tuple[int, ...]
    makespan: float
    even: float


def split(times: Sequence[float], micro_batches: int) -> Split:
    """Divide the micro-batches. Raises InvalidSplit.

    Args:
        times: duration of one micro-batch in each group, > 0 and finite.
    """
    _check(times, micro_batches)
    longest = max(times)
    relative = [time / longest for time in times]  # avoids overflow
    shares = _minimize_makespan(relative, micro_batches)
    makespan = max(map(_product, shares, relative))
    shares = _minimize_variance(relative, shares, makespan)
    each, more = divmod(micro_batches, len(times))
    # If there is a remainder, the first groups get one more, as in frameworks that allow this.
    even = max(time * (each + (at < more)) for at, time in enumerate(times))
    return Split(tuple(shares), max(map(_product, shares, times)), even)


def variance(times: Sequence[float], shares: Sequence[int]) -> float:
    """Return the paper's objective: sum((m_i t_i - mean)^2)."""
    spent = list(map(_product, shares, times))
    mean = math.fsum(spent) / len(spent)
    return math.fsum((group_time - mean) ** 2 for group_time in spent)


def _product(share: int, time: float) -> float:
    return share * time


def _check(times: Sequence[float], micro_batches: int) -> None:
    groups = len(times)
    if not groups:
        raise InvalidSplit("no time given: one time for each data-parallel group is required")
    if groups > MAX_GROUPS:
        raise InvalidSplit(f"there are {groups:,} groups, but at most {MAX_GROUPS:,} can be divided")
    for nth, time in enumerate(times, 1):
        if not (math.isfinite(time) and time > 0):
            raise InvalidSplit(f"the time of group {nth} must be a number above 0, got {time:g}")
    if max(times) / min(times) > MAX_TIME_RATIO:
        raise InvalidSplit(
            f"the times differ by more than a factor of {MAX_TIME_RATIO:,.0f}, from {min(times):g} to {max(times):g}; "
            f"at least one is wrong"
        )
    if micro_batches < groups:
        raise InvalidSplit(
            f"{micro_batches:,} micro-batches are too few for {groups:,} groups; each group needs at least one"
        )
    if micro_batches > MAX_MICRO_BATCHES:
        raise InvalidSplit(
            f"{micro_batches:,} micro-batches are too many; at most {MAX_MICRO_BATCHES:,} can be divided"
        )


def _minimize_makespan(times: Sequence[float], micro_batches: int) -> list[int]:
    """Return the shares with the smallest makespan. Each group has at least one micro-batch."""
    # Groups whose first micro-batch finishes after the deadline get only one micro-batch. The deadline is computed
    # without these groups.
    ascending, remaining, rate = sorted(times), micro_batches, math.fsum(1 / time for time in times)
    for time in reversed(ascending):
        if remaining / rate >= time:
            break
        remaining -= 1
        rate -= 1 / time
        if remaining <= 0 or rate <= 0:
            break
    deadline = remaining / rate * (1 - TOLERANCE) if remaining > 0 and rate > 0 else 0.0
    shares = [max(1, math.floor(deadline / time)) for time in times]
    undistributed = micro_batches - sum(shares)
    if undistributed < 0:  # possible only through rounding in a sum of very unequal rates
        shares, undistributed = [1] * len(times), micro_batches - len(times)
    heap = [((share + 1) * time, at) for at, (share, time) in enumerate(zip(shares, times, strict=True))]
    heapify(heap)
    for _ in range(undistributed):
        _, at = heap[0]
        shares[at] += 1
        heapreplace(heap, ((shares[at] + 1) * times[at], at))
    return shares


class _Corner(NamedTuple):
    """A corner of the convex hull.

    Attributes:
        center: the c for which the corner is optimal.
        total, squares: B and A, relative to `origin`.
    """

    center: float
    total: float
    squares: float
    shares: list[int]


def _minimize_variance(times: Sequence[float], shares: list[int], makespan: float) -> list[int]:
    """Return the shares with the smallest variance among those with this makespan."""
    groups = len(times)
    max_shares = [
        max(share, math.floor(makespan * (1 + TOLERANCE) / time)) for share, time in zip(shares, times, strict=True)
    ]
    if sum(max_shares) == sum(shares):  # only one division has this makespan, as in nearly all cases
        return shares
    origin = math.fsum(map(_product, shares, times)) / groups  # smaller numbers have smaller rounding errors

    def corner(c: float, near: Sequence[int]) -> _Corner:
        found = _nearest_shares(c + origin, times, near, max_shares)
        spent = [share * time - origin for share, time in zip(found, times, strict=True)]
        return _Corner(c, math.fsum(spent), math.fsum(item * item for item in spent), found)

    def value(total: float, squares: float) -> float:
        return squares - total * total / groups

    first = corner(-origin, shares)
    last = corner(makespan - origin, first.shares)
    best = min(first, last, key=lambda item: value(item.total, item.squares))
    best_value = value(best.total, best.squares)
    rounding = max(first.squares, last.squares) * ROUNDING
    between = [(first, last)]
    while between:
        low, high = between.pop()
        width = high.total - low.total
        if width <= TOLERANCE or high.center <= low.center:
            continue
        # The intersection of both tangents. No corner between them is better.
        at_low, at_high = (item.squares - 2 * item.center * item.total for item in (low, high))
        tip = (at_low - at_high) / (2 * (high.center - low.center))
        if value(tip, at_low + 2 * low.center * tip) >= best_value - rounding:
            continue
        found = corner((high.squares - low.squares) / (2 * width), low.shares)
        found_value = value(found.total, found.squares)
        if found_value < best_value:
            best, best_value = found, found_value
        chord = low.squares - 2 * found.center * low.total
        if found.squares - 2 * found.center * found.total < chord - rounding:
            between += [(low, found), (found, high)]
    return best.shares


def _nearest_shares(c: float, times: Sequence[float], shares: Sequence[int], max_shares: Sequence[int]) -> list[int]:
    """Return the shares with the smallest sum((m_i t_i - c)^2) and 1 <= m_i <= max_shares.

    Single micro-batches are moved from the group where this saves the most to the group where it costs the least, until
    no move saves anything.
    """
    found = list(shares)

    def added_cost(at: int) -> float:
        """Return the cost of one more micro-batch."""
        return times[at] * ((2 * found[at] + 1) * times[at] - 2 * c) if found[at] < max_shares[at] else math.inf

    def removal_saving(at: int) -> float:
        """Return the saving from removing one micro-batch."""
        return times[at] * ((2 * found[at] - 1) * times[at] - 2 * c) if found[at] > 1 else -math.inf

    # Heap entries may be out of date. Such an entry is recomputed when it reaches the top.
    additions = [(added_cost(at), at) for at in range(len(times))]
    removals = [(-removal_saving(at), at) for at in range(len(times))]
    heapify(additions)
    heapify(removals)
    while True:
        cost, target = additions[0]
        if cost != added_cost(target):
            heapreplace(additions, (added_cost(target), target))
            continue
        saved, source = removals[0]
        if -saved != removal_saving(source):
            heapreplace(removals, (-removal_saving(source), source))
            continue
        if not -saved > cost:  # an infinite cost means that the move is forbidden
            return found
        found[target] += 1
        found[source] -= 1
        heapreplace(additions, (added_cost(target), target))
        heapreplace(removals, (-removal_saving(source), source))
