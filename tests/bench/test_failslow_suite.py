"""Tests of a few sets of `make bench-failslow`: what healthd finds in them, and whether the scoring is correct."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest

from healthd.failslow.analysis import diagnose
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, SlowJob, Suspect

if TYPE_CHECKING:
    from failslow.generate import Made

pytestmark = pytest.mark.one_python

BENCH = str(Path(__file__).parents[2] / "bench")
TUNED_ON = 1


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, BENCH])


def small_sets(positive: int, negative: int) -> list[Made]:
    """Return the sets with little noise and few ranks."""
    from failslow.generate import sets

    return [one for one in sets(TUNED_ON, positive, negative) if one.cv <= 0.05 and len(one.series) <= 16]


def oracle(made: Made) -> Diagnosis:
    """Return a perfect diagnosis, from the generated truth."""
    points = []
    for series, at in zip(made.series, made.at, strict=True):
        of = [event for event in made.events if made.gang or series.name in event.slow]
        points.append(tuple(point_of(event, list(map(int, at))) for event in of))
    suspects = [
        Suspect(sorted(e.slow)[0], "rank", e.cause, Confidence.HIGH, (), tuple(sorted(e.slow)))
        for e in made.events
        if e.nameable
    ]
    return Diagnosis(tuple(points), tuple(suspects))


def point_of(event: object, at: list[int]) -> Point:
    from failslow.generate import Event

    assert isinstance(event, Event)
    onset = next(place for place, tick in enumerate(at) if tick >= event.onset)
    relief = next((place for place, tick in enumerate(at) if event.relief is not None and tick >= event.relief), None)
    return Point(onset, min(onset + 5, len(at) - 1), event.height, 1.0, relief)


def test_healthd_finds_what_is_slow_and_is_silent_about_healthy_jobs() -> None:
    from failslow.score import outcome

    results = [outcome(made, diagnose(made.series, made.evidence)) for made in small_sets(40, 48)]
    healthy = [one for one in results if not one.made.positive]
    slow = [one for one in results if one.made.positive]
    assert len(healthy) >= 20
    assert len(slow) >= 20
    assert [one.made.name for one in healthy if one.alarmed][1:] == []
    assert [one.made.name for one in slow if one.missed][2:] == []
    found = [found for one in slow for found in one.found]
    assert sum(one.within for one in found) >= 0.9 * len(found)
    assert median(one.delay for one in found) <= 15
    assert [one.made.name for one in slow if one.blamed == "wrong"][1:] == []


def test_who_knows_the_truth_is_always_right_and_who_says_nothing_misses_all() -> None:
    from failslow.score import aims, outcome

    made = small_sets(30, 24)
    right = [outcome(one, oracle(one)) for one in made]
    assert all(met for met, _ in aims(right))
    assert {one.blamed for one in right} == {"right", "nobody"}
    assert not any(one.stray or one.missed for one in right)
    assert max(abs(found.onset) for one in right for found in one.found) <= 2  # except for missing samples
    silent = [outcome(one, Diagnosis(tuple(() for _ in one.series))) for one in made]
    assert all(one.missed is one.made.positive and not one.alarmed for one in silent)


def test_a_point_before_the_slowness_or_in_a_healthy_worker_finds_nothing() -> None:
    from failslow.score import outcome

    made = next(one for one in small_sets(40, 0) if not one.gang and len(one.events[0].slow) < len(one.series))
    slow = next(place for place, one in enumerate(made.series) if one.name in made.events[0].slow)
    healthy = next(place for place, one in enumerate(made.series) if one.name not in made.events[0].slow)
    for place, point in ((slow, Point(20, 25, 0.3, 1.0)), (healthy, point_of(made.events[0], list(made.at[healthy])))):
        told = outcome(made, Diagnosis(tuple((point,) if at == place else () for at in range(len(made.series)))))
        assert told.missed
        assert told.stray == 1


def test_blame_of_a_healthy_rank_or_of_anybody_in_a_healthy_job_is_wrong() -> None:
    from failslow.score import outcome

    for made in small_sets(40, 1):
        slow = frozenset[str]().union(*(event.slow for event in made.events))
        innocent = [one.name for one in made.series if one.name not in slow]
        if innocent:
            suspect = Suspect(innocent[0], "rank", Cause.COMPUTE, Confidence.LOW, (), (innocent[0],))
            told = outcome(made, replace(oracle(made), suspects=(suspect,)))
            assert told.blamed == "wrong"


def test_a_slow_job_counts_as_found_and_as_a_report_of_a_healthy_one() -> None:
    from failslow.score import outcome

    made = small_sets(40, 2)
    for one in (made[0], made[-1]):
        names = tuple(series.name for series in one.series)
        point = point_of(one.events[0], list(one.at[0])) if one.events else Point(100, 105, 0.2, 1.0)
        job = SlowJob("", 0.0, point, names, len(names), Cause.UNKNOWN, "")
        told = outcome(one, Diagnosis(tuple(() for _ in one.series), slow_jobs=(job,)))
        assert told.alarmed
        assert bool(told.found) is one.positive


def test_a_seed_is_always_the_same_sets_however_they_are_shared_out() -> None:
    from failslow.generate import sets

    once, again = [one.series for one in sets(5, 6, 6)], [one.series for one in sets(5, 6, 6)]
    shared = [one.series for part in range(3) for one in sets(5, 6, 6, part, 3)]
    assert once == again
    assert sorted(once, key=str) == sorted(shared, key=str)
    assert once != [one.series for one in sets(6, 6, 6)]


def test_what_is_called_slow_is_so_by_its_height_and_a_gang_waits_for_its_slowest() -> None:
    for made in small_sets(40, 0):
        event, steady = made.events[0], not made.beside & {"jitter", "pauses", "bimodal", "batch_size", "gaps"}
        if made.gang:
            for one in made.series:
                assert one.busy is not None
                assert one.transfer is not None
                assert all(b + t <= v * 1.001 for b, t, v in zip(one.busy, one.transfer, one.value, strict=True))
        if steady:
            series = next(one for one in made.series if one.name in event.slow)
            rest = median(series.value[event.begin - 50 : event.begin])
            slow = median(series.value[event.end - 12 : event.end])
            assert slow / rest - 1 == pytest.approx(event.height, abs=0.12)


def test_intervals_are_exact() -> None:
    from failslow.score import interval

    assert interval(0, 20) == pytest.approx((0.0, 0.16843), abs=1e-5)  # 1 - 0.025 ** (1 / 20)
    assert interval(20, 20) == pytest.approx((0.83157, 1.0), abs=1e-5)
    assert interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)


def test_both_others_find_a_step_that_nobody_can_overlook() -> None:
    from failslow.baselines import bocd_points, window_points

    noise = [1.0, 1.02, 0.99, 1.01, 0.98]
    value = noise * 30 + [1.5 * one for one in noise] * 10
    for points_of in (bocd_points, window_points):
        assert any(abs(point.onset_index - 150) <= 10 for point in points_of(value))
        assert points_of(noise * 30) == ()


def test_an_answer_about_other_series_is_refused() -> None:
    from failslow.score import outcome

    made = small_sets(0, 1)[0]
    with pytest.raises(ValueError, match="points of"):
        outcome(made, Diagnosis(()))
