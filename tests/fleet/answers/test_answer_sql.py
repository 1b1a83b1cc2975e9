"""Tests of each answer query with small hand-written tables."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tiny_tables import run_query

from healthd.fleet import lint, queries
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.answers import (
        alarms,
        availability,
        checks,
        evidence,
        failslow,
        goodput,
        rate,
        repairs,
        states,
    )
    from healthd.fleet.answers.study import STUDY_TABLES
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

QUERIES = {name: entry for name, entry in queries.answer_queries().items() if name not in queries.builtin_queries()}
TEST = re.compile(r"^def test_query_of_(.+?)(?:__\w+)?\(", re.MULTILINE)
NODE = {"cluster": "c", "node": "n1"}
JOB = {"cluster": "c", "db_index": 1}


def row_type(names: str) -> Any:
    """Return a row class with these columns, which are separated by blanks."""
    return namedtuple("Found", names)


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_query_is_valid_in_both_engines(name: str) -> None:
    known = {*TABLES, "parameters", "numbers", *STUDY_TABLES, *queries.answer_queries()}
    assert lint.find_errors(QUERIES[name].sql, known) == []
    assert QUERIES[name].title


def test_every_query_has_test() -> None:
    files = Path(__file__).parent.glob("test_*_sql.py")
    tested = {name for file in files for name in TEST.findall(file.read_text("utf-8"))}
    assert set(QUERIES) - tested == {"seen_by_chance"}, "test_study.py tests seen_by_chance"


# --- hardware ends


ENDS = row_type("cluster db_index job_id end_time ended node")
SEEN = {**JOB, "code": "gpu_xid/79", "severity": "critical", "state": "FAILED", "first_seen": 95, "node": "n1"}
CODES = [{"code": "gpu_xid/79", "of_node": True}, {"code": "gpu_xid/13", "of_node": False}]
LINE = {**NODE, "stream_id": "s", "seq": 1, "time": 100, "event": "requeue"}
EVENT = {"node": "n1", "stream_id": "s", "seq": 1, "stage": "confirmed", "rest": '{"job":"7"}'}


def ends(state: str, seen: dict[str, Any] = SEEN, rest: str = '{"job":"7"}', **job: Any) -> list[Any]:
    job_row = {**JOB, "job_id": 7, "state": state, "end_time": 110, **job}
    event = {**EVENT, "rest": rest}
    return run_query(
        *("hardware_ends", ENDS),
        jobs=[job_row],
        seen_with_failures=[{**seen, "state": state}],
        codes=CODES,
        lines=[LINE],
        events=[event],
    )


def test_query_of_hardware_ends__node_fail_counts_without_condition() -> None:
    assert ends("NODE_FAIL") == [("c", 1, 7, 110, "node_fail", "n1")]
    assert ends("NODE_FAIL", {**SEEN, "db_index": 2}) == [("c", 1, 7, 110, "node_fail", None)]
    assert ends("NODE_FAIL", {**SEEN, "severity": "degraded"}) == [("c", 1, 7, 110, "node_fail", None)]


@pytest.mark.parametrize(
    ("seen", "counts"),
    [
        ({}, True),
        ({"severity": "degraded"}, True),
        ({"severity": "warning"}, False),
        ({"code": "gpu_xid/13"}, False),
        ({"code": "of_a_site/bad"}, True),
        ({"db_index": 2}, False),
    ],
)
def test_query_of_hardware_ends__failed_counts_with_node_fault(seen: dict[str, Any], counts: bool) -> None:
    assert ends("FAILED", {**SEEN, **seen}) == [("c", 1, 7, 110, "failed", "n1")] * counts


@pytest.mark.parametrize(
    ("rest", "job", "counts"),
    [
        ('{"job":"7"}', {}, True),
        ('{"job":"7","why":1}', {"end_time": 221}, False),
        ('{"job":"8"}', {}, False),
        ('{"job":"70"}', {}, False),
        ('{"job":"5_2"}', {"array_job_id": 5, "array_task_id": 2}, True),
        ('{"job":"5_2"}', {"array_job_id": 5, "array_task_id": 3}, False),
        ('{"job":"7_2"}', {}, False),
    ],
)
def test_query_of_hardware_ends__requeued_counts_if_healthd_named_job(
    rest: str, job: dict[str, Any], counts: bool
) -> None:
    assert ends("REQUEUED", rest=rest, **job) == [("c", 1, 7, job.get("end_time", 110), "requeued", "n1")] * counts


def test_query_of_hardware_ends__other_states_and_times_do_not_count() -> None:
    assert ends("COMPLETED") == []
    assert ends("NODE_FAIL", end_time=1000) == []


def test_query_of_hardware_requeues__is_record_after_hardware_end() -> None:
    attempts = [{"cluster": "c", "db_index": index, "job_id": 7, "submit_time": 10 * index} for index in (1, 2, 3)]
    other = {"cluster": "d", "db_index": 2, "job_id": 7, "submit_time": 20}
    found = run_query(
        *("hardware_requeues", row_type("cluster db_index job_id")),
        jobs=[*attempts, other],
        hardware_ends=[{**JOB, "job_id": 7}],
    )
    assert found == [("c", 2, 7)]


# --- goodput


LOST = {"start_time": 0, "end_time": 1000, "gpus": 8, "gpus_up_to": 8}


@pytest.mark.parametrize(
    ("job", "gpu_seconds"),
    [({}, 4000.0), ({"end_time": 300}, 2400.0), ({"start_time": 2000}, 0.0), ({"gpus": None, "gpus_up_to": None}, 0.0)],
)
def test_query_of_goodput_ended_jobs__caps_loss(job: dict[str, Any], gpu_seconds: float) -> None:
    job_row = {**JOB, **LOST, **job}
    (found,) = run_query(
        *("goodput_ended_jobs", goodput.EndedJob, {"at_most_seconds": 500.0}),
        hardware_ends=[{**JOB, "job_id": 7, "ended": "failed", "node": "n1", "end_time": 1000}],
        chosen_jobs=[job_row],
    )
    assert found == (
        "c",
        7,
        "failed",
        "n1",
        job_row["gpus"],
        job_row["end_time"],
        job_row["gpus_up_to"],
        1,
        gpu_seconds,
    )


def test_query_of_goodput_preempted_jobs__sums_by_requeue_and_method() -> None:
    victims = [{"cluster": "c", "db_index": index, **LOST} for index in (1, 2, 3)]
    preempted = [
        {"cluster": "c", "db_index": index, "state": "PREEMPTED", "how": "logged", "preemptor_db_index": by}
        for index, by in ((1, 9), (2, 9), (3, 8))
    ]
    found = run_query(
        *("goodput_preempted_jobs", goodput.PreemptedJobs, {"at_most_seconds": 10.0}),
        preempted=[*preempted, {**preempted[0], "state": "CANCELLED"}],
        chosen_jobs=victims,
        hardware_requeues=[{"cluster": "c", "db_index": 9, "job_id": 70}],
    )
    assert found == [("logged", None, "c", 8, 1, 80.0, 8), ("logged", 70, "c", 8, 2, 160.0, 16)]


# --- states


def test_query_of_states_ended__sums_runtime_and_lost_work() -> None:
    jobs = [
        {**JOB, "state": "FAILED", "start_time": 0, "end_time": 999, "gpus": 512, "gpus_up_to": 512},
        {
            "cluster": "c",
            "db_index": 2,
            "state": "COMPLETED",
            "start_time": 900,
            "end_time": 999,
            "gpus": 8,
            "gpus_up_to": 8,
        },
        {
            "cluster": "c",
            "db_index": 3,
            "state": "PREEMPTED",
            "start_time": 900,
            "end_time": 999,
            "gpus": 8,
            "gpus_up_to": 8,
        },
        {
            "cluster": "c",
            "db_index": 4,
            "state": "FAILED",
            "start_time": 0,
            "end_time": 1000,
            "gpus": 8,
            "gpus_up_to": 8,
        },
    ]
    found = run_query("states_ended", states.EndedJobs, chosen_jobs=jobs, hardware_ends=[{**JOB, "ended": "failed"}])
    assert found == [
        ("COMPLETED", 8, None, 1, 792, 99, 0, 0, 0),
        ("FAILED", 512, "failed", 1, 512 * 999, 999, 512 * 999, 1, 512 * 999),
        ("PREEMPTED", 8, None, 1, 792, 99, 792, 0, 0),
    ]


def test_query_of_states_outcomes__splits_large_jobs_by_time() -> None:
    jobs = [
        {"cluster": "c", "db_index": index, "state": state, "start_time": 0, "end_time": end, "gpus": gpus}
        for index, state, end, gpus in (
            *((1, "FAILED", 99, 8), (2, "COMPLETED", 100, 8), (3, "COMPLETED", 101, 8), (4, "COMPLETED", 101, 7)),
        )
    ]
    ended = [{**JOB, "ended": "failed"}]
    parameters = {"split": 100, "large": 8}
    found = run_query("states_outcomes", states.Outcome, parameters, chosen_jobs=jobs, hardware_ends=ended)
    assert found == [(False, "FAILED", True, 1), (True, "COMPLETED", False, 2)]


def test_query_of_states_read_periods__covers_job_sources_only() -> None:
    rows = [
        {"cluster": "c", "source": source, "from_time": begin, "to_time": 9}
        for source, begin in (("sacct", 5), ("events", 1), ("jobs_file", 2), ("sacct", None))
    ]
    assert run_query("states_read_periods", states.ReadPeriod, sources_coverage=rows) == [("c", 2, 9), ("c", 5, 9)]


def test_query_of_states_nodes__counts_nodes_without_gpus() -> None:
    nodes = [{"cluster": "c", "gpus": 8}, {"cluster": "c", "gpus": None}, {"cluster": "c", "gpus": 4}]
    assert run_query("states_nodes", states.ClusterGpus, chosen_nodes=nodes) == [("c", 12, 2, 1)]


@pytest.mark.parametrize(("alone", "gpu_seconds"), [(0, 8.0 * 50 + 4.0 * 40), (1, 8.0 * 50)])
def test_query_of_states_used_gpu_time__covers_known_times_and_gpu_nodes(alone: int, gpu_seconds: float) -> None:
    found = run_query(
        *("states_used_gpu_time", states.GpuTime, {"chosen_alone": alone}),
        job_nodes=[
            {**NODE, "db_index": 1, "start_time": 0, "end_time": 100, "gpus": 8.0},
            {**NODE, "db_index": 2, "start_time": 60, "end_time": None, "gpus": 4.0},
            {"cluster": "c", "node": "n2", "db_index": 1, "start_time": 0, "end_time": 100, "gpus": 8.0},
        ],
        known_times=[{"cluster": "c", "begin_time": 50, "end_time": 200}],
        jobs_known=[{"cluster": "c", "known_until": 100}],
        chosen_nodes=[{**NODE, "gpus": 8}, {"cluster": "c", "node": "n2", "gpus": None}],
        chosen_jobs=[JOB],
    )
    assert found == [(gpu_seconds,)]


def test_query_of_states_lost_on_nodes__covers_chosen_nodes_with_gpus() -> None:
    found = run_query(
        *("states_lost_on_nodes", states.GpuTime),
        chosen_jobs=[{**JOB, "state": "FAILED", "start_time": 0, "end_time": 900}],
        job_nodes=[
            {**NODE, "db_index": 1, "gpus": 8.0},
            {"cluster": "c", "node": "n2", "db_index": 1, "gpus": 8.0},
        ],
        chosen_nodes=[{**NODE, "gpus": 8}],
        hardware_ends=[{**JOB, "ended": "failed"}],
    )
    assert found == [(7200.0,)]


# --- evidence


SIGHTING = {
    **NODE,
    "check_name": None,
    "code": "mount/missing",
    "subject": "/a",
    "kind": "level",
    "what": "onset",
    "time": 5,
    "origin": "events",
    "severity": "degraded",
    "condition_id": "c1",
    "observed": False,
    "history": False,
}


@pytest.mark.parametrize(
    ("sighting", "counts"),
    [
        ({}, True),
        ({"what": "growth"}, True),
        ({"what": "seen"}, False),
        ({"what": "seen", "kind": "edge"}, True),
        ({"observed": True}, False),
        ({"history": True}, False),
        ({"observed": None, "history": None}, True),
    ],
)
def test_query_of_evidence__has_new_or_worse_conditions(sighting: dict[str, Any], counts: bool) -> None:
    row = row_type("cluster node check_name code subject kind time origin badness life")
    found = run_query("evidence", row, sightings=[{**SIGHTING, **sighting}])
    kind = sighting.get("kind", "level")
    assert found == [("c", "n1", "mount", "mount/missing", "/a", kind, 5, "events", 2, "c1")] * counts


def test_query_of_failing_levels__spans_sightings_of_condition() -> None:
    row = row_type("cluster node check_name code subject life from_time to_time")
    scraped = {**NODE, "code": "x/y", "severity": "critical", "first_time": 1, "worst_time": 3, "last_time": 9}
    sights = [SIGHTING, {**SIGHTING, "time": 8, "what": "seen"}, {**SIGHTING, "severity": "warning", "time": 99}]
    found = run_query(
        "failing_levels", row, sightings=sights, scraped_conditions=[scraped, {**scraped, "severity": "info"}]
    )
    assert sorted(found) == [
        ("c", "n1", "mount", "mount/missing", "/a", "c1", 5, 8),
        ("c", "n1", "x", "x/y", None, "1", 3, 9),
    ]


# --- links


LINK_CODES = [{"code": "ib_link/down", "inside": False}, {"code": "pcie_link/slow", "inside": True}]
FLAP = {**NODE, "subject": "p1", "code": "ib_link/down", "time": 5}


def test_query_of_links_sightings__covers_chosen_nodes_in_period() -> None:
    row = row_type("cluster node subject code time")
    evidence = [FLAP, {**FLAP, "time": 1000}, {**FLAP, "node": "n2"}, {**FLAP, "code": "mount/missing"}]
    found = run_query("links_sightings", row, evidence=evidence, chosen_nodes=[NODE], link_codes=LINK_CODES)
    assert found == [("c", "n1", "p1", "ib_link/down", 5)]


def test_query_of_links_nodes__has_observed_days() -> None:
    row = row_type("cluster node model switch days")
    nodes = [
        {**NODE, "gpu_model": "h", "switch": "s"},
        {"cluster": "c", "node": "n2", "gpu_model": None, "switch": None},
    ]
    observed = [{**NODE, "observed_seconds": 43200}, {**NODE, "observed_seconds": 86400}]
    found = run_query("links_nodes", row, chosen_nodes=nodes, observed=observed)
    assert found == [("c", "n1", "h", "s", 1.5), ("c", "n2", "", None, 0.0)]


def test_query_of_links_ports__counts_port_names_once() -> None:
    row = row_type("model inside ports")
    evidence = [FLAP, FLAP, {**FLAP, "subject": "p2"}, {**FLAP, "code": "pcie_link/slow", "subject": ""}]
    found = run_query(
        *("links_ports", row), evidence=evidence, chosen_nodes=[{**NODE, "gpu_model": "h"}], link_codes=LINK_CODES
    )
    assert found == [("h", False, 2), ("h", True, 1)]


# --- failslow


def test_query_of_failslow_slow_times__covers_chosen_nodes() -> None:
    slow = {**NODE, "begin_time": 1, "end_time": 2, "slowdown": 0.5, "jobs": "7"}
    found = run_query(
        *("failslow_slow_times", failslow.SlowTimeRow), slow_times=[slow, {**slow, "node": "n2"}], chosen_nodes=[NODE]
    )
    assert found == [("c", "n1", 1, 2, 0.5, "7")]


def test_query_of_failslow_jobs__ends_running_job_at_end_of_known_jobs() -> None:
    found = run_query(
        *("failslow_jobs", failslow.JobOnNode),
        job_nodes=[
            {**NODE, "db_index": 1, "start_time": 5, "end_time": None, "gpus": 8.0},
            {"cluster": "c", "node": "n2", "db_index": 1, "start_time": 5, "end_time": 6, "gpus": 8.0},
        ],
        jobs=[{**JOB, "job_id": 7}],
        jobs_known=[{"cluster": "c", "known_until": 50}],
        slow_times=[NODE],
    )
    assert found == [("c", "n1", 7, 5, 50, 8.0)]


def test_query_of_failslow_conditions__has_row_per_opened_condition() -> None:
    line = {
        **NODE,
        "condition_id": "c1",
        "code": "failslow/job",
        "subject": "",
        "observed": None,
        "onset_time": None,
        "first_time": None,
        "last_time": 30,
        "event": "opened",
        "time": 20,
    }
    lines = [
        line,
        {**line, "event": "acknowledged", "time": 40},
        {**line, "event": "cleared", "time": 60, "last_time": 55, "onset_time": 10},
        {**line, "condition_id": "c2", "event": "cleared"},
        {**line, "condition_id": "c3", "code": "mount/missing"},
        {**line, "condition_id": "c4", "observed": True},
    ]
    found = run_query("failslow_conditions", failslow.SlowCondition, lines=lines, chosen_nodes=[NODE])
    assert found == [("c", "n1", 10, 20, 55, 60, 40)]


def test_query_of_failslow_drains__covers_outages() -> None:
    out = {**NODE, "start_time": 5, "by_whom": "person", "what": "outage"}
    found = run_query(
        *("failslow_drains", failslow.Drain), out_of_service=[out, {**out, "what": "maintenance"}], chosen_nodes=[NODE]
    )
    assert found == [("c", "n1", 5, "person")]


def test_query_of_failslow_validations__last_until_cleared() -> None:
    validation = {
        **NODE,
        "code": "validation/failed",
        "first_time": 5,
        "last_time": 9,
        "cleared_time": 20,
        "origin": "events",
    }
    slow = {**validation, "code": "validation/slow", "cleared_time": None}
    rows = [
        validation,
        {**validation, "first_time": 30, "last_time": 40},
        slow,
        {**validation, "code": "mount/missing"},
    ]
    found = run_query("failslow_validations", failslow.Validation, conditions=rows, chosen_nodes=[NODE])
    assert found == [("c", "n1", "validation/failed", 2, 5, 40, False), ("c", "n1", "validation/slow", 1, 5, 9, True)]


def test_query_of_failslow_gpu_time__covers_period_and_chosen_nodes() -> None:
    found = run_query(
        *("failslow_gpu_time", failslow.GpuTime, {"from_time": 10}),
        job_nodes=[
            {**NODE, "db_index": 1, "start_time": 0, "end_time": 20, "gpus": 2.6667},
            {**NODE, "db_index": 2, "start_time": 15, "end_time": None, "gpus": None},
            {"cluster": "c", "node": "n2", "db_index": 1, "start_time": 0, "end_time": 20, "gpus": 8.0},
        ],
        chosen_nodes=[NODE],
        jobs_known=[{"cluster": "c", "known_until": 50}],
    )
    assert found == [(26670.0,)]


# --- rate


RAN = {"cluster": "c", "db_index": 1, "job_id": 7, "gpus": 256, "nodes": 32, "start_time": 0, "end_time": 100}


def test_query_of_rate_jobs__cuts_jobs_at_period_and_known_end() -> None:
    row = row_type("cluster db_index job_id gpus nodes start_time end_time gpus_up_to ran_from ran_to")
    jobs = [
        {**RAN, "gpus_up_to": 262144},
        {**RAN, "db_index": 2, "end_time": None, "gpus_up_to": 256},
        {**RAN, "db_index": 3, "gpus": 0, "gpus_up_to": 0},
        {**RAN, "db_index": 4, "end_time": 40, "gpus_up_to": 256},
    ]
    known = [{"cluster": "c", "known_until": 80}]
    found = run_query("rate_jobs", row, {"from_time": 50}, chosen_jobs=jobs, jobs_known=known)
    assert sorted(found) == [
        ("c", 1, 7, 256, 32, 0, 100, 131072, 50, 100),
        ("c", 2, 7, 256, 32, 0, None, 256, 50, 80),
    ]


PLACED = {**RAN, "gpus_up_to": 256, "ran_from": 0, "ran_to": 100}


def test_query_of_rate_sums__splits_by_size_class_and_large_jobs() -> None:
    small = {**PLACED, "db_index": 2, "gpus": 8, "gpus_up_to": 8, "nodes": 1}
    found = run_query("rate_sums", rate.RunSums, rate_jobs=[PLACED, small, {**small, "nodes": None}])
    assert found == [(8, False, 2, 200, 100, 800), (256, True, 1, 100, 3200, 25600)]


def test_query_of_rate_exposures__sums_by_node() -> None:
    nodes = [{**NODE, "db_index": 1}, {**NODE, "node": "n2", "db_index": 1}, {**NODE, "db_index": 2}]
    found = run_query("rate_exposures", rate.Exposure, rate_jobs=[PLACED, {**PLACED, "db_index": 2}], job_nodes=nodes)
    assert found == [(256, True, "c", "n1", 200), (256, True, "c", "n2", 100)]


@pytest.mark.parametrize(
    ("seen", "down", "nodes", "node"),
    [("n9", 100, ("n1", "n2"), "n9"), (None, 100, ("n1", "n2"), "n2"), (None, 900, ("n1",), "n1"),
     (None, 900, ("n1", "n2"), None)],
)  # fmt: skip
def test_query_of_rate_failures__names_failed_node(
    seen: str | None, down: int, nodes: tuple[str, ...], node: str | None
) -> None:
    found = run_query(
        *("rate_failures", rate.Failure, {"before_seconds": 600, "after_seconds": 300}),
        rate_jobs=[PLACED],
        hardware_ends=[{**JOB, "ended": "node_fail", "node": seen}],
        job_nodes=[{**NODE, "node": name, "db_index": 1} for name in nodes],
        node_states=[{"cluster": "c", "node": "n2", "start_time": down, "state": "DOWN*"}],
    )
    assert found == [("c", 1, 7, "node_fail", 256, True, 0, 100, node)]


# --- alarms


DAY = 86400


def test_query_of_completed_jobs__filters_by_period_and_state() -> None:
    ended = ((1, "COMPLETED", 5), (2, "FAILED", 5), (3, "COMPLETED", 1000))
    jobs = [{"cluster": "c", "db_index": index, "state": state, "end_time": end} for index, state, end in ended]
    assert run_query("completed_jobs", row_type("cluster db_index end_time"), chosen_jobs=jobs) == [("c", 1, 5)]


def test_query_of_job_node_days__has_row_per_day_of_run() -> None:
    runs = ((1, DAY + 5, DAY + 9), (2, DAY + 5, 3 * DAY), (3, DAY + 9, DAY + 5), (4, DAY, 9 * DAY))
    nodes = [{**NODE, "db_index": index, "start_time": start, "end_time": end} for index, start, end in runs]
    row = row_type("cluster db_index node start_time end_time day")
    found = run_query("job_node_days", row, {"to_time": 5 * DAY}, job_nodes=nodes)
    assert sorted((run.db_index, run.day // DAY) for run in found) == [(1, 1), (2, 1), (2, 2), (2, 3)]


ALARM = {**NODE, "check_name": "x", "code": "x/a", "subject": "s", "badness": 2, "time": 50, "life": "l1"}
OPEN_LEVEL = {**NODE, "check_name": "x", "code": "x/a", "subject": None, "life": "l2", "from_time": 10, "to_time": DAY}


@pytest.mark.parametrize(
    ("seen", "open_level", "found"),
    [
        (ALARM, {**OPEN_LEVEL, "node": "n2"}, ("x/a", True, True, "c n1 x/a s l1")),
        (ALARM, OPEN_LEVEL, ("x/a", True, True, "c n1 x/a s l1")),
        ({**ALARM, "badness": 1}, {**OPEN_LEVEL, "node": "n2"}, ("x/a", False, True, "c n1 x/a s l1")),
        ({**ALARM, "time": 61}, OPEN_LEVEL, ("x/a", True, False, "c n1 x/a l2")),
        ({**ALARM, "time": 61}, {**OPEN_LEVEL, "to_time": 39}, None),
    ],
)
def test_query_of_alarmed_jobs__prefers_new_to_open_conditions(
    seen: dict[str, Any], open_level: dict[str, Any], found: tuple[Any, ...] | None
) -> None:
    placed = {**NODE, "db_index": 1, "start_time": 40, "end_time": 60, "day": 0}
    row = row_type("cluster db_index check_name code failing began life")
    rows = run_query(
        "alarmed_jobs", row, evidence=[seen], failing_levels=[open_level], job_node_days=[placed], completed_jobs=[JOB]
    )
    assert rows == ([("c", 1, "x", *found)] if found else [])


def test_query_of_alarms_jobs__counts_jobs_with_known_nodes() -> None:
    completed = [JOB, {**JOB, "db_index": 2}]
    nodes = [{**NODE, "db_index": 1}, {**NODE, "node": "n2", "db_index": 1}]
    assert run_query("alarms_jobs", alarms.Jobs, completed_jobs=completed, job_nodes=nodes) == [(2, 1)]


ALARMED_JOB = {**JOB, "check_name": "x", "code": "x/a", "failing": True, "began": True, "life": "l1"}


def test_query_of_alarms_unobserved_jobs__has_jobs_observed_less_than_half() -> None:
    placed = [{**NODE, "db_index": index, "day": 0} for index in (1, 2)] + [{**NODE, "db_index": 3, "day": DAY}]
    observed = [{**NODE, "day": day, "seconds": 100, "observed_seconds": seen} for day, seen in ((0, 49), (DAY, 50))]
    completed = [{**JOB, "db_index": index} for index in (1, 2, 3)]
    found = run_query(
        *("alarms_unobserved_jobs", alarms.UnobservedJobs),
        job_node_days=placed,
        observed=observed,
        completed_jobs=completed,
        alarmed_jobs=[ALARMED_JOB],
    )
    assert found == [(2, 1)]


def test_query_of_alarms_counts__counts_job_once_per_level() -> None:
    alarmed = [
        ALARMED_JOB,
        {**ALARMED_JOB, "code": "x/b", "began": False},
        {**ALARMED_JOB, "db_index": 2},
        {**ALARMED_JOB, "db_index": 3, "code": "x/b", "began": False, "life": "l2"},
        {**ALARMED_JOB, "db_index": 4, "failing": False, "life": "l3"},
    ]
    assert run_query("alarms_counts", alarms.AlarmCounts, alarmed_jobs=alarmed) == [
        (0, "", "", 1, 4, 2, 1, 1),
        (1, "x", "", 1, 4, 2, 1, 1),
        (2, "x", "x/a", 1, 4, 2, 0, 1),
        (2, "x", "x/b", 0, 0, 0, 2, 0),
    ]


def test_query_of_alarms_by_week__begins_on_monday_and_is_cut_at_period() -> None:
    monday = 11 * DAY
    completed = [{**JOB, "end_time": monday - 1}, {**JOB, "db_index": 2, "end_time": monday + 5}]
    parameters = {"from_time": monday - DAY, "to_time": monday + DAY}
    found = run_query("alarms_by_week", alarms.Week, parameters, completed_jobs=completed, alarmed_jobs=[ALARMED_JOB])
    assert found == [(monday - DAY, 1.0, 1, 1), (monday, 1.0, 1, 0)]


# --- checks


ALIVE = {**NODE, "event": "alive", "stream_id": "s", "seq": 1, "time": 5, "rest": '{"checks":["a","b"],"n":1}'}


def test_query_of_completed_checks__has_first_list_of_each_day() -> None:
    later = [{**ALIVE, "time": 6, "rest": '{"checks":["c"]}'}, {**ALIVE, "time": DAY, "rest": '{"checks": ["a","b"]}'}]
    others = [{**ALIVE, "node": "n2"}, {**ALIVE, "node": "n1", "time": 3 * DAY, "rest": '{"checks":[]}'}]
    parameters = {"to_time": 4 * DAY}
    found = run_query(
        "completed_checks", evidence.CompletedRow, parameters, events=[ALIVE, *later, *others], chosen_nodes=[NODE]
    )
    assert found == [("c", "n1", '"a","b"', 2, 5)]


def test_query_of_checks_sightings__has_draining_sightings_in_period() -> None:
    sights = [ALARM, {**ALARM, "badness": 1}, {**ALARM, "time": 1000}, {**ALARM, "node": "n2"}]
    assert run_query("checks_sightings", checks.Sighting, evidence=sights, chosen_nodes=[NODE]) == [
        ("c", "n1", "x", 50, 2)
    ]


def test_query_of_checks_reported__counts_failures_warnings_and_codes() -> None:
    sights = [ALARM, {**ALARM, "badness": 3}, {**ALARM, "badness": 1, "code": "x/b"}, {**ALARM, "badness": 0}]
    assert run_query("checks_reported", checks.ReportedChecks, evidence=sights, chosen_nodes=[NODE]) == [("x", 2, 1, 2)]


def test_query_of_checks_deployed__counts_changes_and_earlier_enabling() -> None:
    event = {**NODE, "check_name": "x", "event": "check_enabled", "time": 5, "since_time": 3}
    changed = {**event, "event": "check_changed", "since_time": None}
    events = [event, changed, {**changed, "time": 60}, {**event, "event": "check_disabled", "time": 70}]
    found = run_query("checks_deployed", checks.DeployedCheck, {"from_time": 50}, events=events, chosen_nodes=[NODE])
    assert found == [("x", 3, 1, 1)]


def test_query_of_checks_outages__covers_outages_of_chosen_nodes() -> None:
    out = {**NODE, "start_time": 5, "end_time": None, "by_whom": "slurm", "what": "outage"}
    others = [{**out, "what": "maintenance"}, {**out, "node": "n2"}]
    found = run_query("checks_outages", checks.Outage, out_of_service=[out, *others], chosen_nodes=[NODE])
    assert found == [("c", "n1", 5, None, "slurm")]


def test_query_of_checks_conditions__has_proven_draining_conditions() -> None:
    life = {**NODE, "check_name": None, "code": "x/a", "severity": "critical", "observed": None, "history": None}
    life |= {"first_time": 1, "last_time": 2, "cleared_time": None}
    others = [{**life, "severity": "warning"}, {**life, "observed": True}, {**life, "history": True}]
    found = run_query("checks_conditions", checks.ConditionLife, conditions=[life, *others], chosen_nodes=[NODE])
    assert found == [("c", "n1", "x", 1, 2, None)]


def test_query_of_checks_drain_commands__has_sent_drains() -> None:
    line = {**NODE, "event": "drain", "stage": "sent", "time": 5}
    found = run_query(
        "checks_drain_commands",
        checks.DrainCommand,
        lines=[line, {**line, "stage": "confirmed"}, {**line, "event": "resume"}],
    )
    assert found == [("c", "n1", 5)]


def test_query_of_checks_unobserved_days__has_days_observed_less_than_half() -> None:
    days = [{**NODE, "day": day, "seconds": 100, "observed_seconds": seen} for day, seen in ((0, 49), (DAY, 50))]
    assert run_query("checks_unobserved_days", checks.UnobservedDay, observed=days, chosen_nodes=[NODE]) == [
        ("c", "n1", 0)
    ]


# --- availability


def test_query_of_availability_nodes__has_chosen_nodes_in_order() -> None:
    nodes = [{**NODE, "node": name, "gpu_model": "h", "rack": None, "gpus": 8} for name in ("n2", "n1")]
    found = run_query("availability_nodes", availability.Node, chosen_nodes=nodes)
    assert found == [("c", "n1", "h", None, 8), ("c", "n2", "h", None, 8)]


def test_query_of_availability_outages__covers_outages_of_chosen_nodes() -> None:
    out = {**NODE, "by_whom": "slurm", "first_state": "DOWN", "start_time": 5, "end_time": None, "what": "outage"}
    others = [{**out, "what": "maintenance"}, {**out, "node": "n2"}]
    found = run_query("availability_outages", availability.Outage, out_of_service=[out, *others], chosen_nodes=[NODE])
    assert found == [("c", "n1", "slurm", "DOWN", 5, None)]


def test_query_of_availability_reserved__treats_unknown_maintenance_as_no() -> None:
    reservation = {**NODE, "name": "r", "maintenance": None, "start_time": 5, "end_time": 9}
    rows = [
        reservation,
        {**reservation, "maintenance": True, "start_time": 7},
        {**reservation, "start_time": None},
        {**reservation, "node": "n2"},
    ]
    found = run_query("availability_reserved", availability.Reserved, reservations=rows, chosen_nodes=[NODE])
    assert found == [("c", "n1", "r", False, 5, 9), ("c", "n1", "r", True, 7, 9)]


def test_query_of_availability_read_periods__covers_node_states() -> None:
    sources = (("node_states", 5), ("node_states", None), ("events", 1))
    rows = [{"cluster": "c", "source": source, "from_time": begin, "to_time": 9} for source, begin in sources]
    assert run_query("availability_read_periods", availability.ReadPeriod, sources_coverage=rows) == [("c", 5, 9)]


def test_query_of_availability_coverage_ends__is_latest_read_time() -> None:
    read = (("node_states", 5), ("events", 7), ("sacct", 9), ("events", None))
    rows = [{"cluster": "c", "source": source, "to_time": end} for source, end in read]
    assert run_query("availability_coverage_ends", availability.CoverageEnd, ingests=rows) == [("c", 7)]


def test_query_of_availability_observed__is_cut_to_unread_times() -> None:
    piece = {**NODE, "begin_time": 10, "end_time": 30}
    unread = [{"cluster": "c", "begin_time": begin, "end_time": end} for begin, end in ((0, 10), (5, 20), (25, 99))]
    found = run_query(
        *("availability_observed", availability.Observed),
        observed_intervals=[piece, {**piece, "node": "n2"}],
        chosen_nodes=[NODE],
        unread_times=unread,
    )
    assert found == [("c", "n1", 10, 20), ("c", "n1", 25, 30)]


# --- repairs


def test_query_of_repairs_conditions__has_drains_from_events() -> None:
    fault = {
        **NODE,
        "code": "gpu_xid/119",
        "subject": None,
        "severity": "critical",
        "origin": "events",
        "observed": False,
        "history": False,
        "first_time": 5,
        "cleared_time": 9,
        "cleared_by": "reboot",
    }
    others = [{"severity": "warning"}, {"origin": "scraped"}, {"observed": True}, {"history": True}, {"node": "n2"}]
    rows = [fault, {**fault, "first_time": 1, "cleared_time": None}, *({**fault, **other} for other in others)]
    found = run_query("repairs_conditions", repairs.Fault, conditions=rows, chosen_nodes=[NODE])
    assert found == [
        ("c", "n1", "gpu_xid/119", "", 1, None, "reboot"),
        ("c", "n1", "gpu_xid/119", "", 5, 9, "reboot"),
    ]


def test_query_of_repairs_nodes__has_last_line_of_chosen_nodes() -> None:
    rows = [{**NODE, "time": 5}, {**NODE, "time": 9}, {**NODE, "node": "n2", "time": 99}]
    assert run_query("repairs_nodes", repairs.Observed, lines=rows, chosen_nodes=[NODE]) == [("c", "n1", 9)]


def test_query_of_repairs_steps__has_stages_of_steps_that_healthd_took() -> None:
    stages = ["advised", "claimed", "taken"]
    rows = [{**LINE, "event": "repair", "seq": number, "stage": stage} for number, stage in enumerate(stages)]
    rests = [{**EVENT, "seq": number, "rest": f'{{"id":"{number}"}}'} for number in range(2)]
    rests += [{**EVENT, "seq": 2, "rest": None}]
    others = [{**rows[1], "event": "drain"}, {**rows[1], "node": "n2"}]
    found = run_query("repairs_steps", repairs.StepEvent, lines=[*rows, *others], events=rests, chosen_nodes=[NODE])
    assert found == [("c", "n1", 100, "claimed", '{"id":"1"}'), ("c", "n1", 100, "taken", "")]


# --- compare


def test_query_of_compare_failed__marks_large_started_jobs() -> None:
    jobs = [
        {**JOB, "job_id": 7, "gpus": 256, "start_time": 0, "end_time": 3600},
        {**JOB, "db_index": 2, "job_id": 8, "gpus": 256, "start_time": None, "end_time": 9},
        {**JOB, "db_index": 3, "job_id": 9, "gpus": 8, "start_time": 0, "end_time": 900},
    ]
    ended = [{**JOB, "db_index": index, "node": "n1"} for index in (1, 2, 3)]
    row = row_type("cluster job_id large node lost")
    found = run_query("compare_failed", row, hardware_ends=ended, chosen_jobs=jobs)
    assert found == [("c", 7, True, "n1", 128.0), ("c", 8, False, "n1", 0.0), ("c", 9, False, "n1", 2.0)]


def test_query_of_compare_node_days__covers_large_jobs_in_period() -> None:
    job = {**JOB, "gpus": 256, "nodes": 32, "start_time": 0, "end_time": None}
    known = [{"cluster": "c", "known_until": 3 * DAY}]
    parameters = {"from_time": DAY, "to_time": 2 * DAY}
    found = run_query(
        "compare_node_days", row_type("days"), parameters, chosen_jobs=[job, {**job, "gpus": 128}], jobs_known=known
    )
    assert found == [(32.0,)]


UNIT_COLUMNS = "unit jobs completed failed node_fail preempted timeout gpu_hours"
ENDED_JOB = {**JOB, "state": "COMPLETED", "start_time": 0, "end_time": 900, "gpus": 8, "user_name": "u", "account": "a"}


def test_query_of_compare_by_day__has_row_per_day() -> None:
    jobs = [
        ENDED_JOB,
        {**ENDED_JOB, "state": "TIMEOUT"},
        {**ENDED_JOB, "start_time": None, "end_time": DAY, "state": "FAILED"},
    ]
    found = run_query("compare_by_day", row_type(UNIT_COLUMNS), {"to_time": 2 * DAY}, chosen_jobs=jobs)
    assert found == [("0", 2, 1, 0, 0, 0, 1, 4.0), (str(DAY), 1, 0, 1, 0, 0, 0, 0.0)]


def test_query_of_compare_by_user__falls_back_to_account() -> None:
    jobs = [ENDED_JOB, {**ENDED_JOB, "user_name": None, "state": "NODE_FAIL"}, {**ENDED_JOB, "state": "PREEMPTED"}]
    found = run_query("compare_by_user", row_type(UNIT_COLUMNS), chosen_jobs=jobs)
    assert found == [("c a", 1, 0, 0, 1, 0, 0, 2.0), ("c u", 2, 1, 0, 0, 1, 0, 4.0)]


def test_query_of_compare_nodes__counts_days_out_in_read_periods() -> None:
    found = run_query(
        *("compare_nodes", row_type("cluster node out_days known_days observed_days"), {"to_time": 4 * DAY}),
        sources_coverage=[{"cluster": "c", "source": "node_states", "from_time": DAY, "to_time": 3 * DAY}],
        out_of_service=[{**NODE, "what": "outage", "start_time": 0, "end_time": None}],
        observed=[{**NODE, "observed_seconds": DAY}],
        chosen_nodes=[NODE, {**NODE, "node": "n2"}],
    )
    assert found == [("c", "n1", 2.0, 2.0, 1.0), ("c", "n2", 0.0, 2.0, 0.0)]


def test_query_of_compare_codes__merges_sightings_within_one_hour() -> None:
    sights = [{**ALARM, "time": time} for time in (0, 3600, 7201)] + [{**ALARM, "badness": 1}]
    found = run_query(
        *("compare_codes", row_type("code cluster node times"), {"to_time": DAY}), evidence=sights, chosen_nodes=[NODE]
    )
    assert found == [("x/a", "c", "n1", 2)]


# --- ettr


LONG = {"cluster": "c", "run": 7, "chained_by": "job_id", "submit_time": 10, "end_time": 500, "gpus": 8}
LONG |= {"runtime_seconds": 90_000, "queued_seconds": 5}


def test_query_of_ettr_long_runs__takes_first_attempt_without_overlap() -> None:
    runs = [{**LONG, "attempts": 2, "overlapping": 0}, {**LONG, "attempts": 2, "overlapping": 1, "run": 8}]
    runs.append({**runs[0], "run": 9, "runtime_seconds": 86_399})
    jobs = [{**JOB, "db_index": index, "job_id": run, "submit_time": 10, "run_key": "k"}
            for index, run in ((2, 7), (1, 7), (3, 8), (4, 9))]  # fmt: skip
    row = row_type("cluster run chained_by submit_time end_time gpus runtime_seconds queued_seconds run_key")
    assert run_query("ettr_long_runs", row, runs=runs, chosen_jobs=jobs) == [
        ("c", 7, "job_id", 10, 500, 8, 90_000, 5, "k")
    ]


def test_query_of_ettr_runs__loses_start_and_half_checkpoint() -> None:
    attempt = {**JOB, "job_id": 7, "nodes": 1, "submit_time": 10, "start_time": 20}
    jobs = [
        {**attempt, "state": "NODE_FAIL", "end_time": 120},
        {**attempt, "db_index": 2, "submit_time": 130, "start_time": 140, "state": "COMPLETED", "end_time": 400},
        {**attempt, "db_index": 3, "submit_time": 140, "start_time": None, "state": "CANCELLED", "end_time": 150},
        {**attempt, "db_index": 4, "submit_time": 600, "state": "COMPLETED", "end_time": 700},
    ]
    row = row_type("cluster run gpus nodes starts interruptions runtime_seconds queued_seconds lost_seconds")
    found = run_query(
        *("ettr_runs", row, {"restart_seconds": 30.0, "checkpoint_seconds": 40.0}),
        ettr_long_runs=[{**LONG, "run_key": None}],
        jobs=jobs,
        jobs_known=[{"cluster": "c", "known_until": 900}],
    )
    assert found == [("c", 7, 8, 1, 2, 1, 90_000, 5, 50.0 + 30.0)]


def test_query_of_ettr_concurrent_runs__counts_overlapping_long_runs() -> None:
    runs = [{**LONG, "overlapping": 1}, {**LONG, "overlapping": 0}, {**LONG, "overlapping": 1, "run": 9}]
    assert run_query("ettr_concurrent_runs", row_type("runs"), runs=runs, chosen_jobs=[{**JOB, "job_id": 7}]) == [(1,)]
