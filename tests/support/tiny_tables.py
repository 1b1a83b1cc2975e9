"""Run the SQL of an answer on tables of a few rows that replace all its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from healthd.fleet import engine, lint, queries
from healthd.fleet.store import literal
from healthd.fleet.tables import BIGINT, BOOLEAN, DOUBLE, TABLES, TEXT

Rows = Sequence[Mapping[str, Any]]
_KINDS = {bool: BOOLEAN, int: BIGINT, float: DOUBLE, str: TEXT}


def run_query(name: str, row: Any, arguments: Mapping[str, Any] | None = None, **tables: Rows) -> list[Any]:
    """Return the rows of sql/answers/NAME.sql as `row`, a NamedTuple.

    asked: from_time, to_time (default: 0 to 1000) and parameters. tables: every table that the SQL reads. A table of
    the store may lack columns, which are NULL, and may be empty.
    """
    answer_query = queries.answer_queries()[name]
    assert set(tables) == lint.table_names(answer_query.sql) - {"parameters", "numbers"}, (
        "pass exactly the tables that the SQL reads"
    )
    with duckdb.connect() as connection:
        parameter_row = {"from_time": 0, "to_time": 1000, **answer_query.parameters, **(arguments or {})}
        for table, rows in {"parameters": [parameter_row], **tables}.items():
            connection.execute(f"CREATE TABLE {table} AS {_select(table, rows)}")
        connection.execute("CREATE TABLE numbers AS SELECT range AS n FROM range(100)")
        answer = connection.execute(engine.strip_semicolon(answer_query.sql))
        assert tuple(column[0] for column in answer.description or ()) == row._fields
        return [row(*values) for values in answer.fetchall()]


def _select(table: str, rows: Rows) -> str:
    if table in TABLES:
        kinds = dict(TABLES[table].columns)
        assert all(set(row) <= set(kinds) for row in rows), f"{table} has no such column"
    else:
        kinds = {name: _kind(name, [row.get(name) for row in rows]) for row in rows for name in row}
    assert kinds, f"{table}: no row, so no columns"
    selects = [
        "SELECT " + ", ".join(f"CAST({_value(row.get(name))} AS {kind}) AS {name}" for name, kind in kinds.items())
        for row in rows
    ]
    empty_select = (
        "SELECT " + ", ".join(f"CAST(NULL AS {kind}) AS {name}" for name, kind in kinds.items()) + " WHERE FALSE"
    )
    return " UNION ALL ".join(selects) or empty_select


def _kind(name: str, values: Sequence[Any]) -> str:
    """Return the type of the values; for NULLs only, the type of a column of the store with this name."""
    store_kinds = (kind for table in TABLES.values() for column, kind in table.columns.items() if column == name)
    return next((_KINDS[type(value)] for value in values if value is not None), next(store_kinds, BIGINT))


def _value(value: Any) -> str:
    if value is None:
        return "NULL"
    return literal(value) if isinstance(value, str) else repr(value)
