"""How long an iteration usually takes: from where iterations lie in a stream, and the times of its operations. Pure.

It is the median of their times, but for two things:

- A mark is anywhere in the iteration. From mark to mark is the end of one and the begin of the next: a mixture, nearer
  to the mean than either. Of 40 iterations that differ by a tenth, median and mean are 1 % apart. So the loop is looked
  at from other phases too: an iteration begins where two that follow each other differ most.
- An iteration with a pause in it (a checkpoint) tells only that it was paused: it does not count.

How far it may be off is known by the iterations that were not seen, which may all lie on one side of the median, by
what the phases next to the chosen one tell, and by the ticks of the clock: each duration may be a tick off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

PHASES = 32  # of a loop; a mixture of 1 and 31 is hardly one
FINE = 16  # phases, of which neighbours tell about the same
PAUSE = 2.0  # times the median, or a part of it
OF_TICKS = 100_000  # times, by which a clock's ticks are known

Place = float  # in the stream: 2.5 is half-way between the operations 2 and 3


class Chain(NamedTuple):
    """Iterations that follow each other, from mark to mark. before, after: so many operations there are those of an
    iteration too."""

    marks: Sequence[Place]
    before: int
    after: int


class Usual(NamedTuple):
    """seconds: of an iteration. within: the share of it by which that may be wrong."""

    seconds: float
    within: float


class _Phase(NamedTuple):
    """What is seen from one phase of the loop. seconds: of those without a pause, in their order, at least one. paused:
    how many more there were."""

    seconds: Sequence[float]
    paused: int


def usual(times: Sequence[float], chains: Sequence[Chain], operations: int) -> Usual:
    """operations: of an iteration, as a rule. From mark to mark time must go by."""
    count = min(operations, PHASES)
    differ = [_differ(_phase(times, chains, nth / count, operations)) for nth in range(count)]
    # An operation varies by itself: three phases together are surer than one.
    around = [[(nth + by) % count for by in (-1, 0, 1)] for nth in range(count)]
    best = max(around, key=lambda some: sum(differ[nth] for nth in some))
    near = [_phase(times, chains, nth / count, operations) for nth in best]
    seconds = statistics.fmean(statistics.median(one.seconds) for one in (near if count >= FINE else near[1:2]))
    off = max(_off(one, seconds, len(chains)) for one in near)
    return Usual(seconds, max(off, tick(times) / seconds))


def tick(times: Sequence[float]) -> float:
    """Of the clock that wrote these times, seconds: what lies between the different steps from one to the next, which
    are multiples of it. Hardly more than nothing where the clock is finer than they vary."""
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
    """By how much two that follow each other do, the mean; -1 where there are none."""
    steps = [abs(after - before) for before, after in pairwise(phase.seconds)]
    return statistics.fmean(steps) if steps else -1.0


def _off(phase: _Phase, seconds: float, chains: int) -> float:
    """Where the median may lie instead, as a share of seconds. At each chain an iteration was not seen from end to end.
    Each that was not is below or above the median by chance: of many hardly all are on one side."""
    ascending, many = sorted(phase.seconds), chains + phase.paused
    middle, away = (len(ascending) - 1) / 2, min(many / 2, math.sqrt(many))
    low, high = max(0.0, middle - away), min(len(ascending) - 1.0, middle + away)
    return max(seconds - seconds_at(ascending, low), seconds_at(ascending, high) - seconds) / seconds


def _durations(times: Sequence[float], chain: Chain, phase: float, operations: int) -> Iterator[float]:
    """Of the iterations that begin so much (of one) behind each mark."""
    marks = chain.marks
    places = [begin + phase * (end - begin) for begin, end in pairwise(marks)]
    if (1 - phase) * operations <= chain.before:
        places.insert(0, marks[0] - (1 - phase) * operations)
    if phase * operations <= chain.after:
        places.append(marks[-1] + phase * operations)
    there = [seconds_at(times, place) for place in places]
    return (after - before for before, after in pairwise(there))


def seconds_at(times: Sequence[float], place: Place) -> float:
    """Between the times of two operations, where the place is between these."""
    before = int(place)
    part = place - before
    return times[before] + part * (times[before + 1] - times[before]) if part else times[before]
