"""Tests of `alarms`: completed jobs that saw a failing check, and the confidence interval of their share."""

from __future__ import annotations

import json
from random import Random

import pytest
from fleet_history import history, write_parquet
from fleet_signals import BEGIN, DAY, END, HistoryBuilder, study
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers import alarms
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import Choice, open_study
from healthd.fleet.statistics.weeks import WEEK, week_start
from healthd.fleet.statistics.wilson import design_effect, wilson

pytestmark = pytest.mark.one_python

AT = BEGIN + DAY
HOUR = 3600


def alarms_of(made, folder, chosen=None, **options):
    with study(made, folder, chosen) as opened:
        return alarms.alarms(opened, **options)


def jobs_by_check(answer):
    return {row["check"]: row["jobs"] for row in answer["checks"] if row["jobs"]}


@pytest.mark.parametrize("moment", [AT, AT + 1, AT + HOUR - 1, AT + HOUR])
def test_job_counts_condition_opened_during_its_run(tmp_path, moment):
    made = HistoryBuilder()
    made.job("ab", AT, AT + HOUR)
    made.condition("b", "gpu_xid/79", moment)
    answer = alarms_of(made, tmp_path)
    assert (answer["completed_jobs"], answer["jobs"], answer["share"], jobs_by_check(answer)) == (
        1,
        1,
        1.0,
        {"gpu_xid": 1},
    )


@pytest.mark.parametrize("moment", [AT - 1, AT + HOUR + 1])
def test_job_ignores_condition_before_or_after_it(tmp_path, moment):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    made.condition("a", "gpu_xid/79", moment)
    assert alarms_of(made, tmp_path)["jobs"] == 0


def test_long_job_counts_conditions_of_each_day(tmp_path):
    made = HistoryBuilder()
    made.job("a", BEGIN - 5 * DAY, BEGIN + 3 * DAY)
    for day in range(-4, 3):
        made.condition("a", f"gpu_xid/{70 + day}", BEGIN + day * DAY + 7)
    answer = alarms_of(made, tmp_path)
    assert answer["jobs"] == 1
    assert len(answer["checks"][0]["codes"]) == 7


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "CANCELLED"])
def test_only_completed_jobs_count(tmp_path, state):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR, state)
    made.condition("a", "gpu_xid/79", AT + 1)
    answer = alarms_of(made, tmp_path)
    assert (answer["completed_jobs"], answer["jobs"], answer["share"], answer["interval"]) == (0, 0, None, None)


def test_observed_and_history_conditions_do_not_count(tmp_path):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    made.condition("a", "gpu_xid/79", AT + 1, observed=True)
    made.condition("a", "gpu_xid/80", AT + 1, history=True)
    made.condition("a", "mount/missing", AT - HOUR, kind="level", until=AT + 1, observed=True)
    answer = alarms_of(made, tmp_path)
    assert (answer["jobs"], answer["already_open_jobs"], answer["checks"]) == (0, 0, [])


def test_open_level_and_warning_are_counted_separately(tmp_path):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    made.condition("a", "mount/missing", AT - HOUR, kind="level", until=AT + 60)
    made.job("b", AT, AT + HOUR)
    made.condition("b", "gpu_xid/13", AT + 5, "warning")
    made.job("c", AT, AT + HOUR)
    made.condition("c", "mount/missing", AT - HOUR, kind="level", until=AT - 60)
    answer = alarms_of(made, tmp_path)
    assert (answer["jobs"], answer["already_open_jobs"], answer["warned_jobs"]) == (0, 1, 1)
    assert [(row["check"], row["jobs"], row["already_open_jobs"], row["warned_jobs"]) for row in answer["checks"]] == [
        ("mount", 0, 1, 0),
        ("gpu_xid", 0, 0, 1),
    ]


def test_job_with_two_codes_of_check_counts_once(tmp_path):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    for code in ("gpu_xid/79", "gpu_xid/119", "pcie_aer/fatal"):
        made.condition("a", code, AT + 9)
    answer = alarms_of(made, tmp_path)
    assert answer["jobs"] == 1
    assert jobs_by_check(answer) == {"gpu_xid": 1, "pcie_aer": 1}
    assert {code["code"]: code["jobs"] for code in answer["checks"][0]["codes"]} == {"gpu_xid/119": 1, "gpu_xid/79": 1}


def test_has_findings_only_above_limit(tmp_path):
    made = HistoryBuilder()
    for number in range(100):
        made.job("a" if number == 0 else "b", AT, AT + HOUR)
    made.condition("a", "gpu_xid/79", AT + 9)
    answer = alarms_of(made, tmp_path / "one")
    assert (answer["share"], alarms.has_findings(answer)) == (0.01, False)
    answer = alarms_of(made, tmp_path / "two", limit=0.0099)
    assert (answer["checks"][0]["above"], answer["checks"][0]["significantly_above"], alarms.has_findings(answer)) == (
        True,
        False,
        True,
    )
    assert "gpu_xid (1.0 %, not significantly)" in text_of(answer, Page())


def test_jobs_hit_by_one_condition_widen_interval(tmp_path):
    together, apart = HistoryBuilder(), HistoryBuilder()
    for number in range(200):
        together.job("a" if number < 8 else "z", AT, AT + HOUR)
        apart.job(f"{'abcdefgh'[number]}" if number < 8 else "z", AT, AT + HOUR)
    together.condition("a", "ib_link/down", AT + 9)
    for node in "abcdefgh":
        apart.condition(node, "ib_link/down", AT + 9)
    wide, narrow = alarms_of(together, tmp_path / "a"), alarms_of(apart, tmp_path / "b")
    assert (wide["jobs"], wide["alarms"], narrow["jobs"], narrow["alarms"]) == (8, 1, 8, 8)
    assert wide["interval"][0] < narrow["interval"][0] < 0.04 < narrow["interval"][1] < wide["interval"][1]
    assert narrow["interval"] == pytest.approx(list(wilson(8, 200)))


def test_alarms_leaves_out_unplaced_and_unchosen_jobs(tmp_path):
    made = HistoryBuilder()
    made.job("", AT, AT + HOUR)
    made.job("a", AT, AT + HOUR, account="speech")
    made.job("a", AT, AT + HOUR, account="vision")
    made.condition("a", "gpu_xid/79", AT + 9)
    answer = alarms_of(made, tmp_path / "all")
    assert (answer["completed_jobs"], answer["placed_jobs"], answer["jobs"]) == (3, 2, 2)
    assert any(note.startswith("1 completed jobs ") for note in answer["notes"])
    assert alarms_of(made, tmp_path / "one", Choice(account="vision"))["jobs"] == 1


def test_job_with_end_before_start_counts_nothing(tmp_path):
    made = HistoryBuilder()
    made.job("a", AT + HOUR, AT)
    made.condition("a", "gpu_xid/79", AT + 9)
    assert alarms_of(made, tmp_path)["jobs"] == 0


def test_unobserved_job_is_left_out_of_observed_share(tmp_path):
    made = HistoryBuilder()
    made.alive("a", BEGIN - DAY, END + DAY)
    made.job("a", AT, AT + HOUR)
    made.job("b", AT, AT + HOUR)
    made.condition("a", "gpu_xid/79", AT + 9)
    answer = alarms_of(made, tmp_path)
    assert (answer["share"], answer["observed"]) == (0.5, {"jobs": 1, "alarmed": 1, "share": 1.0})


def test_alarms_names_missing_events_or_jobs(tmp_path):
    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    with pytest.raises(Unanswerable, match="no events: healthd fleet ingest --events"):
        alarms_of(made, tmp_path / "jobs")
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        alarms_of(HistoryBuilder(), tmp_path / "empty")


def test_alarms_handles_job_without_run(tmp_path):
    made = HistoryBuilder()
    made.job("a", None, None, "CANCELLED")
    made.condition("a", "gpu_xid/79", AT)
    answer = alarms_of(made, tmp_path)
    assert (answer["completed_jobs"], answer["share"], answer["checks"], answer["by_week"]) == (0, None, [], [])
    assert "No job completed" in text_of(answer, Page())


def test_weeks_begin_on_monday_and_are_cut_at_period(tmp_path):
    made = HistoryBuilder()
    for day in range(round((END - BEGIN) / DAY)):
        made.job("a", BEGIN + day * DAY, BEGIN + day * DAY + HOUR)
    made.condition("a", "gpu_xid/79", AT)
    weeks = alarms_of(made, tmp_path)["by_week"]
    assert all(row["week_time"] in (week_start(row["week_time"]), BEGIN) for row in weeks)
    for row in weeks:
        week = week_start(row["week_time"])
        assert row["days"] == pytest.approx((min(week + WEEK, END) - max(week, BEGIN)) / DAY)
    assert sum(row["completed"] for row in weeks) == len(made.history["jobs"])


def test_chart_by_week_has_only_whole_weeks(tmp_path):
    from healthd.fleet.views.alarms import view

    made = HistoryBuilder()
    made.job("a", AT, AT + HOUR)
    made.condition("a", "gpu_xid/79", AT + 9)
    document = alarms_of(made, tmp_path)
    part = {"days": 3.0, "completed": 5, "jobs": 0, "share": 0.0}
    weeks = [{**part, "week_time": BEGIN + number * WEEK, "days": days} for number, days in enumerate((3, 7, 7, 7, 1))]
    by_week = view({**document, "by_week": weeks}).figures[-1]
    assert by_week.title == "By week"
    (line,) = by_week.layers
    assert len(line.records) == 3
    assert "By week" not in [figure.title for figure in view({**document, "by_week": weeks[:2]}).figures]


def test_alarms_ignores_order_of_rows(tmp_path):
    for seed in range(3):
        made = history(Random(seed), 30)
        made["events"].append(dict(made["events"][0], seq=10_000) if made["events"] else {})
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            files = write_parquet(made, folder, parts=1 + turn, random=Random(turn))
            with open_study(files, BEGIN, END) as opened:
                documents.append(json.dumps(alarms.alarms(opened), allow_nan=False))
        assert documents[0] == documents[1]
        answer = json.loads(documents[0])
        assert all(0 <= row["jobs"] <= answer["placed_jobs"] for row in answer["checks"])
        assert sum(row["completed"] for row in answer["by_week"]) == answer["completed_jobs"]
        assert max((row["jobs"] for row in answer["checks"]), default=0) <= answer["jobs"]


@given(st.integers(0, 500), st.integers(1, 500), st.floats(1, 100))
def test_wilson_contains_share_and_widens_with_design_effect(found, more, effect):
    low, high = wilson(found, found + more, 1.0)
    assert 0 <= low <= found / (found + more) <= high <= 1
    wide = wilson(found, found + more, effect)
    assert wide[0] <= low + 1e-12
    assert wide[1] >= high - 1e-12


def test_wilson_matches_published_values():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for found, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(found, total) == pytest.approx((low, high), abs=6e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=6e-5)
    assert wilson(0, 0) is None
    assert (design_effect(0, 0), design_effect(8, 8), design_effect(8, 64)) == (1.0, 1.0, 8.0)
