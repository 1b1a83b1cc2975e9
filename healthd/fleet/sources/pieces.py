"""Functions that sources share: files that are read whole, and local commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from healthd.fleet.ingest import IngestError, Run, WrongCommand
from healthd.fleet.sources.calls import EPOCH, output
from healthd.fleet.sources.covered_times import not_ahead, of_text, text_of, to_ask
from healthd.fleet.sources.lines import lines_in, lines_of
from healthd.fleet.sources.reading import Reading
from healthd.fleet.tables import TABLES

if TYPE_CHECKING:
    from healthd.fleet.step import Step, Value

Lines: TypeAlias = "Iterable[tuple[int, str]]"
Parse: TypeAlias = "Callable[[Lines, Reading], Iterable[tuple[Value, ...]]]"

MOST_NAMED = 5
TOGETHER = 128 << 20  # bytes
LATE_SECONDS = 3600
EARLIEST = 1_000_000  # parse_time() rejects earlier times


def whole_files(run: Run, files: Sequence[str], table: str, parse: Parse) -> None:
    """Ingest each file as one step of rows of one table."""

    def stage(step: Step, reading: Reading) -> None:
        step.stage(table, parse(lines_of(reading.name, reading), reading))
        tell_unknown(run, step, table)
        covers_staged(run, step, table)

    for path in watched(run, files):
        with run.guard():
            read_whole(run, path, stage)


def watched(run: Run, files: Sequence[str]) -> Iterator[str]:
    """Yield the files with progress, after checking all time zones (`require_same_zone`).

    Raises UsageError before any file is read.
    """
    for path in files:
        same_zone(run, path, run.cursor(f"file {os.path.abspath(path)}"))
    yield from run.watch(files)


def read_whole(run: Run, path: str, stage: Callable[[Step, Reading], None]) -> None:
    """Ingest a file as one step. An unchanged file that was read with the same options is skipped."""
    name, state = f"file {os.path.abspath(path)}", _stamp(run, path)
    if run.cursor(name) == state:
        return
    with run.step(path) as step:
        stage(step, Reading.of(run, path))
        step.cursor(name, state)


def tell_unknown(run: Run, step: Step, table: str) -> None:
    """Log staged nodes that are missing from the known nodes of their cluster.

    They are kept, but a name with a different spelling there joins with nothing.
    """
    if "node" not in TABLES[table].columns:
        return
    nodes = f"SELECT DISTINCT cluster, node FROM {step.staged(table)} WHERE node IS NOT NULL"
    unknown = step.execute(
        f"SELECT cluster, node FROM ({nodes}) ANTI JOIN {step.live('nodes')} USING (cluster, node) "
        f"WHERE cluster IN (SELECT cluster FROM {step.live('nodes')}) ORDER BY ALL"
    ).fetchall()
    if unknown:
        names = ", ".join(node for _, node in unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
        run.say(f"{run.source.name}: {len(unknown):,} nodes that are unknown in their cluster are kept: {names}")


def covers_staged(run: Run, step: Step, table: str) -> None:
    """Set the coverage of the piece to the times and clusters of its rows, limited to --from and --to."""
    told = step.times(table, run.now)
    found = (time for _, first, last, _ in told for time in (first, last) if time is not None)
    times = [min(max(time, run.from_time or 0), time if run.to_time is None else run.to_time) for time in found]
    step.covers(min(times, default=None), max(times, default=None), *(cluster for cluster, *_ in told))


def read_together(run: Run, paths: Sequence[str], stage: Callable[[Step, Reading], None]) -> None:
    """Ingest many files, about BATCH_BYTES per step, because each step rewrites the months that it touches.

    `stage` stages nothing of a file that it cannot read to its end; the other files of the step are kept.
    """
    left = watched(run, paths)
    path = next(left, None)
    while path is not None:
        taken = 0
        with run.steps() as step:
            while path is not None and taken < TOGETHER:
                with run.guard():
                    name, state = f"file {os.path.abspath(path)}", _stamp(run, path)
                    if run.cursor(name) != state:
                        with run.piece(step, path):
                            stage(step, Reading.of(run, path))
                        step.cursor(name, state)
                        taken += os.path.getsize(path)
                path = next(left, None)


def _stamp(run: Run, path: str) -> str:
    """Return a text that changes with the file or the options. Raises IngestError if the file is missing."""
    try:
        about = os.stat(path)
    except OSError as error:
        raise IngestError(f"{path}: cannot be read: {error.strerror or error}") from None
    how = (run.cluster, run.zone, run.from_time, run.to_time)
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ino} {' '.join(map(str, how))}"


def same_zone(run: Run, path: str, before: str | None) -> None:
    """Raise UsageError if the file was read in another time zone before.

    Most rows are identified by a time, so in another zone each row would be added again, and new files would be off by
    some hours. before: the file's cursor, which ends in zone, from and to.
    """
    zone = before.rsplit(" ", 3)[1] if before else "None"
    if zone not in ("None", str(run.zone)):
        now = f"with {run.zone}" if run.zone else "without it"
        raise WrongCommand(
            f"{path}: was read with --timezone {zone}; {now} its rows would be stored twice: "
            f"use {zone} again, or, if it was wrong, read everything into a new store"
        )


def called(argv: Sequence[str], reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Slurm command, with times in epoch seconds. Raises IngestError if it failed: incomplete
    output.
    """
    with output(argv, EPOCH) as out:
        yield from lines_in(out, reading)


def local_cluster() -> str:
    """Return the name of the local cluster. Raises IngestError if Slurm does not answer."""
    cluster = configured("ClusterName").get("ClusterName")
    if cluster is None:
        raise IngestError("scontrol show config: has no ClusterName: add --cluster NAME")
    return cluster


def configured(*names: str) -> dict[str, str]:
    """Return those of these settings that the local slurmctld has. Raises IngestError if Slurm does not answer."""
    found = {}
    for _, line in called(["scontrol", "show", "config"], Reading("scontrol show config")):
        name, _, value = line.partition("=")
        if name.strip() in names:
            found[name.strip()] = value.strip()
    return found


def of_here(run: Run, name: str) -> Reading:
    """Return a reading for output of the local slurmctld. Raises IngestError if another cluster was given."""
    here = local_cluster()
    if run.cluster not in ("", here):
        raise IngestError(
            f"{name}: the local cluster is {here}, not {run.cluster}: run the command there and write a file"
        )
    return replace(Reading.of(run, name), cluster=here)


def of_slurm(run: Run, name: str) -> Reading:
    """Return a reading for output of slurmdbd: for the given cluster, else the local one."""
    return replace(Reading.of(run, name), cluster=run.cluster or local_cluster())


def since_last_time(
    run: Run, name: str, table: str, command: Callable[[int, int, str], list[str]], parse: Parse
) -> None:
    """Ingest the times that were not yet read from slurmdbd, and the last OVERLAP_SECONDS before them."""
    reading = of_slurm(run, name)
    cursor = f"until {reading.cluster}"
    read = not_ahead(run, of_text(run.cursor(cursor) or ""), cursor)
    end = min(run.to_time or run.now, run.now)
    for begin, until in to_ask(read, run.from_time, end, LATE_SECONDS, EARLIEST):
        since = max(begin, EARLIEST)
        with run.step(f"{reading.name} {since}", since, until, reading.cluster) as step:
            lines = called(command(since, until, reading.cluster), reading)
            step.stage(table, parse(lines, reading))
            read.add(begin, until - 1)
            step.cursor(cursor, text_of(read))
