"""Tests of each query against plain Python on small generated histories, for any order of rows, files and clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fleet_history import BEGIN, CLUSTERS, END, History, Row, history, row, write
from fleet_naive import ANSWERS
from fleet_rows import made as store_of
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthd.fleet import engine, queries
from healthd.fleet.store import open_for_reading
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

THERE = queries.builtin_queries()
NEEDED = {name: queries.with_dependencies(question, THERE) for name, question in THERE.items()}
PARAMETERS = queries.resolve_parameters(THERE.values(), {})
ASKED = engine.QueryParameters(BEGIN, END, PARAMETERS)
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=also(*HealthCheck))

Shown = list[tuple[tuple[str, Any], ...]]


def shown(rows: Any) -> Shown:
    """Return rows as comparable values in a fixed order, with fractions rounded to nine digits."""
    plain = (
        tuple(sorted((n, float(f"{v:.9g}") if isinstance(v, float) else v) for n, v in one.items())) for one in rows
    )
    return sorted(plain, key=repr)


def answers(
    made: History, *names: str, asked: engine.QueryParameters = ASKED, parts: int = 1, random: Random | None = None
) -> dict[str, Shown]:
    """Return the rows of these queries, or of all queries, from DuckDB."""
    with TemporaryDirectory() as folder:
        return ask(write(made, Path(folder), parts, random), *names, asked=asked)


def answer(made: History, name: str, asked: engine.QueryParameters = ASKED) -> Shown:
    """Return the rows of one query from DuckDB."""
    return answers(made, name, asked=asked)[name]


def ask(files: engine.Files, *names: str, asked: engine.QueryParameters = ASKED) -> dict[str, Shown]:
    found = {}
    with engine.open_database(files, 1, 512) as connection:
        for name in names or NEEDED:
            answer = engine.run_on_connection(connection, NEEDED[name], asked)
            found[name] = shown(dict(zip(answer.columns, one, strict=True)) for one in answer.rows)
    return found


def naive(made: History, name: str, like: Shown) -> Shown:
    """Return the rows of the Python implementation, with the columns of the query."""
    rows = ANSWERS[name](made, BEGIN, END)
    columns = {column for column, _ in like[0]} if like else set(rows[0] if rows else ())
    return shown({column: one[column] for column in columns} for one in rows)


def test_each_question_has_an_answer_in_python():
    assert set(ANSWERS) == set(THERE)


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_sql_and_python_answer_alike(random):
    made = history(random)
    for name, found in answers(made).items():
        assert found == naive(made, name, found), name


@pytest.mark.parametrize("seed", range(6))
def test_sql_and_python_answer_alike_on_more_rows(seed):
    made = history(Random(seed), 40)
    for name, found in answers(made).items():
        assert found == naive(made, name, found), name


def test_these_histories_ask_something_of_each_question():
    """Without them, the tests above could compare empty answers."""
    found = answers(history(Random(2), 60))
    assert {name for name, rows in found.items() if len(rows) < 2} == set()
    how = {dict(one)["how"] for one in found["preempted"]}
    assert how == {"logged", "inferred", "unknown"}
    assert {dict(one)["what"] for one in found["sightings"]} == {"onset", "growth", "seen"}
    assert {dict(one)["reported"] for one in found["stream_gaps"]} == {True, False}
    assert any(0 < dict(one)["observed_seconds"] < dict(one)["seconds"] for one in found["observed"])
    assert any(dict(one)["overlapping"] for one in found["runs"])


@settings(EXAMPLES, max_examples=4)
@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_and_how_they_lie_in_files_change_nothing(random):
    made = history(random, 12)
    assert answers(made) == answers(made, parts=3, random=random)


def only(made: History, cluster: str) -> History:
    """Return the rows of one cluster, with whole event streams that name it in any line."""
    streams = {e["stream_id"] for e in made["events"] if e["cluster"] == cluster}
    kept = {
        table: [one for one in rows if one["cluster"] == cluster] for table, rows in made.items() if table != "events"
    }
    return {**kept, "events": [e for e in made["events"] if e["stream_id"] in streams]}


@settings(EXAMPLES, max_examples=4)
@given(st.randoms(use_true_random=False))
def test_another_cluster_in_the_store_changes_nothing(random):
    made = history(random, 12)
    named = {e["stream_id"] for e in made["events"] if e["cluster"]}
    made["events"] = [e for e in made["events"] if e["stream_id"] in named]
    together, apart = answers(made), [answers(only(made, cluster)) for cluster in CLUSTERS]
    for name, rows in together.items():
        assert rows == sorted([*apart[0][name], *apart[1][name]], key=repr), name


def seen(
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
    one = row("events", **{**plain, **more})
    made["events"].append(one)
    return one


def a_failed_job(state: str = "FAILED") -> History:
    """Return a job that ran on gpu-1 for one hour with 256 GPUs and ended in this state."""
    made: History = {name: [] for name in TABLES}
    times = {"submit_time": BEGIN, "start_time": BEGIN + 100, "end_time": BEGIN + 3700}
    made["jobs"].append(row("jobs", cluster="c1", db_index=1, job_id=7, state=state, nodes=1, gpus=256, **times))
    made["job_nodes"].append(row("job_nodes", cluster="c1", db_index=1, node="gpu-1", gpus=256.0, **times))
    return made


@pytest.mark.parametrize(("seconds", "counts"), [(-601, False), (-600, True), (0, True), (300, True), (301, False)])
def test_what_is_seen_from_ten_minutes_before_a_failure_until_five_after_counts(seconds, counts):
    made = a_failed_job()
    seen(made, BEGIN + 3700 + seconds)
    found = answers(made, "seen_with_failures", "node_days")
    assert [dict(one)["code"] for one in found["seen_with_failures"]] == ["gpu_xid/1"] * counts
    assert [dict(one)["failures"] for one in found["node_days"]] == [int(counts)]
    assert [dict(one)["node_seconds"] for one in found["node_days"]] == [3600]


def test_a_level_that_stands_for_long_does_not_count_but_where_it_began_or_worsened_does():
    made = a_failed_job()
    end, long_ago = BEGIN + 3700, BEGIN - 9999
    seen(made, end, "level", "seen_again", long_ago)
    seen(made, end, "level", "opened")
    seen(made, end, "level", "worsened", long_ago)
    seen(made, end, "edge", "seen_again", long_ago)
    codes = [dict(one)["code"] for one in answer(made, "seen_with_failures")]
    assert codes == ["gpu_xid/2", "gpu_xid/3", "gpu_xid/4"]


@pytest.mark.parametrize("kind", ["edge", "level"])
@pytest.mark.parametrize("said", [{"observed": True}, {"history": True}, {"observed": None, "history": None}])
def test_what_a_user_can_forge_and_what_was_there_before_healthd_is_no_cause(kind, said):
    """The same holds for rows from an older store without these two columns."""
    made = a_failed_job()
    seen(made, BEGIN + 3700, kind, **said)
    seen(made, BEGIN + 3700, kind, "worsened", BEGIN, **said)
    found = answers(made, "seen_with_failures", "node_days", "conditions", "sightings")
    assert found["seen_with_failures"] == []
    assert [dict(one)["failures"] for one in found["node_days"]] == [0]
    assert {dict(one)["observed"] for one in found["conditions"]} == {said.get("observed", False) is not False}
    assert {dict(one)["history"] for one in found["sightings"]} == {said.get("history") is True}
    seen(made, BEGIN + 3700, kind)
    assert [dict(one)["code"] for one in answer(made, "seen_with_failures")] == ["gpu_xid/3"]


def test_a_moment_of_which_a_forged_line_tells_too_is_what_the_other_line_says():
    made = a_failed_job()
    end, life = BEGIN + 3700, {"condition_id": "x", "code": "gpu_xid/79"}
    seen(made, end, **life, observed=True, severity="info")
    seen(made, end, **life)
    assert [dict(one)["severity"] for one in answer(made, "seen_with_failures")] == ["critical"]
    made["events"].pop()
    assert answer(made, "seen_with_failures") == []


def test_what_healthd_found_in_the_log_at_its_first_start_does_not_begin_when_it_is_seen_again():
    """The later line has the same first time but no history flag."""
    made = a_failed_job()
    end, life = BEGIN + 3700, {"condition_id": "x", "code": "mount/missing"}
    seen(made, end, "level", **life, history=True)
    seen(made, end + 5000, "level", "seen_again", end, **life)
    found = answers(made, "seen_with_failures", "sightings")
    assert found["seen_with_failures"] == []
    assert sorted((dict(one)["time"], dict(one)["what"], dict(one)["history"]) for one in found["sightings"]) == [
        (end, "seen", True),
        (end + 5000, "seen", False),
    ]


ONE = {"condition_id": "x", "code": "gpu_xid/79"}


def test_what_grows_critical_in_the_second_of_its_onset_is_critical_then():
    made, end = a_failed_job(), BEGIN + 3700
    seen(made, end, "level", "opened", severity="warning", **ONE)
    seen(made, end, "level", "worsened", **ONE)
    found = answers(made, "sightings", "seen_with_failures", "node_days")
    assert [(dict(one)["severity"], dict(one)["what"]) for one in found["sightings"]] == [("critical", "onset")]
    assert [dict(one)["severity"] for one in found["seen_with_failures"]] == ["critical"]
    assert [dict(one)["failures"] for one in found["node_days"]] == [1]


def test_what_grows_critical_later_was_not_critical_at_its_onset():
    made, end = a_failed_job(), BEGIN + 3700
    seen(made, end, "level", "opened", severity="warning", **ONE)
    seen(made, end + 301, "level", "worsened", end, **ONE)
    found = answers(made, "sightings", "node_days")
    shown = [(dict(one)["time"] - end, dict(one)["severity"], dict(one)["what"]) for one in found["sightings"]]
    assert sorted(shown) == [(0, "warning", "onset"), (301, "critical", "growth")]
    assert [dict(one)["failures"] for one in found["node_days"]] == [0]
    assert found["sightings"] == naive(made, "sightings", found["sightings"])


def test_a_job_without_an_end_ran_until_it_was_last_read_and_no_longer():
    made = a_failed_job()
    [job] = made["jobs"]
    job |= {"state": "RUNNING", "end_time": None}
    read = row("ingests", cluster="c1", source="sacct", name="day", from_time=BEGIN, to_time=BEGIN + 1100)
    for ingests, other, ran in [([], [], 0), ([read], [], 1000), ([{**read, "source": "events"}], [], 0)]:
        found = answers({**made, "ingests": ingests, "jobs": [job, *other]}, "node_days", "runs")
        assert [dict(one)["node_seconds"] for one in found["node_days"]] == [ran]
        assert [dict(one)["runtime_seconds"] for one in found["runs"]] == [ran]
    over = {**job, "db_index": 2, "job_id": 8, "gpus": 1, "state": "COMPLETED", "end_time": BEGIN + 2100}
    elsewhere = {**over, "cluster": "c2", "end_time": BEGIN + 9100}
    found = answers({**made, "ingests": [read], "jobs": [job, over, elsewhere]}, "node_days", "jobs_known")
    assert [dict(one)["node_seconds"] for one in found["node_days"]] == [2000], "a later row of its cluster counts"
    assert [dict(one)["known_until"] for one in found["jobs_known"]] == [BEGIN + 2100, BEGIN + 9100]
    sooner = engine.QueryParameters(BEGIN, BEGIN + 600, PARAMETERS)
    assert [dict(one)["node_seconds"] for one in answer(made | {"ingests": [read]}, "node_days", sooner)] == [500]


def test_a_job_that_was_last_read_before_the_time_asked_for_did_not_run_in_it():
    made = a_failed_job()
    made["jobs"][0] |= {"state": "RUNNING", "end_time": None}
    found = answers(made, "node_days", "runs", asked=engine.QueryParameters(BEGIN + 101, END, PARAMETERS))
    assert (found["node_days"], found["runs"]) == ([], [])


@pytest.mark.parametrize("begin", [BEGIN, BEGIN + 3701])
def test_a_line_of_the_log_tells_of_one_end_of_a_job(begin):
    """JobId 7 was preempted, requeued and preempted again 40 seconds later; the log line of the second is missing."""
    made = a_failed_job("PREEMPTED")
    [job] = made["jobs"]
    again = {**job, "db_index": 2, "start_time": BEGIN + 3710, "end_time": BEGIN + 3740}
    made["jobs"].append(again)
    line = row("preemptions", cluster="c1", time=BEGIN + 3700, job_id=7, preemptor_job_id=9, mode="requeued")
    made["preemptions"].append(line)
    found = [dict(one) for one in answer(made, "preempted", engine.QueryParameters(begin, END, PARAMETERS))]
    said = {one["db_index"]: (one["how"], one["preemptor_job_id"]) for one in found}
    assert said == {**({1: ("logged", 9)} if begin == BEGIN else {}), 2: ("unknown", None)}


def drained(made: History, time: int, stage: str = "drain", stream: str = "s1", seq: int = 1) -> None:
    said = {"event": stage, "stage": "confirmed", "reason": "healthd: gpu_xid/79"}
    about = {"cluster": "c1", "node": "gpu-1", "stream_id": stream, "seq": seq, "time": time, "schema_version": 1}
    made["events"].append(row("events", **about, **said))


@pytest.mark.parametrize("behind", [-200, 0, 30])
@pytest.mark.parametrize("again", [False, True])
def test_a_drain_of_a_node_that_was_installed_anew_ends_as_slurms_does(behind: int, again: bool) -> None:
    """The new ledger knows no drain, so no event records the resume. The node may be drained again later."""
    made: History = {name: [] for name in TABLES}
    state = {"cluster": "c1", "node": "gpu-1", "state": "DRAIN", "reason": "healthd: gpu_xid/79", "set_by": "healthd"}
    spells = [(BEGIN + 1000, BEGIN + 4600), *([(BEGIN + 90_000, BEGIN + 91_000)] if again else [])]
    for number, (start, end) in enumerate(spells):
        drained(made, start + behind, stream=f"s{number}")
        made["node_states"].append(row("node_states", start_time=start, end_time=end, **state))
    found = answer(made, "out_of_service")
    told = sorted((dict(one)["start_time"], dict(one)["end_time"], dict(one)["from_healthd"]) for one in found)
    assert told == [(min(start, start + behind), end, 1) for start, end in spells]
    assert found == naive(made, "out_of_service", found)
    made["node_states"][-1]["end_time"] = None
    assert [dict(one)["end_time"] for one in answer(made, "out_of_service")][-1] is None


def test_what_can_be_said_with_a_parameter_is_taken():
    made = a_failed_job("NODE_FAIL")
    seen(made, BEGIN + 3700 - 5000)
    assert answer(made, "seen_with_failures") == []
    longer = engine.QueryParameters(BEGIN, END, {**PARAMETERS, "before_seconds": 5000, "more_than_gpus": 256})
    assert len(answer(made, "seen_with_failures", longer)) == 1
    assert (len(answer(made, "node_days")), len(answer(made, "node_days", longer))) == (1, 0)


def test_a_store_into_which_the_same_came_twice_answers_as_its_rows_do(tmp_path):
    told = history(Random(0), 30)
    rows = {table: [tuple(one.values()) for one in some] for table, some in told.items() if some}
    with open_for_reading(str(store_of(tmp_path / "db", rows, rows))) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        assert sum(map(len, files.values())) > len(rows), "some tables have several months"
        assert ask(files) == answers(told)


def test_an_empty_store_answers_with_no_rows():
    assert set(map(len, answers({name: [] for name in TABLES}).values())) == {0}


@pytest.mark.parametrize("table", sorted(TABLES))
def test_a_table_of_one_row_that_says_almost_nothing_is_answered(table):
    """Everything that may be NULL is NULL."""
    kept = {"cluster": "c1", "node": "gpu-1", "db_index": 1, "job_id": 1, "submit_time": BEGIN, "time": BEGIN}
    kept |= {"start_time": BEGIN, "first_time": BEGIN, "name": "", "stream_id": "s", "seq": 1, "event": "started"}
    made: History = {name: [] for name in TABLES}
    made[table] = [row(table, **{name: value for name, value in kept.items() if name in TABLES[table].columns})]
    found = answers(made)
    with_nodes = {"nodes", "events", "job_nodes", "node_states"}
    assert bool(found["observed"]) == (table in with_nodes)
    assert bool(found["lines"]) == (table == "events")


@pytest.fixture(params=sorted(THERE))
def name(request) -> Iterator[str]:
    return request.param


def test_a_question_says_in_its_comment_what_it_is_made_of(name):
    question = THERE[name]
    assert question.title.endswith("."), "the first line must be a sentence"
    assert len(question.title) <= 78
    assert "\n-- source: " in question.sql
    assert "\n-- columns" in question.sql


def test_a_question_has_no_name_of_a_table():
    assert {*THERE} & {*TABLES, "parameters", "numbers"} == set()
