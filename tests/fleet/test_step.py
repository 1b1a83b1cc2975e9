"""Tests of a step: which rows stay for any order, any split into steps and repeated ingests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fleet_rows import DECEMBER, NOVEMBER, Row, content, job, made, put, row, ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.fleet.manifest import StoreError
from healthd.fleet.step import step
from healthd.fleet.store import open_for_writing
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

QUICK = settings(max_examples=10, deadline=None)


def test_what_is_ingested_later_replaces_what_is_there(tmp_path):
    db = made(tmp_path / "db", {"tickets": [ticket("a", text="old")]}, {"tickets": [ticket("a", text="new")]})
    assert content(db)["tickets"] == [ticket("a", text="new")]


def test_a_job_that_still_ran_does_not_replace_its_end(tmp_path):
    waits, runs = job(1, state="PENDING"), job(1, state="RUNNING", start_time=NOVEMBER + 9)
    ended = job(1, state="FAILED", start_time=NOVEMBER + 9, end_time=NOVEMBER + 99)
    for one, other in ((waits, runs), (runs, ended), (waits, ended)):
        for steps in ((one, other), (other, one)):
            name = "-".join(str(version[6]) for version in steps)
            db = made(tmp_path / name, *({"jobs": [version]} for version in steps))
            assert content(db)["jobs"] == [other], name


def test_a_corrected_end_replaces_the_wrong_one_also_where_it_is_earlier(tmp_path):
    wrong, right = (job(1, start_time=NOVEMBER, end_time=NOVEMBER + end) for end in (7200, 3600))
    assert content(made(tmp_path / "db", {"jobs": [wrong]}, {"jobs": [right]}))["jobs"] == [right]


def test_a_job_whose_submission_comes_to_another_month_is_there_once(tmp_path):
    """This happens after an ingest with a wrong --timezone."""
    wrong, right, other = job(1, DECEMBER - 60), job(1, DECEMBER + 3540), job(2, DECEMBER - 60)
    db = made(tmp_path / "db", {"jobs": [wrong, other]}, {"jobs": [right]})
    assert content(db)["jobs"] == [right, other]
    assert content(made(tmp_path / "same_step", {"jobs": [wrong, right, other]}))["jobs"] == [right, other]


def test_what_is_known_of_another_month_is_not_replaced_by_what_knows_less(tmp_path):
    ended, runs = job(1, NOVEMBER, end_time=NOVEMBER + 9), job(1, DECEMBER)
    assert content(made(tmp_path / "db", {"jobs": [ended]}, {"jobs": [runs]}))["jobs"] == [ended]
    assert content(made(tmp_path / "same_step", {"jobs": [runs, ended]}))["jobs"] == [ended]


def test_a_month_that_loses_its_last_row_loses_its_file(tmp_path):
    db = made(tmp_path / "db", {"jobs": [job(1, NOVEMBER)]}, {"jobs": [job(1, DECEMBER)]})
    assert [path.parent.name for path in db.rglob("*.parquet")] == ["month=2026-12"]


def on(index: int, *nodes: str, **values: int) -> list[Row]:
    said = {"cluster": "c1", "db_index": index, "submit_time": NOVEMBER, **values}
    return [row("job_nodes", node=node, **said) for node in nodes]


def test_the_nodes_of_a_job_are_replaced_together(tmp_path):
    ran, ended = on(1, "a", "b"), on(1, "b", "c", start_time=NOVEMBER, end_time=NOVEMBER + 9)
    both = made(tmp_path / "same_step", {"job_nodes": ran + ended + on(2, "a")})
    later = made(tmp_path / "db", {"job_nodes": ran + on(2, "a")}, {"job_nodes": ended})
    earlier = made(tmp_path / "earlier", {"job_nodes": ended}, {"job_nodes": ran + on(2, "a")})
    assert content(both)["job_nodes"] == content(later)["job_nodes"] == content(earlier)["job_nodes"]
    assert sorted((its[1], its[2]) for its in content(both)["job_nodes"]) == [(1, "b"), (1, "c"), (2, "a")]


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
            said = {"cluster": cluster, "db_index": index, "submit_time": submit, **known}
            rows = [row("job_nodes", node=node, gpus=8.0, **said) for node in nodes if known]
            found += [(row("jobs", job_id=index, state=f"{len(known)} known", **said), rows)]
            found += found[-1:] * draw(st.integers(0, 1))
    return found


def best(said: Sequence[tuple[Row, list[Row]]]) -> dict[str, list[Row]]:
    """Return the expected rows, computed naively: the record with the most values for each job."""
    newest: dict[Row, tuple[Row, list[Row]]] = {}
    for job_row, nodes in said:
        if job_row[:2] not in newest or job_row[6] > newest[job_row[:2]][0][6]:
            newest[job_row[:2]] = job_row, nodes
    tables = {
        "jobs": [its for its, _ in newest.values()],
        "job_nodes": [one for _, its in newest.values() for one in its],
    }
    return {
        table: sorted(rows, key=lambda its: [(value is None, value) for value in its])
        for table, rows in tables.items()
        if rows
    }


def staged(said: Sequence[tuple[Row, list[Row]]]) -> dict[str, list[Row]]:
    return {"jobs": [its for its, _ in said], "job_nodes": [one for _, its in said for one in its]}


@QUICK
@given(st.data())
def test_neither_the_order_of_rows_nor_how_they_are_split_changes_the_store(data):
    said = data.draw(versions())
    mixed = data.draw(st.permutations(said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(mixed)), max_size=3)))
    parts = [mixed[start:end] for start, end in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]
    with TemporaryDirectory() as folder:
        assert content(made(Path(folder) / "db", *map(staged, parts))) == best(said)


@QUICK
@given(versions())
def test_the_same_ingest_again_changes_nothing(said):
    with TemporaryDirectory() as folder:
        once = content(made(Path(folder) / "db", staged(said)))
        assert content(made(Path(folder) / "db", staged(said))) == once


@QUICK
@given(versions())
def test_clusters_in_one_store_are_as_in_a_store_each(said):
    of = {cluster: [one for one in said if one[0][0] == cluster] for cluster in ("c1", "c2")}
    with TemporaryDirectory() as folder:
        alone = [content(made(Path(folder) / name, staged(part))) for name, part in of.items()]
        together = content(made(Path(folder) / "db", *map(staged, of.values())))
    assert together == {
        table: sorted(
            [its for one in alone for its in one.get(table, [])],
            key=lambda its: [(value is None, value) for value in its],
        )
        for table in together
    }


@QUICK
@given(st.lists(st.tuples(st.text(), st.none() | st.text(), st.none() | st.integers(-(2**63), 2**63 - 1)), max_size=9))
def test_whatever_text_is_staged_comes_back_printable(values):
    rows = [
        ticket(f"n{number}{node}", NOVEMBER, text=words, closed_time=end)
        for number, (node, words, end) in enumerate(values)
    ]

    def shown(value):
        return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value

    with TemporaryDirectory() as folder:
        found = content(made(Path(folder) / "db", {"tickets": rows})).get("tickets", [])
    assert set(found) == {tuple(map(shown, its)) for its in rows}


# --- text and SQL


def test_clean_text_has_null_and_the_empty_text(tmp_path):
    text = tmp_path / "rows.tsv"
    text.write_text('c1\ta\t1793491200\t\t""\nc1\tb\t1793491200\t1793491201\t"a ""tab"":\t"\nc1\tc\t1793491200\t\t\n')
    with open_for_writing(str(tmp_path / "db"), make=True) as store, step(store) as one:
        one.stage_text("tickets", str(text))
    assert content(tmp_path / "db")["tickets"] == [
        ticket("a", text=""),
        ticket("b", text='a "tab":\t', closed_time=NOVEMBER + 1),
        ticket("c"),
    ]


@pytest.mark.parametrize("line", ["c1\ta\n", "c1\ta\tNovember\t\t\n", 'c1\ta\t1\t\t"open\n', "c1\ta\t1\t\t\tx\n"])
def test_text_that_is_not_clean_is_refused_and_nothing_is_lost(tmp_path, line):
    db = made(tmp_path / "db", {"tickets": [ticket("a")]})
    (tmp_path / "rows.tsv").write_text(f"c1\tb\t1\t\t\n{line}")
    with open_for_writing(str(db)) as store, pytest.raises(StoreError):
        stage_text(store, tmp_path / "rows.tsv")
    assert content(db)["tickets"] == [ticket("a")]


def stage_text(store, path):
    with step(store) as one:
        one.stage_text("tickets", str(path))


def test_a_query_can_stage_from_what_is_staged_and_what_is_live(tmp_path):
    db = made(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="a", gpus=8)]})
    with open_for_writing(str(db)) as store, step(store) as one:
        one.stage("tickets", [ticket("a"), ticket("b")])
        one.stage_sql(
            "nodes",
            f"SELECT cluster, node, ?, n.gpus, NULL, 's1', NULL FROM {one.staged('tickets')} "
            f"LEFT JOIN {one.live('nodes')} AS n USING (cluster, node)",
            ["H100"],
        )
    assert content(db)["nodes"] == [
        row("nodes", cluster="c1", node="a", gpu_model="H100", gpus=8, switch="s1"),
        row("nodes", cluster="c1", node="b", gpu_model="H100", switch="s1"),
    ]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_keeps_a_row_as_it_is(tmp_path, name):
    example = {"BIGINT": NOVEMBER, "DOUBLE": 0.1, "VARCHAR": "x", "BOOLEAN": True}
    full = tuple(example[kind] for kind in TABLES[name].columns.values())
    empty = tuple(None for _ in full)
    with open_for_writing(str(tmp_path / "db"), make=True) as store:
        put(store, {name: [full, empty]})
        put(store, {name: [full]})
    assert content(tmp_path / "db")[name] == [full, empty]
