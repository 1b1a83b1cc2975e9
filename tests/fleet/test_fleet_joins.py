"""Tests that no join of the fleet's SQL grows with the product of two tables, also if a store lacks a source.

The query plan depends on which tables are empty, so every answer and query runs on a generated history without each
source in turn. The test counts the rows that joins produce and compares; it asserts no time and no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fleet_made import create_store
from history.size import Size, nodes_for

from healthd.fleet import engine
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import Study
from healthd.fleet.database import DuckDb
from healthd.fleet.queries import builtin_queries
from healthd.fleet.store import open_for_reading
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

try:  # only .venv has these; the marked tests run nowhere else
    from healthd.fleet import report
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy", "vl_convert"):
        raise

SIZE = Size(jobs=6000, nodes=nodes_for(6000, 1), months=1, seed=3)
# Rows out of a join, divided by all rows of the store. The largest ratio of the shipped SQL is below 1.
MAX_ROWS_RATIO = 3
# A join on these columns alone pairs each row with all rows of a cluster or a node.
COARSE = {"cluster = cluster", "node = node"}
SMALL_SIDE_ROWS = 100  # rows: a side up to this size may be joined with any other


def plan_operators(plan: Any) -> Iterator[dict[str, Any]]:
    """Yield the operators of EXPLAIN (ANALYZE, FORMAT json); DuckDB 1 and 2 name the keys differently."""
    yield plan
    for child in (*plan.get("children", ()), *plan.get("operator", ())):
        yield from plan_operators(child)


def rows_out(operator: dict[str, Any]) -> int:
    return int(operator.get("intermediate_rows", operator.get("operator_cardinality", 0)))


def find_large_joins(plan: Any, stored: int) -> list[str]:
    """Return the joins of a plan that grow with the product of their sides."""
    found = []
    for operator in plan_operators(plan):
        kind = str(operator.get("type") or operator.get("operator_type") or operator.get("operator_name"))
        if "JOIN" not in kind and "CROSS_PRODUCT" not in kind:
            continue
        conditions = operator.get("extra_info", {}).get("Conditions", [])
        conditions = [conditions] if isinstance(conditions, str) else conditions
        equal = {condition for condition in conditions if " = " in condition or " IS NOT DISTINCT FROM " in condition}
        sides = [rows_out(child) for child in operator["children"]]
        # An ASOF join yields one row per match, by merging.
        coarse = min(sides) > SMALL_SIDE_ROWS and equal <= COARSE and not kind.startswith(("ASOF", "DELIM"))
        # `numbers` makes a row for each day of a run: a merge of sorted sides, whose rows out are limited below.
        coarse = coarse and not (kind.startswith("PIECEWISE_MERGE") and engine.NUMBER_COUNT in sides)
        if coarse or rows_out(operator) > MAX_ROWS_RATIO * stored:
            found.append(f"{kind} of {sides} rows on {conditions} makes {rows_out(operator)} rows")
    return found


class ProfiledConnection:
    """A connection that profiles each query that it executes."""

    def __init__(self, connection: Any, stored: int) -> None:
        self._connection, self._stored = connection, stored
        self.large_joins: list[str] = []
        self.profiled = 0

    def execute(self, sql: str, values: Any = ()) -> Any:
        query = "\n".join(line for line in sql.splitlines() if not line.startswith("--")).lstrip()
        makes_table = query.startswith("CREATE TABLE ")
        if makes_table or query.startswith(("SELECT", "WITH")):
            (row,) = self._connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {query}", values).fetchall()
            self.large_joins += [f"{joined}\n{query}" for joined in find_large_joins(json.loads(row[1]), self._stored)]
            self.profiled += 1
        # Profiling a CREATE TABLE also creates the table; profiling a query discards its rows.
        return self._connection if makes_table else self._connection.execute(sql, values)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """The tables of a store with all sources."""
    db = create_store(tmp_path_factory.mktemp("joins"), SIZE)
    with open_for_reading(str(db)) as snapshot:
        yield {table: list(snapshot.files(table)) for table in TABLES}


MISSING_TABLES = {
    "nothing": (),
    "slurmctld's log": ("preemptions",),
    "events": ("events",),
    "node states": ("node_states",),
    "nodes": ("nodes",),
    "tickets and reservations": ("tickets", "reservations"),
    "exclusions": ("exclusions",),
    "jobs": ("jobs", "job_nodes", "exclusions"),
}


@pytest.mark.parametrize("missing", MISSING_TABLES)
def test_joins_stay_linear_without_each_source(files: dict[str, list[str]], missing: str) -> None:
    available = {table: [] if table in MISSING_TABLES[missing] else paths for table, paths in files.items()}
    with engine.open_database(available, 1, 1024) as connection:
        stored = sum(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in TABLES)
        profiled = ProfiledConnection(connection, stored)
        study = Study(DuckDb(profiled, available), SIZE.start, SIZE.end)  # type: ignore[arg-type]
        study.compute_tables(*builtin_queries())
        for part in report.report_chapters():
            try:
                part.answer(study)
            except Unanswerable:
                assert missing != "nothing" or part.name == "ettr", part.name  # a month has too few runs
    assert profiled.profiled > 50
    assert not profiled.large_joins, "\n\n".join(profiled.large_joins)


@pytest.mark.parametrize(
    "query",
    [
        # Two tables that have only the cluster in common, as an earlier preempted.sql joined jobs with victims.
        "SELECT count(*) FROM jobs AS a JOIN jobs AS b ON a.cluster = b.cluster AND a.job_id <> b.job_id",
        "SELECT count(*) FROM job_nodes AS a JOIN job_nodes AS b ON a.node = b.node AND a.start_time < b.end_time",
        "SELECT count(*) FROM jobs AS a JOIN jobs AS b ON a.start_time < b.end_time AND a.gpus > b.gpus",
    ],
)
def test_quadratic_join_is_found(files: dict[str, list[str]], query: str) -> None:
    with engine.open_database(files, 1, 1024) as connection:
        profiled = ProfiledConnection(connection, 10_000)
        profiled.execute(query)
    assert profiled.large_joins
