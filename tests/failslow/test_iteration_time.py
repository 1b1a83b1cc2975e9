"""Tests of the usual iteration time, for any position of the mark, with pauses and lost operations."""

from __future__ import annotations

import random
import statistics

import pytest

from healthd.failslow.iteration_time import Chain, clock_tick, estimate_iteration_time

OPERATIONS = 20


def operation_times(took: list[float], pause_after: int = 0) -> list[float]:
    times, time = [], 1000.0
    for nth, seconds in enumerate(took):
        times += [time + seconds * at / OPERATIONS for at in range(OPERATIONS)]
        time += seconds + 5 * (pause_after and nth % pause_after == 0)
    return [*times, time]


def chain_from_mark(took: list[float], mark: int) -> Chain:
    marks = [at * OPERATIONS + mark for at in range(len(took))]
    return Chain(marks, mark, OPERATIONS - mark)


@pytest.mark.parametrize("mark", range(0, OPERATIONS, 3))
def test_estimate_is_independent_of_position_of_mark(mark: int) -> None:
    """One iteration in three takes longer; a mixture of both would have another median."""
    chance = random.Random(1)
    took = [chance.gauss(1.0, 0.01) * (1.5 if chance.random() < 0.33 else 1.0) for _ in range(100)]
    estimate = estimate_iteration_time(operation_times(took), [chain_from_mark(took, mark)], OPERATIONS)
    assert estimate.seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert estimate.relative_error < 0.03


def test_pauses_between_iterations_do_not_change_estimate() -> None:
    chance = random.Random(2)
    took = [chance.uniform(0.9, 1.1) for _ in range(120)]
    chains = [chain_from_mark(took, 7)]
    calm = estimate_iteration_time(operation_times(took), chains, OPERATIONS)
    paused = estimate_iteration_time(operation_times(took, pause_after=5), chains, OPERATIONS)
    assert paused.seconds == pytest.approx(calm.seconds, rel=0.01)
    assert paused.relative_error > calm.relative_error


def test_error_grows_with_fewer_complete_iterations() -> None:
    chance = random.Random(3)
    took = [chance.gauss(1.0, 0.1) for _ in range(60)]
    marks = chain_from_mark(took, 7).marks
    whole = estimate_iteration_time(operation_times(took), [Chain(marks, 0, 0)], OPERATIONS)
    torn = estimate_iteration_time(
        operation_times(took), [Chain(marks[at : at + 3], 0, 0) for at in range(0, 60, 4)], OPERATIONS
    )
    assert 0 < whole.relative_error < torn.relative_error
    # Times that are multiples of 25 ms may come from a clock with that tick.
    assert estimate_iteration_time(
        operation_times([0.5] * 60), [Chain(marks, 0, 0)], OPERATIONS
    ).relative_error == pytest.approx(0.025 / 0.5)


def test_missing_iterations_do_not_change_estimate() -> None:
    marks = chain_from_mark([0.5] * 40, 3).marks
    chains = [Chain(marks[:10], 3, 0), Chain(marks[13:15], 17, 2), Chain(marks[20:], 0, 17)]
    assert estimate_iteration_time(operation_times([0.5] * 40), chains, OPERATIONS).seconds == pytest.approx(0.5)


def test_half_of_times_may_be_equal() -> None:
    times = [float(at // 40) for at in range(41 * OPERATIONS)]
    estimate = estimate_iteration_time(times, [chain_from_mark([1.0] * 40, 0)], OPERATIONS)
    assert abs(estimate.seconds - 0.5) <= estimate.relative_error * estimate.seconds


@pytest.mark.parametrize("epoch", [0.0, 1_790_000_000.0])
def test_clock_tick_is_found_in_times(epoch: float) -> None:
    chance = random.Random(4)
    fine = sorted(epoch + chance.uniform(0, 50) for _ in range(1000))
    assert clock_tick(fine) < 1e-5
    for seconds in (0.001, 0.25, 1.0):
        coarse = [round(moment / seconds) * seconds for moment in fine]
        assert clock_tick(coarse) == pytest.approx(seconds, rel=0.01)
    assert clock_tick([epoch] * 3) == 0
