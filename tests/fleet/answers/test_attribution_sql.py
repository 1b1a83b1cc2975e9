"""Tests of the queries of `attribution`, and of small queries of other answers, with hand-written tables."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
from tiny_tables import run_query

pytestmark = pytest.mark.one_python

pytest.importorskip("numpy")  # only .venv has it; the marked tests run nowhere else

from healthd.fleet import report  # noqa: E402
from healthd.fleet.answers import attribution, availability, evidence, rate, study  # noqa: E402
from healthd.fleet.statistics.domain_faults import LinkFault  # noqa: E402

NODE = {"cluster": "c", "node": "n1"}
JOB = {"cluster": "c", "db_index": 1}
WEEK = 7 * 86400
MONDAY = 4 * 86400 + 10 * WEEK


# --- failed


Failed = namedtuple("Failed", "cluster db_index state end_time gpus looked gpu_seconds lost_gpu_seconds place")
FAILED = {**JOB, "state": "FAILED", "start_time": 0, "end_time": 5000, "gpus": 8}
PERIOD = {"from_time": 1000, "to_time": 10_000}


def failed_rows(pieces: list[tuple[int, int]], nodes: tuple[str, ...] = ("n1",), **job: Any) -> list[Any]:
    places = [{**JOB, "node": node} for node in nodes]
    seen = [{**NODE, "begin_time": begin, "end_time": end} for begin, end in pieces]
    elsewhere = {"cluster": "z", "node": "z", "begin_time": 0, "end_time": 1}
    return run_query(
        *("attribution_failed", Failed, PERIOD),
        chosen_jobs=[{**FAILED, **job}],
        job_nodes=places,
        observed_intervals=[*seen, elsewhere],
    )


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(4400, 5300)], "observed"),
        ([(4401, 5300)], "not_observed"),
        ([(4400, 5299)], "not_observed"),
        ([(0, 4800), (4800, 6000)], "observed"),
        ([(0, 4800), (4801, 6000)], "not_observed"),
        ([(0, 4800), (4800, 5000), (5000, 6000)], "observed"),
        ([], "not_observed"),
        ([(5000, 6000)], "not_observed"),
    ],
)
def test_query_of_attribution_failed__is_observed_only_without_gap(
    pieces: list[tuple[int, int]], expected: str
) -> None:
    assert [row.looked for row in failed_rows(pieces)] == [expected]


def test_query_of_attribution_failed__requires_all_nodes_of_known_list() -> None:
    assert [row.looked for row in failed_rows([(0, 9000)], ("n1", "n2"))] == ["not_observed"]
    assert [row.looked for row in failed_rows([(0, 9000)], ())] == ["no_node_list"]


@pytest.mark.parametrize(
    ("job", "lost"),
    [
        ({}, (40_000, 14_400)),
        ({"start_time": 4000}, (8000, 8000)),
        ({"start_time": 6000}, (0, 0)),
        ({"start_time": None}, (0, 0)),
        ({"gpus": None}, (0, 0)),
    ],
)
def test_query_of_attribution_failed__caps_loss_at_30_minutes(job: dict[str, Any], lost: tuple[int, int]) -> None:
    assert [(row.gpu_seconds, row.lost_gpu_seconds) for row in failed_rows([], **job)] == [lost]


@pytest.mark.parametrize(("job", "counts"), [({"state": "NODE_FAIL"}, 1), ({"state": "TIMEOUT"}, 0),
                                             ({"end_time": 999}, 0), ({"end_time": 10_000}, 0)])  # fmt: skip
def test_query_of_attribution_failed__covers_failures_in_period(job: dict[str, Any], counts: int) -> None:
    assert len(failed_rows([], **job)) == counts


def test_query_of_attribution_failed__sorts_by_loss() -> None:
    jobs = [{**FAILED, "db_index": index, "gpus": gpus} for index, gpus in ((1, 8), (2, 16), (3, 8))]
    nothing = {"cluster": "z", "node": "z", "begin_time": 0, "end_time": 1}
    found = run_query(
        *("attribution_failed", Failed, PERIOD), chosen_jobs=jobs, job_nodes=[], observed_intervals=[nothing]
    )
    assert sorted((row.place, row.db_index) for row in found) == [(1, 2), (2, 1), (3, 3)]


# --- seen


SEEN_CONDITION = {
    "cluster": "c",
    "db_index": 1,
    "job_id": 7,
    "state": "FAILED",
    "end_time": 5000,
    "nodes": None,
    "node": "n1",
    "code": "gpu_xid/95",
    "subject": None,
    "check_name": None,
    "severity": "critical",
    "kind": "edge",
    "first_seen": 4900,
    "last_seen": 4950,
    "from_events": 1,
}
FAILED_ROW = {**JOB, "gpus": 8, "looked": "observed", "gpu_seconds": 40_000, "lost_gpu_seconds": 14_400}
LINE = {"cluster": "c", "node": "n1", "stream_id": "s", "code": "gpu_xid/95", "subject": None, "time": 4900}
ConditionWithChance = namedtuple("Seen", ("by_chance", *attribution.ConditionRow._fields))


def condition_rows(*lines: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> list[Any]:
    """Return the condition rows for lines with {jobs, rest, first_time, last_time, ...}."""
    other = {**LINE, "node": "z", "seq": 0, "first_time": None, "last_time": None}
    numbered = [{**other, **LINE, "seq": number, **line} for number, line in enumerate(lines, 1)]
    return run_query(
        *("attribution_conditions", ConditionWithChance),
        seen_with_failures=rows or [SEEN_CONDITION],
        seen_by_chance=[{**SEEN_CONDITION, "first_seen": 1300, "last_seen": 1350}],
        chosen_jobs=[{**JOB, "array_job_id": 5, "array_task_id": 2, "start_time": 0}],
        attribution_failed=[FAILED_ROW],
        lines=[other, *({key: line[key] for key in other} for line in numbered)],
        events=[{"node": line["node"], "stream_id": "s", "seq": line["seq"], "jobs": line.get("jobs"),
                 "rest": line.get("rest")} for line in numbered],
    )  # fmt: skip


def test_query_of_attribution_conditions__has_matches_and_chance_matches() -> None:
    found = sorted(condition_rows())
    assert [(row.by_chance, row.place, row.first_seen, row.jobs) for row in found] == [
        (0, 1, 4900, ""),
        (1, 1, 1300, ""),
    ]
    first = found[0]
    assert (first.nodes, first.subject, first.check_name, first.array_job_id, first.array_task_id) == (0, "", "", 5, 2)
    assert (first.gpus, first.looked, first.gpu_seconds, first.lost_gpu_seconds) == (8, "observed", 40_000, 14_400)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ({}, "7 8"),
        ({"jobs": ""}, ""),
        ({"jobs": None}, ""),
        ({"subject": "gpu-1"}, ""),
        ({"node": "n2"}, ""),
        ({"code": "gpu_xid/13"}, ""),
        ({"first_time": 4950, "last_time": 9000}, "7 8"),
        ({"first_time": 4951, "last_time": 9000}, ""),
        ({"first_time": 0, "last_time": 4900}, "7 8"),
        ({"first_time": 0, "last_time": 4899}, ""),
        ({"rest": '{"jobs_more":3}'}, ""),
        ({"rest": '{"more":3}'}, "7 8"),
    ],
)
def test_query_of_attribution_conditions__has_jobs_named_in_line(line: dict[str, Any], names: str) -> None:
    assert [row.jobs for row in condition_rows({"jobs": "7 8", **line}) if not row.by_chance] == [names]


def test_query_of_attribution_conditions__has_row_per_uncut_job_list() -> None:
    lists = [{"jobs": "7"}, {"jobs": "8"}, {"jobs": "7"}]
    assert sorted(row.jobs for row in condition_rows(*lists) if not row.by_chance) == ["7", "8"]
    assert [row.jobs for row in condition_rows(*lists, {"jobs": "9", "rest": '"jobs_more"'}) if not row.by_chance] == [
        ""
    ]


def test_query_of_attribution_conditions__numbers_conditions_by_job() -> None:
    rows = [{**SEEN_CONDITION, "code": "b"}, {**SEEN_CONDITION, "code": "a"}, {**SEEN_CONDITION, "db_index": 9}]
    found = sorted(row for row in condition_rows(rows=rows) if not row.by_chance)
    assert [(row.place, row.code) for row in found] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(("chance", "after", "places"), [(0, 0, [1, 2, 2]), (0, 2, [3]), (0, 4, []), (1, 0, [1])])
def test_query_of_attribution_page__has_whole_conditions(chance: int, after: int, places: list[int]) -> None:
    blank = dict.fromkeys(attribution.ConditionRow._fields, 0)
    rows = [
        {"by_chance": by_chance, **blank, "place": place, "jobs": jobs}
        for by_chance, place, jobs in ((0, 3, ""), (0, 2, "8"), (0, 2, "7"), (0, 1, ""), (1, 1, ""))
    ]
    parameters = {"chance": chance, "after_place": after, "page_rows": 2}
    found = run_query("attribution_page", attribution.ConditionRow, parameters, attribution_conditions=rows)
    assert [row.place for row in found] == places
    assert [row.jobs for row in found if row.place == 2] == ["7", "8"][: places.count(2)]


# --- sums


def test_query_of_attribution_totals__sums_by_state_and_observation() -> None:
    rows = [
        {"state": state, "looked": looked, "lost_gpu_seconds": 5}
        for state, looked in (("FAILED", "observed"), ("FAILED", "observed"), ("NODE_FAIL", "no_node_list"))
    ]
    found = run_query("attribution_totals", attribution.FailureTotal, attribution_failed=rows)
    assert found == [("FAILED", "observed", 2, 10), ("NODE_FAIL", "no_node_list", 1, 5)]


def test_query_of_attribution_largest__has_next_places() -> None:
    rows = [
        {**FAILED_ROW, "db_index": index, "state": "FAILED", "end_time": 9, "place": 4 - index} for index in (1, 2, 3)
    ]
    jobs = [{"cluster": "c", "db_index": index, "job_id": 70 + index} for index in (1, 2, 3)]
    parameters = {"after_place": 1, "page_rows": 2}
    found = run_query("attribution_largest", attribution.FailedJob, parameters, attribution_failed=rows, jobs=jobs)
    assert found == [("c", 70 + index, index, "FAILED", 9, 8, 14_400, "observed") for index in (2, 1)]


@pytest.mark.parametrize(
    ("start", "end", "weeks"),
    [
        (MONDAY, MONDAY + 10, {MONDAY: 80}),
        (MONDAY - 10, MONDAY + 20, {MONDAY - WEEK: 80, MONDAY: 160}),
        (MONDAY, MONDAY + WEEK, {MONDAY: 8 * WEEK}),
        (MONDAY, MONDAY + 2 * WEEK + 1, {MONDAY: 8 * WEEK, MONDAY + WEEK: 8 * WEEK, MONDAY + 2 * WEEK: 8}),
        (MONDAY + 4 * WEEK, None, {MONDAY + 4 * WEEK: 8 * 50}),
        (MONDAY + 9, MONDAY + 9, {}),
    ],
)
def test_query_of_attribution_weeks__splits_run_at_each_monday(
    start: int, end: int | None, weeks: dict[int, int]
) -> None:
    found = run_query(
        *("attribution_weeks", attribution.Week, {"to_time": MONDAY + 9 * WEEK}),
        chosen_jobs=[{"cluster": "c", "gpus": 8, "start_time": start, "end_time": end}],
        jobs_known=[{"cluster": "c", "known_until": MONDAY + 4 * WEEK + 50}],
    )
    assert dict(found) == weeks


# --- dates, flags, tickets


def dates(times: list[int], other_nodes: int = 0, **parameters: Any) -> list[Any]:
    """Return the dates of a check that each node got at one of `times`; `other_nodes` more nodes got another check."""
    every = [("mount", time, f"n{place}") for place, time in enumerate(times)]
    every += [("other", 5, f"m{place}") for place in range(other_nodes)]
    lines = [
        {"cluster": "c", "node": node, "stream_id": "s", "seq": seq, "event": "check_enabled", "time": time}
        for _, time, node in every
        for seq in (1, 2)
    ]
    events = [
        {"node": node, "stream_id": "s", "seq": seq, "check_name": name} for name, _, node in every for seq in (1, 2)
    ]
    nodes = [{"cluster": "c", "node": node} for _, _, node in every]
    found = run_query("attribution_check_dates", attribution.CheckDate, parameters, lines=lines, events=events,
                  chosen_nodes=nodes)  # fmt: skip
    return [row for row in found if row.check == "mount"]


@pytest.mark.parametrize(
    ("times", "time"), [([7], 7), ([7, 10], 8), ([7, 9], 8), ([9, 7, 100], 9), ([1, 2, 3, 900], 2), ([5, 5, 6, 6], 5)]
)
def test_query_of_attribution_check_dates__is_median_of_nodes(times: list[int], time: int) -> None:
    (found,) = dates(times)
    assert found == ("c", "mount", "check_enabled", "", time, min(times), max(times), len(times))


@pytest.mark.parametrize(("other_nodes", "counts"), [(9, True), (10, False)])
def test_query_of_attribution_check_dates__requires_tenth_of_nodes(other_nodes: int, counts: bool) -> None:
    assert bool(dates([7], other_nodes)) == counts


@pytest.mark.parametrize(("begin", "end", "counts"), [(8, 9, True), (9, 20, False), (0, 8, False)])
def test_query_of_attribution_check_dates__is_in_period(begin: int, end: int, counts: bool) -> None:
    assert bool(dates([7, 10], from_time=begin, to_time=end)) == counts


CLEARED = {
    **NODE,
    "event": "cleared",
    "code": "gpu_row_remap/failure",
    "subject": None,
    "cleared_by": "check",
    "time": 5,
}


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ({}, True),
        ({"cleared_by": None}, True),
        ({"cleared_by": "window"}, False),
        ({"event": "seen_again"}, False),
        ({"code": "gpu_xid/79"}, False),
        ({"node": "n2"}, False),
        ({"time": 1000}, False),
    ],
)
def test_query_of_attribution_cleared_flags__requires_clear_by_check(line: dict[str, Any], counts: bool) -> None:
    found = run_query(
        "attribution_cleared_flags", attribution.ClearedFlag, lines=[{**CLEARED, **line}], chosen_nodes=[NODE]
    )
    assert found == [("c", "n1", "", "gpu_row_remap/failure", 5)] * counts


def test_query_of_attribution_tickets__has_tickets_opened_in_period() -> None:
    ticket = {**NODE, "opened_time": 5, "text": "swap"}
    rows = [ticket, {**ticket, "opened_time": 1000}, {**ticket, "text": None}, {**ticket, "node": "n2"}]
    found = run_query("attribution_tickets", attribution.Ticket, tickets=rows, chosen_nodes=[NODE])
    assert found == [("c", "n1", 5, None, "swap")]


# --- other answers


SLOT = {**NODE, "subject": "s1"}
GPU = {**SLOT, "gpu": "A", "serial": "1", "uuid": "A", "from_time": 10, "until_time": 600, "ended": "replaced"}
GPU_FAULT = {**SLOT, "gpu": "A", "from_time": 10, "time": 500, "end_time": 500, "code": "gpu_xid/79"}


def replaced(
    *faults: dict[str, Any], chosen: tuple[dict[str, Any], ...] = (NODE,), within: int = 1000, **period: Any
) -> list[str]:
    found = run_query(
        *("attribution_replaced_gpus", attribution.ReplacedGpu, {"within_seconds": within}),
        gpu_periods=[{**GPU, "next_gpu": "B", "next_serial": "2", **period}],
        gpu_faults=[{**GPU_FAULT, **fault} for fault in faults],
        chosen_nodes=list(chosen),
    )
    assert all(gpu[:8] == ("c", "n1", "s1", period.get("until_time", 600), "1", "A", "B", "2") for gpu in found)
    return [gpu.code for gpu in found]


def test_query_of_attribution_replaced_gpus__has_last_fault() -> None:
    assert replaced({"time": 400, "code": "gpu_ecc/uncorrected"}, {}, {"time": 300, "code": "x"}) == ["gpu_xid/79"]
    assert replaced({}, within=100) == ["gpu_xid/79"]
    assert replaced({}, within=99) == []


def test_query_of_attribution_replaced_gpus__counts_from_the_end_of_the_fault() -> None:
    for end_time, within in ((None, 1), (601, 1), (599, 1), (500, 100)):
        assert replaced({"time": 20, "end_time": end_time}, within=within) == ["gpu_xid/79"], end_time
    assert replaced({"time": 20, "end_time": 598}, within=1) == []
    later = {"time": 300, "end_time": 300, "code": "x"}
    assert replaced({"time": 20, "end_time": None}, later, within=1) == ["gpu_xid/79"], "the later fault is too old"


@pytest.mark.parametrize("period", [{"ended": "moved"}, {"ended": "removed"}, {"until_time": 1000}])
def test_query_of_attribution_replaced_gpus__leaves_out_other_gpus(period: dict[str, Any]) -> None:
    assert replaced({}, **period) == []


@pytest.mark.parametrize("fault", [{"gpu": "B"}, {"subject": "s2"}, {"from_time": 11}, {"node": "n2"}])
def test_query_of_attribution_replaced_gpus__requires_fault_of_the_same_gpu(fault: dict[str, Any]) -> None:
    assert replaced(fault) == []
    assert replaced({}, chosen=({**NODE, "node": "n2"},)) == []


def test_query_of_attribution_listed_nodes__has_time_of_first_list() -> None:
    periods = [{**GPU, "from_time": 20}, GPU, {**GPU, "node": "n2", "from_time": 5}]
    found = run_query("attribution_listed_nodes", attribution.ListedNode, gpu_periods=periods, chosen_nodes=[NODE])
    assert found == [("c", "n1", 10)]


def test_query_of_rate_clusters__has_each_cluster_once() -> None:
    jobs = [{"cluster": name} for name in ("b", "a", "b")]
    assert run_query("rate_clusters", rate.Cluster, chosen_jobs=jobs) == [("a",), ("b",)]


def test_query_of_availability_ingested__counts_node_states() -> None:
    rows = [{"source": source} for source in ("sacct", "node_states", "node_states")]
    assert run_query("availability_ingested", availability.Ingested, ingests=rows) == [(2,)]


def test_query_of_report_sources__sorts_by_source_and_time() -> None:
    source = {"cluster": "c", "source": "sacct", "from_time": 5, "to_time": 9, "names": 1, "rows_read": 2,
           "rows_unread": 0, "read_time": 3}  # fmt: skip
    rows = [{**source, "from_time": None}, source, {**source, "source": "events"}]
    found = run_query("report_sources", report.Source, sources_coverage=rows)
    assert [(row.source, row.from_time) for row in found] == [("events", 5), ("sacct", 5), ("sacct", None)]


def test_query_of_chosen_node_names__has_all_nodes() -> None:
    nodes = [{"cluster": "c", "node": node} for node in ("b", "a")]
    assert run_query("chosen_node_names", study.ChosenNode, chosen_nodes=nodes) == [("c", "a"), ("c", "b")]


@pytest.mark.parametrize("steps", [[], [30, 60]])
def test_query_of_observed_share__covers_chosen_nodes(steps: list[int]) -> None:
    observed = [{**NODE, "seconds": 10, "observed_seconds": part} for part in (4, 5)]
    found = run_query(
        *("observed_share", study.ObservedShare),
        observed=[*observed, {**observed[0], "node": "n2"}],
        chosen_nodes=[NODE],
        scraped_conditions=[{"step_seconds": step} for step in steps],
    )
    assert found == [(20, 9, max(steps, default=None))]


# --- slowing


CONDITION = {
    "cluster": "c", "node": "n1", "code": "gpu_clocks/slow", "subject": "g", "check_name": "gpu_clocks",
    "condition_id": "x", "first_time": 100, "last_time": 200, "cleared_time": None, "kind": "level",
    "origin": "events", "severity": "degraded", "observed": False, "history": False,
}  # fmt: skip


def slowing_rows(*messages: dict[str, Any], **condition: Any) -> list[Any]:
    events = [{"node": "n1", "condition_id": "x", "stream_id": "s", **message} for message in messages]
    return run_query(
        *("slowing_conditions", evidence.Slowing),
        conditions=[{**CONDITION, **condition}],
        events=events,
        chosen_nodes=[NODE],
        named_nodes=[{"node": "n1"}],
        named_checks=[{"check_name": "gpu_clocks"}],
    )


@pytest.mark.parametrize(
    ("condition", "end"),
    [
        ({}, None),
        ({"cleared_time": 300}, 300),
        ({"cleared_time": 50}, 100),
        ({"origin": "scraped"}, 200),
        ({"kind": "edge"}, 800),
        ({"kind": "edge", "last_time": 50}, 700),
    ],
)
def test_query_of_slowing_conditions__ends_when_cleared_or_last_scraped(
    condition: dict[str, Any], end: int | None
) -> None:
    assert [row.end_time for row in slowing_rows(**condition)] == [end]


@pytest.mark.parametrize(
    "condition",
    [
        *({"severity": "info"}, {"observed": True}, {"history": True}, {"node": "n2"}, {"cluster": "d"}),
        {"check_name": "mount"},
    ],
)
def test_query_of_slowing_conditions__leaves_out_other_conditions(condition: dict[str, Any]) -> None:
    assert slowing_rows(**condition) == []


def test_query_of_slowing_conditions__has_newest_message() -> None:
    rows = [
        {"time": 5, "seq": 1, "message": "old"},
        {"time": 5, "seq": 2, "message": "new"},
        {"time": 9, "seq": 3, "message": None},
        {"time": 9, "seq": 4, "message": "of another", "condition_id": "y"},
    ]
    assert [row.message for row in slowing_rows(*rows)] == ["new"]
    assert [row.message for row in slowing_rows()] == [None]


# --- link faults

LINK_FAULT = {
    **NODE,
    "event": "opened",
    "condition_id": "x1",
    "check_name": "gpu_nvlink",
    "code": "gpu_nvlink/inactive",
    "subject": "p",
    "severity": "critical",
    "first_time": 1000,
    "time": 1060,
    "nvlink_domain": "rack",
    "observed": False,
    "history": False,
    "was": None,
}


def link_faults(*lines: dict[str, Any]) -> list[LinkFault]:
    return run_query("link_faults", LinkFault, lines=[{**LINK_FAULT, **line} for line in lines])


def test_query_of_link_faults__has_first_sighting_of_each_condition() -> None:
    found = link_faults(
        {},
        {"event": "seen_again", "time": 5000},
        {"condition_id": "x2", "first_time": None, "time": 7000},
    )
    assert found == [
        LinkFault("c", "n1", "rack", "gpu_nvlink/inactive", 1000),
        LinkFault("c", "n1", "rack", "gpu_nvlink/inactive", 7000),
    ]


@pytest.mark.parametrize(("was", "begun"), [("warning", 5000), ("info", 5000), ("degraded", 1000)])
def test_query_of_link_faults__has_time_at_which_condition_drains(was: str, begun: int) -> None:
    opened = {"severity": "degraded" if was == "degraded" else "warning"}
    worsened = {"event": "worsened", "was": was, "time": 5000}
    found = link_faults(opened, worsened, {"event": "seen_again", "time": 9000})
    assert found == [LinkFault("c", "n1", "rack", "gpu_nvlink/inactive", begun)]


@pytest.mark.parametrize(
    "line",
    [
        {"nvlink_domain": None},
        {"severity": "warning"},
        {"event": "cleared"},
        {"check_name": "imex"},
        {"observed": True},
        {"observed": None},
        {"history": True},
    ],
)
def test_query_of_link_faults__leaves_out_other_lines(line: dict[str, Any]) -> None:
    assert link_faults(line, {"node": "n2"}) == [LinkFault("c", "n2", "rack", "gpu_nvlink/inactive", 1000)]
