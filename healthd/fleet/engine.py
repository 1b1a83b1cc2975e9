"""Runs SQL queries with DuckDB on a store's Parquet files.

It downloads nothing and reads nothing outside the store: extensions are neither installed nor loaded, access to other
files is disabled, and the settings are locked before a site's SQL runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb

from healthd.fleet import store
from healthd.fleet.queries import InvalidQuery, Query, Value
from healthd.fleet.tables import BIGINT, DOUBLE, TABLES, TEXT
from healthd.fleet.times import CLOCK_AHEAD_SECONDS, CLOCK_SET_SECONDS, MAX_SECONDS

Files = Mapping[str, Sequence[str]]  # absolute paths of each table's Parquet files

NUMBER_COUNT = 10_000  # size of the table `numbers`: n from 0 to 9,999
FETCH_ROWS = 10_000  # rows
# The machine may be a head node that also runs slurmctld. DuckDB therefore uses half of its cores, but at most 4, with
# 1 GiB for each core.
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
MEMORY_MIB = 1024 * THREADS
# DuckDB's memory limit covers only its buffers. With 4 million jobs and 1 GiB, DuckDB's other memory and Python took
# another 150 MiB. DuckDB's limit is therefore this share of the process's limit.
BUFFER_SHARE = 3 / 4
# Columns that contain times, by table. The table of a job's nodes is not listed, because it repeats the job's times.
TIME_COLUMNS = {
    "ingests": ("from_time", "to_time - 1"),
    "jobs": ("submit_time", "start_time", "end_time"),
    "events": ("time",),
    "node_states": ("start_time", "end_time"),
    "reservations": ("start_time", "end_time"),
    "preemptions": ("time",),
    "exclusions": ("submit_time",),
    "tickets": ("opened_time", "closed_time"),
    "failures": ("time",),
    "scraped_conditions": ("first_time", "last_time"),
}


@dataclass(frozen=True, slots=True)
class QueryParameters:
    """The requested period, [from_time, to_time) in epoch seconds, and the parameters for the query."""

    from_time: int
    to_time: int
    values: Mapping[str, Value]

    @property
    def columns(self) -> dict[str, tuple[str, Value]]:
        """The type and value of each column."""
        types = {int: BIGINT, float: DOUBLE, str: TEXT}
        named = {"from_time": self.from_time, "to_time": self.to_time, **self.values}
        return {name: (types[type(value)], value) for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def run_queries(
    queries: Sequence[Query],
    files: Files,
    parameters: QueryParameters,
    threads: int = THREADS,
    memory_mib: int = MEMORY_MIB,
) -> Iterator[QueryResult]:
    """Run the last of these queries. The other queries are its dependencies (`queries.with_dependencies`).

    Raises InvalidQuery if DuckDB rejects the SQL, and StoreError if a file is damaged.
    """
    with open_database(files, threads, memory_mib) as connection:
        yield run_on_connection(connection, queries, parameters)


@contextmanager
def open_database(
    files: Files, threads: int = THREADS, memory_mib: int = MEMORY_MIB
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database with a view of each table.

    Data that does not fit into memory is written to a temporary folder below TMPDIR, which is removed at the end.
    Raises StoreError.

    Args:
        memory_mib: memory limit of the process.
    """
    with tempfile.TemporaryDirectory(prefix="healthd-fleet-") as scratch, store.keyboard_interrupts():
        connection = store.connect(scratch)
        try:
            connection.execute(f"SET threads = {threads}; SET memory_limit = '{int(memory_mib * BUFFER_SHARE)}MiB'")
            connection.execute(f"CREATE TABLE numbers AS SELECT range AS n FROM range({NUMBER_COUNT})")
            for name in TABLES:
                connection.execute(
                    f"CREATE VIEW {name} AS {store.select_sql(connection, name, list(files.get(name, ())))}"
                )
            paths = ", ".join(store.literal(path) for table_paths in files.values() for path in table_paths)
            connection.execute(f"SET allowed_paths = [{paths}]")
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
            yield connection
        except duckdb.OutOfMemoryException:
            raise store.MemoryLimitExceeded(memory_mib) from None
        finally:
            connection.close()


def run_on_connection(
    connection: duckdb.DuckDBPyConnection, queries: Sequence[Query], parameters: QueryParameters
) -> QueryResult:
    """Run the last of these queries on an open database. The caller must read its rows before the next call."""
    columns = parameters.columns
    kinds = ", ".join(f"CAST(? AS {kind}) AS {name}" for name, (kind, _) in columns.items())
    connection.execute(
        f"CREATE OR REPLACE TABLE parameters AS SELECT {kinds}", [value for _, value in columns.values()]
    )
    *dependencies, last = queries
    try:
        for query in dependencies:
            connection.execute(f"CREATE OR REPLACE VIEW {query.name} AS {strip_semicolon(query.sql)}")
        connection.execute(strip_semicolon(last.sql))
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        raise _invalid_query(last, error) from None
    return QueryResult(tuple(column[0] for column in connection.description or ()), _rows(connection, last))


def covered_period(files: Files) -> tuple[int, int] | None:
    """Return the period [from, to) that the store's ingests and rows cover, or None if the store contains no times.

    Raises StoreError.
    """
    with open_database(files, 1) as connection:
        newest = connection.execute("SELECT max(read_time) FROM ingests").fetchone()
        read_time = newest[0] if newest else None
        until = MAX_SECONDS if read_time is None else read_time + CLOCK_AHEAD_SECONDS
        condition = f"t BETWEEN {CLOCK_SET_SECONDS} AND {until}"
        times_sql = " UNION ALL ".join(
            f"SELECT min(t) AS f, max(t) AS t FROM (SELECT {column} AS t FROM {table}) WHERE {condition}"
            for table, columns in TIME_COLUMNS.items()
            for column in columns
        )
        row = connection.execute(
            f"SELECT CAST(min(f) AS BIGINT), CAST(max(t) + 1 AS BIGINT) FROM ({times_sql})"
        ).fetchone()
    return None if row is None or None in row else (int(row[0]), int(row[1]))


def _rows(connection: duckdb.DuckDBPyConnection, query: Query) -> Iterator[tuple[Any, ...]]:
    try:
        while rows := connection.fetchmany(FETCH_ROWS):
            yield from rows
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        raise _invalid_query(query, error) from None


def _invalid_query(query: Query, error: duckdb.Error) -> InvalidQuery:
    return InvalidQuery(f"{query.path}: {store.first_line(error)}")


def strip_semicolon(sql: str) -> str:
    """Remove a semicolon at the end of the SQL, so that it can be part of another statement."""
    return sql.rstrip().removesuffix(";")
