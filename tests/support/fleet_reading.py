"""Helpers that read inputs for the tests of the fleet's sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timezone
from pathlib import Path
from typing import Any

from healthd.fleet.sources.reading import Reading


@dataclass
class RecordedReading:
    """A reading and the counts that it reported."""

    reading: Reading = field(init=False)
    unread: list[tuple[int, str]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reading = Reading(
            *("file", "c1", timezone.utc),
            unread=lambda line, why: self.unread.append((line, why)),
            read=self.read.append,
            cut=self.cut.append,
        )

    @property
    def unread_lines(self) -> list[int]:
        """Return the numbers of the unread lines."""
        return [line for line, _ in self.unread]


def numbered_lines(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.splitlines(), 1))


def store_rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the sorted rows of a table of a store."""
    import duckdb

    from healthd.fleet import store
    from healthd.fleet.tables import TABLES

    with store.open_for_reading(str(folder)) as snapshot, store.connect() as connection:
        result = connection.execute(
            f"SELECT * FROM ({store.select_sql(connection, table, snapshot.files(table))}) ORDER BY ALL"
        )
        assert isinstance(connection, duckdb.DuckDBPyConnection)
        return [dict(zip(TABLES[table].columns, row, strict=True)) for row in result.fetchall()]
