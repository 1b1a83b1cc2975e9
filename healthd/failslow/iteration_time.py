"""The typical duration of an iteration, from the positions of iterations in a stream and the times of operations. Pure
functions.

It is the median of the durations, with two corrections:

- A mark can be anywhere in the iteration. The time from mark to mark then covers the end of one iteration and the
  beginning of the next: a mixture that is nearer to the mean than either. For 40 iterations that differ by a tenth,
  median and mean differ by 1 %. The loop is therefore evaluated from other phases too: an iteration begins at the phase
  where consecutive durations differ most.
- An iteration with a pause (a checkpoint) only shows the pause. It does not count.

The error estimate covers three things: missing iterations, which may all lie on one side of the median; the phases next
to the chosen one; and the clock tick, because each duration may be wrong by one tick.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

PHASES = 32  # of a loop; a mixture of 1 and 31 parts is negligible
FINE = 16  # from this number of phases on, neighbours give about the same result
PAUSE = 2.0  # factor above or below the median
OF_TICKS = 100_000  # times from which the clock tick is estimated

Place = float  # in the stream: 2.5 is half-way between operations 2 and 3


class Chain(NamedTuple):
    """Consecutive iterations, from mark to mark. before, after: number of operations outside the chain that belong to
    an iteration.
    """

    marks: Sequence[Place]
    before: int
    after: int


class Usual(NamedTuple):
    """seconds: duration of an iteration. relative_error: its possible error as a share of seconds."""

    seconds: float
    within: float


class _Phase(NamedTuple):
    """Durations measured at one phase of the loop.

    seconds: durations without a pause, in order, at least one. paused: number of durations with a pause.
    """

    seconds: Sequence[float]
    paused: int


def usual(times: Sequence[float], chains: Sequence[Chain], operations: int) -> Usual:
    """Return the typical duration of an iteration. Time must advance from mark to mark.

    Args:
        operations: typical number of operations in an iteration.
    """
    count = min(operations, PHASES)
    differ = [_differ(_phase(times, chains, nth / count, operations)) for nth in range(count)]
    # A single operation varies: three phases together are more reliable than one.
    around = [[(nth + by) % count for by in (-1, 0, 1)] for nth in range(count)]
    best = max(around, key=lambda some: sum(differ[nth] for nth in some))
    near = [_phase(times, chains, nth / count, operations) for nth in best]
    seconds = statistics.fmean(statistics.median(one.seconds) for one in (near if count >= FINE else near[1:2]))
    off = max(_off(one, seconds, len(chains)) for one in near)
    return Usual(seconds, max(off, tick(times) / seconds))


def tick(times: Sequence[float]) -> float:
    """Return the tick of the clock that wrote these times, in seconds.

    The steps between consecutive times are multiples of the tick, so the tick is the smallest difference between
    distinct steps. For a clock finer than the variation of the times, the result is close to 0.
    """
    rounding = 4 * math.ulp(max(map(abs, (times[0], times[-1]))))
    some = times[-OF_TICKS:]
    steps = sorted({after - before for before, after in pairwise(some) if after > before})
    return min((more - less for less, more in pairwise([0.0, *steps]) if more - less > rounding), default=0.0)


def _phase(times: Sequence[float], chains: Sequence[Chain], phase: float, operations: int) -> _Phase:
    every = [one for chain in chains for one in _durations(times, chain, phase, operations) if one > 0]
    middle = statistics.median(every or [1.0])
    seconds = [one for one in every if middle / PAUSE <= one <= middle * PAUSE]
    return _Phase(seconds or [middle], len(every) - len(seconds))


def _differ(phase: _Phase) -> float:
    """Return the mean difference between consecutive durations, or -1 for fewer than two."""
    steps = [abs(after - before) for before, after in pairwise(phase.seconds)]
    return statistics.fmean(steps) if steps else -1.0


def _off(phase: _Phase, seconds: float, chains: int) -> float:
    """Return how far the true median may be, as a share of `seconds`.

    At each chain one iteration is incomplete. Each missing iteration is below or above the median by chance: many are
    very unlikely to be all on one side.
    """
    ascending, many = sorted(phase.seconds), chains + phase.paused
    middle, away = (len(ascending) - 1) / 2, min(many / 2, math.sqrt(many))
    low, high = max(0.0, middle - away), min(len(ascending) - 1.0, middle + away)
    return max(seconds - seconds_at(ascending, low), seconds_at(ascending, high) - seconds) / seconds


def _durations(times: Sequence[float], chain: Chain, phase: float, operations: int) -> Iterator[float]:
    """Yield the durations of the iterations that begin `phase` (a share of an iteration) after each mark."""
    marks = chain.marks
    places = [begin + phase * (end - begin) for begin, end in pairwise(marks)]
    if (1 - phase) * operations <= chain.before:
        places.insert(0, marks[0] - (1 - phase) * operations)
    if phase * operations <= chain.after:
        places.append(marks[-1] + phase * operations)
    there = [seconds_at(times, place) for place in places]
    return (after - before for before, after in pairwise(there))


def seconds_at(times: Sequence[float], place: Place) -> float:
    """Return the time at a position, interpolated between two operations."""
    before = int(place)
    part = place - before
    return times[before] + part * (times[before + 1] - times[before]) if part else times[before]
