"""What Slurm kept of its nodes' states: `sacctmgr show event`.

The text is that of --parsable2 with a line of columns; the columns are found by their names, which are the same in
22.05 and 26.05 (github.com/SchedMD/slurm, src/sacctmgr/common.c, sacctmgr_process_format_list()): Cluster, NodeName,
TimeStart, TimeEnd, State, Reason, User. TimeEnd is "Unknown" while the state lasts (src/common/parse_time.c,
_make_time_str_internal()). User is "root(0)", in 22.05 cut after 19 characters (src/sacctmgr/event_functions.c).
Rows without a node are events of the whole cluster, and are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.builtin_reasons import is_slurms_own
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.pieces import configured, since_last_time, whole_files
from healthd.fleet.sources.reading import Reading

COLUMNS = Columns(
    ("nodename", "timestart", "timeend", "state"),
    ("cluster", "reason", "user"),
    free="reason",  # it may hold the separator: nothing is quoted
)

HEALTHD, SLURM, PERSON = "healthd", "slurm", "person"
ROOT = "root"
Row: TypeAlias = "tuple[str, str, int, int | None, str, str | None, str | None, str | None]"


def command(from_time: int, to_time: int, cluster: str) -> list[str]:
    """Every state of every node that lasted at any moment between the two times: without State= they are all there,
    and without a Start= only yesterday's (src/sacctmgr/event_functions.c, _set_cond()). slurmdbd keys them by node and
    start (accounting_storage_mysql.c: primary key (node_name, time_start)), and so does the table.

    Run it with SLURM_TIME_FORMAT=%s; parse_time() takes a time as uts%s (src/common/parse_time.c).
    """
    where = (f"start=uts{from_time}", f"end=uts{to_time}", f"clusters={cluster}")
    form = "format=Cluster,NodeName,Start,End,State,User,Reason"
    return ["sacctmgr", "--readonly", "--parsable2", "show", "event", "events=node", *where, form]


def set_by(user: str | None, reason: str, slurm_user: str = SLURM) -> str | None:
    """Whose doing a state is. `user`: None = the text does not say; "" = slurmctld named nobody, which is its own.
    Slurm's own states have the name of SlurmUser (src/slurmctld/node_mgr.c, set_node_down_ptr()). Where that is root,
    a person who is root has it too: then, and for any root, the Reason tells them apart."""
    if reason.startswith("healthd:"):
        return HEALTHD
    if user is None:
        return None
    if not user or (user == slurm_user and user != ROOT):
        return SLURM
    return SLURM if user == ROOT and is_slurms_own(reason) else PERSON


def slurm_user(cluster: str) -> str:
    """SlurmUser of the cluster whose slurmctld answers here; of another, or where none answers: "slurm"."""
    try:
        here = configured("ClusterName", "SlurmUser")
    except IngestError:  # slurmdbd's machine needs no slurmctld, and its states are read all the same
        return SLURM
    user = here.get("SlurmUser", "").partition("(")[0]
    return user if user and here.get("ClusterName") == cluster else SLURM


def parse(lines: Iterable[tuple[int, str]], reading: Reading, slurm_user: str = SLURM) -> Iterator[Row]:
    """`slurm_user`: the name that Slurm's own states have."""
    for number, row in rows(lines, COLUMNS, reading, "|"):
        node = row["nodename"]
        if not node:
            continue
        try:
            start, end = reading.seconds(row["timestart"]), reading.maybe_seconds(row["timeend"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if end is not None and end < start:
            reading.unread(number, f"the state of {node} ends before it starts")
            continue
        reading.read(1)
        if not reading.wants(start, end):
            continue
        user, reason = row.get("user"), row.get("reason", "")
        user = None if user is None else user.partition("(")[0]
        cluster = reading.cluster_of(row.get("cluster"))
        kept = reading.user(user) if user else None
        yield cluster, node, start, end, row["state"], reason or None, kept, set_by(user, reason, slurm_user)


def ingest(run: Run, files: list[str]) -> None:
    """Of our own call what lasted since an hour before the last one: what ended meanwhile has its end now."""
    whole_files(run, files, "node_states", parse)
    if not files:
        since_last_time(run, "sacctmgr show event", "node_states", command, _told_here)


def _told_here(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    return parse(lines, reading, slurm_user(reading.cluster))


SOURCE = Source(
    "node_states",
    "--node-states",
    "FILE",
    "what `sacctmgr show event` prints; without FILE it is run here",
    ingest,
    runs=True,
)
