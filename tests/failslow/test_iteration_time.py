"""Tests of the usual iteration time, for any position of the mark, with pauses and lost operations."""

from __future__ import annotations

import random
import statistics

import pytest

from healthd.failslow.iteration_time import Chain, clock_tick, estimate_iteration_time

OPERATIONS = 20


def stream(took: list[float], pause_after: int = 0) -> list[float]:
    times, now = [], 1000.0
    for nth, seconds in enumerate(took):
        times += [now + seconds * at / OPERATIONS for at in range(OPERATIONS)]
        now += seconds + 5 * (pause_after and nth % pause_after == 0)
    return [*times, now]


def from_mark(took: list[float], mark: int) -> Chain:
    marks = [at * OPERATIONS + mark for at in range(len(took))]
    return Chain(marks, mark, OPERATIONS - mark)


@pytest.mark.parametrize("mark", range(0, OPERATIONS, 3))
def test_where_the_mark_lies_in_the_iteration_changes_nothing(mark: int) -> None:
    """One iteration in three takes longer; a mixture of both would have another median."""
    chance = random.Random(1)
    took = [chance.gauss(1.0, 0.01) * (1.5 if chance.random() < 0.33 else 1.0) for _ in range(100)]
    told = estimate_iteration_time(stream(took), [from_mark(took, mark)], OPERATIONS)
    assert told.seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert told.relative_error < 0.03


def test_pauses_between_iterations_change_nothing() -> None:
    chance = random.Random(2)
    took = [chance.uniform(0.9, 1.1) for _ in range(120)]
    chains = [from_mark(took, 7)]
    calm = estimate_iteration_time(stream(took), chains, OPERATIONS)
    paused = estimate_iteration_time(stream(took, pause_after=5), chains, OPERATIONS)
    assert paused.seconds == pytest.approx(calm.seconds, rel=0.01)
    assert paused.relative_error > calm.relative_error


def test_the_less_of_the_iterations_was_seen_the_less_is_known() -> None:
    chance = random.Random(3)
    took = [chance.gauss(1.0, 0.1) for _ in range(60)]
    marks = from_mark(took, 7).marks
    whole = estimate_iteration_time(stream(took), [Chain(marks, 0, 0)], OPERATIONS)
    torn = estimate_iteration_time(
        stream(took), [Chain(marks[at : at + 3], 0, 0) for at in range(0, 60, 4)], OPERATIONS
    )
    assert 0 < whole.relative_error < torn.relative_error
    # Times that are multiples of 25 ms may come from a clock with that tick.
    assert estimate_iteration_time(
        stream([0.5] * 60), [Chain(marks, 0, 0)], OPERATIONS
    ).relative_error == pytest.approx(0.025 / 0.5)


def test_iterations_of_one_length_take_that_also_where_some_of_them_were_not_seen() -> None:
    marks = from_mark([0.5] * 40, 3).marks
    chains = [Chain(marks[:10], 3, 0), Chain(marks[13:15], 17, 2), Chain(marks[20:], 0, 17)]
    assert estimate_iteration_time(stream([0.5] * 40), chains, OPERATIONS).seconds == pytest.approx(0.5)


def test_half_of_the_times_may_stand_still() -> None:
    times = [float(at // 40) for at in range(41 * OPERATIONS)]
    told = estimate_iteration_time(times, [from_mark([1.0] * 40, 0)], OPERATIONS)
    assert abs(told.seconds - 0.5) <= told.relative_error * told.seconds


@pytest.mark.parametrize("epoch", [0.0, 1_790_000_000.0])
def test_the_ticks_of_a_clock_are_seen_in_its_times(epoch: float) -> None:
    chance = random.Random(4)
    fine = sorted(epoch + chance.uniform(0, 50) for _ in range(1000))
    assert clock_tick(fine) < 1e-5
    for seconds in (0.001, 0.25, 1.0):
        coarse = [round(one / seconds) * seconds for one in fine]
        assert clock_tick(coarse) == pytest.approx(seconds, rel=0.01)
    assert clock_tick([epoch] * 3) == 0
