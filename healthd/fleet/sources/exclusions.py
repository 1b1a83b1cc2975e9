"""Nodes that the user of a job excluded, as `squeue` shows them of the jobs that slurmctld still knows.

A job's record is named by (job id, submit time): squeue has no DBIndex. What a user asked with --exclude is all that
is there; slurmctld itself adds the nodes that a prolog failed on nowhere here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.common.text import is_decimal
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import called, of_here, whole_files
from healthd.fleet.sources.reading import Reading

# The names of `-o` and of `-O` (github.com/SchedMD/slurm, src/squeue/print.c; -O has ExcNodes since 24.05).
COLUMNS = Columns(("jobid", "submit_time", "exc_nodes"))
NO_NODES = ("", "(null)", "N/A")

Row: TypeAlias = "tuple[str, None, int, str, str, int]"


def command() -> list[str]:
    """All jobs that slurmctld knows, also those that ended in the last MinJobAge. %A is the raw id; without a width
    nothing is cut (src/squeue/print.c, _print_str()). Run it with SLURM_TIME_FORMAT=%s."""
    return ["squeue", "--all", "--states=all", "--format=%A|%V|%x"]


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    """Of an array that waits there is one line, with the array's own id. Padded columns (squeue -O) are read where
    nothing can have been cut off: each value has a blank behind it."""
    for number, row in rows(_separated(lines, reading), COLUMNS, reading, "|"):
        if row["exc_nodes"] in NO_NODES:
            continue
        try:
            submitted, nodes = reading.seconds(row["submit_time"]), expand(row["exc_nodes"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not is_decimal(row["jobid"]):
            reading.unread(number, f'"{row["jobid"]}" is no id of a job: use -o %A')
            continue
        reading.read(1)
        for node in nodes if reading.wants(submitted, None) else ():
            yield reading.cluster_of(), None, submitted, node, "squeue", int(row["jobid"])


def _separated(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[int, str]]:
    """Lines of -O with a separator between the columns, all others as they are."""
    starts: list[int] | None = None
    for number, line in lines:
        if starts is None:
            names = [] if "|" in line else line.split()
            starts = [line.index(name) for name in names]
            width = len(line)
            yield number, "|".join(names) or line
        elif not starts:
            yield number, line
        else:
            ends = [*starts[1:], width]
            cells = [line[start:end] for start, end in zip(starts, ends, strict=True)]
            if len(line) > width or any(cell and not cell.endswith(" ") for cell in cells):
                reading.unread(number, "a column may be cut: ask for it wider, or use -o '%A|%V|%x'")
            else:
                yield number, "|".join(cell.strip() for cell in cells)


def ingest(run: Run, files: list[str]) -> None:
    whole_files(run, files, "exclusions", parse)
    if not files:
        reading = of_here(run, "squeue")
        with run.step(reading.name, run.now, run.now, reading.cluster) as step:
            step.stage("exclusions", parse(called(command(), reading), reading))


SOURCE = Source(
    "exclusions",
    "--exclusions",
    "FILE",
    "what `squeue -o '%A|%V|%x'` prints; without FILE it is run here",
    ingest,
    runs=True,
)
