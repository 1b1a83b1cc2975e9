"""Tests of `prune`: rows older than a date are removed and do not return."""

from __future__ import annotations

import json

import pytest
from fleet_rows import DECEMBER, NOVEMBER, content, files, job, made, row, ticket

from healthd.fleet import prune as pruning
from healthd.fleet.manifest import StoreError
from healthd.fleet.prune import prune
from healthd.fleet.store import open_for_reading, open_for_writing
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python


def over(index, submit):
    return job(index, submit, end_time=submit + 60)


def pruned(db, before):
    with open_for_writing(str(db)) as store:
        return prune(store, before)


def test_a_job_that_is_over_goes_with_all_that_hangs_on_it(tmp_path):
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
    db = made(tmp_path / "db", rows)
    removed = pruned(db, DECEMBER)
    assert {table: count for table, count in removed.items() if count} == {"jobs": 1, "job_nodes": 1, "exclusions": 1}
    assert content(db) == {table: its[1:] for table, its in rows.items()}


def running(end):
    """Return a job that began before December, with its node and its exclusion."""
    its = {"cluster": "c1", "db_index": 1, "submit_time": NOVEMBER}
    return {
        "jobs": [job(1, NOVEMBER, end_time=end)],
        "job_nodes": [row("job_nodes", node="a", end_time=end, **its)],
        "exclusions": [row("exclusions", cluster="c1", job_id=1, submit_time=NOVEMBER, node="b", source="script")],
    }


@pytest.mark.parametrize("end", [None, DECEMBER + 1])
def test_a_job_that_still_ran_stays_and_its_end_comes_later(tmp_path, end):
    db = made(tmp_path / "db", running(end))
    assert not any(pruned(db, DECEMBER).values())
    assert content(db) == running(end)
    made(db, running(DECEMBER + 5))
    assert content(db)["jobs"] == running(DECEMBER + 5)["jobs"]
    assert content(db)["job_nodes"] == running(DECEMBER + 5)["job_nodes"]
    removed = pruned(db, DECEMBER + 5)
    assert [removed[table] for table in running(None)] == [1, 1, 1]
    assert content(db) == {}


def test_a_date_in_a_month_rewrites_that_month_only(tmp_path):
    db = made(tmp_path / "db", {"jobs": [over(1, NOVEMBER), job(2, NOVEMBER + 86400), job(3, DECEMBER)]})
    assert pruned(db, NOVEMBER + 86400)["jobs"] == 1
    assert files(db) == {"jobs/month=2026-11/2.parquet", "jobs/month=2026-12/1.parquet"}
    assert [its[1] for its in content(db)["jobs"]] == [2, 3]


def test_what_still_went_on_stays(tmp_path):
    open_, late, over = ticket("a"), ticket("b", closed_time=DECEMBER + 1), ticket("c", closed_time=DECEMBER)
    db = made(tmp_path / "db", {"tickets": [open_, late, over]})
    assert pruned(db, DECEMBER)["tickets"] == 1
    assert content(db)["tickets"] == [open_, late]


def test_what_was_read_is_forgotten_with_its_time(tmp_path):
    of = [
        row("ingests", cluster="c1", source="sacct", name=str(end), to_time=end) for end in (NOVEMBER, DECEMBER, None)
    ]
    db = made(tmp_path / "db", {"ingests": of})
    assert pruned(db, NOVEMBER + 1)["ingests"] == 1
    assert sorted(content(db)["ingests"]) == of[1:]


def test_nodes_stay(tmp_path):
    db = made(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="a")]})
    assert "nodes" not in pruned(db, DECEMBER)
    assert len(content(db)["nodes"]) == 1


def test_what_was_pruned_does_not_come_back(tmp_path):
    rows = {
        "jobs": [over(1, NOVEMBER), job(2, DECEMBER)],
        "tickets": [ticket("a", closed_time=NOVEMBER + 1), ticket("b")],
    }
    db = made(tmp_path / "db", rows)
    pruned(db, DECEMBER)
    kept = content(db)
    made(db, rows)
    assert content(db) == kept
    assert [its[1] for its in kept["jobs"]] == [2]


def test_an_earlier_date_afterwards_changes_nothing(tmp_path):
    db = made(tmp_path / "db", {"jobs": [job(1, NOVEMBER), job(2, DECEMBER)]})
    pruned(db, DECEMBER)
    before = (db / "manifest.json").read_text()
    assert not any(pruned(db, NOVEMBER).values())
    assert (db / "manifest.json").read_text() == before
    assert json.loads(before)["pruned_before"] == DECEMBER


def test_a_damaged_file_is_named_and_nothing_is_pruned(tmp_path):
    db = made(tmp_path / "db", {"jobs": [job(1, NOVEMBER), job(2, DECEMBER)]})
    file = db / "jobs/month=2026-12/1.parquet"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StoreError, match=f"{file}: is damaged"):
        pruned(db, DECEMBER)
    with open_for_reading(str(db)) as snapshot:
        assert len(snapshot.files("jobs")) == 2


def test_each_table_with_an_end_of_its_own_has_that_column():
    assert {name for name, column in pruning.END_COLUMNS.items() if column not in TABLES[name].columns} == set()
    ending = {name for name, table in TABLES.items() if {"end_time", "closed_time", "last_time"} & set(table.columns)}
    assert ending - set(pruning.END_COLUMNS) == {"events"}
