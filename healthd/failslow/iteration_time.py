"""Computes the typical duration of an iteration, from the positions of iterations and the times of operations.

All functions are pure.

The result is the median of the durations, with two corrections:

- The mark (the operations at which iterations are counted) can be anywhere in the iteration. The time from mark to mark
  then covers the end of one iteration and the beginning of the next. This mixture varies less than whole iterations, so
  its median is nearer to the mean. For 40 iterations that differ by a tenth, median and mean differ by 1 %. The loop is
  therefore also evaluated at other phases. An iteration begins at the phase where consecutive durations differ most.
- An iteration with a pause (a checkpoint) measures only the pause and is left out.

The error estimate has three parts: missing iterations (all of them may be on one side of the median), the difference to
the phases next to the chosen one, and the clock tick (each duration may be wrong by one tick).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

PHASES = 32  # number of phases in a loop; a mixture of 1/32 of one iteration and 31/32 of the next is negligible
FINE_PHASES = 16  # with at least this many phases, neighbouring phases give about the same result
PAUSE_RATIO = 2.0  # an iteration whose duration is more than this factor above or below the median is a pause
TICK_SAMPLES = 100_000  # number of times from which the clock tick is estimated

Position = float  # position in the stream; 2.5 is halfway between operations 2 and 3


class Chain(NamedTuple):
    """Consecutive iterations, from mark to mark.

    `before` and `after` are the numbers of operations before and after the chain that continue an iteration.
    """

    marks: Sequence[Position]
    before: int
    after: int


class IterationTime(NamedTuple):
    """The duration of an iteration in seconds. `relative_error` is the possible error as a share of `seconds`."""

    seconds: float
    relative_error: float


class _Phase(NamedTuple):
    """Durations measured at one phase of the loop.

    Attributes:
        seconds: durations without a pause, in order, at least one.
        paused: number of durations with a pause.
    """

    seconds: Sequence[float]
    paused: int


def estimate_iteration_time(times: Sequence[float], chains: Sequence[Chain], operations: int) -> IterationTime:
    """Return the typical duration of an iteration. Time must advance from mark to mark.

    Args:
        operations: typical number of operations in an iteration.
    """
    count = min(operations, PHASES)
    differences = [_mean_difference(_phase(times, chains, number / count, operations)) for number in range(count)]
    # A single operation varies, so three phases together are more reliable than one.
    around = [[(number + shift) % count for shift in (-1, 0, 1)] for number in range(count)]
    best = max(around, key=lambda candidate: sum(differences[number] for number in candidate))
    best_phases = [_phase(times, chains, number / count, operations) for number in best]
    seconds = statistics.fmean(
        statistics.median(phase.seconds) for phase in (best_phases if count >= FINE_PHASES else best_phases[1:2])
    )
    relative_error = max(_relative_error(phase, seconds, len(chains)) for phase in best_phases)
    return IterationTime(seconds, max(relative_error, clock_tick(times) / seconds))


def clock_tick(times: Sequence[float]) -> float:
    """Return the tick of the clock that wrote these times, in seconds.

    The steps between consecutive times are multiples of the tick, so the tick is the smallest difference between
    distinct steps. For a clock finer than the variation of the times, the result is close to 0.
    """
    rounding = 4 * math.ulp(max(map(abs, (times[0], times[-1]))))
    recent = times[-TICK_SAMPLES:]
    steps = sorted({after - before for before, after in pairwise(recent) if after > before})
    return min(
        (larger - smaller for smaller, larger in pairwise([0.0, *steps]) if larger - smaller > rounding), default=0.0
    )


def _phase(times: Sequence[float], chains: Sequence[Chain], phase: float, operations: int) -> _Phase:
    durations = [
        duration for chain in chains for duration in _durations(times, chain, phase, operations) if duration > 0
    ]
    middle = statistics.median(durations or [1.0])
    seconds = [duration for duration in durations if middle / PAUSE_RATIO <= duration <= middle * PAUSE_RATIO]
    return _Phase(seconds or [middle], len(durations) - len(seconds))


def _mean_difference(phase: _Phase) -> float:
    """Return the mean difference between consecutive durations, or -1 if there are fewer than two."""
    steps = [abs(after - before) for before, after in pairwise(phase.seconds)]
    return statistics.fmean(steps) if steps else -1.0


def _relative_error(phase: _Phase, seconds: float, chains: int) -> float:
    """Return the possible deviation of the true median, as a share of `seconds`.

    Each chain has one incomplete iteration, whose duration is missing. A missing duration is below or above the median
    by chance, so it is very unlikely that many missing durations are all on the same side.
    """
    ascending, unseen = sorted(phase.seconds), chains + phase.paused
    middle, reach = (len(ascending) - 1) / 2, min(unseen / 2, math.sqrt(unseen))
    low, high = max(0.0, middle - reach), min(len(ascending) - 1.0, middle + reach)
    return max(seconds - seconds_at(ascending, low), seconds_at(ascending, high) - seconds) / seconds


def _durations(times: Sequence[float], chain: Chain, phase: float, operations: int) -> Iterator[float]:
    """Yield the durations of the iterations that begin `phase` (a share of an iteration) after each mark."""
    marks = chain.marks
    positions = [begin + phase * (end - begin) for begin, end in pairwise(marks)]
    if (1 - phase) * operations <= chain.before:
        positions.insert(0, marks[0] - (1 - phase) * operations)
    if phase * operations <= chain.after:
        positions.append(marks[-1] + phase * operations)
    begin_times = [seconds_at(times, position) for position in positions]
    return (after - before for before, after in pairwise(begin_times))


def seconds_at(times: Sequence[float], position: Position) -> float:
    """Return the time at a position, interpolated between two operations."""
    before = int(position)
    part = position - before
    return times[before] + part * (times[before + 1] - times[before]) if part else times[before]
