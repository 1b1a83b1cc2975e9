"""Tests of `replay`: the plan for a job with a known fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gangs import Fault, diagnose, gang, workers

from healthd.failslow.mitigation.planner import Action, Overheads, SlowSpan, replay
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, Series, Suspect

pytestmark = pytest.mark.one_python


def replay_series(series: list[Series], costs: Overheads, gpus: int = 8, settles: int = 0) -> tuple[SlowSpan, ...]:
    return replay(series, diagnose(series), gpus, costs, settles=settles)


def test_replay_counts_gang_loss_and_saving_of_remedy() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    (slow_span,) = replay_series(series, Overheads(s2=5, s3=1000, s4=1000))
    assert slow_span.suspects == ("3",)
    assert slow_span.cause in (Cause.COMPUTE, Cause.COMPUTE_GPU)
    assert slow_span.lost == pytest.approx(100 * 0.5 * 8, rel=0.1)
    (taken,) = slow_span.actions
    assert taken.action is Action.MICRO_BATCHES
    assert taken.overhead == 5 * 8
    assert taken.lost >= taken.overhead
    assert taken.saved == pytest.approx(slow_span.lost - taken.lost - taken.overhead)
    assert 100 <= taken.position < 200
    assert slow_span.relief is not None


def test_loss_before_alarm_counts_at_alarm() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    judgement = diagnose(series)
    (slow_span,) = replay(series, judgement, 8, Overheads(s2=0.1, s3=1000, s4=1000))
    alarms = {point.alarm_index for points in judgement.points for point in points}
    (taken,) = slow_span.actions
    assert taken.position == min(alarms)
    assert taken.lost > 0.1 * 8


def test_simultaneous_faults_are_one_slow_span() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200), Fault("busy", [5], 0.5, 101, 200)], samples=400)
    (slow_span,) = replay_series(series, Overheads(s2=5, s3=1000, s4=1000))
    assert slow_span.lost == pytest.approx(100 * 0.5 * 8, rel=0.15)


def test_open_span_has_no_relief_and_names_next_action() -> None:
    series = workers([1.0] * 8, {2: 0.6})
    (slow_span,) = replay_series(series, Overheads(s2=5, s3=1000, s4=2000))
    assert slow_span.relief is None
    assert slow_span.next_action is not None
    assert (slow_span.next_action.action, slow_span.next_action.lost_gpu_seconds) == (Action.TOPOLOGY, 1000 * 8)


def test_healthy_series_have_no_span() -> None:
    assert replay_series(gang(4, samples=200), Overheads()) == ()
    assert replay([], Diagnosis(()), 8, Overheads()) == ()


def test_pause_within_span_adds_no_loss() -> None:
    """A checkpoint counts as one iteration that is a hundred times as long."""
    value = [1.0] * 100 + [1.5] * 100 + [1.0] * 100
    paused = [*value[:150], 100.0, *value[151:]]
    losses = []
    for times in (value, paused):
        series = Series("0", times, range(300))
        point = Point(100, 110, 0.5, 1.0, 200)
        judgement = Diagnosis(((point,),), (Suspect("0", "series", Cause.COMPUTE, Confidence.HIGH, (), ("0",), point),))
        (slow_span,) = replay([series], judgement, 1, Overheads())
        losses.append(slow_span.lost)
    assert losses == [pytest.approx(50), pytest.approx(50)]


def test_longer_regime_is_compared_with_its_own_level() -> None:
    """Sequences of double length take twice as long without a loss."""
    names = ["short" if at % 2 else "long" for at in range(300)]
    value = [(1.0 if name == "short" else 2.0) * (1.5 if 100 <= at < 200 else 1.0) for at, name in enumerate(names)]
    series = Series("0", value, range(300), regimes=names)
    point = Point(100, 110, 0.5, 1.0, 200)
    judgement = Diagnosis(((point,),), (Suspect("0", "series", Cause.COMPUTE, Confidence.HIGH, (), ("0",), point),))
    (slow_span,) = replay([series], judgement, 1, Overheads())
    assert slow_span.lost == pytest.approx(50 * 0.5 + 50 * 1.0)


def test_seconds_option_scales_loss() -> None:
    series = gang(8, [Fault("busy", [3], 0.5, 100, 200)], samples=400)
    thousandfold = [replace(entry, value=[1000 * time for time in entry.value]) for entry in series]
    judgement = diagnose(series)
    (seconds,) = replay(series, judgement, 8, Overheads())
    (milliseconds,) = replay(thousandfold, judgement, 8, Overheads(), seconds=1e-3)
    assert milliseconds.lost == pytest.approx(seconds.lost)


@pytest.mark.parametrize(("ranks", "per_stage"), [(32, 8), (16, 8)])
def test_slow_node_with_whole_stage_gets_no_micro_batches(ranks: int, per_stage: int) -> None:
    groups = {rank: f"g{rank // per_stage}" for rank in range(ranks)}
    series = gang(ranks, [Fault("busy", range(8), 0.4)], groups=groups, per_node=8)
    (found,) = replay(series, diagnose(series), ranks, Overheads(5, 10, 15))
    assert {entry.action for entry in found.actions} == {Action.RESTART}


def test_slow_node_with_half_stage_gets_micro_batches() -> None:
    groups = {rank: f"g{rank // 16}" for rank in range(32)}
    series = gang(32, [Fault("busy", range(8), 0.4)], groups=groups, per_node=8)
    (found,) = replay(series, diagnose(series), 32, Overheads(5, 10, 15))
    assert found.actions[0].action is Action.MICRO_BATCHES
