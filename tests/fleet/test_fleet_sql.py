"""Tests of each query against plain Python on small generated histories, for any order of rows, files and clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fleet_history import BEGIN, CLUSTERS, END, History, Row, history, row, write_parquet
from fleet_naive import ANSWERS
from fleet_rows import store_with as store_of
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthd.fleet import engine, queries
from healthd.fleet.store import open_for_reading
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

BUILTIN_QUERIES = queries.builtin_queries()
NEEDED = {name: queries.with_dependencies(question, BUILTIN_QUERIES) for name, question in BUILTIN_QUERIES.items()}
PARAMETERS = queries.resolve_parameters(BUILTIN_QUERIES.values(), {})
DEFAULT_PARAMETERS = engine.QueryParameters(BEGIN, END, PARAMETERS)
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=also(*HealthCheck))

ComparableRows = list[tuple[tuple[str, Any], ...]]


def comparable_rows(rows: Any) -> ComparableRows:
    """Return rows as comparable values in a fixed order, with fractions rounded to nine digits."""
    plain = (
        tuple(sorted((n, float(f"{v:.9g}") if isinstance(v, float) else v) for n, v in row_values.items()))
        for row_values in rows
    )
    return sorted(plain, key=repr)


def run_queries(
    made: History,
    *names: str,
    parameters: engine.QueryParameters = DEFAULT_PARAMETERS,
    parts: int = 1,
    random: Random | None = None,
) -> dict[str, ComparableRows]:
    """Return the rows of these queries, or of all queries, from DuckDB."""
    with TemporaryDirectory() as folder:
        return run_on_files(write_parquet(made, Path(folder), parts, random), *names, parameters=parameters)


def run_query(made: History, name: str, parameters: engine.QueryParameters = DEFAULT_PARAMETERS) -> ComparableRows:
    """Return the rows of one query from DuckDB."""
    return run_queries(made, name, parameters=parameters)[name]


def run_on_files(
    files: engine.Files, *names: str, parameters: engine.QueryParameters = DEFAULT_PARAMETERS
) -> dict[str, ComparableRows]:
    found = {}
    with engine.open_database(files, 1, 512) as connection:
        for name in names or NEEDED:
            answer = engine.run_on_connection(connection, NEEDED[name], parameters)
            found[name] = comparable_rows(dict(zip(answer.columns, values, strict=True)) for values in answer.rows)
    return found


def naive_rows(made: History, name: str, like: ComparableRows) -> ComparableRows:
    """Return the rows of the Python implementation, with the columns of the query."""
    rows = ANSWERS[name](made, BEGIN, END)
    columns = {column for column, _ in like[0]} if like else set(rows[0] if rows else ())
    return comparable_rows({column: values[column] for column in columns} for values in rows)


def test_every_query_has_naive_answer():
    assert set(ANSWERS) == set(BUILTIN_QUERIES)


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_queries_match_naive_answers(random):
    made = history(random)
    for name, found in run_queries(made).items():
        assert found == naive_rows(made, name, found), name


@pytest.mark.parametrize("seed", range(6))
def test_queries_match_naive_answers_on_more_rows(seed):
    made = history(Random(seed), 40)
    for name, found in run_queries(made).items():
        assert found == naive_rows(made, name, found), name


def test_histories_give_rows_for_every_query():
    """Without them, the tests above could compare empty answers."""
    found = run_queries(history(Random(2), 60))
    assert {name for name, rows in found.items() if len(rows) < 2} == set()
    methods = {dict(entry)["how"] for entry in found["preempted"]}
    assert methods == {"logged", "inferred", "unknown"}
    assert {dict(entry)["what"] for entry in found["sightings"]} == {"onset", "growth", "seen"}
    assert {dict(entry)["ended"] for entry in found["gpu_periods"]} == {"moved", "replaced", "removed", None}
    assert {dict(entry)["reported"] for entry in found["stream_gaps"]} == {True, False}
    assert any(0 < dict(entry)["observed_seconds"] < dict(entry)["seconds"] for entry in found["observed"])
    assert any(dict(entry)["overlapping"] for entry in found["runs"])


@settings(EXAMPLES, max_examples=4)
@given(st.randoms(use_true_random=False))
def test_queries_ignore_row_order_and_file_layout(random):
    made = history(random, 12)
    assert run_queries(made) == run_queries(made, parts=3, random=random)


def rows_of_cluster(made: History, cluster: str) -> History:
    """Return the rows of one cluster, with whole event streams that name it in any line."""
    streams = {e["stream_id"] for e in made["events"] if e["cluster"] == cluster}
    return {
        table: [
            entry
            for entry in rows
            if (entry["stream_id"] in streams if table in ("events", "gpus") else entry["cluster"] == cluster)
        ]
        for table, rows in made.items()
    }


@settings(EXAMPLES, max_examples=4)
@given(st.randoms(use_true_random=False))
def test_queries_ignore_other_clusters(random):
    made = history(random, 12)
    named = {e["stream_id"] for e in made["events"] if e["cluster"]}
    for table in ("events", "gpus"):
        made[table] = [e for e in made[table] if e["stream_id"] in named]
    together, apart = run_queries(made), [run_queries(rows_of_cluster(made, cluster)) for cluster in CLUSTERS]
    for name, rows in together.items():
        assert rows == sorted([*apart[0][name], *apart[1][name]], key=repr), name


def add_condition(
    made: History, edge: int, kind: str = "edge", event: str = "opened", first: int | None = None, **more: Any
) -> Row:
    """Add a condition of gpu-1 that was last seen at `edge`. `more` has further values of its line."""
    seq = len(made["events"]) + 1
    plain = {
        "cluster": "c1",
        "node": "gpu-1",
        "boot_id": "b",
        "stream_id": "s",
        "seq": seq,
        "time": edge,
        "mono": 1.0 * edge,
        "event": event,
        "condition_id": f"x-{seq}",
        "check_name": "gpu_xid",
        "code": f"gpu_xid/{seq}",
        "subject": "",
        "severity": "critical",
        "kind": kind,
        "first_time": edge if first is None else first,
        "last_time": edge,
        "times": 1,
        "observed": False,
        "history": False,
    }
    entry = row("events", **{**plain, **more})
    made["events"].append(entry)
    return entry


def history_of_failed_job(state: str = "FAILED") -> History:
    """Return a job that ran on gpu-1 for one hour with 256 GPUs and ended in this state."""
    made: History = {name: [] for name in TABLES}
    times = {"submit_time": BEGIN, "start_time": BEGIN + 100, "end_time": BEGIN + 3700}
    made["jobs"].append(row("jobs", cluster="c1", db_index=1, job_id=7, state=state, nodes=1, gpus=256, **times))
    made["job_nodes"].append(row("job_nodes", cluster="c1", db_index=1, node="gpu-1", gpus=256.0, **times))
    return made


@pytest.mark.parametrize(("seconds", "counts"), [(-601, False), (-600, True), (0, True), (300, True), (301, False)])
def test_condition_counts_from_10_min_before_failure_to_5_min_after(seconds, counts):
    made = history_of_failed_job()
    add_condition(made, BEGIN + 3700 + seconds)
    found = run_queries(made, "seen_with_failures", "node_days")
    assert [dict(entry)["code"] for entry in found["seen_with_failures"]] == ["gpu_xid/1"] * counts
    assert [dict(entry)["failures"] for entry in found["node_days"]] == [int(counts)]
    assert [dict(entry)["node_seconds"] for entry in found["node_days"]] == [3600]


def test_old_level_counts_only_at_onset_or_growth():
    made = history_of_failed_job()
    end, long_ago = BEGIN + 3700, BEGIN - 9999
    add_condition(made, end, "level", "seen_again", long_ago)
    add_condition(made, end, "level", "opened")
    add_condition(made, end, "level", "worsened", long_ago)
    add_condition(made, end, "edge", "seen_again", long_ago)
    codes = [dict(entry)["code"] for entry in run_query(made, "seen_with_failures")]
    assert codes == ["gpu_xid/2", "gpu_xid/3", "gpu_xid/4"]


@pytest.mark.parametrize("kind", ["edge", "level"])
@pytest.mark.parametrize("flags", [{"observed": True}, {"history": True}, {"observed": None, "history": None}])
def test_observed_and_history_conditions_are_no_cause(kind, flags):
    """The same holds for rows from an older store without these two columns."""
    made = history_of_failed_job()
    add_condition(made, BEGIN + 3700, kind, **flags)
    add_condition(made, BEGIN + 3700, kind, "worsened", BEGIN, **flags)
    found = run_queries(made, "seen_with_failures", "node_days", "conditions", "sightings")
    assert found["seen_with_failures"] == []
    assert [dict(entry)["failures"] for entry in found["node_days"]] == [0]
    assert {dict(entry)["observed"] for entry in found["conditions"]} == {flags.get("observed", False) is not False}
    assert {dict(entry)["history"] for entry in found["sightings"]} == {flags.get("history") is True}
    add_condition(made, BEGIN + 3700, kind)
    assert [dict(entry)["code"] for entry in run_query(made, "seen_with_failures")] == ["gpu_xid/3"]


def test_enforced_line_decides_beside_observed_line():
    made = history_of_failed_job()
    end, life = BEGIN + 3700, {"condition_id": "x", "code": "gpu_xid/79"}
    add_condition(made, end, **life, observed=True, severity="info")
    add_condition(made, end, **life)
    assert [dict(entry)["severity"] for entry in run_query(made, "seen_with_failures")] == ["critical"]
    made["events"].pop()
    assert run_query(made, "seen_with_failures") == []


def test_history_condition_does_not_begin_when_seen_again():
    """The later line has the same first time but no history flag."""
    made = history_of_failed_job()
    end, life = BEGIN + 3700, {"condition_id": "x", "code": "mount/missing"}
    add_condition(made, end, "level", **life, history=True)
    add_condition(made, end + 5000, "level", "seen_again", end, **life)
    found = run_queries(made, "seen_with_failures", "sightings")
    assert found["seen_with_failures"] == []
    assert sorted(
        (dict(entry)["time"], dict(entry)["what"], dict(entry)["history"]) for entry in found["sightings"]
    ) == [
        (end, "seen", True),
        (end + 5000, "seen", False),
    ]


ONE_CONDITION = {"condition_id": "x", "code": "gpu_xid/79"}


def test_condition_worsened_at_onset_is_critical_at_onset():
    made, end = history_of_failed_job(), BEGIN + 3700
    add_condition(made, end, "level", "opened", severity="warning", **ONE_CONDITION)
    add_condition(made, end, "level", "worsened", **ONE_CONDITION)
    found = run_queries(made, "sightings", "seen_with_failures", "node_days")
    assert [(dict(entry)["severity"], dict(entry)["what"]) for entry in found["sightings"]] == [("critical", "onset")]
    assert [dict(entry)["severity"] for entry in found["seen_with_failures"]] == ["critical"]
    assert [dict(entry)["failures"] for entry in found["node_days"]] == [1]


def test_condition_worsened_later_is_not_critical_at_onset():
    made, end = history_of_failed_job(), BEGIN + 3700
    add_condition(made, end, "level", "opened", severity="warning", **ONE_CONDITION)
    add_condition(made, end + 301, "level", "worsened", end, **ONE_CONDITION)
    found = run_queries(made, "sightings", "node_days")
    shown = [(dict(entry)["time"] - end, dict(entry)["severity"], dict(entry)["what"]) for entry in found["sightings"]]
    assert sorted(shown) == [(0, "warning", "onset"), (301, "critical", "growth")]
    assert [dict(entry)["failures"] for entry in found["node_days"]] == [0]
    assert found["sightings"] == naive_rows(made, "sightings", found["sightings"])


def test_job_without_end_ran_until_last_read():
    made = history_of_failed_job()
    [job] = made["jobs"]
    job |= {"state": "RUNNING", "end_time": None}
    read = row("ingests", cluster="c1", source="sacct", name="day", from_time=BEGIN, to_time=BEGIN + 1100)
    for ingests, other, ran in [([], [], 0), ([read], [], 1000), ([{**read, "source": "events"}], [], 0)]:
        found = run_queries({**made, "ingests": ingests, "jobs": [job, *other]}, "node_days", "runs")
        assert [dict(entry)["node_seconds"] for entry in found["node_days"]] == [ran]
        assert [dict(entry)["runtime_seconds"] for entry in found["runs"]] == [ran]
    over = {**job, "db_index": 2, "job_id": 8, "gpus": 1, "state": "COMPLETED", "end_time": BEGIN + 2100}
    elsewhere = {**over, "cluster": "c2", "end_time": BEGIN + 9100}
    found = run_queries({**made, "ingests": [read], "jobs": [job, over, elsewhere]}, "node_days", "jobs_known")
    assert [dict(entry)["node_seconds"] for entry in found["node_days"]] == [2000], "a later row of its cluster counts"
    assert [dict(entry)["known_until"] for entry in found["jobs_known"]] == [BEGIN + 2100, BEGIN + 9100]
    sooner = engine.QueryParameters(BEGIN, BEGIN + 600, PARAMETERS)
    assert [dict(entry)["node_seconds"] for entry in run_query(made | {"ingests": [read]}, "node_days", sooner)] == [
        500
    ]


def test_job_last_read_before_period_did_not_run_in_it():
    made = history_of_failed_job()
    made["jobs"][0] |= {"state": "RUNNING", "end_time": None}
    found = run_queries(made, "node_days", "runs", parameters=engine.QueryParameters(BEGIN + 101, END, PARAMETERS))
    assert (found["node_days"], found["runs"]) == ([], [])


@pytest.mark.parametrize("begin", [BEGIN, BEGIN + 3701])
def test_preemption_line_explains_one_end_of_job(begin):
    """JobId 7 was preempted, requeued and preempted again 40 seconds later; the log line of the second is missing."""
    made = history_of_failed_job("PREEMPTED")
    [job] = made["jobs"]
    again = {**job, "db_index": 2, "start_time": BEGIN + 3710, "end_time": BEGIN + 3740}
    made["jobs"].append(again)
    line = row("preemptions", cluster="c1", time=BEGIN + 3700, job_id=7, preemptor_job_id=9, mode="requeued")
    made["preemptions"].append(line)
    found = [dict(entry) for entry in run_query(made, "preempted", engine.QueryParameters(begin, END, PARAMETERS))]
    results = {entry["db_index"]: (entry["how"], entry["preemptor_job_id"]) for entry in found}
    assert results == {**({1: ("logged", 9)} if begin == BEGIN else {}), 2: ("unknown", None)}


def add_drain(made: History, time: int, stage: str = "drain", stream: str = "s1", seq: int = 1) -> None:
    values = {"event": stage, "stage": "confirmed", "reason": "healthd: gpu_xid/79"}
    position = {"cluster": "c1", "node": "gpu-1", "stream_id": stream, "seq": seq, "time": time, "schema_version": 1}
    made["events"].append(row("events", **position, **values))


@pytest.mark.parametrize("behind", [-200, 0, 30])
@pytest.mark.parametrize("again", [False, True])
def test_drain_of_reinstalled_node_ends_with_slurm_state(behind: int, again: bool) -> None:
    """The new ledger knows no drain, so no event records the resume. The node may be drained again later."""
    made: History = {name: [] for name in TABLES}
    state = {"cluster": "c1", "node": "gpu-1", "state": "DRAIN", "reason": "healthd: gpu_xid/79", "set_by": "healthd"}
    spells = [(BEGIN + 1000, BEGIN + 4600), *([(BEGIN + 90_000, BEGIN + 91_000)] if again else [])]
    for number, (start, end) in enumerate(spells):
        add_drain(made, start + behind, stream=f"s{number}")
        made["node_states"].append(row("node_states", start_time=start, end_time=end, **state))
    found = run_query(made, "out_of_service")
    spans = sorted((dict(entry)["start_time"], dict(entry)["end_time"], dict(entry)["from_healthd"]) for entry in found)
    assert spans == [(min(start, start + behind), end, 1) for start, end in spells]
    assert found == naive_rows(made, "out_of_service", found)
    made["node_states"][-1]["end_time"] = None
    assert [dict(entry)["end_time"] for entry in run_query(made, "out_of_service")][-1] is None


def test_query_uses_given_parameters():
    made = history_of_failed_job("NODE_FAIL")
    add_condition(made, BEGIN + 3700 - 5000)
    assert run_query(made, "seen_with_failures") == []
    longer = engine.QueryParameters(BEGIN, END, {**PARAMETERS, "before_seconds": 5000, "more_than_gpus": 256})
    assert len(run_query(made, "seen_with_failures", longer)) == 1
    assert (len(run_query(made, "node_days")), len(run_query(made, "node_days", longer))) == (1, 0)


def test_rows_ingested_twice_count_once(tmp_path):
    history_rows = history(Random(0), 30)
    rows = {
        table: [tuple(entry.values()) for entry in table_rows]
        for table, table_rows in history_rows.items()
        if table_rows
    }
    with open_for_reading(str(store_of(tmp_path / "db", rows, rows))) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        assert sum(map(len, files.values())) > len(rows), "some tables have several months"
        assert run_on_files(files) == run_queries(history_rows)


def test_empty_store_gives_no_rows():
    assert set(map(len, run_queries({name: [] for name in TABLES}).values())) == {0}


@pytest.mark.parametrize("table", sorted(TABLES))
def test_table_with_one_sparse_row_is_answered(table):
    """Everything that may be NULL is NULL."""
    values = {"cluster": "c1", "node": "gpu-1", "db_index": 1, "job_id": 1, "submit_time": BEGIN, "time": BEGIN}
    values |= {"start_time": BEGIN, "first_time": BEGIN, "name": "", "stream_id": "s", "seq": 1, "event": "started"}
    made: History = {name: [] for name in TABLES}
    made[table] = [row(table, **{name: value for name, value in values.items() if name in TABLES[table].columns})]
    found = run_queries(made)
    with_nodes = {"nodes", "events", "job_nodes", "node_states"}
    assert bool(found["observed"]) == (table in with_nodes)
    assert bool(found["lines"]) == (table == "events")


@pytest.fixture(params=sorted(BUILTIN_QUERIES))
def name(request) -> Iterator[str]:
    return request.param


def test_query_comment_has_title_columns_and_source(name):
    question = BUILTIN_QUERIES[name]
    assert question.title.endswith("."), "the first line must be a sentence"
    assert len(question.title) <= 78
    assert "\n-- source: " in question.sql
    assert "\n-- columns" in question.sql


def test_query_names_differ_from_table_names():
    assert {*BUILTIN_QUERIES} & {*TABLES, "parameters", "numbers"} == set()
