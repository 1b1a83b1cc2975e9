"""S2: who computes how many micro-batches, so that the slowest data-parallel group is done as early as can be. Pure.

FALCON (arXiv 2410.12588, S2) minimises the variance of m_i t_i, with sum m_i = M. That alone misses the best makespan,
max(m_i t_i), in about 2 % of random cases, and the makespan is what an iteration takes. So first the makespan, and of
all that have the best one the least variance. Both are exact:

- The makespan: each micro-batch goes to the group that is done with it first. All that are done by the time T where
  sum(T / t_i) = M come before any other, so it begins there and has fewer than one for each group to give.
- The variance: sum((x_i - mean)^2) is the minimum over c of sum((x_i - c)^2), which for one c is convex in each m_i, so
  that moves of one micro-batch from a group to another find its best. With A = sum x_i^2 and B = sum x_i the variance
  A - B^2 / n is concave, so the best lies at a corner of the convex hull of all (B, A): each corner is the best of some
  c. Between two known corners the others lie in the triangle below them, whose tip says how good they could be; where
  that is no better than what is known nobody looks (Eisner and Severance 1976).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from healthd.common.errors import HealthdError

MOST_GROUPS = 10_000
MOST_MICRO_BATCHES = 1_000_000
FARTHEST_TIMES = 1e6  # between the longest and the shortest time: more is no measurement
ROUNDING = 1e-14  # of a sum of squares
EQUAL = 1e-9  # makespans that differ by less, relatively, are the same: times are measured


class WrongSplit(HealthdError):
    """These times, or this number of micro-batches, cannot be divided: one sentence."""


class Split(NamedTuple):
    """micro_batches: of each group, in the order of the times. Seconds, or the unit of the times: makespan, what the
    slowest group takes; even, what it takes if all have the same number, or nearly."""

    micro_batches: tuple[int, ...]
    makespan: float
    even: float


def split(times: Sequence[float], micro_batches: int) -> Split:
    """times: how long a micro-batch takes in each group, > 0 and finite. Raises WrongSplit."""
    _check(times, micro_batches)
    longest = max(times)
    relative = [time / longest for time in times]  # so that nothing overflows
    shares = _earliest(relative, micro_batches)
    makespan = max(map(_product, shares, relative))
    shares = _evened(relative, shares, makespan)
    each, more = divmod(micro_batches, len(times))
    # Of a rest that all cannot share, the first groups have one more: what frameworks do that allow it at all.
    even = max(time * (each + (at < more)) for at, time in enumerate(times))
    return Split(tuple(shares), max(map(_product, shares, times)), even)


def variance(times: Sequence[float], shares: Sequence[int]) -> float:
    """The paper's objective: sum((m_i t_i - mean)^2)."""
    spent = list(map(_product, shares, times))
    mean = math.fsum(spent) / len(spent)
    return math.fsum((one - mean) ** 2 for one in spent)


def _product(share: int, time: float) -> float:
    return share * time


def _check(times: Sequence[float], micro_batches: int) -> None:
    groups = len(times)
    if not groups:
        raise WrongSplit("there is no time: one for each data-parallel group is needed")
    if groups > MOST_GROUPS:
        raise WrongSplit(f"there are {groups:,} groups: at most {MOST_GROUPS:,} can be divided")
    for nth, time in enumerate(times, 1):
        if not (math.isfinite(time) and time > 0):
            raise WrongSplit(f"the time of group {nth} must be a number above 0, got {time:g}")
    if max(times) / min(times) > FARTHEST_TIMES:
        raise WrongSplit(
            f"the times differ by more than {FARTHEST_TIMES:,.0f} times, from {min(times):g} to {max(times):g}: one of "
            f"them is no measurement"
        )
    if micro_batches < groups:
        raise WrongSplit(f"{micro_batches:,} micro-batches are too few for {groups:,} groups: each must have one")
    if micro_batches > MOST_MICRO_BATCHES:
        raise WrongSplit(f"{micro_batches:,} micro-batches are too many: at most {MOST_MICRO_BATCHES:,} can be divided")


def _earliest(times: Sequence[float], micro_batches: int) -> list[int]:
    """Those of the least makespan; each group has one at least."""
    # All that are done by then come before all others; those of a group that is later than that have their one only.
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
    if rest < 0:  # rounding in a sum of very unequal rates
        shares, rest = [1] * len(times), micro_batches - len(times)
    heap = [((share + 1) * time, at) for at, (share, time) in enumerate(zip(shares, times, strict=True))]
    heapify(heap)
    for _ in range(rest):
        _, at = heap[0]
        shares[at] += 1
        heapreplace(heap, ((shares[at] + 1) * times[at], at))
    return shares


class _Corner(NamedTuple):
    """of: the c whose best it is; total and squares: B and A, of times less `_Evening.origin`."""

    of: float
    total: float
    squares: float
    shares: list[int]


def _evened(times: Sequence[float], shares: list[int], makespan: float) -> list[int]:
    """Of all shares with this makespan those of the least variance."""
    groups = len(times)
    most = [max(share, math.floor(makespan * (1 + EQUAL) / time)) for share, time in zip(shares, times, strict=True)]
    if sum(most) == sum(shares):  # there is no other way: nearly always
        return shares
    origin = math.fsum(map(_product, shares, times)) / groups  # sums of small numbers lose less

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
        # Where the tangents at both meet: no corner between them is better than this.
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
    """The shares of the least sum((m_i t_i - c)^2), with 1 <= m_i <= most: one is moved from where that saves most to
    where it costs least, as long as it saves."""
    found = list(shares)

    def costs(at: int) -> float:
        """Of one more."""
        return times[at] * ((2 * found[at] + 1) * times[at] - 2 * c) if found[at] < most[at] else math.inf

    def saves(at: int) -> float:
        """By one less."""
        return times[at] * ((2 * found[at] - 1) * times[at] - 2 * c) if found[at] > 1 else -math.inf

    # An entry is as of when it was made: one that is no longer true is made anew when it comes up.
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
        if not -saved > cost:  # what is infinite is no move
            return found
        found[to] += 1
        found[of] -= 1
        heapreplace(more, (costs(to), to))
        heapreplace(less, (-saves(of), of))
