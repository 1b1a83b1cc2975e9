"""Tests of `alarms`: completed jobs that saw a failing check, and the confidence interval of their share."""

from __future__ import annotations

import json
from random import Random

import pytest
from fleet_history import history, write
from fleet_signals import BEGIN, DAY, END, Made, study
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


def asked(made, folder, chosen=None, **given):
    with study(made, folder, chosen) as one:
        return alarms.alarms(one, **given)


def jobs_of(told):
    return {row["check"]: row["jobs"] for row in told["checks"] if row["jobs"]}


@pytest.mark.parametrize("moment", [AT, AT + 1, AT + HOUR - 1, AT + HOUR])
def test_what_begins_while_a_completed_job_runs_is_seen_by_it_also_at_its_first_and_last_second(tmp_path, moment):
    made = Made()
    made.job("ab", AT, AT + HOUR)
    made.seen("b", "gpu_xid/79", moment)
    told = asked(made, tmp_path)
    assert (told["completed_jobs"], told["jobs"], told["share"], jobs_of(told)) == (1, 1, 1.0, {"gpu_xid": 1})


@pytest.mark.parametrize("moment", [AT - 1, AT + HOUR + 1])
def test_what_begins_before_or_after_the_job_is_not_seen(tmp_path, moment):
    made = Made()
    made.job("a", AT, AT + HOUR)
    made.seen("a", "gpu_xid/79", moment)
    assert asked(made, tmp_path)["jobs"] == 0


def test_a_job_of_many_days_sees_what_begins_on_any_of_them(tmp_path):
    made = Made()
    made.job("a", BEGIN - 5 * DAY, BEGIN + 3 * DAY)
    for day in range(-4, 3):
        made.seen("a", f"gpu_xid/{70 + day}", BEGIN + day * DAY + 7)
    told = asked(made, tmp_path)
    assert told["jobs"] == 1
    assert len(told["checks"][0]["codes"]) == 7


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "CANCELLED"])
def test_only_completed_jobs_count(tmp_path, state):
    made = Made()
    made.job("a", AT, AT + HOUR, state)
    made.seen("a", "gpu_xid/79", AT + 1)
    told = asked(made, tmp_path)
    assert (told["completed_jobs"], told["jobs"], told["share"], told["interval"]) == (0, 0, None, None)


def test_what_a_user_can_forge_and_what_is_history_are_no_alarm(tmp_path):
    made = Made()
    made.job("a", AT, AT + HOUR)
    made.seen("a", "gpu_xid/79", AT + 1, observed=True)
    made.seen("a", "gpu_xid/80", AT + 1, history=True)
    made.seen("a", "mount/missing", AT - HOUR, kind="level", until=AT + 1, observed=True)
    told = asked(made, tmp_path)
    assert (told["jobs"], told["already_open_jobs"], told["checks"]) == (0, 0, [])


def test_a_level_that_stood_already_is_counted_apart_and_a_warning_too(tmp_path):
    made = Made()
    made.job("a", AT, AT + HOUR)
    made.seen("a", "mount/missing", AT - HOUR, kind="level", until=AT + 60)
    made.job("b", AT, AT + HOUR)
    made.seen("b", "gpu_xid/13", AT + 5, "warning")
    made.job("c", AT, AT + HOUR)
    made.seen("c", "mount/missing", AT - HOUR, kind="level", until=AT - 60)
    told = asked(made, tmp_path)
    assert (told["jobs"], told["already_open_jobs"], told["warned_jobs"]) == (0, 1, 1)
    assert [(row["check"], row["jobs"], row["already_open_jobs"], row["warned_jobs"]) for row in told["checks"]] == [
        ("mount", 0, 1, 0),
        ("gpu_xid", 0, 0, 1),
    ]


def test_a_job_that_saw_two_codes_of_a_check_is_one_job_of_the_check_and_of_all(tmp_path):
    made = Made()
    made.job("a", AT, AT + HOUR)
    for code in ("gpu_xid/79", "gpu_xid/119", "pcie_aer/fatal"):
        made.seen("a", code, AT + 9)
    told = asked(made, tmp_path)
    assert told["jobs"] == 1
    assert jobs_of(told) == {"gpu_xid": 1, "pcie_aer": 1}
    assert {code["code"]: code["jobs"] for code in told["checks"][0]["codes"]} == {"gpu_xid/119": 1, "gpu_xid/79": 1}


def test_a_check_above_the_limit_is_found_and_one_at_it_is_not(tmp_path):
    made = Made()
    for number in range(100):
        made.job("a" if number == 0 else "b", AT, AT + HOUR)
    made.seen("a", "gpu_xid/79", AT + 9)
    told = asked(made, tmp_path / "one")
    assert (told["share"], alarms.has_findings(told)) == (0.01, False)
    told = asked(made, tmp_path / "two", limit=0.0099)
    assert (told["checks"][0]["above"], told["checks"][0]["significantly_above"], alarms.has_findings(told)) == (
        True,
        False,
        True,
    )
    assert "Above 1.0 %: gpu_xid (1.0 %, not significantly)." in text_of(told, Page())


def test_jobs_that_one_condition_met_are_one_clump_and_make_the_interval_wider(tmp_path):
    together, apart = Made(), Made()
    for number in range(200):
        together.job("a" if number < 8 else "z", AT, AT + HOUR)
        apart.job(f"{'abcdefgh'[number]}" if number < 8 else "z", AT, AT + HOUR)
    together.seen("a", "ib_link/down", AT + 9)
    for node in "abcdefgh":
        apart.seen(node, "ib_link/down", AT + 9)
    wide, narrow = asked(together, tmp_path / "a"), asked(apart, tmp_path / "b")
    assert (wide["jobs"], wide["alarms"], narrow["jobs"], narrow["alarms"]) == (8, 1, 8, 8)
    assert wide["interval"][0] < narrow["interval"][0] < 0.04 < narrow["interval"][1] < wide["interval"][1]
    assert narrow["interval"] == pytest.approx(list(wilson(8, 200)))


def test_a_job_without_nodes_is_named_and_a_choice_of_jobs_leaves_the_others_out(tmp_path):
    made = Made()
    made.job("", AT, AT + HOUR)
    made.job("a", AT, AT + HOUR, account="speech")
    made.job("a", AT, AT + HOUR, account="vision")
    made.seen("a", "gpu_xid/79", AT + 9)
    told = asked(made, tmp_path / "all")
    assert (told["completed_jobs"], told["placed_jobs"], told["jobs"]) == (3, 2, 2)
    assert "1 completed jobs are left out: their nodes are not known." in told["notes"]
    assert asked(made, tmp_path / "one", Choice(account="vision"))["jobs"] == 1


def test_a_job_that_ends_before_it_starts_sees_nothing(tmp_path):
    made = Made()
    made.job("a", AT + HOUR, AT)
    made.seen("a", "gpu_xid/79", AT + 9)
    assert asked(made, tmp_path)["jobs"] == 0


def test_a_job_whose_nodes_nobody_observed_is_left_out_of_the_second_share(tmp_path):
    made = Made()
    made.alive("a", BEGIN - DAY, END + DAY)
    made.job("a", AT, AT + HOUR)
    made.job("b", AT, AT + HOUR)
    made.seen("a", "gpu_xid/79", AT + 9)
    told = asked(made, tmp_path)
    assert (told["share"], told["observed"]) == (0.5, {"jobs": 1, "alarmed": 1, "share": 1.0})


def test_a_store_without_events_or_without_jobs_says_what_to_ingest(tmp_path):
    made = Made()
    made.job("a", AT, AT + HOUR)
    with pytest.raises(Unanswerable, match="no events: healthd fleet ingest --events"):
        asked(made, tmp_path / "jobs")
    with pytest.raises(Unanswerable, match="the store has no jobs"):
        asked(Made(), tmp_path / "empty")


def test_a_store_of_one_event_and_one_job_that_never_ran_has_an_empty_table(tmp_path):
    made = Made()
    made.job("a", None, None, "CANCELLED")
    made.seen("a", "gpu_xid/79", AT)
    told = asked(made, tmp_path)
    assert (told["completed_jobs"], told["share"], told["checks"], told["by_week"]) == (0, None, [], [])
    assert "No job completed in this period." in text_of(told, Page())


def test_weeks_begin_on_monday_and_part_weeks_have_fewer_days(tmp_path):
    made = Made()
    for day in range(round((END - BEGIN) / DAY)):
        made.job("a", BEGIN + day * DAY, BEGIN + day * DAY + HOUR)
    made.seen("a", "gpu_xid/79", AT)
    weeks = asked(made, tmp_path)["by_week"]
    assert all(row["week_time"] in (week_start(row["week_time"]), BEGIN) for row in weeks)
    for row in weeks:
        week = week_start(row["week_time"])
        assert row["days"] == pytest.approx((min(week + WEEK, END) - max(week, BEGIN)) / DAY)
    assert sum(row["completed"] for row in weeks) == len(made.history["jobs"])


def test_the_chart_by_week_has_whole_weeks_only(tmp_path):
    from healthd.fleet.views.alarms import view

    made = Made()
    made.job("a", AT, AT + HOUR)
    made.seen("a", "gpu_xid/79", AT + 9)
    document = asked(made, tmp_path)
    part = {"days": 3.0, "completed": 5, "jobs": 0, "share": 0.0}
    weeks = [{**part, "week_time": BEGIN + number * WEEK, "days": days} for number, days in enumerate((3, 7, 7, 7, 1))]
    by_week = view({**document, "by_week": weeks}).figures[-1]
    assert by_week.title == "By week"
    (line,) = by_week.layers
    assert len(line.records) == 3
    assert "By week" not in [figure.title for figure in view({**document, "by_week": weeks[:2]}).figures]


def test_the_answer_is_the_same_whatever_the_order_of_the_rows(tmp_path):
    for seed in range(3):
        made = history(Random(seed), 30)
        made["events"].append(dict(made["events"][0], seq=10_000) if made["events"] else {})
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            files = write(made, folder, parts=1 + turn, random=Random(turn))
            with open_study(files, BEGIN, END) as one:
                documents.append(json.dumps(alarms.alarms(one), allow_nan=False))
        assert documents[0] == documents[1]
        told = json.loads(documents[0])
        assert all(0 <= row["jobs"] <= told["placed_jobs"] for row in told["checks"])
        assert sum(row["completed"] for row in told["by_week"]) == told["completed_jobs"]
        assert max((row["jobs"] for row in told["checks"]), default=0) <= told["jobs"]


@given(st.integers(0, 500), st.integers(1, 500), st.floats(1, 100))
def test_wilsons_interval_holds_the_share_and_grows_with_the_clumping(found, more, effect):
    low, high = wilson(found, found + more, 1.0)
    assert 0 <= low <= found / (found + more) <= high <= 1
    wide = wilson(found, found + more, effect)
    assert wide[0] <= low + 1e-12
    assert wide[1] >= high - 1e-12


def test_wilsons_interval_is_that_of_the_books():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for found, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(found, of) == pytest.approx((low, high), abs=6e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=6e-5)
    assert wilson(0, 0) is None
    assert (design_effect(0, 0), design_effect(8, 8), design_effect(8, 64)) == (1.0, 1.0, 8.0)
