"""Failures of nodes as another tool kept them (--failures): node, time, kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import whole_files
from healthd.fleet.sources.reading import Reading

COLUMNS = Columns(("node", "time", "kind"), ("cluster",))

Row: TypeAlias = "tuple[str, str, int, str]"


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    """`node` may be a host list: then each failed at that time."""
    for number, row in rows(lines, COLUMNS, reading):
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


def ingest(run: Run, files: list[str]) -> None:
    whole_files(run, files, "failures", parse)


SOURCE = Source("failures", "--failures", "FILE", "failures of nodes from another tool, CSV: node,time,kind", ingest)
