"""Tests of a step: which rows stay for any order, any split into steps and repeated ingests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fleet_rows import DECEMBER, NOVEMBER, Row, content, job, put, row, store_with, ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.fleet.manifest import StoreError
from healthd.fleet.step import step
from healthd.fleet.store import open_for_writing
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

QUICK = settings(max_examples=10, deadline=None)


def test_later_ingest_replaces_row(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a", text="old")]}, {"tickets": [ticket("a", text="new")]})
    assert content(db)["tickets"] == [ticket("a", text="new")]


def test_running_job_does_not_replace_its_end(tmp_path):
    waits, runs = job(1, state="PENDING"), job(1, state="RUNNING", start_time=NOVEMBER + 9)
    ended = job(1, state="FAILED", start_time=NOVEMBER + 9, end_time=NOVEMBER + 99)
    for first, second in ((waits, runs), (runs, ended), (waits, ended)):
        for steps in ((first, second), (second, first)):
            name = "-".join(str(version[6]) for version in steps)
            db = store_with(tmp_path / name, *({"jobs": [version]} for version in steps))
            assert content(db)["jobs"] == [second], name


def test_corrected_end_replaces_later_end(tmp_path):
    before, corrected = (job(1, start_time=NOVEMBER, end_time=NOVEMBER + end) for end in (7200, 3600))
    assert content(store_with(tmp_path / "db", {"jobs": [before]}, {"jobs": [corrected]}))["jobs"] == [corrected]


def test_job_moved_to_other_month_is_stored_once(tmp_path):
    """This happens after an ingest with a wrong --timezone."""
    before, corrected, other = job(1, DECEMBER - 60), job(1, DECEMBER + 3540), job(2, DECEMBER - 60)
    db = store_with(tmp_path / "db", {"jobs": [before, other]}, {"jobs": [corrected]})
    assert content(db)["jobs"] == [corrected, other]
    assert content(store_with(tmp_path / "same_step", {"jobs": [before, corrected, other]}))["jobs"] == [
        corrected,
        other,
    ]


def test_ended_job_is_not_replaced_by_running_job_of_other_month(tmp_path):
    ended, runs = job(1, NOVEMBER, end_time=NOVEMBER + 9), job(1, DECEMBER)
    assert content(store_with(tmp_path / "db", {"jobs": [ended]}, {"jobs": [runs]}))["jobs"] == [ended]
    assert content(store_with(tmp_path / "same_step", {"jobs": [runs, ended]}))["jobs"] == [ended]


def test_month_without_rows_loses_its_file(tmp_path):
    db = store_with(tmp_path / "db", {"jobs": [job(1, NOVEMBER)]}, {"jobs": [job(1, DECEMBER)]})
    assert [path.parent.name for path in db.rglob("*.parquet")] == ["month=2026-12"]


def job_nodes(index: int, *nodes: str, **values: int) -> list[Row]:
    columns = {"cluster": "c1", "db_index": index, "submit_time": NOVEMBER, **values}
    return [row("job_nodes", node=node, **columns) for node in nodes]


def test_nodes_of_job_are_replaced_together(tmp_path):
    ran, ended = job_nodes(1, "a", "b"), job_nodes(1, "b", "c", start_time=NOVEMBER, end_time=NOVEMBER + 9)
    same_step = store_with(tmp_path / "same_step", {"job_nodes": ran + ended + job_nodes(2, "a")})
    later = store_with(tmp_path / "db", {"job_nodes": ran + job_nodes(2, "a")}, {"job_nodes": ended})
    earlier = store_with(tmp_path / "earlier", {"job_nodes": ended}, {"job_nodes": ran + job_nodes(2, "a")})
    assert content(same_step)["job_nodes"] == content(later)["job_nodes"] == content(earlier)["job_nodes"]
    assert sorted((stored_row[1], stored_row[2]) for stored_row in content(same_step)["job_nodes"]) == [
        (1, "b"),
        (1, "c"),
        (2, "a"),
    ]


# --- properties


@st.composite
def versions(draw: st.DrawFn) -> list[tuple[Row, list[Row]]]:
    """Return records of sacct for a few jobs of two clusters; later records of a job have more values."""
    found = []
    for index in range(draw(st.integers(1, 4))):
        cluster = draw(st.sampled_from(["c1", "c2"]))
        submit = draw(st.sampled_from([NOVEMBER, DECEMBER - 1, DECEMBER, DECEMBER + 40 * 86400, None]))
        nodes = draw(st.lists(st.sampled_from("abc"), unique=True))
        times = {"start_time": NOVEMBER + 5}, {"start_time": NOVEMBER + 5, "end_time": NOVEMBER + 50}
        for known in ({}, *times)[: draw(st.integers(1, 3))]:
            values = {"cluster": cluster, "db_index": index, "submit_time": submit, **known}
            rows = [row("job_nodes", node=node, gpus=8.0, **values) for node in nodes if known]
            found += [(row("jobs", job_id=index, state=f"{len(known)} known", **values), rows)]
            found += found[-1:] * draw(st.integers(0, 1))
    return found


def best_rows(records: Sequence[tuple[Row, list[Row]]]) -> dict[str, list[Row]]:
    """Return the expected rows, computed naively: the record with the most values for each job."""
    newest: dict[Row, tuple[Row, list[Row]]] = {}
    for job_row, nodes in records:
        if job_row[:2] not in newest or job_row[6] > newest[job_row[:2]][0][6]:
            newest[job_row[:2]] = job_row, nodes
    tables = {
        "jobs": [values for values, _ in newest.values()],
        "job_nodes": [node_row for _, values in newest.values() for node_row in values],
    }
    return {
        table: sorted(rows, key=lambda values: [(value is None, value) for value in values])
        for table, rows in tables.items()
        if rows
    }


def staged_rows(records: Sequence[tuple[Row, list[Row]]]) -> dict[str, list[Row]]:
    return {
        "jobs": [values for values, _ in records],
        "job_nodes": [node_row for _, values in records for node_row in values],
    }


@QUICK
@given(st.data())
def test_store_ignores_order_and_split_of_rows(data):
    records = data.draw(versions())
    mixed = data.draw(st.permutations(records))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(mixed)), max_size=3)))
    parts = [mixed[start:end] for start, end in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]
    with TemporaryDirectory() as folder:
        assert content(store_with(Path(folder) / "db", *map(staged_rows, parts))) == best_rows(records)


@QUICK
@given(versions())
def test_repeated_ingest_changes_nothing(records):
    with TemporaryDirectory() as folder:
        once = content(store_with(Path(folder) / "db", staged_rows(records)))
        assert content(store_with(Path(folder) / "db", staged_rows(records))) == once


@QUICK
@given(versions())
def test_clusters_in_one_store_do_not_interact(records):
    by_cluster = {cluster: [entry for entry in records if entry[0][0] == cluster] for cluster in ("c1", "c2")}
    with TemporaryDirectory() as folder:
        alone = [content(store_with(Path(folder) / name, staged_rows(part))) for name, part in by_cluster.items()]
        together = content(store_with(Path(folder) / "db", *map(staged_rows, by_cluster.values())))
    assert together == {
        table: sorted(
            [values for entry in alone for values in entry.get(table, [])],
            key=lambda values: [(value is None, value) for value in values],
        )
        for table in together
    }


@QUICK
@given(st.lists(st.tuples(st.text(), st.none() | st.text(), st.none() | st.integers(-(2**63), 2**63 - 1)), max_size=9))
def test_staged_text_is_printable(values):
    rows = [
        ticket(f"n{number}{node}", NOVEMBER, text=text, closed_time=end)
        for number, (node, text, end) in enumerate(values)
    ]

    def printable(value):
        return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value

    with TemporaryDirectory() as folder:
        found = content(store_with(Path(folder) / "db", {"tickets": rows})).get("tickets", [])
    assert set(found) == {tuple(map(printable, stored_row)) for stored_row in rows}


# --- text and SQL


def test_staged_text_distinguishes_null_and_empty(tmp_path):
    text = tmp_path / "rows.tsv"
    text.write_text('c1\ta\t1793491200\t\t""\nc1\tb\t1793491200\t1793491201\t"a ""tab"":\t"\nc1\tc\t1793491200\t\t\n')
    with open_for_writing(str(tmp_path / "db"), make=True) as store, step(store) as open_step:
        open_step.stage_text("tickets", str(text))
    assert content(tmp_path / "db")["tickets"] == [
        ticket("a", text=""),
        ticket("b", text='a "tab":\t', closed_time=NOVEMBER + 1),
        ticket("c"),
    ]


@pytest.mark.parametrize("line", ["c1\ta\n", "c1\ta\tNovember\t\t\n", 'c1\ta\t1\t\t"open\n', "c1\ta\t1\t\t\tx\n"])
def test_invalid_text_is_rejected_and_nothing_is_lost(tmp_path, line):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    (tmp_path / "rows.tsv").write_text(f"c1\tb\t1\t\t\n{line}")
    with open_for_writing(str(db)) as store, pytest.raises(StoreError):
        stage_text(store, tmp_path / "rows.tsv")
    assert content(db)["tickets"] == [ticket("a")]


def stage_text(store, path):
    with step(store) as open_step:
        open_step.stage_text("tickets", str(path))


def test_stage_sql_reads_staged_and_live_rows(tmp_path):
    db = store_with(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="a", gpus=8)]})
    with open_for_writing(str(db)) as store, step(store) as open_step:
        open_step.stage("tickets", [ticket("a"), ticket("b")])
        open_step.stage_sql(
            "nodes",
            f"SELECT cluster, node, ?, n.gpus, NULL, 's1', NULL FROM {open_step.staged('tickets')} "
            f"LEFT JOIN {open_step.live('nodes')} AS n USING (cluster, node)",
            ["H100"],
        )
    assert content(db)["nodes"] == [
        row("nodes", cluster="c1", node="a", gpu_model="H100", gpus=8, switch="s1"),
        row("nodes", cluster="c1", node="b", gpu_model="H100", switch="s1"),
    ]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_keeps_row_unchanged(tmp_path, name):
    example = {"BIGINT": NOVEMBER, "DOUBLE": 0.1, "VARCHAR": "x", "BOOLEAN": True}
    full = tuple(example[kind] for kind in TABLES[name].columns.values())
    empty = tuple(None for _ in full)
    with open_for_writing(str(tmp_path / "db"), make=True) as store:
        put(store, {name: [full, empty]})
        put(store, {name: [full]})
    assert content(tmp_path / "db")[name] == [full, empty]
