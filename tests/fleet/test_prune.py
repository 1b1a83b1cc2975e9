"""Tests of `prune`: rows older than a date are removed and do not return."""

from __future__ import annotations

import json

import pytest
from fleet_rows import DECEMBER, NOVEMBER, content, files, job, row, store_with, ticket

from healthd.fleet import prune as pruning
from healthd.fleet.manifest import StoreError
from healthd.fleet.prune import prune
from healthd.fleet.store import open_for_reading, open_for_writing
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python


def ended_job(index, submit):
    return job(index, submit, end_time=submit + 60)


def run_prune(db, before):
    with open_for_writing(str(db)) as store:
        return prune(store, before)


def test_ended_job_is_removed_with_nodes_and_exclusions(tmp_path):
    rows = {
        "jobs": [job(1, DECEMBER - 9, end_time=DECEMBER), job(2, DECEMBER), job(3, None)],
        "job_nodes": [
            row("job_nodes", cluster="c1", db_index=index, node="a", submit_time=submit, end_time=end)
            for index, submit, end in ((1, DECEMBER - 9, DECEMBER), (2, DECEMBER, None), (3, None, None))
        ],
        "exclusions": [
            row("exclusions", cluster="c1", job_id=index, node="b", submit_time=submit)
            for index, submit in ((1, DECEMBER - 9), (2, DECEMBER))
        ],
    }
    db = store_with(tmp_path / "db", rows)
    removed = run_prune(db, DECEMBER)
    assert {table: count for table, count in removed.items() if count} == {"jobs": 1, "job_nodes": 1, "exclusions": 1}
    assert content(db) == {table: values[1:] for table, values in rows.items()}


def running_job(end):
    """Return a job that began before December, with its node and its exclusion."""
    values = {"cluster": "c1", "db_index": 1, "submit_time": NOVEMBER}
    return {
        "jobs": [job(1, NOVEMBER, end_time=end)],
        "job_nodes": [row("job_nodes", node="a", end_time=end, **values)],
        "exclusions": [row("exclusions", cluster="c1", job_id=1, submit_time=NOVEMBER, node="b", source="script")],
    }


@pytest.mark.parametrize("end", [None, DECEMBER + 1])
def test_running_job_stays_until_it_ends(tmp_path, end):
    db = store_with(tmp_path / "db", running_job(end))
    assert not any(run_prune(db, DECEMBER).values())
    assert content(db) == running_job(end)
    store_with(db, running_job(DECEMBER + 5))
    assert content(db)["jobs"] == running_job(DECEMBER + 5)["jobs"]
    assert content(db)["job_nodes"] == running_job(DECEMBER + 5)["job_nodes"]
    removed = run_prune(db, DECEMBER + 5)
    assert [removed[table] for table in running_job(None)] == [1, 1, 1]
    assert content(db) == {}


def test_prune_rewrites_only_month_of_date(tmp_path):
    db = store_with(tmp_path / "db", {"jobs": [ended_job(1, NOVEMBER), job(2, NOVEMBER + 86400), job(3, DECEMBER)]})
    assert run_prune(db, NOVEMBER + 86400)["jobs"] == 1
    assert files(db) == {"jobs/month=2026-11/2.parquet", "jobs/month=2026-12/1.parquet"}
    assert [values[1] for values in content(db)["jobs"]] == [2, 3]


def test_open_ticket_stays(tmp_path):
    open_, late, closed = ticket("a"), ticket("b", closed_time=DECEMBER + 1), ticket("c", closed_time=DECEMBER)
    db = store_with(tmp_path / "db", {"tickets": [open_, late, closed]})
    assert run_prune(db, DECEMBER)["tickets"] == 1
    assert content(db)["tickets"] == [open_, late]


def test_ingest_records_are_pruned_by_end(tmp_path):
    records = [
        row("ingests", cluster="c1", source="sacct", name=str(end), to_time=end) for end in (NOVEMBER, DECEMBER, None)
    ]
    db = store_with(tmp_path / "db", {"ingests": records})
    assert run_prune(db, NOVEMBER + 1)["ingests"] == 1
    assert sorted(content(db)["ingests"]) == records[1:]


def test_nodes_stay(tmp_path):
    db = store_with(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="a")]})
    assert "nodes" not in run_prune(db, DECEMBER)
    assert len(content(db)["nodes"]) == 1


def test_lists_of_gpus_stay_and_get_the_cluster_of_their_stream(tmp_path):
    stream = {"node": "a", "stream_id": "s1", "time": NOVEMBER}
    first, second = (row("gpus", cluster=name, seq=seq, subject="p", **stream) for name, seq in (("", 1), ("c1", 2)))
    unknown = row("gpus", cluster="", node="b", stream_id="s2", seq=1, subject="p", time=NOVEMBER)
    events = [row("events", cluster=name, seq=seq, **stream) for name, seq in (("", 1), ("c1", 3))]
    db = store_with(tmp_path / "db", {"gpus": [first, second, unknown], "events": events})
    assert run_prune(db, DECEMBER)["events"] == 2
    found = content(db)
    assert "events" not in found
    assert [(values[0], values[1]) for values in found["gpus"]] == [("", "b"), ("c1", "a"), ("c1", "a")]
    assert sorted(values[1:] for values in found["gpus"]) == sorted(values[1:] for values in (first, second, unknown))
    manifest = (db / "manifest.json").read_text()
    run_prune(db, DECEMBER)
    assert (db / "manifest.json").read_text() == manifest


def test_pruned_rows_do_not_return(tmp_path):
    rows = {
        "jobs": [ended_job(1, NOVEMBER), job(2, DECEMBER)],
        "tickets": [ticket("a", closed_time=NOVEMBER + 1), ticket("b")],
    }
    db = store_with(tmp_path / "db", rows)
    run_prune(db, DECEMBER)
    remaining = content(db)
    store_with(db, rows)
    assert content(db) == remaining
    assert [values[1] for values in remaining["jobs"]] == [2]


def test_earlier_date_changes_nothing(tmp_path):
    db = store_with(tmp_path / "db", {"jobs": [job(1, NOVEMBER), job(2, DECEMBER)]})
    run_prune(db, DECEMBER)
    before = (db / "manifest.json").read_text()
    assert not any(run_prune(db, NOVEMBER).values())
    assert (db / "manifest.json").read_text() == before
    assert json.loads(before)["pruned_before"] == DECEMBER


def test_damaged_file_is_named_and_nothing_is_pruned(tmp_path):
    db = store_with(tmp_path / "db", {"jobs": [job(1, NOVEMBER), job(2, DECEMBER)]})
    file = db / "jobs/month=2026-12/1.parquet"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StoreError, match=f"{file}: is damaged"):
        run_prune(db, DECEMBER)
    with open_for_reading(str(db)) as snapshot:
        assert len(snapshot.files("jobs")) == 2


def test_end_columns_exist_for_every_table_with_end():
    assert {name for name, column in pruning.END_COLUMNS.items() if column not in TABLES[name].columns} == set()
    ending = {name for name, table in TABLES.items() if {"end_time", "closed_time", "last_time"} & set(table.columns)}
    assert ending - set(pruning.END_COLUMNS) == {"events"}
