"""Tests of `replay`: the plan for a job with a known fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gangs import Fault, gang, judged, workers

from healthd.failslow.mitigation.planner import Action, Overheads, SlowSpan, replay
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, Series, Suspect

pytestmark = pytest.mark.one_python


def of(series: list[Series], costs: Overheads, gpus: int = 8, settles: int = 0) -> tuple[SlowSpan, ...]:
    return replay(series, judged(series), gpus, costs, settles=settles)


def test_a_slow_gpu_costs_what_its_gang_lost_and_a_remedy_saves_the_rest() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    (stretch,) = of(series, Overheads(s2=5, s3=1000, s4=1000))
    assert stretch.suspects == ("3",)
    assert stretch.cause in (Cause.COMPUTE, Cause.COMPUTE_GPU)
    assert stretch.lost == pytest.approx(100 * 0.5 * 8, rel=0.1)
    (taken,) = stretch.actions
    assert taken.action is Action.MICRO_BATCHES
    assert taken.overhead == 5 * 8
    assert taken.lost >= taken.overhead
    assert taken.saved == pytest.approx(stretch.lost - taken.lost - taken.overhead)
    assert 100 <= taken.position < 200
    assert stretch.relief is not None


def test_what_was_lost_before_the_alarm_counts_at_the_alarm() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    judgement = judged(series)
    (stretch,) = replay(series, judgement, 8, Overheads(s2=0.1, s3=1000, s4=1000))
    alarms = {point.alarm_index for points in judgement.points for point in points}
    (taken,) = stretch.actions
    assert taken.position == min(alarms)
    assert taken.lost > 0.1 * 8


def test_two_who_are_slow_at_one_time_are_one_slowness_of_the_gang() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200), Fault("busy", [5], 0.5, 101, 200)], samples=400)
    (stretch,) = of(series, Overheads(s2=5, s3=1000, s4=1000))
    assert stretch.lost == pytest.approx(100 * 0.5 * 8, rel=0.15)


def test_what_still_lasts_at_the_end_has_no_relief_and_says_what_is_due() -> None:
    series = workers([1.0] * 8, {2: 0.6})
    (stretch,) = of(series, Overheads(s2=5, s3=1000, s4=2000))
    assert stretch.relief is None
    assert stretch.next_action is not None
    assert (stretch.next_action.action, stretch.next_action.lost_gpu_seconds) == (Action.TOPOLOGY, 1000 * 8)


def test_where_nothing_is_slow_there_is_no_stretch() -> None:
    assert of(gang(4, samples=200), Overheads()) == ()
    assert replay([], Diagnosis(()), 8, Overheads()) == ()


def test_a_pause_within_is_no_loss_of_an_hour() -> None:
    """A checkpoint counts as one iteration that is a hundred times as long."""
    value = [1.0] * 100 + [1.5] * 100 + [1.0] * 100
    paused = [*value[:150], 100.0, *value[151:]]
    told = []
    for times in (value, paused):
        series = Series("0", times, range(300))
        point = Point(100, 110, 0.5, 1.0, 200)
        judgement = Diagnosis(((point,),), (Suspect("0", "series", Cause.COMPUTE, Confidence.HIGH, (), ("0",), point),))
        (stretch,) = replay([series], judgement, 1, Overheads())
        told.append(stretch.lost)
    assert told == [pytest.approx(50), pytest.approx(50)]


def test_a_longer_regime_is_held_against_its_own_level() -> None:
    """Sequences of double length take twice as long without a loss."""
    names = ["short" if at % 2 else "long" for at in range(300)]
    value = [(1.0 if name == "short" else 2.0) * (1.5 if 100 <= at < 200 else 1.0) for at, name in enumerate(names)]
    series = Series("0", value, range(300), regimes=names)
    point = Point(100, 110, 0.5, 1.0, 200)
    judgement = Diagnosis(((point,),), (Suspect("0", "series", Cause.COMPUTE, Confidence.HIGH, (), ("0",), point),))
    (stretch,) = replay([series], judgement, 1, Overheads())
    assert stretch.lost == pytest.approx(50 * 0.5 + 50 * 1.0)


def test_times_in_milliseconds_cost_a_thousandth() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    thousandfold = [replace(one, value=[1000 * time for time in one.value]) for one in series]
    judgement = judged(series)
    (seconds,) = replay(series, judgement, 8, Overheads())
    (milliseconds,) = replay(thousandfold, judgement, 8, Overheads(), seconds=1e-3)
    assert milliseconds.lost == pytest.approx(seconds.lost)


@pytest.mark.parametrize(("ranks", "per_stage"), [(32, 8), (16, 8)])
def test_a_slow_node_with_a_whole_stage_is_planned_without_moving_micro_batches(ranks: int, per_stage: int) -> None:
    groups = {rank: f"g{rank // per_stage}" for rank in range(ranks)}
    series = gang(ranks, [Fault("busy", range(8), 0.4)], groups=groups, per_node=8)
    (found,) = replay(series, judged(series), ranks, Overheads(5, 10, 15))
    assert {one.action for one in found.actions} == {Action.RESTART}


def test_a_slow_node_with_half_of_a_stage_can_give_micro_batches_away() -> None:
    groups = {rank: f"g{rank // 16}" for rank in range(32)}
    series = gang(32, [Fault("busy", range(8), 0.4)], groups=groups, per_node=8)
    (found,) = replay(series, judged(series), 32, Overheads(5, 10, 15))
    assert found.actions[0].action is Action.MICRO_BATCHES
