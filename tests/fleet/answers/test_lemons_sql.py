"""Tests of the queries of `lemons` with small hand-written tables."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
from tiny_tables import run_query

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.answers import lemon_evidence, lemons
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise

NODE = {"cluster": "c", "node": "n1"}
JOB = {"cluster": "c", "db_index": 1}
WINDOW = {"window_from": 10_000, "window_to": 20_000}
HIT = {**NODE, "time": 15_000, "code": "gpu_xid/79", "severity": "critical", "kind": "condition"}
FAILED = {**JOB, "job_id": 7, "state": "FAILED", "end_time": 15_000, "gpus": 8, "nodes": 1}


# --- hits


SIGHTING = {
    "cluster": "c",
    "node": "n1",
    "time": 5,
    "code": "gpu_xid/79",
    "severity": "critical",
    "kind": "edge",
    "what": "seen",
    "observed": False,
    "history": False,
}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"severity": "degraded"}, True),
        ({"severity": "warning"}, False),
        ({"observed": True}, False),
        ({"history": True}, False),
        ({"observed": None, "history": None}, True),
        ({"kind": "level"}, False),
        ({"kind": "level", "what": "onset"}, True),
        ({"kind": "level", "what": "growth"}, True),
    ],
)
def test_query_of_lemons_sightings__counts_draining_conditions(changes: dict[str, Any], counts: bool) -> None:
    row = namedtuple("Found", "cluster node time code severity kind")
    sighting = {**SIGHTING, **changes}
    found = run_query("lemons_sightings", row, sightings=[sighting], node_states=[])
    assert found == [("c", "n1", 5, "gpu_xid/79", sighting["severity"], "condition")] * counts


def test_query_of_lemons_sightings__counts_slurm_states() -> None:
    row = namedtuple("Found", "cluster node time code severity kind")
    states = [
        {**NODE, "start_time": 5, "state": "DOWN*", "reason": "Not responding", "set_by": "slurm"},
        {**NODE, "start_time": 6, "state": "IDLE+DRAIN"},
        {"cluster": "c", "start_time": 7, "state": "DOWN"},
    ]
    found = run_query("lemons_sightings", row, sightings=[{**SIGHTING, "severity": "info"}], node_states=states)
    assert sorted(found) == [("c", "n1", 5, "Not responding", "down", "slurm"), ("c", "n1", 6, "", "drain", "unknown")]


# --- GPUs


SLOT = {"cluster": "c", "node": "n1", "subject": "s1"}
OLD = {**SLOT, "gpu": "A", "serial": "1", "from_time": 10, "until_time": 100}
NEW = {**SLOT, "gpu": "B", "serial": "2", "from_time": 100, "until_time": None}
GPU_SIGHTING = {**SIGHTING, "subject": "s1", "condition_id": "x"}
LINE = {
    "cluster": "c",
    "node": "n1",
    "condition_id": "x",
    "event": "opened",
    "time": 50,
    "last_time": 50,
    "serial": None,
}


GPU_FAULT = namedtuple("GPU_FAULT", "cluster node subject gpu from_time time code end_time")


def faulty_gpus(
    sightings: list[dict[str, Any]], serial: str | None = None, periods: tuple[dict[str, Any], ...] = (OLD, NEW)
) -> list[tuple[str, int]]:
    lines = [LINE, {**LINE, "serial": serial}]
    found = run_query("gpu_faults", GPU_FAULT, sightings=sightings, lines=lines, gpu_periods=list(periods))
    return sorted((fault.gpu, fault.time) for fault in found)


def end_of_fault(condition_id: str | None, *lines: dict[str, Any]) -> int | None:
    sightings = [{**GPU_SIGHTING, "time": 50, "condition_id": condition_id}]
    rows = [LINE, *({**LINE, **line} for line in lines)]
    (fault,) = run_query("gpu_faults", GPU_FAULT, sightings=sightings, lines=rows, gpu_periods=[OLD, NEW])
    return fault.end_time


def test_query_of_gpu_faults__names_the_gpu_in_the_slot_at_that_time() -> None:
    times = (9, 10, 99, 100, 500)
    found = faulty_gpus([{**GPU_SIGHTING, "time": time} for time in times])
    assert found == [("A", 10), ("A", 99), ("B", 100), ("B", 500)]
    assert faulty_gpus([{**GPU_SIGHTING, "time": 50, "subject": subject} for subject in ("s2", "")]) == []


def test_query_of_gpu_faults__prefers_the_serial_number_of_the_condition() -> None:
    # A new GPU fails before the first inventory of the boot.
    assert faulty_gpus([{**GPU_SIGHTING, "time": 99}], "2") == [("B", 99)]


def test_query_of_gpu_faults__names_the_gpu_in_the_slot_for_a_fault_that_stays_open_after_a_swap() -> None:
    assert faulty_gpus([{**GPU_SIGHTING, "time": time} for time in (99, 100, 500)], "1") == [
        ("A", 99),
        ("B", 100),
        ("B", 500),
    ]
    assert faulty_gpus([{**GPU_SIGHTING, "time": 500}], "3") == [("B", 500)]


def test_query_of_gpu_faults__ignores_a_later_return_of_the_gpu() -> None:
    again = {**OLD, "from_time": 300, "until_time": None}
    periods = (OLD, {**NEW, "until_time": 300}, again)
    found = faulty_gpus([{**GPU_SIGHTING, "time": time} for time in (9, 200, 300)], "1", periods)
    assert found == [("A", 9), ("A", 300), ("B", 200)]


def test_query_of_gpu_faults__has_the_end_of_the_fault() -> None:
    assert end_of_fault("x") is None
    assert end_of_fault("x", {"event": "seen_again", "time": 70, "last_time": 60}) is None
    assert end_of_fault("x", {"event": "cleared", "time": 90, "last_time": 60}) == 90
    assert end_of_fault("x", {"event": "cleared", "time": 90, "last_time": 95}) == 95
    assert end_of_fault(None, {"event": "cleared", "time": 90, "last_time": 60}) == 50


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"severity": "warning"}, False),
        ({"severity": "degraded"}, True),
        ({"observed": True}, False),
        ({"history": True}, False),
        ({"kind": "level"}, False),
        ({"kind": "level", "what": "onset"}, True),
    ],
)
def test_query_of_gpu_faults__counts_draining_conditions(changes: dict[str, Any], counts: bool) -> None:
    assert faulty_gpus([{**GPU_SIGHTING, "time": 50, **changes}]) == [("A", 50)] * counts


def test_query_of_lemon_gpu_faults() -> None:
    row = namedtuple("Found", "cluster node subject gpu from_time time code")
    fault = {**SLOT, "gpu": "A", "from_time": 10, "code": "gpu_xid/79"}
    faults = [{**fault, "time": time} for time in (9_999, 10_000, 19_999, 20_000)]
    faults.append({**fault, "time": 15_000, "node": "n2"})
    found = run_query("lemon_gpu_faults", row, WINDOW, gpu_faults=faults, chosen_nodes=[NODE])
    assert [fault.time for fault in found] == [10_000, 19_999]


def test_query_of_lemon_gpu_periods() -> None:
    row = namedtuple("Found", "cluster node subject gpu serial uuid name from_time until_time ended")
    period = {**OLD, "uuid": "A", "name": "H100", "ended": None}
    periods = [{**period, "from_time": time} for time in (5, 19_999, 20_000)]
    periods.append({**period, "node": "n2"})
    found = run_query(
        "lemon_gpu_periods", row, WINDOW, gpu_periods=periods, chosen_nodes=[NODE], lines=[{**NODE, "time": 19_000}]
    )
    assert [(period.node, period.from_time) for period in found] == [("n1", 5), ("n1", 19_999)]


@pytest.mark.parametrize(
    ("until_time", "line_times", "expected"),
    [
        (None, (14_999,), 14_999),
        (None, (15_000,), None),
        (None, (14_999, 25_000), None),
        (None, (), 10),
        (100, (14_999,), 100),
    ],
)
def test_query_of_lemon_gpu_periods__ends_with_last_line_of_silent_node(
    until_time: int | None, line_times: tuple[int, ...], expected: int | None
) -> None:
    row = namedtuple("Found", "cluster node subject gpu serial uuid name from_time until_time ended")
    period = {**OLD, "uuid": "A", "name": "H100", "ended": None, "until_time": until_time}
    lines = [{**NODE, "time": time} for time in line_times] + [{**NODE, "node": "n2", "time": 19_000}]
    arguments = {**WINDOW, "silent_seconds": 5_000}
    (found,) = run_query("lemon_gpu_periods", row, arguments, gpu_periods=[period], lines=lines, chosen_nodes=[NODE])
    assert found.until_time == expected


# --- periods of GPUs


def gpu_list(seq: int, time: int, gpu: str, stream_id: str = "a", cluster: str = "c") -> dict[str, Any]:
    head = {"cluster": cluster, "node": "n1", "stream_id": stream_id, "seq": seq, "time": time}
    return {**head, "subject": "s1", "serial": gpu, "uuid": f"GPU-{gpu}", "name": "H100"}


def periods_of(*lists: dict[str, Any], **line_times: int) -> list[tuple[str, int, int | None, str | None]]:
    """Return the periods of the listed GPUs. `line_times` contains the time of a line of each stream."""
    row = namedtuple(
        "Found", "node subject gpu serial uuid name from_time until_time ended next_gpu next_serial cluster"
    )
    lines = [{**NODE, "stream_id": stream_id, "time": time} for stream_id, time in line_times.items()]
    lines.append({**NODE, "node": "n2", "stream_id": "a", "time": 5})
    found = run_query("gpu_periods", row, gpus=list(lists), lines=lines)
    return sorted((period.serial, period.from_time, period.until_time, period.ended) for period in found)


def test_query_of_gpu_periods__merges_repeated_lists() -> None:
    lists = [gpu_list(1, 2_000_000_000, "1"), gpu_list(2, 2_000_000_500, "1"), gpu_list(1, 2_000_001_000, "1", "b")]
    assert periods_of(*lists) == [("1", 2_000_000_000, None, None)]


def test_query_of_gpu_periods__counts_a_list_with_and_without_cluster_once() -> None:
    lists = [gpu_list(1, 2_000_000_000, "1"), gpu_list(1, 2_000_000_000, "1", cluster="")]
    assert periods_of(*lists) == [("1", 2_000_000_000, None, None)]


def test_query_of_gpu_periods__follows_the_order_of_lines_if_the_clock_is_set_back() -> None:
    lists = [gpu_list(1, 2_000_000_000, "1"), gpu_list(2, 1_999_990_000, "2")]
    expected = [("1", 2_000_000_000, 2_000_000_000, "replaced"), ("2", 2_000_000_000, None, None)]
    assert periods_of(*lists) == expected
    assert periods_of(gpu_list(2, 2_000_000_000, "1"), gpu_list(3, 1_999_990_000, "2")) == expected


def test_query_of_gpu_periods__ignores_an_unset_clock_in_the_order_of_streams() -> None:
    lists = [gpu_list(1, 2_000_000_000, "1"), gpu_list(2, 946_684_900, "2", "b")]
    assert periods_of(*lists, b=2_000_000_600) == [
        ("1", 2_000_000_000, 2_000_000_000, "replaced"),
        ("2", 2_000_000_000, None, None),
    ]


# --- failed jobs, node failures, moments


@pytest.mark.parametrize(
    ("time", "counts"),
    [(14_399, False), (14_400, True), (15_000, True), (15_300, True), (15_301, False)],
)
def test_query_of_lemons_failed_jobs__is_10_min_before_end_to_5_min_after(time: int, counts: bool) -> None:
    found = run_query(
        *("lemons_failed_jobs", lemon_evidence.FailedJobSighting, WINDOW),
        lemons_sightings=[{**HIT, "time": time}],
        jobs=[FAILED],
        job_nodes=[{**JOB, "node": "n1", "end_time": 15_000}],
    )
    expected = ("c", 1, 7, "FAILED", 15_000, 8, 1, "n1", time, "gpu_xid/79", "critical", "condition")
    assert found == [expected] * counts


@pytest.mark.parametrize("end", [14_400, 14_401, 15_299, 15_300, 16_199, 16_200])
def test_query_of_lemons_failed_jobs__meets_moment_once_in_any_time_bin(end: int) -> None:
    found = run_query(
        *("lemons_failed_jobs", lemon_evidence.FailedJobSighting, WINDOW),
        lemons_sightings=[{**HIT, "time": end + shift} for shift in (-600, -301, 0, 300)],
        jobs=[{**FAILED, "end_time": end}],
        job_nodes=[{**JOB, "node": "n1", "end_time": end}],
    )
    assert [row.time - end for row in found] == [-600, -301, 0, 300]


@pytest.mark.parametrize(
    ("hit", "job"),
    [
        ({"time": 9999}, {"end_time": 9999}),
        ({"time": 20_000}, {"end_time": 19_999}),
        ({"node": "n2"}, {}),
        ({"cluster": "d"}, {}),
        ({}, {"state": "COMPLETED"}),
    ],
)
def test_query_of_lemons_failed_jobs__skips_other_times_nodes_and_states(
    hit: dict[str, Any], job: dict[str, Any]
) -> None:
    job_row = {**FAILED, **job}
    found = run_query(
        *("lemons_failed_jobs", lemon_evidence.FailedJobSighting, WINDOW),
        lemons_sightings=[{**HIT, **hit}],
        jobs=[job_row],
        job_nodes=[{**JOB, "node": "n1", "end_time": job_row["end_time"]}],
    )
    assert found == []


def test_query_of_lemons_node_fails__has_each_node() -> None:
    jobs = [
        {**FAILED, "state": "NODE_FAIL"},
        {**FAILED, "db_index": 2},
        {**FAILED, "db_index": 3, "state": "NODE_FAIL", "end_time": 20_000},
    ]
    places = [{**JOB, "node": "n2"}, {**JOB, "node": "n1"}, {**JOB, "db_index": 3, "node": "n1"}]
    found = run_query("lemons_node_fails", lemon_evidence.FailedJobSighting, WINDOW, jobs=jobs, job_nodes=places)
    assert found == [("c", 1, 7, "NODE_FAIL", 15_000, 8, 1, node, 15_000, "", "", "unknown") for node in ("n1", "n2")]


@pytest.mark.parametrize(
    ("runs", "busy"),
    [
        ([(14_000, 16_000)], True),
        ([(14_000, 14_700)], True),
        ([(14_000, 14_699)], False),
        ([(15_000, 16_000)], True),
        ([(15_001, 16_000)], False),
        ([(14_000, None)], True),
        ([(13_000, 16_000), (14_000, 14_100)], True),
        ([(9000, 9500)], False),
        ([], False),
    ],
)
def test_query_of_lemons_moments__are_busy_while_job_runs(runs: list[tuple[int, int | None]], busy: bool) -> None:
    found = run_query(
        *("lemons_moments", lemon_evidence.ConditionMoment, WINDOW),
        lemons_sightings=[HIT, HIT, {**HIT, "time": 20_000}, {**HIT, "time": 9999}],
        job_nodes=[{**JOB, "node": "n1", "start_time": start, "end_time": end} for start, end in runs],
    )
    assert found == [(*HIT.values(), busy)]


def test_query_of_lemons_moments__has_each_node_and_condition() -> None:
    hits = [HIT, {**HIT, "code": "mount/missing"}, {**HIT, "node": "n2"}, {**HIT, "cluster": "d"}]
    jobs = [{**JOB, "node": "n2", "start_time": 14_000, "end_time": 16_000}]
    found = run_query("lemons_moments", lemon_evidence.ConditionMoment, WINDOW, lemons_sightings=hits, job_nodes=jobs)
    assert [(row.cluster, row.node, row.code, row.busy) for row in found] == [
        ("c", "n1", "gpu_xid/79", False),
        ("c", "n1", "mount/missing", False),
        ("c", "n2", "gpu_xid/79", True),
        ("d", "n1", "gpu_xid/79", False),
    ]


# --- outages and external records


def test_query_of_lemons_outages__has_states_and_drains() -> None:
    states = [
        {**NODE, "start_time": 15_000, "end_time": 16_000, "state": "DOWN", "reason": "x", "set_by": "slurm"},
        {**NODE, "start_time": 9000, "end_time": 10_000},
        {**NODE, "start_time": 9000},
        {**NODE, "start_time": 20_000},
    ]
    line = {**NODE, "stream_id": "s", "stage": "confirmed"}
    lines = [
        {**line, "seq": 1, "time": 14_000, "event": "drain", "reason": "healthd: a/b"},
        {**line, "seq": 2, "time": 14_500, "event": "drain", "stage": "decided", "reason": None},
        {**line, "seq": 3, "time": 15_000, "event": "resume", "reason": None},
        {**line, "seq": 4, "time": 19_000, "event": "drain", "reason": None},
    ]
    found = run_query("lemons_outages", lemon_evidence.OutageRow, WINDOW, node_states=states, lines=lines)
    assert found == [
        ("c", "n1", 9000, None, "", "", "unknown"),
        ("c", "n1", 15_000, 16_000, "DOWN", "x", "slurm"),
        ("c", "n1", 14_000, 15_000, "DRAIN", "healthd: a/b", "healthd"),
        ("c", "n1", 19_000, None, "DRAIN", "", "healthd"),
    ]


def test_query_of_lemons_maintenance__overlaps_window() -> None:
    reservation = {**NODE, "maintenance": True, "start_time": 9000, "end_time": 10_001}
    others = [{**reservation, "maintenance": False}, {**reservation, "end_time": 10_000}, {**reservation, "node": None}]
    rows = [
        reservation,
        *others,
        {**reservation, "start_time": 20_000, "end_time": None},
        {**reservation, "end_time": None},
    ]
    found = run_query("lemons_maintenance", lemon_evidence.Maintenance, WINDOW, reservations=rows)
    assert found == [("c", "n1", 9000, 10_001), ("c", "n1", 9000, None)]


def test_query_of_lemons_external_records__has_tickets_and_failures() -> None:
    tickets = [{**NODE, "opened_time": time, "text": text} for time, text in ((9999, "a"), (10_000, None))]
    failures = [{**NODE, "time": 19_999, "kind": "hw"}, {**NODE, "time": 20_000}, {"cluster": "c", "time": 15_000}]
    found = run_query(
        "lemons_external_records", lemon_evidence.ExternalRecord, WINDOW, tickets=tickets, failures=failures
    )
    assert found == [("c", "n1", "failure", 19_999, "hw", ""), ("c", "n1", "ticket", 10_000, "ticket", "")]


# --- first and last times


def test_query_of_lemons_first_seen__uses_jobs_and_lines_with_cluster() -> None:
    found = run_query(
        *("lemons_first_seen", lemon_evidence.FirstSeen),
        job_nodes=[{**NODE, "start_time": time} for time in (0, None, 70, 60)],
        events=[{"cluster": "c", "node": "n2", "time": 50}, {"cluster": "", "node": "n1", "time": 1}],
    )
    assert found == [("c", "n1", 60), ("c", "n2", 50)]


def test_query_of_lemons_cluster_starts__is_first_time_in_any_table() -> None:
    found = run_query(
        *("lemons_cluster_starts", lemon_evidence.ClusterStart),
        jobs=[{"cluster": "a", "start_time": 0}, {"cluster": "a", "start_time": 9}],
        events=[{"cluster": "b", "time": 8}],
        node_states=[{"cluster": "c", "start_time": 7}, {"cluster": "a", "start_time": 10}],
        failures=[{"cluster": "d", "time": 6}, {"cluster": "d"}],
    )
    assert found == [("a", 9), ("b", 8), ("c", 7), ("d", 6)]


def test_query_of_lemons_newest__is_before_end_of_period() -> None:
    found = run_query(
        *("lemons_newest", lemons.NewestTime),
        jobs=[{"cluster": "c", "start_time": 5, "end_time": 1000}, {"cluster": "c", "start_time": 4, "end_time": 999}],
        events=[{"cluster": "c", "time": 3}, {"cluster": "d", "time": 4}],
        node_states=[{"cluster": "c", "start_time": 1001}],
        failures=[{"cluster": "c", "time": 2}],
        scraped_conditions=[{"cluster": "c", "last_time": 1}],
    )
    assert found == [
        *(("events", "c", 3), ("events", "d", 4), ("failures", "c", 2), ("jobs", "c", 999)),
        ("scraped_conditions", "c", 1),
    ]


# --- signals


def signals(**tables: list[dict[str, Any]]) -> list[lemons.Signals]:
    nothing = {name: [] for name in ("exclusions", "tickets", "job_nodes", "jobs")}
    none = {"cluster": "z", "node": "z"}
    sights = [{**SIGHTING, **none, "check_name": "gpu_xid", "subject": "g"}]
    observed = [{**none, "day": 0, "seconds": 1, "observed_seconds": 1}]
    places = {"chosen_nodes": [NODE], "all_nodes": [NODE, {"cluster": "c", "node": "n2"}]}
    inputs = {**nothing, "sightings": sights, "observed": observed, **places, **tables}
    return run_query("lemons_signals", lemons.Signals, WINDOW, **inputs)


def test_query_of_lemons_signals__is_0_for_node_without_data() -> None:
    assert signals() == [("c", "n1", 2, 0, 0, 0, 0, 0, 0)]


def test_query_of_lemons_signals__counts_different_draining_xids() -> None:
    xid = {**SIGHTING, "check_name": "gpu_xid", "subject": "gpu-0", "time": 15_000}
    rows = [
        *(xid, {**xid, "time": 16_000}, {**xid, "code": "gpu_xid/48"}, {**xid, "subject": None}),
        *({**xid, "code": "gpu_xid/13", "severity": "warning"}, {**xid, "code": "mount/x", "check_name": "mount"}),
        *({**xid, "code": "gpu_xid/95", "time": time} for time in (9999, 20_000)),
        *({**xid, "code": "gpu_xid/64", "observed": True}, {**xid, "code": "gpu_xid/63", "history": True}),
    ]
    assert [row.xids for row in signals(sightings=rows)] == [3]


def test_query_of_lemons_signals__counts_rows_in_window() -> None:
    times = (9999, 10_000, 15_000, 20_000)
    exclusions = [{**NODE, "job_id": 1, "submit_time": time} for time in times]
    jobs = [
        {**JOB, "db_index": index, "nodes": nodes, "start_time": start, "end_time": end}
        for index, nodes, start, end in ((1, 1, 1, 15_000), (2, 2, 1, 15_000), (3, 1, None, 15_000), (4, 1, 1, 20_000))
    ]
    (found,) = signals(
        exclusions=[*exclusions, {**exclusions[1], "job_id": 2}],
        tickets=[{**NODE, "opened_time": time} for time in times],
        jobs=jobs,
        job_nodes=[{"cluster": "c", "db_index": index, "node": "n1"} for index in (1, 2, 3, 4)],
        observed=[{**NODE, "day": day, "seconds": 100, "observed_seconds": 40} for day in (-80_000, 0, 86_400)],
    )
    assert (found.exclusions, found.tickets, found.single_jobs) == (2, 2, 1)
    assert (found.seconds, found.observed_seconds) == (100, 40)


def test_query_of_lemons_large_jobs__ended_in_window() -> None:
    rows = [
        {"gpus": gpus, "start_time": start, "end_time": end}
        for gpus, start, end in ((129, 1, 10_000), (128, 1, 10_000), (129, None, 10_000), (129, 1, 20_000))
    ]
    assert run_query("lemons_large_jobs", lemons.JobCount, WINDOW, chosen_jobs=rows) == [(1,)]
