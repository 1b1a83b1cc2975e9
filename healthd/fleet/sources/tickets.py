"""Repair tickets as a table that a site writes: node, opened, closed, words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import whole_files
from healthd.fleet.sources.reading import Reading

COLUMNS = Columns(
    ("node", "opened"), ("closed", "words", "cluster"), {"opened_time": "opened", "closed_time": "closed"}
)

Row: TypeAlias = "tuple[str, str, int, int | None, str | None]"


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    """`node` may be a host list: then each has the ticket. An empty `closed` is one that is still open."""
    for number, row in rows(lines, COLUMNS, reading):
        try:
            opened, closed = reading.seconds(row["opened"]), reading.maybe_seconds(row.get("closed", ""))
            nodes = expand(row["node"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not nodes:
            reading.unread(number, "no node is named")
        elif closed is not None and closed < opened:
            reading.unread(number, "the ticket is closed before it is opened")
        else:
            reading.read(1)
            for node in nodes if reading.wants(opened, closed) else ():
                yield reading.cluster_of(row.get("cluster")), node, opened, closed, row.get("words") or None


def ingest(run: Run, files: list[str]) -> None:
    whole_files(run, files, "tickets", parse)


SOURCE = Source("tickets", "--tickets", "FILE", "repair tickets, CSV: node,opened,closed,words", ingest)
