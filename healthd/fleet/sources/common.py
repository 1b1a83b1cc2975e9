"""Functions shared by several sources: they read whole files and run local commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from healthd.fleet.ingest import IngestError, Run, UsageError
from healthd.fleet.sources.covered_times import format_spans, parse_spans, uncovered_spans, without_future
from healthd.fleet.sources.lines import iterate_lines, read_lines
from healthd.fleet.sources.reading import Reading
from healthd.fleet.sources.slurm_commands import EPOCH_TIMES, command_output
from healthd.fleet.tables import TABLES

if TYPE_CHECKING:
    from healthd.fleet.step import Step, Value

Lines: TypeAlias = "Iterable[tuple[int, str]]"
Parse: TypeAlias = "Callable[[Lines, Reading], Iterable[tuple[Value, ...]]]"

MAX_NAMED = 5
BATCH_BYTES = 128 << 20  # bytes
OVERLAP_SECONDS = 3600
MIN_SLURM_TIME = 1_000_000  # parse_time() rejects times before this


def ingest_files(run: Run, files: Sequence[str], table: str, parse: Parse) -> None:
    """Ingest each file as one step, with rows for one table."""

    def stage(step: Step, reading: Reading) -> None:
        step.stage(table, parse(read_lines(reading.name, reading), reading))
        report_unknown_nodes(run, step, table)
        set_coverage(run, step, table)

    for path in check_and_track(run, files):
        with run.guard():
            ingest_file(run, path, stage)


def check_and_track(run: Run, files: Sequence[str]) -> Iterator[str]:
    """Check all files' time zones (`require_same_zone`), then yield the files and show progress.

    Raises UsageError before any file is read.
    """
    for path in files:
        require_same_zone(run, path, run.cursor(f"file {os.path.abspath(path)}"))
    yield from run.track(files)


def ingest_file(run: Run, path: str, stage: Callable[[Step, Reading], None]) -> None:
    """Ingest a file as one step. Skip a file that is unchanged since it was read with the same options."""
    name, state = f"file {os.path.abspath(path)}", _file_state(run, path)
    if run.cursor(name) == state:
        return
    with run.step(path) as step:
        stage(step, Reading.from_run(run, path))
        step.cursor(name, state)


def report_unknown_nodes(run: Run, step: Step, table: str) -> None:
    """Log staged nodes that are not among the known nodes of their cluster.

    Rows with such nodes are kept. But if the source spells a node's name differently, these rows cannot be joined with
    the node's other rows.
    """
    if "node" not in TABLES[table].columns:
        return
    nodes = f"SELECT DISTINCT cluster, node FROM {step.staged(table)} WHERE node IS NOT NULL"
    unknown = step.execute(
        f"SELECT cluster, node FROM ({nodes}) ANTI JOIN {step.live('nodes')} USING (cluster, node) "
        f"WHERE cluster IN (SELECT cluster FROM {step.live('nodes')}) ORDER BY ALL"
    ).fetchall()
    if unknown:
        names = ", ".join(node for _, node in unknown[:MAX_NAMED]) + (", ..." if len(unknown) > MAX_NAMED else "")
        run.log(f"{run.source.name}: {len(unknown):,} nodes that are unknown in their cluster are kept: {names}")


def set_coverage(run: Run, step: Step, table: str) -> None:
    """Set the piece's coverage to the times and clusters of its rows, limited to --from and --to."""
    cluster_times = step.covered_times(table, run.now)
    found = (time for _, first, last, _ in cluster_times for time in (first, last) if time is not None)
    times = [min(max(time, run.from_time or 0), time if run.to_time is None else run.to_time) for time in found]
    step.set_coverage(min(times, default=None), max(times, default=None), *(cluster for cluster, *_ in cluster_times))


def ingest_in_batches(run: Run, paths: Sequence[str], stage: Callable[[Step, Reading], None]) -> None:
    """Ingest many files in steps of about BATCH_BYTES. Large steps are cheaper, because each step rewrites the months
    of its rows.

    If `stage` cannot read a file completely, it stages none of its rows; the step's other files are kept.
    """
    remaining = check_and_track(run, paths)
    path = next(remaining, None)
    while path is not None:
        bytes_read = 0
        with run.steps() as step:
            while path is not None and bytes_read < BATCH_BYTES:
                with run.guard():
                    name, state = f"file {os.path.abspath(path)}", _file_state(run, path)
                    if run.cursor(name) != state:
                        with run.piece(step, path):
                            stage(step, Reading.from_run(run, path))
                        step.cursor(name, state)
                        bytes_read += os.path.getsize(path)
                path = next(remaining, None)


def _file_state(run: Run, path: str) -> str:
    """Return a string that changes if the file or the options change. Raises IngestError if the file is missing."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise IngestError(f"{path}: cannot be read: {error.strerror or error}") from None
    options = (run.cluster, run.zone, run.from_time, run.to_time)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {' '.join(map(str, options))}"


def require_same_zone(run: Run, path: str, before: str | None) -> None:
    """Raise UsageError if the file was previously read in another time zone.

    Most rows are identified by a time. If the file were read in another zone, each row would be added again with
    another time.

    Args:
        before: the file's cursor, which ends with zone, from and to.
    """
    zone = before.rsplit(" ", 3)[1] if before else "None"
    if zone not in ("None", str(run.zone)):
        current = f"with {run.zone}" if run.zone else "without it"
        raise UsageError(
            f"{path}: was read with --timezone {zone}; {current} its rows would be stored twice; use {zone} again. "
            "If that zone was wrong, read everything into a new store"
        )


def command_lines(argv: Sequence[str], reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield a Slurm command's output lines, with times in epoch seconds.

    Raises IngestError if the command failed, because its output is then incomplete.
    """
    with command_output(argv, EPOCH_TIMES) as out:
        yield from iterate_lines(out, reading)


def local_cluster() -> str:
    """Return the name of the local cluster. Raises IngestError if Slurm does not answer."""
    cluster = slurm_settings("ClusterName").get("ClusterName")
    if cluster is None:
        raise IngestError("scontrol show config prints no ClusterName: add --cluster NAME")
    return cluster


def slurm_settings(*names: str) -> dict[str, str]:
    """Return the local slurmctld's values of these settings. Raises IngestError if Slurm does not answer."""
    found = {}
    for _, line in command_lines(["scontrol", "show", "config"], Reading("scontrol show config")):
        name, _, value = line.partition("=")
        if name.strip() in names:
            found[name.strip()] = value.strip()
    return found


def local_reading(run: Run, name: str) -> Reading:
    """Return a Reading for output from the local slurmctld. Raises IngestError if another cluster was given."""
    cluster = local_cluster()
    if run.cluster not in ("", cluster):
        raise IngestError(
            f"{name}: the local cluster is {cluster}, not {run.cluster}; run the command there and save its output to "
            "a file"
        )
    return replace(Reading.from_run(run, name), cluster=cluster)


def slurmdbd_reading(run: Run, name: str) -> Reading:
    """Return a Reading for output from slurmdbd, for the given cluster or, without one, the local cluster."""
    return replace(Reading.from_run(run, name), cluster=run.cluster or local_cluster())


def ingest_new_period(
    run: Run, name: str, table: str, command: Callable[[int, int, str], list[str]], parse: Parse
) -> None:
    """Ingest the times that were not yet read from slurmdbd, and reread the OVERLAP_SECONDS before them."""
    reading = slurmdbd_reading(run, name)
    cursor = f"until {reading.cluster}"
    read = without_future(run, parse_spans(run.cursor(cursor) or ""), cursor)
    end = min(run.to_time or run.now, run.now)
    for begin, until in uncovered_spans(read, run.from_time, end, OVERLAP_SECONDS, MIN_SLURM_TIME):
        since = max(begin, MIN_SLURM_TIME)
        with run.step(f"{reading.name} {since}", since, until, reading.cluster) as step:
            lines = command_lines(command(since, until, reading.cluster), reading)
            step.stage(table, parse(lines, reading))
            read.add(begin, until - 1)
            step.cursor(cursor, format_spans(read))
