"""Reads tables from a site or another tool: tickets (--tickets), node failures (--failures) and jobs (--jobs).

The node of a ticket or failure may be a host list. The row then applies to each node in the list.

A job history is CSV or Parquet: job_id,nodes,gpus,submit,start,end,state,restarts,user. Slurm's other fields
(partition, exit code, ...) are unknown. A row's db_index is 62 bits of a hash of its cluster, job id, submit time and
restarts. If the same row is read again, it therefore replaces the earlier row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.common.text import is_decimal
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.common import check_and_track, ingest_file, ingest_files, set_coverage
from healthd.fleet.sources.lines import open_unpacked, read_lines
from healthd.fleet.sources.reading import Reading
from healthd.fleet.tables import JOBS

if TYPE_CHECKING:
    from healthd.fleet.step import Step

TICKET_COLUMNS = Columns(
    ("node", "opened"), ("closed", "text", "cluster"), {"opened_time": "opened", "closed_time": "closed"}
)
FAILURE_COLUMNS = Columns(("node", "time", "kind"), ("cluster",))
JOB_COLUMNS = Columns(
    ("job_id", "nodes", "submit", "start", "end", "state"),
    ("gpus", "restarts", "user", "cluster", "partition", "account", "qos"),
    {"submit_time": "submit", "start_time": "start", "end_time": "end", "node_list": "nodes", "user_name": "user"},
)
NAME = "jobs_file"
NO_NODES = ("none assigned", "(null)", "none", "n/a")  # what Slurm's commands print if there are no nodes
_DB_INDEX_LIMIT = 2**62
_SUBMIT, _END = (list(JOBS.columns).index(name) for name in ("submit_time", "end_time"))
_PARQUET = b"PAR1"

Ticket: TypeAlias = "tuple[str, str, int, int | None, str | None]"
Failure: TypeAlias = "tuple[str, str, int, str]"
Row: TypeAlias = "tuple[Any, ...]"


def tickets(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Ticket]:
    """Yield (cluster, node, opened, closed, text). A ticket without `closed` is still open."""
    for number, row in rows(lines, TICKET_COLUMNS, reading):
        try:
            opened, closed = reading.seconds(row["opened"]), reading.optional_seconds(row.get("closed", ""))
            nodes = expand(row["node"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not nodes:
            reading.unread(number, "no node is named")
        elif closed is not None and closed < opened:
            reading.unread(number, "the ticket was closed before it was opened")
        else:
            reading.read(1)
            for node in nodes if reading.is_in_period(opened, closed) else ():
                yield reading.resolve_cluster(row.get("cluster")), node, opened, closed, row.get("text") or None


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
        for node in nodes if reading.is_in_period(time, time) else ():
            yield reading.resolve_cluster(row.get("cluster")), node, time, row["kind"]


# --- job history


def is_parquet(path: str) -> bool:
    """Return True for a Parquet file. Raises IngestError if it cannot be opened."""
    with open_unpacked(path) as file:
        return file.read(4) == _PARQUET


def csv_jobs(reading: Reading) -> Iterator[Row]:
    return _rows(rows(read_lines(reading.name, reading), JOB_COLUMNS, reading), reading)


def parquet_jobs(reading: Reading) -> Iterator[Row]:
    """Yield the jobs in a Parquet file.

    Times may be numbers, text or timestamps. Times without a zone are read in the given zone. Lists of names are host
    lists. If a column has another type (a struct), all rows are counted as unread.
    """
    import duckdb

    try:
        with (
            open(reading.name, "rb") as opened_file,
            duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection,
        ):
            # The file's name is not passed, because DuckDB treats "jobs[1].parquet" as a pattern and reads
            # jobs1.parquet.
            file = [f"/proc/self/fd/{opened_file.fileno()}"]
            described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", file).fetchall()
            names = JOB_COLUMNS.named([name for name, *_ in described])
            JOB_COLUMNS.check(names, reading.name)
            used_columns = [
                (name, _as_text(column, kind))
                for name, (column, kind, *_) in zip(names, described, strict=True)
                if name in (*JOB_COLUMNS.required, *JOB_COLUMNS.optional)
            ]
            columns = [name for name, _ in used_columns]
            table = connection.execute(f"SELECT {', '.join(sql for _, sql in used_columns)} FROM read_parquet(?)", file)
            number = 0
            while batch := table.fetchmany(10_000):
                batch_rows = [dict(zip(columns, (value or "" for value in row), strict=True)) for row in batch]
                yield from _rows(enumerate(batch_rows, number + 1), reading)
                number += len(batch)
    except duckdb.Error as error:
        raise IngestError(f"{reading.name}: cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from None


def _as_text(column: str, kind: str) -> str:
    """Return SQL that converts a Parquet column to text."""
    name = '"' + column.replace('"', '""') + '"'
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"epoch({name})::BIGINT::VARCHAR"
    if kind.endswith("[]"):
        return f"array_to_string({name}, ',')"
    if kind in ("DOUBLE", "FLOAT"):
        return f"CASE WHEN {name} = floor({name}) THEN {name}::BIGINT::VARCHAR ELSE {name}::VARCHAR END"
    return f"{name}::VARCHAR"


def _rows(table: Iterable[tuple[int, dict[str, str]]], reading: Reading) -> Iterator[Row]:
    for number, row in table:
        try:
            job = _row(row, reading)
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        reading.read(1)
        if reading.is_in_period(job[_SUBMIT], job[_END]):
            yield job


def _row(row: dict[str, str], reading: Reading) -> Row:
    """Convert a row. Raises ValueError if the row cannot be read."""
    cluster = reading.resolve_cluster(row.get("cluster"))
    job, restarts = _count(row, "job_id"), _count(row, "restarts")
    if job is None:
        raise ValueError("no job_id")
    submit, start, end = (reading.optional_seconds(row[name]) for name in ("submit", "start", "end"))
    if submit is None:
        raise ValueError("no submit time")
    if start is not None and end is not None and end < start:
        raise ValueError(f"job {job} ends before it starts")
    if not row["state"]:
        raise ValueError(f"job {job} has no state")
    node_list = "" if row["nodes"].lower() in NO_NODES else row["nodes"]
    names = expand(node_list)
    values = {
        "cluster": cluster,
        "db_index": db_index(cluster, job, submit, restarts or 0),
        "job_id": job,
        "restarts": restarts,
        "state": row["state"].split()[0].upper(),  # "CANCELLED by 1000"
        "submit_time": submit,
        "start_time": start,
        "end_time": end,
        "nodes": len(names) if names else None,
        "gpus": _count(row, "gpus"),
        "node_list": node_list or None,
        "user_name": reading.user(row["user"]) if row.get("user") else None,
        "exclusions_known": False,
        "source": NAME,
        **{name: row[name] for name in ("partition", "account", "qos") if row.get(name)},
    }
    return tuple(map(values.get, JOBS.columns))


def _count(row: dict[str, str], name: str) -> int | None:
    text = row.get(name, "")
    if not text:
        return None
    if not (is_decimal(text) and len(text) <= 18):
        raise ValueError(f"{name} is {text[:40]!r}, not a number")
    return int(text)


def db_index(cluster: str, job: int, submit: int, restarts: int) -> int:
    """Return a number below 2**62 (a BIGINT) that identifies a row."""
    text = "\0".join((NAME, cluster, str(job), str(submit), str(restarts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _DB_INDEX_LIMIT


def _ingest_jobs(run: Run, files: list[str]) -> None:
    def stage(step: Step, reading: Reading) -> None:
        step.stage("jobs", (parquet_jobs if is_parquet(reading.name) else csv_jobs)(reading))
        step.stage("job_nodes", _job_nodes(step))
        set_coverage(run, step, "jobs")

    for path in check_and_track(run, files):
        with run.guard():
            ingest_file(run, path, stage)


def _job_nodes(step: Step) -> Iterator[Row]:
    """Yield the nodes for the staged jobs."""
    columns = "cluster, db_index, node_list, submit_time, start_time, end_time, gpus"
    jobs = step.execute(f"SELECT {columns} FROM {step.staged('jobs')} WHERE node_list IS NOT NULL")
    while batch := jobs.fetchmany(10_000):
        for cluster, index, node_list, submit, start, end, gpus in batch:
            nodes = expand(node_list)
            for node in nodes:
                yield cluster, index, node, submit, start, end, None if gpus is None else gpus / len(nodes)


TICKETS = Source(
    "tickets",
    "--tickets",
    "FILE",
    "repair tickets, CSV: node,opened,closed,text",
    lambda run, files: ingest_files(run, files, "tickets", tickets),
)
FAILURES = Source(
    "failures",
    "--failures",
    "FILE",
    "node failures reported by another tool, CSV: node,time,kind",
    lambda run, files: ingest_files(run, files, "failures", failures),
)
JOBS_FILE = Source(
    NAME,
    "--jobs",
    "FILE",
    "job history, CSV or Parquet: job_id,nodes,gpus,submit,start,end,state,restarts,user",
    _ingest_jobs,
)
