"""Tests of `checks`: first and only checks of incidents, silent checks, and the time from evidence to drain."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import pytest
from fleet_history import history, write
from fleet_signals import BEGIN, DAY, END, Made, study
from fleet_views import text_of
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet.answers import checks
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import open_study

pytestmark = pytest.mark.one_python

AT = BEGIN + DAY
HOUR = 3600


def asked(made, folder, **given):
    with study(made, folder) as one:
        return checks.checks(one, **given)


def of(told, check):
    (found,) = [row for row in told["checks"] if row["check"] == check]
    return found


def sight(node, check, time, badness=3):
    return checks.Sighting("c1", node, check, time, badness)


def test_sights_within_the_gap_are_one_incident_and_further_apart_two():
    its = [sight("a", "pcie_aer", 0), sight("a", "gpu_xid", 900), sight("a", "gpu_xid", 1801), sight("b", "mount", 5)]
    found = checks.incidents(its, 900)
    assert [(one.node[1], one.start_time, one.end_time, one.checks) for one in found] == [
        ("a", 0, 900, ("pcie_aer", "gpu_xid")),
        ("a", 1801, 1801, ("gpu_xid",)),
        ("b", 5, 5, ("mount",)),
    ]


def test_of_one_second_the_worse_is_first_then_the_name():
    (one,) = checks.incidents([sight("a", "b", 1, 2), sight("a", "z", 1, 3), sight("a", "a", 1, 2)], 9)
    assert one.checks == ("z", "a", "b")


SIGHTS = st.lists(
    st.builds(sight, st.sampled_from("ab"), st.sampled_from(("x", "y", "z")), st.integers(0, 5000), st.integers(2, 3)),
    max_size=30,
)


@given(SIGHTS, st.randoms(), st.integers(1, 2000))
def test_the_shares_of_being_first_sum_to_one_and_the_order_of_the_rows_says_nothing(its, random, gap):
    found = checks.incidents(its, gap)
    told = checks.by_check(found, [], {}, {check: checks.DeployedCheck(check) for check in "xyz"})
    assert sum(row["first"] for row in told) == len(found)
    assert all(row["alone"] <= row["first"] <= row["incidents"] for row in told)
    if found:
        assert sum(row["share_first"] for row in told) == pytest.approx(1)
    assert checks.incidents(random.sample(its, len(its)), gap) == found


@given(SIGHTS, st.integers(1, 2000))
def test_incidents_of_a_node_lie_further_apart_than_the_gap_and_hold_all_its_sights(its, gap):
    found = checks.incidents(its, gap)
    for one, after in pairwise(found):
        assert one.node != after.node or after.start_time > one.end_time + gap
    for row in its:
        assert any(one.node[1] == row.node and one.start_time <= row.time <= one.end_time for one in found)


def test_a_check_that_is_enabled_and_silent_is_never_and_one_that_only_warned_is_not(tmp_path):
    made = Made()
    made.alive("ab")
    made.seen("a", "gpu_xid/79", AT)
    made.seen("a", "ib_link/rate_unknown", AT, "warning", "level")
    made.line("a", BEGIN - DAY, "check_enabled", check_name="mount", since_time=BEGIN - 9 * DAY)
    told = asked(made, tmp_path)
    assert told["never"] == ["mount"]
    assert {row["check"]: row["reported"] for row in told["checks"]} == {
        "gpu_xid": "failing",
        "ib_link": "warnings",
        "mount": "never",
    }
    assert (of(told, "mount")["since_time"], of(told, "mount")["nodes_running"]) == (BEGIN - 9 * DAY, 2)
    assert "gpu_ecc" in told["not_deployed"]
    assert "mount" not in told["not_deployed"]
    assert "Enabled, but never reported anything: mount." in text_of(told, Page())


def test_the_list_of_alive_is_read_also_beside_texts_that_look_like_it(tmp_path):
    made = Made()
    rest = json.dumps({"conditions": [{"subject": '"checks":["forged"]'}], "checks": ["gpu_xid", "mount"]})
    made.alive("a", rest=rest)
    assert {row["check"] for row in asked(made, tmp_path)["checks"]} == {"gpu_xid", "mount"}


def drained(made, folder):
    return asked(made, folder)["drains"]["all"]


def test_the_time_to_the_drain_begins_with_the_first_sight_of_what_stood_when_it_began(tmp_path):
    made = Made()
    made.alive("a")
    made.seen("a", "ib_link/down", AT, "degraded", "level", until=AT + 240)
    made.seen("a", "gpu_xid/79", AT + 100)
    made.out("a", AT + 300, AT + HOUR)
    told = asked(made, tmp_path)
    (by_whom,) = told["drains"]["by_whom"]
    (by_check,) = told["drains"]["by_check"]
    assert (by_whom["by_whom"], by_whom["p50_seconds"], by_whom["p99_seconds"]) == ("healthd", 300, 300)
    assert (by_check["check"], by_check["with_evidence"]) == ("ib_link", 1)
    assert told["after"] == {"drained": 1, "not_drained": 0, "already_out": 0, "too_recent": 0}


@pytest.mark.parametrize(
    "before",
    [
        {"cleared": AT - HOUR},  # cleared before the drain
        {"time": AT - 3 * DAY},  # not seen in the day before
        {"severity": "warning"},
        {"observed": True},
        {"time": AT + 301},  # after the drain
    ],
)
def test_what_was_over_long_ago_mild_forged_or_later_is_no_evidence(tmp_path, before):
    made = Made()
    made.alive("a", BEGIN - DAY)
    its = {"time": AT - 2 * HOUR, "severity": "critical", **before}
    made.seen("a", "gpu_xid/79", its.pop("time"), its.pop("severity"), **its)
    made.out("a", AT + 300, AT + HOUR, "person")
    told = drained(made, tmp_path)
    assert (told["drains"], told["with_evidence"], told["nothing_seen"], told["not_observed"]) == (1, 0, 1, 0)
    assert told["p50_seconds"] is None


def test_what_stood_before_the_outage_before_is_no_evidence_of_the_next(tmp_path):
    made = Made()
    made.alive("a")
    made.seen("a", "mount/missing", AT, "critical", "level", until=AT + 3 * HOUR)
    made.out("a", AT + 60, AT + HOUR)
    made.out("a", AT + 2 * HOUR, AT + 3 * HOUR, "person")
    told = drained(made, tmp_path)
    assert (told["drains"], told["with_evidence"], told["nothing_seen"], told["p99_seconds"]) == (2, 1, 1, 60)


def test_a_drain_of_a_node_that_nobody_observed_is_not_one_before_which_nothing_was_seen(tmp_path):
    made = Made()
    made.alive("a")
    made.out("b", AT, AT + HOUR, "slurm")
    told = drained(made, tmp_path)
    assert (told["nothing_seen"], told["not_observed"], told["share_observed"]) == (0, 1, 0.0)


def test_the_time_until_the_command_is_told_apart_from_the_drain(tmp_path):
    made = Made()
    made.alive("a")
    made.seen("a", "gpu_xid/79", AT)
    made.line("a", AT + 20, "drain", stage="sent", reason="healthd: gpu_xid/79")
    made.line("a", AT + 25, "drain", stage="confirmed", reason="healthd: gpu_xid/79")
    told = drained(made, tmp_path)
    assert (told["sent_p50_seconds"], told["p50_seconds"]) == (20, 25)


def test_incidents_are_told_by_what_came_after(tmp_path):
    made = Made()
    made.alive("abcd", BEGIN, END)
    made.seen("a", "gpu_xid/79", AT)
    made.out("a", AT + 2 * HOUR, AT + 9 * HOUR, "person")
    made.seen("a", "gpu_xid/80", AT + 5 * HOUR)
    made.seen("b", "gpu_xid/79", AT)
    made.seen("c", "gpu_xid/79", END - HOUR)
    assert asked(made, tmp_path)["after"] == {"drained": 1, "not_drained": 1, "already_out": 1, "too_recent": 1}


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_shortest_time_within_which_so_many_were(values, percentile):
    values.sort()
    told = checks.nearest_rank(values, percentile)
    assert 100 * sum(value <= told for value in values) >= percentile * len(values)
    assert 100 * sum(value < told for value in values) < percentile * len(values)


def test_an_empty_store_says_what_to_ingest_and_a_quiet_one_says_so(tmp_path):
    with pytest.raises(Unanswerable, match="no events"):
        asked(Made(), tmp_path / "empty")
    made = Made()
    made.alive("a")
    told = asked(made, tmp_path / "quiet")
    assert (told["incidents"], told["drains"]["all"]["drains"], told["never"]) == (
        0,
        0,
        ["gpu_xid", "ib_link", "mount"],
    )
    assert "No check failed in this period." in text_of(told, Page())


def test_the_answer_is_the_same_whatever_the_order_of_the_rows(tmp_path):
    for seed in range(3):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            with open_study(write(made, folder, parts=1 + turn, random=Random(turn)), BEGIN, END) as one:
                documents.append(json.dumps(checks.checks(one), allow_nan=False))
        assert documents[0] == documents[1]
