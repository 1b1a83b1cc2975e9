"""Performs one step of an ingest: stages rows, merges them into their tables' months, and commits them together.

If there are two versions of a row, the more complete one is kept, as defined by the table (tables.py). If both are
equally complete, a staged row replaces a stored one. Of two equally complete staged rows, the one with the larger
values in `preferred_columns` (the later end) is kept. If these are equal too, the larger row is kept, so that the order
of the rows does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import duckdb

from healthd.fleet import prune
from healthd.fleet.manifest import File, Manifest, StoreError
from healthd.fleet.prune import END_COLUMNS
from healthd.fleet.staging_text import Value as Value
from healthd.fleet.staging_text import clean_field
from healthd.fleet.store import ALL_MONTHS, UNKNOWN_MONTH, Store, literal, quoted, select_sql, store_errors
from healthd.fleet.tables import TABLES, Table
from healthd.fleet.times import CLOCK_AHEAD_SECONDS, CLOCK_SET_SECONDS

MAX_TIME = 4102444799  # the end of 2099: a later time is invalid
# column of a staged row with the time that determines the row's month; -1 if there is no time
MONTH_SECONDS_COLUMN = "month_seconds"
# column with one bit for each column of `preferred_columns` that has a value; the lowest bit marks staged rows
RANK_COLUMN = "merge_rank"

Execute = Callable[[str], duckdb.DuckDBPyConnection]


class Merge:
    """Merges one table's staged rows into its months."""

    def __init__(self, store: Store, execute: Execute, table: Table, staged: str) -> None:
        self.store = store
        self.execute = execute
        self.table = table
        self.staged = staged
        self.can_move = table.month_column not in ("", *table.key_columns)
        self.key = _names(table.key_columns)
        self.row_key = _names((*table.key_columns, *table.row_key_columns))
        self.columns = _names(table.columns)
        self.has_moved = False

    def write_months(self) -> dict[str, File | None]:
        """Write the months that change. Return each month's new file, or None if no rows are left."""
        if expired := prune.expired_condition(self.table, self.store.manifest.pruned_before):
            self.execute(f"DELETE FROM {self.staged} WHERE {expired}")
        vacated = self._settle_months() if self.can_move else []
        touched = self._query_column(
            f"SELECT DISTINCT {self._month_sql(MONTH_SECONDS_COLUMN)} FROM {self.staged} ORDER BY 1"
        )
        return {month: self._write_month(month) for month in sorted({*touched, *vacated})}

    def _query_column(self, query: str) -> list[Any]:
        return [row[0] for row in self.execute(query).fetchall()]

    def _month_sql(self, seconds: str) -> str:
        if not self.table.month_column:
            return literal(ALL_MONTHS)
        month = f"strftime(make_timestamp({seconds} * 1000000), '%Y-%m')"
        return f"CASE WHEN {seconds} BETWEEN 0 AND {MAX_TIME} THEN {month} ELSE {literal(UNKNOWN_MONTH)} END"

    def _rank_sql(self, staged: int) -> str:
        has_values = (f"({quoted(name)} IS NOT NULL)::INT" for name in self.table.preferred_columns)
        bits = [*has_values, str(staged)]
        return (
            " + ".join(f"{bit} * {1 << position}" for position, bit in enumerate(reversed(bits))) + f" AS {RANK_COLUMN}"
        )

    def _stored_sql(self, months: Iterable[str]) -> str:
        files = self.store.manifest.files(self.table.name)
        paths = [os.path.join(self.store.folder, files[month].name) for month in months if month in files]
        return f"({select_sql(self.store.connection, self.table.name, paths)})"

    def _same_key_sql(self, left_alias: str, right_alias: str) -> str:
        names = map(quoted, self.table.key_columns)
        return " AND ".join(f"{left_alias}.{name} IS NOT DISTINCT FROM {right_alias}.{name}" for name in names)

    def _settle_months(self) -> list[str]:
        """If the rows of a key moved to another month, keep only the best rows of this key.

        This happens, for example, after a time zone was corrected. Return the months from which rows were moved. Only
        the keys of the stored months are read, and only from row groups that may contain the keys according to
        Parquet's statistics.
        """
        keys_sql = f"SELECT {self.key}, {MONTH_SECONDS_COLUMN}, {self._rank_sql(1)} FROM {self.staged}"
        if live := self.store.manifest.files(self.table.name):
            seconds = f"coalesce({quoted(self.table.month_column)}, -1)"
            staged = f"(SELECT DISTINCT {self.key} FROM {self.staged})"
            keys_sql += (
                f" UNION ALL SELECT {self.key}, {seconds} AS {MONTH_SECONDS_COLUMN}, {self._rank_sql(0)} "
                f"FROM {self._stored_sql(live)} SEMI JOIN {staged} USING ({self.key})"
            )
        first, last = self._month_sql(f"min({MONTH_SECONDS_COLUMN})"), self._month_sql(f"max({MONTH_SECONDS_COLUMN})")
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE moving AS SELECT {self.key} FROM ({keys_sql}) GROUP BY {self.key} "
            f"HAVING {first} <> {last}"
        )
        self.has_moved = bool(self._query_column("SELECT 1 FROM moving LIMIT 1"))
        if not self.has_moved:
            return []
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE moved AS SELECT {self.key}, max(({RANK_COLUMN}, {MONTH_SECONDS_COLUMN})) AS "
            f"best, list(DISTINCT {self._month_sql(MONTH_SECONDS_COLUMN)}) FILTER ({RANK_COLUMN} % 2 = 0) AS "
            f"left_months FROM ({keys_sql}) AS b SEMI JOIN moving AS m ON {self._same_key_sql('b', 'm')} GROUP BY "
            f"{self.key}"
        )
        self.execute(
            f"DELETE FROM {self.staged} AS s USING moved AS m "
            f"WHERE {self._same_key_sql('s', 'm')} AND (best[1] % 2, best[2]) IS DISTINCT FROM (1, "
            f"{MONTH_SECONDS_COLUMN})"
        )
        return self._query_column("SELECT DISTINCT unnest(left_months) FROM moved WHERE best[1] % 2 = 1")

    def _write_month(self, month: str) -> File | None:
        """Write the month's stored and staged rows, sorted by key."""
        path = self.store.path(self.table.name, month)
        count = self._query_column(
            f"COPY (SELECT {self.columns} FROM ({self._best_rows_sql(self._stored_and_staged(month))}) ORDER BY "
            f"{self.row_key}) TO {literal(path)} (FORMAT parquet, COMPRESSION zstd)"
        )[0]
        if not count:
            os.unlink(path)
            return None
        return File(os.path.relpath(path, self.store.folder), count, os.path.getsize(path))

    def _stored_and_staged(self, month: str) -> str:
        stored_sql = f"SELECT {self.columns}, {self._rank_sql(0)} FROM {self._stored_sql([month])} AS o"
        if self.has_moved:
            stored_sql += (
                f" ANTI JOIN (SELECT * FROM moved WHERE best[1] % 2 = 1) AS m ON {self._same_key_sql('o', 'm')}"
            )
        staged_sql = f"SELECT {self.columns}, {self._rank_sql(1)} FROM {self.staged}"
        return f"{stored_sql} UNION ALL {staged_sql} WHERE {self._month_sql(MONTH_SECONDS_COLUMN)} = {literal(month)}"

    def _best_rows_sql(self, rows_sql: str) -> str:
        """Return a query for the rows to keep. Most keys have only one version and need no comparison."""
        prefer = [quoted(name) for name in self.table.preferred_columns]
        versions_sql = f"SELECT {', '.join([self.row_key, *prefer, RANK_COLUMN])} FROM ({rows_sql})"
        lows = "".join(f", min({name}) AS low_{n}, max({name}) AS high_{n}" for n, name in enumerate(prefer))
        differ = "".join(f" OR min(low_{n}) IS DISTINCT FROM max(high_{n})" for n, _ in enumerate(prefer))
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE contested AS SELECT {self.key} FROM ("
            f"SELECT {self.row_key}, count(*) AS times, min({RANK_COLUMN}) AS low, max({RANK_COLUMN}) AS high{lows} "
            f"FROM ({versions_sql}) GROUP BY {self.row_key}) "
            f"GROUP BY {self.key} HAVING max(times) > 1 OR min(low) <> max(high){differ}"
        )
        if not self._query_column("SELECT 1 FROM contested LIMIT 1"):
            return rows_sql
        same = f"contested AS c ON {self._same_key_sql('b', 'c')}"
        best = f"SELECT * FROM ({rows_sql}) AS b SEMI JOIN {same}"
        order = ", ".join(f"{name} DESC NULLS LAST" for name in (RANK_COLUMN, *prefer))
        best = f"SELECT * FROM ({best}) QUALIFY rank() OVER (PARTITION BY {self.key} ORDER BY {order}) = 1"
        larger = ", ".join(f"{quoted(name)} DESC NULLS LAST" for name in self.table.columns)
        best = f"SELECT * FROM ({best}) QUALIFY row_number() OVER (PARTITION BY {self.row_key} ORDER BY {larger}) = 1"
        return f"SELECT * FROM ({rows_sql}) AS b ANTI JOIN {same} UNION ALL {best}"


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(quoted, columns))


class Step:
    """The rows staged so far. After an error the store is unchanged."""

    def __init__(self, store: Store, source: str = "") -> None:
        self.store = store
        self.source = source
        self.cursors: dict[str, str] = {}
        self.covered: tuple[int | None, int | None] | None = None
        self.clusters: set[str] = set()
        self._staged: set[str] = set()
        self._texts = 0

    def stage(self, table: str, rows: Iterable[tuple[Value, ...]]) -> int:
        """Stage rows in the order of the table's columns. Return their number. Text is made printable."""
        self._texts += 1
        path = os.path.join(self.store.temporary, f"rows{self._texts}.tsv")
        count = 0
        try:
            with open(path, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write("\t".join(map(clean_field, row)) + "\n")
                    count += 1
            if count:
                self.stage_text(table, path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return count

    def stage_text(self, table: str, path: str) -> None:
        """Stage a file of clean text. The file is not removed.

        Each line is a row with all the table's columns in order, separated by tabs. The file is UTF-8 and has no
        header. An empty field is NULL, "" is an empty text. A text that contains a tab or quotation mark is quoted,
        with quotation marks doubled.
        """
        columns = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in TABLES[table].columns.items())
        self.stage_sql(
            table,
            f"SELECT * FROM read_csv({literal(path)}, auto_detect = false, header = false, delim = '\t', quote = '\"', "
            f"escape = '\"', nullstr = '', allow_quoted_nulls = false, columns = {{{columns}}})",
        )

    def stage_sql(self, table: str, query: str, parameters: Iterable[Any] = ()) -> None:
        """Stage the rows of a query, which has the table's columns in order.

        The query may read `staged` and `live` rows.
        """
        self._create_staging(table)
        month = TABLES[table].month_column
        seconds = f"coalesce({quoted(month)}, -1)" if month else "0"
        names = ", ".join(f"c{number}" for number in range(len(TABLES[table].columns)))
        casts = ", ".join(
            f"c{number}::{kind} AS {quoted(name)}" for number, (name, kind) in enumerate(TABLES[table].columns.items())
        )
        typed = f"SELECT {casts} FROM ({query}) AS given({names})"
        self.execute(f"INSERT INTO {self.staged(table)} SELECT *, {seconds} FROM ({typed})", parameters)

    def staged(self, table: str) -> str:
        """Return SQL for a FROM clause with the staged rows. They have the table's columns and one more."""
        self._create_staging(table)
        return f"staging.{quoted(table)}"

    def live(self, table: str) -> str:
        """Return SQL for a FROM clause with the rows in the store."""
        return f"({select_sql(self.store.connection, table, self.store.files(table))})"

    def execute(self, query: str, parameters: Iterable[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run a DuckDB query. Raises StoreError if there is no space left or a file is damaged."""
        with store_errors(self.store):
            return self.store.connection.execute(query, list(parameters))

    def cursor(self, name: str, text: str) -> None:
        """Set the position up to which the source was read. It is committed with the rows."""
        self.cursors[f"{self.source}{name}"] = text

    def set_coverage(self, from_time: int | None, to_time: int | None, *clusters: str) -> None:
        """Set the piece's period and clusters. Used if these are known only from the rows."""
        self.covered = from_time, to_time
        self.clusters.update(clusters)

    def covered_times(self, table: str, current_time: int) -> list[tuple[str, int | None, int | None, int]]:
        """Return (cluster, first time, last time, rows) for the staged rows. A time is None if no row has one.

        Times from a wrong clock are ignored, and the future is never covered.
        """
        columns = list(map(quoted, filter(None, dict.fromkeys((TABLES[table].month_column, END_COLUMNS.get(table))))))
        valid = f"BETWEEN {CLOCK_SET_SECONDS} AND {current_time + CLOCK_AHEAD_SECONDS}"
        first, last = (
            ", ".join(f"{function}({name}) FILTER ({name} {valid})" for name in columns) for function in ("min", "max")
        )
        times_sql = f"SELECT cluster, least({first}), greatest({last}), count(*) FROM {self.staged(table)}"
        found = self.execute(f"{times_sql} GROUP BY cluster ORDER BY cluster").fetchall()
        return [
            (cluster, *(None if time is None else min(time, current_time) for time in (begin, end)), rows)
            for cluster, begin, end, rows in found
        ]

    def _create_staging(self, table: str) -> None:
        if not self._staged:
            path = os.path.join(self.store.temporary, "staged.duckdb")
            self.execute(f"ATTACH {literal(path)} AS staging")
            self.execute("BEGIN")  # never committed, because the staged rows are not needed later
        if table not in self._staged:
            self._staged.add(table)
            kinds = (f"{quoted(name)} {kind}" for name, kind in TABLES[table].columns.items())
            self.execute(f"CREATE TABLE staging.{quoted(table)} ({', '.join(kinds)}, {MONTH_SECONDS_COLUMN} BIGINT)")

    def merged(self) -> Manifest:
        """Write the files of the staged rows and return the new manifest. Raises StoreError."""
        manifest = self.store.manifest
        for name in sorted(self._staged):
            merge = Merge(self.store, self.execute, TABLES[name], self.staged(name))
            manifest = manifest.with_files(name, merge.write_months())
        return replace(manifest, cursors=dict(sorted({**manifest.cursors, **self.cursors}.items())))

    def discard(self) -> None:
        if self._staged:
            for query in ("ROLLBACK", "DETACH staging"):
                with suppress(duckdb.Error):
                    self.store.connection.execute(query)
            for name in ("staged.duckdb", "staged.duckdb.wal"):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.store.temporary, name))


@contextmanager
def step(store: Store, source: str = "") -> Iterator[Step]:
    """Stage rows and set cursors in the block. At its end, either all of them are committed or none.

    Raises StoreError.

    Args:
        source: prefix of the cursors.
    """
    new_step = Step(store, source)
    try:
        yield new_step
        with store_errors(store):
            manifest = new_step.merged()
        if manifest != store.manifest:
            store.commit(manifest)
    except BaseException:
        with suppress(OSError):  # the new files fill the disk, so remove them first
            store.remove_leftovers()
        raise
    finally:
        new_step.discard()
