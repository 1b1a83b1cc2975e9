"""Runs the answers' SQL with DuckDB in this process or, for very large stores, with Spark (spark.py)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import duckdb

from healthd.fleet import engine, store

# Errors that a file, the disk or the memory limit may cause.
_STORAGE_ERRORS = (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException)


class Rows(NamedTuple):
    """Result of a query: its column names and its rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Database(Protocol):
    """A database with the store's tables and the table `numbers`."""

    def table(self, name: str, sql: str) -> None:
        """Compute a query's rows once and store them as a table with this name."""

    def view(self, name: str, sql: str) -> None:
        """Define a view, replacing any existing view with this name."""

    def rows(self, sql: str) -> Rows:
        """Run a query and return its rows."""


class DuckDb:
    """A database on a connection from `engine.open_database(files)`. Raises StoreError for a damaged file."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, files: engine.Files) -> None:
        self._connection, self._files = connection, files

    def table(self, name: str, sql: str) -> None:
        self._execute(f"CREATE TABLE {name} AS {sql}")

    def view(self, name: str, sql: str) -> None:
        self._execute(f"CREATE OR REPLACE VIEW {name} AS {sql}")

    def rows(self, sql: str) -> Rows:
        result = self._execute(sql)
        return Rows(tuple(column[0] for column in result.description or ()), result.fetchall())

    def _execute(self, sql: str) -> duckdb.DuckDBPyConnection:
        try:
            return self._connection.execute(sql)
        except duckdb.Error as error:
            # Damaged bytes inside a Parquet page raise the bare base class. Errors in the SQL raise subclasses.
            if type(error) is not duckdb.Error and not isinstance(error, _STORAGE_ERRORS):
                raise
            paths = [path for table_paths in self._files.values() for path in table_paths]
            raise store.damaged_file_error(self._connection, paths, error) from None
