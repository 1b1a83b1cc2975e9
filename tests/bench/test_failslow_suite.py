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

    return [
        generated
        for generated in sets(TUNED_ON, positive, negative)
        if generated.cv <= 0.05 and len(generated.series) <= 16
    ]


def oracle(made: Made) -> Diagnosis:
    """Return a perfect diagnosis, from the generated truth."""
    points = []
    for series, ticks in zip(made.series, made.at, strict=True):
        own_events = [event for event in made.events if made.gang or series.name in event.slow]
        points.append(tuple(point_of(event, list(map(int, ticks))) for event in own_events))
    suspects = [
        Suspect(
            sorted(slow_event.slow)[0], "rank", slow_event.cause, Confidence.HIGH, (), tuple(sorted(slow_event.slow))
        )
        for slow_event in made.events
        if slow_event.nameable
    ]
    return Diagnosis(tuple(points), tuple(suspects))


def point_of(event: object, ticks: list[int]) -> Point:
    from failslow.generate import Event

    assert isinstance(event, Event)
    onset = next(index for index, tick in enumerate(ticks) if tick >= event.onset)
    relief = next(
        (index for index, tick in enumerate(ticks) if event.relief is not None and tick >= event.relief), None
    )
    return Point(onset, min(onset + 5, len(ticks) - 1), event.height, 1.0, relief)


def test_diagnose_finds_slow_jobs_and_ignores_healthy_ones() -> None:
    from failslow.score import outcome

    results = [outcome(made, diagnose(made.series, made.evidence)) for made in small_sets(40, 48)]
    healthy = [result for result in results if not result.made.positive]
    slow = [result for result in results if result.made.positive]
    assert len(healthy) >= 20
    assert len(slow) >= 20
    assert [result.made.name for result in healthy if result.alarmed][1:] == []
    assert [result.made.name for result in slow if result.missed][2:] == []
    found = [found for result in slow for found in result.found]
    assert sum(result.within for result in found) >= 0.9 * len(found)
    assert median(result.delay for result in found) <= 15
    assert [result.made.name for result in slow if result.blamed == "wrong"][1:] == []


def test_scoring_accepts_oracle_and_counts_silence_as_missed() -> None:
    from failslow.score import aims, outcome

    made = small_sets(30, 24)
    oracle_results = [outcome(item, oracle(item)) for item in made]
    assert all(is_met for is_met, _ in aims(oracle_results))
    assert {item.blamed for item in oracle_results} == {"right", "nobody"}
    assert not any(item.stray or item.missed for item in oracle_results)
    assert max(abs(found.onset) for item in oracle_results for found in item.found) <= 2  # except for missing samples
    silent = [outcome(item, Diagnosis(tuple(() for _ in item.series))) for item in made]
    assert all(item.missed is item.made.positive and not item.alarmed for item in silent)


def test_scoring_ignores_early_points_and_points_of_healthy_workers() -> None:
    from failslow.score import outcome

    made = next(item for item in small_sets(40, 0) if not item.gang and len(item.events[0].slow) < len(item.series))
    slow = next(index for index, item in enumerate(made.series) if item.name in made.events[0].slow)
    healthy = next(index for index, item in enumerate(made.series) if item.name not in made.events[0].slow)
    for index, point in ((slow, Point(20, 25, 0.3, 1.0)), (healthy, point_of(made.events[0], list(made.at[healthy])))):
        score = outcome(
            made, Diagnosis(tuple((point,) if position == index else () for position in range(len(made.series))))
        )
        assert score.missed
        assert score.stray == 1


def test_scoring_counts_blame_of_healthy_rank_as_wrong() -> None:
    from failslow.score import outcome

    for made in small_sets(40, 1):
        slow = frozenset[str]().union(*(event.slow for event in made.events))
        innocent = [item.name for item in made.series if item.name not in slow]
        if innocent:
            suspect = Suspect(innocent[0], "rank", Cause.COMPUTE, Confidence.LOW, (), (innocent[0],))
            score = outcome(made, replace(oracle(made), suspects=(suspect,)))
            assert score.blamed == "wrong"


def test_scoring_counts_slow_job_as_alarm() -> None:
    from failslow.score import outcome

    made = small_sets(40, 2)
    for job_set in (made[0], made[-1]):
        names = tuple(series.name for series in job_set.series)
        point = point_of(job_set.events[0], list(job_set.at[0])) if job_set.events else Point(100, 105, 0.2, 1.0)
        job = SlowJob("", 0.0, point, names, len(names), Cause.UNKNOWN, "")
        score = outcome(job_set, Diagnosis(tuple(() for _ in job_set.series), slow_jobs=(job,)))
        assert score.alarmed
        assert bool(score.found) is job_set.positive


def test_sets_depend_on_seed_only() -> None:
    from failslow.generate import sets

    first, second = [item.series for item in sets(5, 6, 6)], [item.series for item in sets(5, 6, 6)]
    shared = [item.series for part in range(3) for item in sets(5, 6, 6, part, 3)]
    assert first == second
    assert sorted(first, key=str) == sorted(shared, key=str)
    assert first != [item.series for item in sets(6, 6, 6)]


def test_sets_have_stated_slowdown_and_gangs_wait() -> None:
    for made in small_sets(40, 0):
        event, steady = made.events[0], not made.disturbances & {"jitter", "pauses", "bimodal", "batch_size", "gaps"}
        if made.gang:
            for item in made.series:
                assert item.busy is not None
                assert item.transfer is not None
                assert all(b + t <= v * 1.001 for b, t, v in zip(item.busy, item.transfer, item.value, strict=True))
        if steady:
            series = next(item for item in made.series if item.name in event.slow)
            normal = median(series.value[event.begin - 50 : event.begin])
            slow = median(series.value[event.end - 12 : event.end])
            assert slow / normal - 1 == pytest.approx(event.height, abs=0.12)


def test_interval_is_exact() -> None:
    from failslow.score import interval

    assert interval(0, 20) == pytest.approx((0.0, 0.16843), abs=1e-5)  # 1 - 0.025 ** (1 / 20)
    assert interval(20, 20) == pytest.approx((0.83157, 1.0), abs=1e-5)
    assert interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)


def test_baselines_find_obvious_step() -> None:
    from failslow.baselines import bocd_points, window_points

    noise = [1.0, 1.02, 0.99, 1.01, 0.98]
    value = noise * 30 + [1.5 * noisy for noisy in noise] * 10
    for points_of in (bocd_points, window_points):
        assert any(abs(point.onset_index - 150) <= 10 for point in points_of(value))
        assert points_of(noise * 30) == ()


def test_scoring_rejects_diagnosis_of_other_series() -> None:
    from failslow.score import outcome

    made = small_sets(0, 1)[0]
    with pytest.raises(ValueError, match="points of"):
        outcome(made, Diagnosis(()))
