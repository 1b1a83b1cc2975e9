"""Tests of series that were slower than their peers from the first sample on, and of series that are not compared."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gangs import gang, values_only, workers
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.cli import main
from healthd.common.page import Page
from healthd.failslow import report
from healthd.failslow.always_slow import _median_without, compare_with_peers
from healthd.failslow.analysis import diagnose
from healthd.failslow.model import Series

pytestmark = pytest.mark.one_python

STALL = Path(__file__).parents[1] / "data" / "failslow" / "input_stall_rank2.csv"
STAGES = {rank: f"s{rank // 4}" for rank in range(16)}


def slow_measures(series: Sequence[Series]) -> list[tuple[str, str]]:
    return [(entry.series, entry.measure) for entry in compare_with_peers(series).slow]


def test_rank_with_stalled_input_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.main(["failslow", str(STALL), "--index", "step", "--json"])
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["slow_throughout"]
    assert (status, found["series"], found["measure"], found["peers"]) == (1, "2", "own", 3)
    assert found["ratio"] == pytest.approx(2.17, abs=0.02)
    assert (answer["suspects"], answer["job_slow"], answer["compared"]) == ([], [], 4)


def test_text_of_slow_rank_does_not_state_nothing_slow(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["failslow", str(STALL), "--index", "step"])
    out = capsys.readouterr().out
    assert re.search(r"throughout \(2\.17 x\)", out)
    assert "nothing" not in out


@pytest.mark.parametrize(("ratio", "reported"), [(1.0, []), (1.1, []), (1.35, [("5", "own")]), (2.35, [("5", "own")])])
def test_slow_rank_of_given_group_is_reported(ratio: float, reported: list[tuple[str, str]]) -> None:
    busy = [1.0] * 4 + [1.0, ratio, 1.0, 1.0] + [0.6] * 8
    assert slow_measures(gang(16, busy=busy, groups=STAGES)) == reported


def test_workers_of_given_group_are_compared_by_busy_time() -> None:
    """From a trace whose slow worker took 45 s in all of 44 steps, and its peers 19 s."""
    draw = random.Random(5)
    series = []
    for worker in range(8):
        busy = [draw.gauss(45 if worker == 0 else 19 if worker < 4 else 30, 0.5) for _ in range(44)]
        stage = f"s{worker // 4}"
        series.append(Series(f"d{worker}", [46.0 + draw.random()] * 44, range(44), "worker", stage, busy=busy))
    assert slow_measures(series) == [("d0", "busy")]


def test_shared_index_with_gaps_is_compared() -> None:
    """The trace has only short periods of the job's steps."""
    series = gang(16, busy=[2.0] + [1.0] * 15, groups=STAGES, samples=44)
    index = [step if step < 5 else 900 + step if step < 40 else 50_000 + step for step in range(44)]
    found = compare_with_peers([replace(entry, index=index) for entry in series])
    assert ([entry.series for entry in found.slow], found.compared_count) == (["0"], 16)


def test_different_levels_without_groups_are_not_slow() -> None:
    assert slow_measures(gang(16, busy=[1.0] * 4 + [1.8] * 4 + [3.2] * 4 + [0.6] * 4)) == []
    assert slow_measures(gang(8, busy=[1.0, 1.5, 2.4, 4.0, 6.1, 9.3, 14.0, 21.0])) == []


def test_slightly_slower_rank_without_groups_is_not_slow() -> None:
    assert slow_measures(gang(8, busy=[1.3] + [1.0] * 7)) == []


def test_half_of_group_is_not_slow() -> None:
    assert slow_measures(gang(16, busy=[1.0, 1.0, 1.5, 1.5] * 4, groups=STAGES)) == []


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    "busy", [[1.0, 1.0, 2.0, 2.0], [1.0] * 4 + [2.0] * 4, [1.00, 1.15, 1.30, 1.45], [0.5, 0.5, 0.5, 0.25]]
)
def test_scattered_group_without_outlier_is_not_compared(busy: list[float], grouped: bool) -> None:
    series = gang(len(busy), busy=busy, groups=dict.fromkeys(range(len(busy)), "s0") if grouped else None)
    found = compare_with_peers(series)
    assert (found.slow, found.compared_count, list(found.skipped.values())) == ((), 0, [len(busy)])
    judgement = diagnose(series)
    assert (judgement.suspects, len(judgement.notes)) == ((), 1)
    out = report.format_text(report.build_document(["job.csv"], series, judgement), Page(100))
    assert "nothing became slow" in out
    assert ("group s0" in out) == grouped


def test_scattered_groups_give_one_reason_and_others_are_compared() -> None:
    found = compare_with_peers(gang(16, busy=[1.0] * 8 + [1.0, 1.0, 1.5, 1.5] + [1.0, 1.0, 2.0, 2.0], groups=STAGES))
    assert (found.slow, found.compared_count) == ((), 8)
    ((reason, number),) = found.skipped.items()
    assert ("group s3" in reason, number) == (True, 8)


def test_workers_without_group_are_not_compared_and_noted() -> None:
    found = diagnose(workers([1.0, 1.0, 1.0, 2.5], {}))
    assert (found.slow_throughout, found.compared_count, len(found.notes)) == ((), 0, 1)


def test_whole_iterations_of_waiting_ranks_are_not_compared() -> None:
    found = compare_with_peers(values_only(gang(16, busy=[2.0] + [1.0] * 15, groups=STAGES)))
    assert (found.slow, found.compared_count, sum(found.skipped.values())) == ((), 0, 16)


def test_group_of_three_is_not_compared() -> None:
    groups = {rank: f"s{rank // 3}" for rank in range(6)}
    found = compare_with_peers(gang(6, busy=[2.0] + [1.0] * 5, groups=groups))
    assert (found.slow, found.compared_count, sum(found.skipped.values())) == ((), 0, 6)


def test_short_series_are_not_compared() -> None:
    assert compare_with_peers(gang(4, busy=[2.0, 1.0, 1.0, 1.0], samples=19)).compared_count == 0


def test_later_slowness_is_not_slow_throughout() -> None:
    series = gang(16, groups=STAGES)
    late = [item * (1 if at < 60 else 2) for at, item in enumerate(series[0].busy or ())]
    changed = replace(series[0], busy=late, wait=None)
    assert slow_measures([changed, *(replace(item, wait=None) for item in series[1:])]) == []


def test_different_regimes_are_not_compared() -> None:
    series = gang(16, busy=[2.0] + [1.0] * 15, groups=STAGES)
    with_regimes = [replace(entry, regimes=["64" if at == 0 else "32"] * 300) for at, entry in enumerate(series)]
    found = compare_with_peers(with_regimes)
    assert (found.slow, found.compared_count, sum(found.skipped.values())) == ((), 12, 4)


def test_ranks_without_common_time_are_not_compared() -> None:
    series = gang(4, busy=[2.0, 1.0, 1.0, 1.0])
    later = [replace(entry, index=range(1000 * at, 1000 * at + 300)) for at, entry in enumerate(series)]
    assert compare_with_peers(later).compared_count == 0


@given(seed=st.integers(0, 10_000), ranks=st.sampled_from([4, 8, 16]), grouped=st.booleans())
@settings(deadline=None, max_examples=25)
def test_healthy_gang_has_nothing_slow_in_any_order(seed: int, ranks: int, grouped: bool) -> None:
    series = gang(ranks, cv=0.05, seed=seed, samples=60, groups=STAGES if grouped else None)
    random.Random(seed).shuffle(series)
    found = compare_with_peers(series)
    assert found.slow == ()
    assert found.compared_count + sum(found.skipped.values()) == ranks


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60),
            st.sampled_from(["", "a"]),
            st.booleans(),
            st.integers(0, 100),
        ),
        max_size=6,
    )
)
@settings(deadline=None)
def test_every_long_series_is_compared_or_counted(
    rows: list[tuple[list[float], str, bool, int]],
) -> None:
    series = [
        Series(
            str(at),
            values,
            range(begin, begin + len(values)),
            group=group,
            busy=[entry / 2 for entry in values] if busy else None,
        )
        for at, (values, group, busy, begin) in enumerate(rows)
    ]
    found = compare_with_peers(series)
    assert found.compared_count + sum(found.skipped.values()) == sum(len(entry.value) >= 20 for entry in series)


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12), st.data())
def test_median_without_equals_median_of_others(values: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    expected = statistics.median([*values[:at], *values[at + 1 :]])
    assert _median_without(sorted(values), values[at]) == pytest.approx(expected)
