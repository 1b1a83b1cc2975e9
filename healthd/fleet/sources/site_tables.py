"""Tables that a site or another tool writes: repair tickets (--tickets) and failures of nodes (--failures).

The node may be a host list; the row then counts for each node in it. fleet/sources/jobs_file.py reads tables of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import whole_files
from healthd.fleet.sources.reading import Reading

TICKET_COLUMNS = Columns(
    ("node", "opened"), ("closed", "words", "cluster"), {"opened_time": "opened", "closed_time": "closed"}
)
FAILURE_COLUMNS = Columns(("node", "time", "kind"), ("cluster",))

Ticket: TypeAlias = "tuple[str, str, int, int | None, str | None]"
Failure: TypeAlias = "tuple[str, str, int, str]"


def tickets(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Ticket]:
    """Yield (cluster, node, opened, closed, words). A ticket without `closed` is still open."""
    for number, row in rows(lines, TICKET_COLUMNS, reading):
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


def failures(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Failure]:
    """Yield (cluster, node, time, kind)."""
    for number, row in rows(lines, FAILURE_COLUMNS, reading):
        try:
            time, nodes = reading.seconds(row["time"]), expand(row["node"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not nodes:
            reading.unread(number, "no node is named")
            continue
        reading.read(1)
        for node in nodes if reading.wants(time, time) else ():
            yield reading.cluster_of(row.get("cluster")), node, time, row["kind"]


def _ingest_tickets(run: Run, files: list[str]) -> None:
    whole_files(run, files, "tickets", tickets)


def _ingest_failures(run: Run, files: list[str]) -> None:
    whole_files(run, files, "failures", failures)


TICKETS = Source("tickets", "--tickets", "FILE", "repair tickets, CSV: node,opened,closed,words", _ingest_tickets)
FAILURES = Source(
    "failures", "--failures", "FILE", "failures of nodes from another tool, CSV: node,time,kind", _ingest_failures
)
