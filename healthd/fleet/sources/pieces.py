"""What sources have in common: a file that is read whole, and a command that we run ourselves."""

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
EARLIEST = 1_000_000  # parse_time() takes none before


def whole_files(run: Run, files: Sequence[str], table: str, parse: Parse) -> None:
    """Each file is a step of rows of one table."""

    def stage(step: Step, reading: Reading) -> None:
        step.stage(table, parse(lines_of(reading.name, reading), reading))
        tell_unknown(run, step, table)
        covers_staged(run, step, table)

    for path in watched(run, files):
        with run.guard():
            read_whole(run, path, stage)


def watched(run: Run, files: Sequence[str]) -> Iterator[str]:
    """The files, if none of them would come twice (`same_zone`). WrongCommand: nothing of any is read."""
    for path in files:
        same_zone(run, path, run.cursor(f"file {os.path.abspath(path)}"))
    yield from run.watch(files)


def read_whole(run: Run, path: str, stage: Callable[[Step, Reading], None]) -> None:
    """A file is a step. One that was read before in the same way, and did not change, is passed over."""
    name, state = f"file {os.path.abspath(path)}", _stamp(run, path)
    if run.cursor(name) == state:
        return
    with run.step(path) as step:
        stage(step, Reading.of(run, path))
        step.cursor(name, state)


def tell_unknown(run: Run, step: Step, table: str) -> None:
    """Nodes of what is staged that their cluster has not, where the store knows its nodes: they are kept, but a name
    that is written otherwise there joins with nothing."""
    if "node" not in TABLES[table].columns:
        return
    nodes = f"SELECT DISTINCT cluster, node FROM {step.staged(table)} WHERE node IS NOT NULL"
    unknown = step.execute(
        f"SELECT cluster, node FROM ({nodes}) ANTI JOIN {step.live('nodes')} USING (cluster, node) "
        f"WHERE cluster IN (SELECT cluster FROM {step.live('nodes')}) ORDER BY ALL"
    ).fetchall()
    if unknown:
        names = ", ".join(node for _, node in unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
        run.say(f"{run.source.name}: nodes that are not known in their cluster are kept, {len(unknown):,}: {names}")


def covers_staged(run: Run, step: Step, table: str) -> None:
    """The piece speaks of the times and clusters of its rows; of what --from and --to left out it does not."""
    told = step.times(table, run.now)
    found = (time for _, first, last, _ in told for time in (first, last) if time is not None)
    times = [min(max(time, run.from_time or 0), time if run.to_time is None else run.to_time) for time in found]
    step.covers(min(times, default=None), max(times, default=None), *(cluster for cluster, *_ in told))


def read_together(run: Run, paths: Sequence[str], stage: Callable[[Step, Reading], None]) -> None:
    """The same of many files, some TOGETHER bytes a step: each step writes the months that it touches anew. `stage`
    stages nothing of a file that it cannot read to its end: the others of the step are kept."""
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
    """Another one if the file changed, or is to be read in another way. IngestError: it is not there."""
    try:
        about = os.stat(path)
    except OSError as error:
        raise IngestError(f"{path}: cannot be read: {error.strerror or error}") from None
    how = (run.cluster, run.zone, run.from_time, run.to_time)
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ino} {' '.join(map(str, how))}"


def same_zone(run: Run, path: str, before: str | None) -> None:
    """`before`: the cursor of a text that was read, whose last words are zone, from and to. Most rows are named by a
    time, so that in another zone each would stand beside itself. WrongCommand: they would; and files that are new would
    stand in the store some hours off."""
    zone = before.rsplit(" ", 3)[1] if before else "None"
    if zone not in ("None", str(run.zone)):
        now = f"with {run.zone}" if run.zone else "without one"
        raise WrongCommand(
            f"{path}: was read with --timezone {zone}; {now} its rows would be there twice: "
            f"say {zone} again, or, if it was wrong, read everything into a new store"
        )


def called(argv: Sequence[str], reading: Reading) -> Iterator[tuple[int, str]]:
    """The lines that a command of Slurm prints, with times in epoch seconds. IngestError: it failed; then what it
    printed is not all."""
    with output(argv, EPOCH) as out:
        yield from lines_in(out, reading)


def local_cluster() -> str:
    """The name of the cluster whose commands these are. IngestError: it cannot be asked."""
    cluster = configured("ClusterName").get("ClusterName")
    if cluster is None:
        raise IngestError("scontrol show config: names no ClusterName: say --cluster NAME")
    return cluster


def configured(*names: str) -> dict[str, str]:
    """Of these settings those that slurmctld here has. IngestError: it cannot be asked."""
    found = {}
    for _, line in called(["scontrol", "show", "config"], Reading("scontrol show config")):
        name, _, value = line.partition("=")
        if name.strip() in names:
            found[name.strip()] = value.strip()
    return found


def of_here(run: Run, name: str) -> Reading:
    """A reading of what slurmctld's cluster here says. IngestError: another cluster was said."""
    here = local_cluster()
    if run.cluster not in ("", here):
        raise IngestError(
            f"{name}: would tell of the cluster {here} here, not of {run.cluster}: run it there, into a file"
        )
    return replace(Reading.of(run, name), cluster=here)


def of_slurm(run: Run, name: str) -> Reading:
    """A reading of what slurmdbd says: of the cluster that was said, or else the one here."""
    return replace(Reading.of(run, name), cluster=run.cluster or local_cluster())


def since_last_time(
    run: Run, name: str, table: str, command: Callable[[int, int, str], list[str]], parse: Parse
) -> None:
    """What slurmdbd tells of the times that were not read yet, and of the last LATE_SECONDS before."""
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
