"""Rows of the fleet's tables for tests, and the content of a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

from healthd.fleet.step import Step, step
from healthd.fleet.store import Store, connect, damaged_file_error, open_for_reading, open_for_writing, select_sql
from healthd.fleet.tables import TABLES

NOVEMBER, DECEMBER = 1_793_491_200, 1_796_083_200  # the 1st of each in 2026, 00:00 UTC
Row = tuple[Any, ...]


def row(table: str, **values: Any) -> Row:
    """Return a row of the table; fields that are not given are None."""
    assert set(values) <= set(TABLES[table].columns), values
    return tuple(values.get(name) for name in TABLES[table].columns)


def job(index: int, submit: int | None = NOVEMBER, **values: Any) -> Row:
    return row("jobs", **{"cluster": "c1", "db_index": index, "job_id": index, "submit_time": submit, **values})


def ticket(node: str, opened: int | None = NOVEMBER, **values: Any) -> Row:
    return row("tickets", **{"cluster": "c1", "node": node, "opened_time": opened, **values})


def put(store: Store, rows: Mapping[str, list[Row]]) -> None:
    """Write these rows in one step."""
    with step(store) as new_step:
        stage(new_step, rows)


def stage(target: Step, rows: Mapping[str, list[Row]]) -> None:
    for table, table_rows in rows.items():
        target.stage(table, table_rows)


def store_with(folder: Path, *steps: Mapping[str, list[Row]]) -> Path:
    """Return a store into which these steps were written in order."""
    with open_for_writing(str(folder), make=True) as store:
        for rows in steps:
            put(store, rows)
    return folder


def content(folder: Path) -> dict[str, list[Row]]:
    """Return the sorted rows of every table that has rows."""
    result = {}
    with open_for_reading(str(folder)) as snapshot, connect() as connection:
        for table in TABLES:
            query = select_sql(connection, table, snapshot.files(table))
            try:
                rows = connection.execute(query).fetchall()
            except duckdb.Error as error:
                raise damaged_file_error(connection, snapshot.files(table), error) from None
            if rows:
                result[table] = sorted(rows, key=lambda values: [(value is None, value) for value in values])
    return result


def files(folder: Path) -> set[str]:
    """Return every Parquet file below the folder, live or not."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.parquet")}
