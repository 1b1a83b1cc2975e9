"""Tests of finding the iteration time from the rhythm of a rank's operations."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NESTED_PATTERNS, simulate_calls

from healthd.failslow.period import PeriodNotFound, find_period

pytestmark = pytest.mark.one_python  # pure arithmetic that takes minutes

PATTERNS = {
    "buckets": ["all_reduce"] * 25 + ["broadcast"],
    "sharded": ["all_gather"] * 64 + ["all_gather", "reduce_scatter"] * 64 + ["all_reduce"],
    "layers": ["send", "recv", "all_gather", "reduce_scatter"] * 48 + ["all_reduce"] * 3,
    "micro-batches": (["send", "recv", "gather", "scatter", "gather", "scatter"] * 4 + ["x"]) * 8 + ["all_reduce"] * 3,
    "two": ["all_gather", "reduce_scatter"],
    "tensor": ["all_reduce"] * 192 + ["reduce_scatter", "all_gather"],
}


def period_of(made):
    return find_period([name for name, _ in made], [time for _, time in made])


@pytest.mark.parametrize("disturbance", [{}, {"lost": 0.001}, {"evaluation_at": 30}, {"prefix": 40}, {"cv": 0.1}])
@pytest.mark.parametrize("name", PATTERNS)
def test_iteration_time_is_accurate_to_1_2_percent(name, disturbance):
    made, took = simulate_calls(PATTERNS[name], 80, **disturbance)
    period = period_of(made)
    assert period.operations == len(PATTERNS[name])
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert period.confidence > 0.5


@pytest.mark.parametrize("name", ["buckets", "sharded", "tensor"])
def test_operation_in_every_tenth_iteration_does_not_multiply_period(name):
    made, _ = simulate_calls(PATTERNS[name], 300, log_every=10)
    assert period_of(made).operations == len(PATTERNS[name])


@pytest.mark.parametrize("lost", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("name", NESTED_PATTERNS)
def test_loop_of_layers_is_no_iteration_also_with_lost_entries(name, lost):
    made, took = simulate_calls(NESTED_PATTERNS[name], 60, lost=lost, seed=5)
    period = period_of(made[len(NESTED_PATTERNS[name]) // 3 :])
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert period.operations == pytest.approx(len(NESTED_PATTERNS[name]), rel=0.025)


def test_longer_loop_seen_rarely_makes_period_doubtful():
    pattern = NESTED_PATTERNS["layers of fully sharded data parallel"]
    short_record, long_record = (period_of(simulate_calls(pattern, iterations)[0]) for iterations in (12, 60))
    assert short_record.operations == 3
    assert short_record.confidence < 0.5
    assert short_record.alternative == (145, pytest.approx(1.0, rel=0.1))
    assert (long_record.operations, long_record.alternative) == (145, None)
    assert long_record.confidence > 0.9


def test_ambiguous_micro_batches_make_period_doubtful():
    part = ["recv", *["all_gather", "reduce_scatter"] * 20, "send"]
    period = period_of(simulate_calls(part * 16 + ["barrier"] * 4, 40)[0])
    assert {period.operations, period.alternative[0]} == {len(part), 16 * len(part) + 4}
    assert period.confidence < 0.5


def test_very_long_iteration_uses_more_operations():
    made, took = simulate_calls(["all_gather", "reduce_scatter"] * 1990 + ["all_reduce"] * 2, 30)
    period = period_of(made)
    assert period.operations == 3982
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


def test_half_iteration_in_reverse_order_is_no_iteration():
    forward, backward = ["a", "b", "c", "d"], ["d", "c", "b", "a"]
    made, _ = simulate_calls(["x", *forward, "x", *backward], 60)
    assert period_of(made).operations == 10


def test_record_may_begin_within_iteration():
    made, took = simulate_calls(PATTERNS["sharded"], 60)
    assert period_of(made[77:]).iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


def test_each_iteration_has_time():
    made, took = simulate_calls(PATTERNS["buckets"], 100, seed=4)
    period = period_of(made)
    assert len(period.seconds) == len(period.begin_seconds) == 99
    # The first time begins at the rarest operation, which is the last one of a simulated iteration.
    assert statistics.fmean(period.seconds) == pytest.approx(statistics.fmean(took), rel=0.01)


@pytest.mark.parametrize("name", ["buckets", "sharded", "tensor"])
def test_iteration_with_lost_mark_has_time(name):
    pattern = PATTERNS[name]
    made, took = simulate_calls(pattern, 60, seed=2)
    for at in (50, 31, 30, 10):
        del made[at * len(pattern) + len(pattern) - 1]
    period = period_of(made)
    assert len(period.seconds) == 59
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert max(period.seconds) < 1.5


def test_different_iterations_with_lost_mark_get_no_times():
    pattern = PATTERNS["buckets"]
    made, _ = simulate_calls(pattern, 60, seed=2, cv=0.01)
    at = 31 * len(pattern)
    made = (
        made[:at]
        + [(name, made[at][1] + 2 * (time - made[at][1])) for name, time in made[at : at + len(pattern)]]
        + [(name, time + made[at + len(pattern)][1] - made[at][1]) for name, time in made[at + len(pattern) :]]
    )
    del made[at - 1]
    period = period_of(made)
    assert len(period.seconds) == 57
    assert max(period.seconds) < 1.2


def test_evaluation_as_long_as_two_iterations_is_no_iteration():
    pattern = PATTERNS["buckets"]
    made, took = simulate_calls(pattern, 60, seed=2)
    whole = []
    for number in range(60):
        whole += made[number * len(pattern) : (number + 1) * len(pattern)]
        if number % 10 == 9:
            whole += [("all_gather", whole[-1][1] + 1e-6 * at) for at in range(2 * len(pattern))]
    period = period_of(whole)
    assert len(period.seconds) == pytest.approx(53, abs=1)
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


@pytest.mark.parametrize("pace", [1.4, 0.5])
def test_evaluation_with_same_operations_is_no_iteration(pace):
    """An evaluation has the operations of training except the last one, which marks an iteration."""
    chance = random.Random(6)
    made, time = [], 0.0
    for number in range(300):
        took = chance.gauss(1.0, 0.02)
        made += [("dp" if at == 16 else "tp", time + took * at / 17) for at in range(17)]
        time += took
        if number % 100 == 99:
            made += [("tp", time + pace * at / 17) for at in range(500)]
            time += pace * 500 / 17
    period = period_of(made)
    assert len(period.seconds) <= 300
    assert max(period.seconds) < 1.2
    assert min(period.seconds) > 0.8


@pytest.mark.parametrize("took", [0.4, 0.7, 1.4, 2.6])
@pytest.mark.parametrize("different", [5, 40])
def test_too_coarse_clock_makes_period_doubtful(took, different):
    epoch = 1_790_000_000.3
    made = [
        (f"op {at}", float(int(epoch + took * (n + at / different)))) for n in range(100) for at in range(different)
    ]
    period = period_of(made)
    assert period.confidence < 0.5
    assert abs(period.iteration_seconds - took) <= period.relative_error * period.iteration_seconds


def test_millisecond_clock_is_sufficient():
    made, took = simulate_calls(PATTERNS["buckets"], 60)
    period = period_of([(name, 1_790_000_000 + round(time, 3)) for name, time in made])
    assert period.confidence > 0.9
    assert period.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


@given(st.permutations(["a", "b", "c", "d", "zz", ""]), st.integers(0, 1000))
@settings(max_examples=25)
def test_names_of_operations_do_not_matter(names, seed):
    pattern = random.Random(seed).choices("uvwxyz", k=9)
    made, _ = simulate_calls(pattern, 40, seed=seed, lost=0.005)
    renamed = dict(zip("uvwxyz", names, strict=True))

    def result_of(stream):
        try:
            return period_of(stream)
        except PeriodNotFound as error:
            return str(error)

    assert result_of(made) == result_of([(renamed[name], time) for name, time in made])


@given(st.floats(-1e6, 1e6), st.sampled_from([0.25, 2.0, 1024.0]))
def test_shift_and_unit_of_time_do_not_change_period(shift, scale):
    made, _ = simulate_calls(["a", "b", "c"], 40)
    original, scaled = period_of(made), period_of([(name, (time + shift) * scale) for name, time in made])
    assert (scaled.operations, scaled.confidence) == (original.operations, original.confidence)
    assert scaled.iteration_seconds == pytest.approx(original.iteration_seconds * scale, rel=1e-5)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([("a", float(at)) for at in range(500)], "one kind"),
        ([("ab"[at % 2], float(at)) for at in range(39)], "39 operations"),
        ([(random.Random(at).choice("abcd"), float(at)) for at in range(2000)], "has no repeating pattern"),
        ([("abc"[at % 3], 5.0) for at in range(500)], "do not advance"),
        (simulate_calls([str(at) for at in range(30)], 19)[0], "has no repeating pattern"),  # 20 periods are needed
    ],
)
def test_stream_without_rhythm_is_one_sentence(made, message):
    with pytest.raises(PeriodNotFound, match=message):
        period_of(made)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e9)), max_size=120))
def test_any_stream_has_period_or_none(made):
    made.sort(key=lambda call: call[1])
    try:
        period = period_of(made)
    except PeriodNotFound:
        return
    assert period.iteration_seconds > 0
    assert 0 < period.confidence <= 1
    assert min(period.seconds) > 0
    assert 2 <= period.operations <= len(made) // 20
