"""Reservations as slurmdbd keeps them: `sacctmgr show reservation`, one row for each node.

slurmctld's own list (`scontrol show reservation`) forgets what is over. Names and columns are those of --parsable2 in
22.05 to 26.05 (github.com/SchedMD/slurm, src/sacctmgr/reservation_functions.c, common.c); the flags have commas between
them and begin with MAINT where it is maintenance (src/common/slurm_protocol_defs.c, reservation_flags_string()).
What changes a reservation makes a new record of it, with a later TimeStart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.hostlist import expand
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import since_last_time, whole_files
from healthd.fleet.sources.reading import Reading

COLUMNS = Columns(("name", "timestart", "timeend", "flags", "nodename"), ("cluster",))
MAINTENANCE = "MAINT"

Row: TypeAlias = "tuple[str, str, str | None, int, int | None, str, bool]"


def command(from_time: int, to_time: int, cluster: str) -> list[str]:
    """Those that lasted at any moment between the two times. Run it with SLURM_TIME_FORMAT=%s."""
    where = (f"start=uts{from_time}", f"end=uts{to_time}", f"clusters={cluster}")
    form = "format=Cluster,Name,TimeStart,TimeEnd,Flags,NodeNames"
    return ["sacctmgr", "--readonly", "--parsable2", "show", "reservation", *where, form]


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    """One without nodes (of licenses only) has one row, whose node is None."""
    for number, row in rows(lines, COLUMNS, reading, "|"):
        try:
            start, end = reading.seconds(row["timestart"]), reading.maybe_seconds(row["timeend"])
            nodes = expand(row["nodename"]) if row["nodename"] else (None,)
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if end is not None and end < start:
            reading.unread(number, f"the reservation {row['name']} ends before it starts")
            continue
        maintenance = MAINTENANCE in row["flags"].split(",")
        reading.read(1)
        for node in nodes if reading.wants(start, end) else ():
            yield reading.cluster_of(row.get("cluster")), row["name"], node, start, end, row["flags"], maintenance


def ingest(run: Run, files: list[str]) -> None:
    """Of our own call what lasted since an hour before the last one: what ended meanwhile has its end now."""
    whole_files(run, files, "reservations", parse)
    if not files:
        since_last_time(run, "sacctmgr show reservation", "reservations", command, parse)


SOURCE = Source(
    "reservations",
    "--reservations",
    "FILE",
    "what `sacctmgr show reservation` prints; without FILE it is run here",
    ingest,
    runs=True,
)
