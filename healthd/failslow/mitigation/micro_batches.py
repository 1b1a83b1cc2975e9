"""S2: division of micro-batches so that the slowest data-parallel group finishes as early as possible. Pure functions.

FALCON (arXiv 2410.12588, S2) minimises the variance of m_i t_i, with sum m_i = M. This alone misses the best makespan,
max(m_i t_i), in about 2 % of random cases, and the makespan is the duration of an iteration. This module therefore
minimises the makespan first, and then the variance among all divisions with that makespan. Both steps are exact:

- Makespan: each micro-batch goes to the group that finishes it first. All micro-batches that finish by the time T with
  sum(T / t_i) = M precede any other. The search begins there and has fewer than one micro-batch per group left.
- Variance: sum((x_i - mean)^2) is the minimum over c of sum((x_i - c)^2). For a given c this is convex in each m_i, so
  that moving single micro-batches between groups finds the optimum. With A = sum x_i^2 and B = sum x_i the variance
  A - B^2 / n is concave. The optimum is therefore a corner of the convex hull of all (B, A), and each corner is optimal
  for some c. Between two known corners, the others lie in the triangle below them. The tip of the triangle bounds their
  value; if it is no better than the best known value, the interval is skipped (Eisner and Severance 1976).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from healthd.common.errors import HealthdError

MOST_GROUPS = 10_000
MOST_MICRO_BATCHES = 1_000_000
FARTHEST_TIMES = 1e6  # between the longest and the shortest time; more indicates a wrong time
ROUNDING = 1e-14  # relative error of a sum of squares
EQUAL = 1e-9  # relative difference of makespans that count as equal, because times are measured


class WrongSplit(HealthdError):
    """The times or the number of micro-batches are invalid. The message is one sentence."""


class Split(NamedTuple):
    """A division of micro-batches.

    micro_batches: of each group, in the order of the times. makespan: time of the slowest group, in the unit of the
    times. even: the same if the micro-batches are divided evenly, or nearly.
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
    shares = _earliest(relative, micro_batches)
    makespan = max(map(_product, shares, relative))
    shares = _evened(relative, shares, makespan)
    each, more = divmod(micro_batches, len(times))
    # If the division has a remainder, the first groups get one more, as in frameworks that allow this.
    even = max(time * (each + (at < more)) for at, time in enumerate(times))
    return Split(tuple(shares), max(map(_product, shares, times)), even)


def variance(times: Sequence[float], shares: Sequence[int]) -> float:
    """Return the objective of the paper: sum((m_i t_i - mean)^2)."""
    spent = list(map(_product, shares, times))
    mean = math.fsum(spent) / len(spent)
    return math.fsum((one - mean) ** 2 for one in spent)


def _product(share: int, time: float) -> float:
    return share * time


def _check(times: Sequence[float], micro_batches: int) -> None:
    groups = len(times)
    if not groups:
        raise WrongSplit("no time given: one per data-parallel group is required")
    if groups > MOST_GROUPS:
        raise WrongSplit(f"there are {groups:,} groups: at most {MOST_GROUPS:,} can be divided")
    for nth, time in enumerate(times, 1):
        if not (math.isfinite(time) and time > 0):
            raise WrongSplit(f"the time of group {nth} must be a number above 0, got {time:g}")
    if max(times) / min(times) > FARTHEST_TIMES:
        raise WrongSplit(
            f"the times differ by more than {FARTHEST_TIMES:,.0f} times, from {min(times):g} to {max(times):g}: "
            f"one time is wrong"
        )
    if micro_batches < groups:
        raise WrongSplit(f"{micro_batches:,} micro-batches are too few for {groups:,} groups: each needs at least one")
    if micro_batches > MOST_MICRO_BATCHES:
        raise WrongSplit(f"{micro_batches:,} micro-batches are too many: at most {MOST_MICRO_BATCHES:,} can be divided")


def _earliest(times: Sequence[float], micro_batches: int) -> list[int]:
    """Return the shares with the smallest makespan. Each group has at least one micro-batch."""
    # Groups whose first micro-batch finishes after the deadline get only one. The deadline is computed without them.
    quick, left, rate = sorted(times), micro_batches, math.fsum(1 / time for time in times)
    for time in reversed(quick):
        if left / rate >= time:
            break
        left -= 1
        rate -= 1 / time
        if left <= 0 or rate <= 0:
            break
    by = left / rate * (1 - EQUAL) if left > 0 and rate > 0 else 0.0
    shares = [max(1, math.floor(by / time)) for time in times]
    rest = micro_batches - sum(shares)
    if rest < 0:  # caused by rounding in a sum of very unequal rates
        shares, rest = [1] * len(times), micro_batches - len(times)
    heap = [((share + 1) * time, at) for at, (share, time) in enumerate(zip(shares, times, strict=True))]
    heapify(heap)
    for _ in range(rest):
        _, at = heap[0]
        shares[at] += 1
        heapreplace(heap, ((shares[at] + 1) * times[at], at))
    return shares


class _Corner(NamedTuple):
    """A corner of the convex hull. center: the c for which it is optimal. total, squares: B and A, relative to
    `origin`.
    """

    of: float
    total: float
    squares: float
    shares: list[int]


def _evened(times: Sequence[float], shares: list[int], makespan: float) -> list[int]:
    """Return the shares with the smallest variance among those with this makespan."""
    groups = len(times)
    most = [max(share, math.floor(makespan * (1 + EQUAL) / time)) for share, time in zip(shares, times, strict=True)]
    if sum(most) == sum(shares):  # no alternative, as in nearly all cases
        return shares
    origin = math.fsum(map(_product, shares, times)) / groups  # smaller numbers reduce rounding errors

    def corner(c: float, near: Sequence[int]) -> _Corner:
        found = _nearest_to(c + origin, times, near, most)
        spent = [share * time - origin for share, time in zip(found, times, strict=True)]
        return _Corner(c, math.fsum(spent), math.fsum(one * one for one in spent), found)

    def value(total: float, squares: float) -> float:
        return squares - total * total / groups

    first = corner(-origin, shares)
    last = corner(makespan - origin, first.shares)
    best = min(first, last, key=lambda one: value(one.total, one.squares))
    least = value(best.total, best.squares)
    nothing = max(first.squares, last.squares) * ROUNDING
    between = [(first, last)]
    while between:
        low, high = between.pop()
        width = high.total - low.total
        if width <= EQUAL or high.of <= low.of:
            continue
        # Intersection of both tangents: no corner between them is better.
        at_low, at_high = (one.squares - 2 * one.of * one.total for one in (low, high))
        tip = (at_low - at_high) / (2 * (high.of - low.of))
        if value(tip, at_low + 2 * low.of * tip) >= least - nothing:
            continue
        found = corner((high.squares - low.squares) / (2 * width), low.shares)
        here = value(found.total, found.squares)
        if here < least:
            best, least = found, here
        chord = low.squares - 2 * found.of * low.total
        if found.squares - 2 * found.of * found.total < chord - nothing:
            between += [(low, found), (found, high)]
    return best.shares


def _nearest_to(c: float, times: Sequence[float], shares: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the shares with the smallest sum((m_i t_i - c)^2) and 1 <= m_i <= max_shares.

    Move one micro-batch from where that saves most to where it costs least, until no move saves anything.
    """
    found = list(shares)

    def costs(at: int) -> float:
        """Return the cost of one more micro-batch."""
        return times[at] * ((2 * found[at] + 1) * times[at] - 2 * c) if found[at] < most[at] else math.inf

    def saves(at: int) -> float:
        """Return the saving of one micro-batch less."""
        return times[at] * ((2 * found[at] - 1) * times[at] - 2 * c) if found[at] > 1 else -math.inf

    # Heap entries can be out of date. Such an entry is computed again when it reaches the top.
    more = [(costs(at), at) for at in range(len(times))]
    less = [(-saves(at), at) for at in range(len(times))]
    heapify(more)
    heapify(less)
    while True:
        cost, to = more[0]
        if cost != costs(to):
            heapreplace(more, (costs(to), to))
            continue
        saved, of = less[0]
        if -saved != saves(of):
            heapreplace(less, (-saves(of), of))
            continue
        if not -saved > cost:  # an infinite cost forbids the move
            return found
        found[to] += 1
        found[of] -= 1
        heapreplace(more, (costs(to), to))
        heapreplace(less, (-saves(of), of))
