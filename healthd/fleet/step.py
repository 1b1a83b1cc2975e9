"""One step of an ingest: rows are staged, then all tables are committed together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import duckdb

from healthd.fleet.manifest import Manifest, StoreError
from healthd.fleet.merge import SECONDS, Merge
from healthd.fleet.prune import ENDS
from healthd.fleet.staging_text import Value as Value
from healthd.fleet.staging_text import field
from healthd.fleet.store import Store, explained, literal, quoted, select
from healthd.fleet.tables import TABLES
from healthd.fleet.times import CLOCK_AHEAD_SECONDS, CLOCK_SET_SECONDS


class Step:
    """What was staged until now. Any error leaves the store as it was."""

    def __init__(self, store: Store, source: str = "") -> None:
        self.store = store
        self.source = source
        self.cursors: dict[str, str] = {}
        self.covered: tuple[int | None, int | None] | None = None
        self.clusters: set[str] = set()
        self._staged: set[str] = set()
        self._texts = 0

    def stage(self, table: str, rows: Iterable[tuple[Value, ...]]) -> int:
        """Rows in the order of the table's columns; returns how many. Text becomes printable."""
        self._texts += 1
        path = os.path.join(self.store.temporary, f"rows{self._texts}.tsv")
        count = 0
        try:
            with open(path, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write("\t".join(map(field, row)) + "\n")
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
        """Clean text: a row a line, tabs between all the table's columns in their order, UTF-8, no heading. An empty
        field is NULL, "" is an empty text; a text with a tab or a quotation mark stands in quotation marks, which are
        doubled in it. The file is left."""
        columns = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in TABLES[table].columns.items())
        self.stage_sql(
            table,
            f"SELECT * FROM read_csv({literal(path)}, auto_detect = false, header = false, delim = '\t', quote = '\"', "
            f"escape = '\"', nullstr = '', allow_quoted_nulls = false, columns = {{{columns}}})",
        )

    def stage_sql(self, table: str, query: str, parameters: Iterable[Any] = ()) -> None:
        """What a query gives: the table's columns in their order. It may read what is staged (`staged`) and what is
        live (`live`)."""
        self._begin(table)
        month = TABLES[table].month_of
        seconds = f"coalesce({quoted(month)}, -1)" if month else "0"
        names = ", ".join(f"c{number}" for number in range(len(TABLES[table].columns)))
        casts = ", ".join(
            f"c{number}::{kind} AS {quoted(name)}" for number, (name, kind) in enumerate(TABLES[table].columns.items())
        )
        typed = f"SELECT {casts} FROM ({query}) AS given({names})"
        self.execute(f"INSERT INTO {self.staged(table)} SELECT *, {seconds} FROM ({typed})", parameters)

    def staged(self, table: str) -> str:
        """What to write behind FROM for the rows that are staged: the table's columns, and one more."""
        self._begin(table)
        return f"staging.{quoted(table)}"

    def live(self, table: str) -> str:
        """What to write behind FROM for the rows that the store has."""
        return f"({select(self.store.connection, table, self.store.files(table))})"

    def execute(self, query: str, parameters: Iterable[Any] = ()) -> duckdb.DuckDBPyConnection:
        """Ask DuckDB. Raises StoreError: no room, or a damaged file."""
        with explained(self.store):
            return self.store.connection.execute(query, list(parameters))

    def cursor(self, name: str, text: str) -> None:
        """How far the source was read, committed with the rows."""
        self.cursors[f"{self.source}{name}"] = text

    def covers(self, from_time: int | None, to_time: int | None, *clusters: str) -> None:
        """Of which time and clusters the piece speaks, where only its rows tell."""
        self.covered = from_time, to_time
        self.clusters.update(clusters)

    def times(self, table: str, now: int) -> list[tuple[str, int | None, int | None, int]]:
        """(cluster, first time, last time, rows) of what is staged; None: no row has one. The time of a clock that is
        wrong is none, and nothing is read of what is not yet."""
        columns = list(map(quoted, filter(None, dict.fromkeys((TABLES[table].month_of, ENDS.get(table))))))
        its = f"BETWEEN {CLOCK_SET_SECONDS} AND {now + CLOCK_AHEAD_SECONDS}"
        first, last = (
            ", ".join(f"{which}({name}) FILTER ({name} {its})" for name in columns) for which in ("min", "max")
        )
        told = f"SELECT cluster, least({first}), greatest({last}), count(*) FROM {self.staged(table)}"
        found = self.execute(f"{told} GROUP BY cluster ORDER BY cluster").fetchall()
        return [
            (cluster, *(None if time is None else min(time, now) for time in (begin, end)), rows)
            for cluster, begin, end, rows in found
        ]

    def _begin(self, table: str) -> None:
        if not self._staged:
            path = os.path.join(self.store.temporary, "staged.duckdb")
            self.execute(f"ATTACH {literal(path)} AS staging")
            self.execute("BEGIN")  # never committed: nobody reads it afterwards
        if table not in self._staged:
            self._staged.add(table)
            kinds = (f"{quoted(name)} {kind}" for name, kind in TABLES[table].columns.items())
            self.execute(f"CREATE TABLE staging.{quoted(table)} ({', '.join(kinds)}, {SECONDS} BIGINT)")

    def merged(self) -> Manifest:
        """The manifest with what is staged; its files are written. Raises StoreError."""
        manifest = self.store.manifest
        for name in sorted(self._staged):
            merge = Merge(self.store, self.execute, TABLES[name], self.staged(name))
            manifest = manifest.with_files(name, merge.months())
        return replace(manifest, cursors=dict(sorted({**manifest.cursors, **self.cursors}.items())))

    def close(self) -> None:
        if self._staged:
            for query in ("ROLLBACK", "DETACH staging"):
                with suppress(duckdb.Error):
                    self.store.connection.execute(query)
            for name in ("staged.duckdb", "staged.duckdb.wal"):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.store.temporary, name))


@contextmanager
def step(store: Store, source: str = "") -> Iterator[Step]:
    """Stage rows and set cursors in the block; at its end they are the store's, all or none. `source`: before the names
    of its cursors. Raises StoreError."""
    one = Step(store, source)
    try:
        yield one
        with explained(store):
            manifest = one.merged()
        if manifest != store.manifest:
            store.commit(manifest)
    except BaseException:
        with suppress(OSError):  # they take the room that is missing
            store.clear()
        raise
    finally:
        one.close()
