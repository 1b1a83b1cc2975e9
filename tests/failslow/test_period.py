"""Tests of finding the iteration time from the rhythm of a rank's operations."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NESTED, calls

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


def found(made):
    return find_period([name for name, _ in made], [time for _, time in made])


@pytest.mark.parametrize("beside", [{}, {"lost": 0.001}, {"evaluation_at": 30}, {"prefix": 40}, {"cv": 0.1}])
@pytest.mark.parametrize("name", PATTERNS)
def test_an_iteration_is_as_long_as_it_was_made_within_1_2_percent(name, beside):
    made, took = calls(PATTERNS[name], 80, **beside)
    told = found(made)
    assert told.operations == len(PATTERNS[name])
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert told.confidence > 0.5


@pytest.mark.parametrize("name", ["buckets", "sharded", "tensor"])
def test_a_loss_that_is_logged_every_tenth_iteration_makes_no_iteration_of_ten(name):
    made, _ = calls(PATTERNS[name], 300, log_every=10)
    assert found(made).operations == len(PATTERNS[name])


@pytest.mark.parametrize("lost", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("name", NESTED)
def test_a_loop_of_layers_is_no_iteration_though_entries_were_lost(name, lost):
    made, took = calls(NESTED[name], 60, lost=lost, seed=5)
    told = found(made[len(NESTED[name]) // 3 :])
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert told.operations == pytest.approx(len(NESTED[name]), rel=0.025)


def test_a_longer_loop_that_is_seen_less_than_twenty_times_makes_the_choice_doubtful():
    pattern = NESTED["layers of fully sharded data parallel"]
    few, many = (found(calls(pattern, iterations)[0]) for iterations in (12, 60))
    assert few.operations == 3
    assert few.confidence < 0.5
    assert few.alternative == (145, pytest.approx(1.0, rel=0.1))
    assert (many.operations, many.alternative) == (145, None)
    assert many.confidence > 0.9


def test_sixteen_micro_batches_or_sixteen_iterations_and_a_checkpoint_are_a_doubt_that_is_told():
    part = ["recv", *["all_gather", "reduce_scatter"] * 20, "send"]
    told = found(calls(part * 16 + ["barrier"] * 4, 40)[0])
    assert {told.operations, told.alternative[0]} == {len(part), 16 * len(part) + 4}
    assert told.confidence < 0.5


def test_an_iteration_of_which_the_newest_40_000_operations_hold_ten_is_seen_in_more_of_them():
    made, took = calls(["all_gather", "reduce_scatter"] * 1990 + ["all_reduce"] * 2, 30)
    told = found(made)
    assert told.operations == 3982
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


def test_half_an_iteration_with_the_same_operations_in_another_order_is_no_iteration():
    there, back = ["a", "b", "c", "d"], ["d", "c", "b", "a"]
    made, _ = calls(["x", *there, "x", *back], 60)
    assert found(made).operations == 10


def test_a_ring_buffer_begins_in_the_middle_of_an_iteration():
    made, took = calls(PATTERNS["sharded"], 60)
    assert found(made[77:]).iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


def test_each_iteration_has_its_time():
    made, took = calls(PATTERNS["buckets"], 100, seed=4)
    told = found(made)
    assert len(told.seconds) == len(told.begin_seconds) == 99
    # The first time begins at the rarest operation, which is the last one of a simulated iteration.
    assert statistics.fmean(told.seconds) == pytest.approx(statistics.fmean(took), rel=0.01)


@pytest.mark.parametrize("name", ["buckets", "sharded", "tensor"])
def test_an_iteration_whose_mark_was_lost_has_its_time_too(name):
    pattern = PATTERNS[name]
    made, took = calls(pattern, 60, seed=2)
    for at in (50, 31, 30, 10):
        del made[at * len(pattern) + len(pattern) - 1]
    told = found(made)
    assert len(told.seconds) == 59
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)
    assert max(told.seconds) < 1.5


def test_of_two_iterations_that_differ_and_whose_mark_was_lost_no_times_are_made_up():
    pattern = PATTERNS["buckets"]
    made, _ = calls(pattern, 60, seed=2, cv=0.01)
    at = 31 * len(pattern)
    made = (
        made[:at]
        + [(name, made[at][1] + 2 * (time - made[at][1])) for name, time in made[at : at + len(pattern)]]
        + [(name, time + made[at + len(pattern)][1] - made[at][1]) for name, time in made[at + len(pattern) :]]
    )
    del made[at - 1]
    told = found(made)
    assert len(told.seconds) == 57
    assert max(told.seconds) < 1.2


def test_an_evaluation_that_is_as_long_as_two_iterations_is_none():
    pattern = PATTERNS["buckets"]
    made, took = calls(pattern, 60, seed=2)
    whole = []
    for number in range(60):
        whole += made[number * len(pattern) : (number + 1) * len(pattern)]
        if number % 10 == 9:
            whole += [("all_gather", whole[-1][1] + 1e-6 * at) for at in range(2 * len(pattern))]
    told = found(whole)
    assert len(told.seconds) == pytest.approx(53, abs=1)
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


@pytest.mark.parametrize("pace", [1.4, 0.5])
def test_an_evaluation_that_calls_the_same_operations_is_no_iteration(pace):
    """An evaluation has the operations of training except the last one, which marks an iteration."""
    chance = random.Random(6)
    made, now = [], 0.0
    for number in range(300):
        took = chance.gauss(1.0, 0.02)
        made += [("dp" if at == 16 else "tp", now + took * at / 17) for at in range(17)]
        now += took
        if number % 100 == 99:
            made += [("tp", now + pace * at / 17) for at in range(500)]
            now += pace * 500 / 17
    told = found(made)
    assert len(told.seconds) <= 300
    assert max(told.seconds) < 1.2
    assert min(told.seconds) > 0.8


@pytest.mark.parametrize("took", [0.4, 0.7, 1.4, 2.6])
@pytest.mark.parametrize("different", [5, 40])
def test_a_time_that_the_clock_is_too_coarse_to_tell_is_told_as_doubtful(took, different):
    epoch = 1_790_000_000.3
    made = [
        (f"op {at}", float(int(epoch + took * (n + at / different)))) for n in range(100) for at in range(different)
    ]
    told = found(made)
    assert told.confidence < 0.5
    assert abs(told.iteration_seconds - took) <= told.relative_error * told.iteration_seconds


def test_a_clock_of_milliseconds_tells_an_iteration_of_a_second():
    made, took = calls(PATTERNS["buckets"], 60)
    told = found([(name, 1_790_000_000 + round(time, 3)) for name, time in made])
    assert told.confidence > 0.9
    assert told.iteration_seconds == pytest.approx(statistics.median(took), rel=0.012)


@given(st.permutations(["a", "b", "c", "d", "zz", ""]), st.integers(0, 1000))
@settings(max_examples=25)
def test_names_of_operations_change_nothing(names, seed):
    pattern = random.Random(seed).choices("uvwxyz", k=9)
    made, _ = calls(pattern, 40, seed=seed, lost=0.005)
    other = dict(zip("uvwxyz", names, strict=True))

    def told(stream):
        try:
            return found(stream)
        except PeriodNotFound as error:
            return str(error)

    assert told(made) == told([(other[name], time) for name, time in made])


@given(st.floats(-1e6, 1e6), st.sampled_from([0.25, 2.0, 1024.0]))
def test_another_beginning_and_unit_of_time_change_no_period(shift, scale):
    made, _ = calls(["a", "b", "c"], 40)
    one, other = found(made), found([(name, (time + shift) * scale) for name, time in made])
    assert (other.operations, other.confidence) == (one.operations, one.confidence)
    assert other.iteration_seconds == pytest.approx(one.iteration_seconds * scale, rel=1e-5)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([("a", float(at)) for at in range(500)], "one kind"),
        ([("ab"[at % 2], float(at)) for at in range(39)], "39 operations"),
        ([(random.Random(at).choice("abcd"), float(at)) for at in range(2000)], "has no repeating pattern"),
        ([("abc"[at % 3], 5.0) for at in range(500)], "do not advance"),
        (calls([str(at) for at in range(30)], 19)[0], "has no repeating pattern"),  # 20 periods are needed
    ],
)
def test_what_has_no_rhythm_is_told_in_a_sentence(made, why):
    with pytest.raises(PeriodNotFound, match=why):
        found(made)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e9)), max_size=120))
def test_any_stream_has_a_period_or_none(made):
    made.sort(key=lambda one: one[1])
    try:
        told = found(made)
    except PeriodNotFound:
        return
    assert told.iteration_seconds > 0
    assert 0 < told.confidence <= 1
    assert min(told.seconds) > 0
    assert 2 <= told.operations <= len(made) // 20
