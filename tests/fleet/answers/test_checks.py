"""Tests of `checks`: first and only checks of incidents, silent checks, and the time from evidence to drain."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import pytest
from fleet_history import history, write_parquet
from fleet_signals import BEGIN, DAY, END, HistoryBuilder, study
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


def checks_of(made, folder, **options):
    with study(made, folder) as opened:
        return checks.checks(opened, **options)


def check_row(answer, check):
    (found,) = [row for row in answer["checks"] if row["check"] == check]
    return found


def sighting(node, check, time, badness=3):
    return checks.Sighting("c1", node, check, time, badness)


def test_incidents_merges_sightings_within_gap():
    sightings = [
        sighting("a", "pcie_aer", 0),
        sighting("a", "gpu_xid", 900),
        sighting("a", "gpu_xid", 1801),
        sighting("b", "mount", 5),
    ]
    found = checks.incidents(sightings, 900)
    assert [(incident.node[1], incident.start_time, incident.end_time, incident.checks) for incident in found] == [
        ("a", 0, 900, ("pcie_aer", "gpu_xid")),
        ("a", 1801, 1801, ("gpu_xid",)),
        ("b", 5, 5, ("mount",)),
    ]


def test_incidents_sorts_equal_times_by_severity_then_name():
    (incident,) = checks.incidents([sighting("a", "b", 1, 2), sighting("a", "z", 1, 3), sighting("a", "a", 1, 2)], 9)
    assert incident.checks == ("z", "a", "b")


SIGHTINGS = st.lists(
    st.builds(
        sighting, st.sampled_from("ab"), st.sampled_from(("x", "y", "z")), st.integers(0, 5000), st.integers(2, 3)
    ),
    max_size=30,
)


@given(SIGHTINGS, st.randoms(), st.integers(1, 2000))
def test_by_check_shares_sum_to_one_in_any_order(sightings, random, gap):
    found = checks.incidents(sightings, gap)
    rows = checks.by_check(found, [], {}, {check: checks.DeployedCheck(check) for check in "xyz"})
    assert sum(row["first"] for row in rows) == len(found)
    assert all(row["alone"] <= row["first"] <= row["incidents"] for row in rows)
    if found:
        assert sum(row["share_first"] for row in rows) == pytest.approx(1)
    assert checks.incidents(random.sample(sightings, len(sightings)), gap) == found


@given(SIGHTINGS, st.integers(1, 2000))
def test_incidents_are_separated_by_gap_and_cover_all_sightings(sightings, gap):
    found = checks.incidents(sightings, gap)
    for incident, next_incident in pairwise(found):
        assert incident.node != next_incident.node or next_incident.start_time > incident.end_time + gap
    for row in sightings:
        assert any(
            incident.node[1] == row.node and incident.start_time <= row.time <= incident.end_time for incident in found
        )


def test_enabled_silent_check_is_listed_as_never(tmp_path):
    made = HistoryBuilder()
    made.alive("ab")
    made.condition("a", "gpu_xid/79", AT)
    made.condition("a", "ib_link/rate_unknown", AT, "warning", "level")
    made.line("a", BEGIN - DAY, "check_enabled", check_name="mount", since_time=BEGIN - 9 * DAY)
    answer = checks_of(made, tmp_path)
    assert answer["never"] == ["mount"]
    assert {row["check"]: row["reported"] for row in answer["checks"]} == {
        "gpu_xid": "failing",
        "ib_link": "warnings",
        "mount": "never",
    }
    assert (check_row(answer, "mount")["since_time"], check_row(answer, "mount")["nodes_running"]) == (
        BEGIN - 9 * DAY,
        2,
    )
    assert "gpu_ecc" in answer["not_deployed"]
    assert "mount" not in answer["not_deployed"]
    assert re.search(r"never .*: mount\.", text_of(answer, Page()))


def test_check_list_of_alive_ignores_forged_text(tmp_path):
    made = HistoryBuilder()
    rest = json.dumps({"conditions": [{"subject": '"checks":["forged"]'}], "checks": ["gpu_xid", "mount"]})
    made.alive("a", rest=rest)
    assert {row["check"] for row in checks_of(made, tmp_path)["checks"]} == {"gpu_xid", "mount"}


def drain_times(made, folder):
    return checks_of(made, folder)["drains"]["all"]


def test_time_to_drain_starts_at_first_open_evidence(tmp_path):
    made = HistoryBuilder()
    made.alive("a")
    made.condition("a", "ib_link/down", AT, "degraded", "level", until=AT + 240)
    made.condition("a", "gpu_xid/79", AT + 100)
    made.outage("a", AT + 300, AT + HOUR)
    answer = checks_of(made, tmp_path)
    (by_whom,) = answer["drains"]["by_whom"]
    (by_check,) = answer["drains"]["by_check"]
    assert (by_whom["by_whom"], by_whom["p50_seconds"], by_whom["p99_seconds"]) == ("healthd", 300, 300)
    assert (by_check["check"], by_check["with_evidence"]) == ("ib_link", 1)
    assert answer["after"] == {"drained": 1, "not_drained": 0, "already_out": 0, "too_recent": 0}


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
def test_irrelevant_condition_is_no_evidence_of_drain(tmp_path, before):
    made = HistoryBuilder()
    made.alive("a", BEGIN - DAY)
    values = {"time": AT - 2 * HOUR, "severity": "critical", **before}
    made.condition("a", "gpu_xid/79", values.pop("time"), values.pop("severity"), **values)
    made.outage("a", AT + 300, AT + HOUR, "person")
    answer = drain_times(made, tmp_path)
    assert (answer["drains"], answer["with_evidence"], answer["nothing_seen"], answer["not_observed"]) == (1, 0, 1, 0)
    assert answer["p50_seconds"] is None


def test_evidence_before_earlier_outage_does_not_count(tmp_path):
    made = HistoryBuilder()
    made.alive("a")
    made.condition("a", "mount/missing", AT, "critical", "level", until=AT + 3 * HOUR)
    made.outage("a", AT + 60, AT + HOUR)
    made.outage("a", AT + 2 * HOUR, AT + 3 * HOUR, "person")
    answer = drain_times(made, tmp_path)
    assert (answer["drains"], answer["with_evidence"], answer["nothing_seen"], answer["p99_seconds"]) == (2, 1, 1, 60)


def test_drain_of_unobserved_node_counts_as_not_observed(tmp_path):
    made = HistoryBuilder()
    made.alive("a")
    made.outage("b", AT, AT + HOUR, "slurm")
    answer = drain_times(made, tmp_path)
    assert (answer["nothing_seen"], answer["not_observed"], answer["share_observed"]) == (0, 1, 0.0)


def test_time_to_command_is_separate_from_time_to_drain(tmp_path):
    made = HistoryBuilder()
    made.alive("a")
    made.condition("a", "gpu_xid/79", AT)
    made.line("a", AT + 20, "drain", stage="sent", reason="healthd: gpu_xid/79")
    made.line("a", AT + 25, "drain", stage="confirmed", reason="healthd: gpu_xid/79")
    answer = drain_times(made, tmp_path)
    assert (answer["sent_p50_seconds"], answer["p50_seconds"]) == (20, 25)


def test_incidents_are_split_by_outcome(tmp_path):
    made = HistoryBuilder()
    made.alive("abcd", BEGIN, END)
    made.condition("a", "gpu_xid/79", AT)
    made.outage("a", AT + 2 * HOUR, AT + 9 * HOUR, "person")
    made.condition("a", "gpu_xid/80", AT + 5 * HOUR)
    made.condition("b", "gpu_xid/79", AT)
    made.condition("c", "gpu_xid/79", END - HOUR)
    assert checks_of(made, tmp_path)["after"] == {"drained": 1, "not_drained": 1, "already_out": 1, "too_recent": 1}


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 100))
def test_nearest_rank_is_smallest_sufficient_value(values, percentile):
    values.sort()
    rank = checks.nearest_rank(values, percentile)
    assert 100 * sum(value <= rank for value in values) >= percentile * len(values)
    assert 100 * sum(value < rank for value in values) < percentile * len(values)


def test_checks_handles_empty_and_quiet_store(tmp_path):
    with pytest.raises(Unanswerable, match="no events"):
        checks_of(HistoryBuilder(), tmp_path / "empty")
    made = HistoryBuilder()
    made.alive("a")
    answer = checks_of(made, tmp_path / "quiet")
    assert (answer["incidents"], answer["drains"]["all"]["drains"], answer["never"]) == (
        0,
        0,
        ["gpu_xid", "ib_link", "mount"],
    )
    assert "No check failed" in text_of(answer, Page())


def test_checks_ignores_order_of_rows(tmp_path):
    for seed in range(3):
        made = history(Random(seed), 30)
        documents = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            with open_study(write_parquet(made, folder, parts=1 + turn, random=Random(turn)), BEGIN, END) as opened:
                documents.append(json.dumps(checks.checks(opened), allow_nan=False))
        assert documents[0] == documents[1]
