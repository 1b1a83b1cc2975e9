"""What is staged of one table, into its months.

Which of two rows stays is defined by the table (tables.py): a row that knows more goes before one that knows less, then
a staged row before one that is there. Of two that were staged together it is the one with the later end (the larger
values of `prefer`), then the larger row, so that their order changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import duckdb

from healthd.fleet import prune
from healthd.fleet.manifest import File
from healthd.fleet.store import ALL, UNKNOWN, Store, literal, quoted, select
from healthd.fleet.tables import Table

MOST_TIME = 4102444799  # the end of 2099: a time beyond it is none
SECONDS = "month_seconds"  # of a staged row: what its month is taken from, -1 for none
RANK = "merge_rank"  # how much a row knows; the lowest bit: it is staged

Execute = Callable[[str], duckdb.DuckDBPyConnection]


class Merge:
    def __init__(self, store: Store, execute: Execute, table: Table, staged: str) -> None:
        self.store = store
        self.execute = execute
        self.table = table
        self.staged = staged
        self.moves = table.month_of not in ("", *table.replace_by)
        self.key = _names(table.replace_by)
        self.one = _names((*table.replace_by, *table.rows_by))
        self.columns = _names(table.columns)
        self.moved = False

    def months(self) -> dict[str, File | None]:
        """Month -> its new file; of months that nothing touches nothing is said."""
        if gone := prune.gone(self.table, self.store.manifest.pruned_before):
            self.execute(f"DELETE FROM {self.staged} WHERE {gone}")
        left = self._settle_months() if self.moves else []
        touched = self._ask(f"SELECT DISTINCT {self._month(SECONDS)} FROM {self.staged} ORDER BY 1")
        return {month: self._write(month) for month in sorted({*touched, *left})}

    def _ask(self, query: str) -> list[Any]:
        return [row[0] for row in self.execute(query).fetchall()]

    def _month(self, seconds: str) -> str:
        if not self.table.month_of:
            return literal(ALL)
        month = f"strftime(make_timestamp({seconds} * 1000000), '%Y-%m')"
        return f"CASE WHEN {seconds} BETWEEN 0 AND {MOST_TIME} THEN {month} ELSE {literal(UNKNOWN)} END"

    def _rank(self, staged: int) -> str:
        known = (f"({quoted(name)} IS NOT NULL)::INT" for name in self.table.prefer)
        bits = [*known, str(staged)]
        return " + ".join(f"{bit} * {1 << place}" for place, bit in enumerate(reversed(bits))) + f" AS {RANK}"

    def _live(self, months: Iterable[str]) -> str:
        files = self.store.manifest.files(self.table.name)
        paths = [os.path.join(self.store.folder, files[month].name) for month in months if month in files]
        return f"({select(self.store.connection, self.table.name, paths)})"

    def _same(self, one: str, other: str) -> str:
        names = map(quoted, self.table.replace_by)
        return " AND ".join(f"{one}.{name} IS NOT DISTINCT FROM {other}.{name}" for name in names)

    def _settle_months(self) -> list[str]:
        """A key that has come to another month (a corrected time zone) is one thing all the same: only its best rows
        stay staged. Returns the months that it left. Of the live months only the keys are read, and by Parquet's own
        statistics only where they can be."""
        both = f"SELECT {self.key}, {SECONDS}, {self._rank(1)} FROM {self.staged}"
        if live := self.store.manifest.files(self.table.name):
            seconds = f"coalesce({quoted(self.table.month_of)}, -1)"
            staged = f"(SELECT DISTINCT {self.key} FROM {self.staged})"
            both += f" UNION ALL SELECT {self.key}, {seconds} AS {SECONDS}, {self._rank(0)} FROM {self._live(live)} "
            both += f"SEMI JOIN {staged} USING ({self.key})"
        first, last = self._month(f"min({SECONDS})"), self._month(f"max({SECONDS})")
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE moving AS SELECT {self.key} FROM ({both}) GROUP BY {self.key} "
            f"HAVING {first} <> {last}"
        )
        self.moved = bool(self._ask("SELECT 1 FROM moving LIMIT 1"))
        if not self.moved:
            return []
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE moved AS SELECT {self.key}, max(({RANK}, {SECONDS})) AS best, "
            f"list(DISTINCT {self._month(SECONDS)}) FILTER ({RANK} % 2 = 0) AS left_months "
            f"FROM ({both}) AS b SEMI JOIN moving AS m ON {self._same('b', 'm')} GROUP BY {self.key}"
        )
        self.execute(
            f"DELETE FROM {self.staged} AS s USING moved AS m "
            f"WHERE {self._same('s', 'm')} AND (best[1] % 2, best[2]) IS DISTINCT FROM (1, {SECONDS})"
        )
        return self._ask("SELECT DISTINCT unnest(left_months) FROM moved WHERE best[1] % 2 = 1")

    def _write(self, month: str) -> File | None:
        """The month's rows, old and staged, sorted by what names them."""
        path = self.store.path(self.table.name, month)
        count = self._ask(
            f"COPY (SELECT {self.columns} FROM ({self._best(self._both(month))}) ORDER BY {self.one}) "
            f"TO {literal(path)} (FORMAT parquet, COMPRESSION zstd)"
        )[0]
        if not count:
            os.unlink(path)
            return None
        return File(os.path.relpath(path, self.store.folder), count, os.path.getsize(path))

    def _both(self, month: str) -> str:
        old = f"SELECT {self.columns}, {self._rank(0)} FROM {self._live([month])} AS o"
        if self.moved:
            old += f" ANTI JOIN (SELECT * FROM moved WHERE best[1] % 2 = 1) AS m ON {self._same('o', 'm')}"
        new = f"SELECT {self.columns}, {self._rank(1)} FROM {self.staged}"
        return f"{old} UNION ALL {new} WHERE {self._month(SECONDS)} = {literal(month)}"

    def _best(self, both: str) -> str:
        """Of each thing the rows that stay. Most things have one version, and those need not be compared."""
        prefer = [quoted(name) for name in self.table.prefer]
        ones = f"SELECT {', '.join([self.one, *prefer, RANK])} FROM ({both})"
        lows = "".join(f", min({name}) AS low_{n}, max({name}) AS high_{n}" for n, name in enumerate(prefer))
        differ = "".join(f" OR min(low_{n}) IS DISTINCT FROM max(high_{n})" for n, _ in enumerate(prefer))
        self.execute(
            f"CREATE OR REPLACE TEMP TABLE contested AS SELECT {self.key} FROM (SELECT {self.one}, count(*) AS times, "
            f"min({RANK}) AS low, max({RANK}) AS high{lows} FROM ({ones}) GROUP BY {self.one}) GROUP BY {self.key} "
            f"HAVING max(times) > 1 OR min(low) <> max(high){differ}"
        )
        if not self._ask("SELECT 1 FROM contested LIMIT 1"):
            return both
        same = f"contested AS c ON {self._same('b', 'c')}"
        best = f"SELECT * FROM ({both}) AS b SEMI JOIN {same}"
        order = ", ".join(f"{name} DESC NULLS LAST" for name in (RANK, *prefer))
        best = f"SELECT * FROM ({best}) QUALIFY rank() OVER (PARTITION BY {self.key} ORDER BY {order}) = 1"
        larger = ", ".join(f"{quoted(name)} DESC NULLS LAST" for name in self.table.columns)
        best = f"SELECT * FROM ({best}) QUALIFY row_number() OVER (PARTITION BY {self.one} ORDER BY {larger}) = 1"
        return f"SELECT * FROM ({both}) AS b ANTI JOIN {same} UNION ALL {best}"


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(quoted, columns))
