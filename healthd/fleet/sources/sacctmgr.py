"""Reads slurmdbd's node states and reservations from sacctmgr's `show event` and `show reservation`.

The text is --parsable2 output with a header line. Columns are found by their names, which are the same in 22.05 to
26.05 (github.com/SchedMD/slurm, src/sacctmgr/common.c, sacctmgr_process_format_list(); reservation_functions.c).

Node states: TimeEnd is "Unknown" while a state lasts (src/common/parse_time.c, _make_time_str_internal()). User is
"root(0)", truncated after 19 characters in 22.05 (src/sacctmgr/event_functions.c). Rows without a node are events for
the whole cluster and are skipped.

Reservations: there is one row for each node. slurmctld's own list (`scontrol show reservation`) drops reservations that
are over. The flags are separated by commas; MAINT comes first for maintenance (src/common/slurm_protocol_defs.c,
reservation_flags_string()). A change to a reservation creates a new record with a later TimeStart.

The commands need SLURM_TIME_FORMAT=%s; parse_time() accepts a time as uts%s (src/common/parse_time.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from healthd.common.slurm.builtin_reasons import is_set_by_slurm
from healthd.common.slurm.hostlist import expand
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.common import ingest_files, ingest_new_period, slurm_settings
from healthd.fleet.sources.reading import Reading

SACCTMGR = ("sacctmgr", "--readonly", "--parsable2", "show")

# --- node states

STATE_COLUMNS = Columns(
    ("nodename", "timestart", "timeend", "state"),
    ("cluster", "reason", "user"),
    free="reason",  # may contain the separator, because nothing is quoted
)
HEALTHD, SLURM, PERSON = "healthd", "slurm", "person"
ROOT = "root"
State: TypeAlias = "tuple[str, str, int, int | None, str, str | None, str | None, str | None]"


def states_command(from_time: int, to_time: int, cluster: str) -> list[str]:
    """Return the command that lists all node states in force at any time between the two times.

    Without State=, sacctmgr prints all states. Without Start=, it prints only yesterday's
    (src/sacctmgr/event_functions.c, _set_cond()). slurmdbd identifies a state by its node and start
    (accounting_storage_mysql.c: primary key (node_name, time_start)). The store's table has the same key.
    """
    where = (f"start=uts{from_time}", f"end=uts{to_time}", f"clusters={cluster}")
    form = "format=Cluster,NodeName,Start,End,State,User,Reason"
    return [*SACCTMGR, "event", "events=node", *where, form]


def set_by(user: str | None, reason: str, slurm_user: str = SLURM) -> str | None:
    """Return the origin of a state (healthd, slurm or person), or None if the text does not show it.

    States that Slurm sets name SlurmUser (src/slurmctld/node_mgr.c, set_node_down_ptr()). The user root may be Slurm
    (if SlurmUser is root) or a person. For root, the Reason decides.

    Args:
        user: None if there is no such column; "" if slurmctld named no user, which means that slurmctld itself set the
            state.
    """
    if reason.startswith("healthd:"):
        return HEALTHD
    if user is None:
        return None
    if not user or (user == slurm_user and user != ROOT):
        return SLURM
    return SLURM if user == ROOT and is_set_by_slurm(reason) else PERSON


def slurm_user(cluster: str) -> str:
    """Return SlurmUser if this cluster's slurmctld answers on this machine, otherwise "slurm"."""
    try:
        local_settings = slurm_settings("ClusterName", "SlurmUser")
    except IngestError:  # the machine with slurmdbd may have no slurmctld; the states can still be read
        return SLURM
    user = local_settings.get("SlurmUser", "").partition("(")[0]
    return user if user and local_settings.get("ClusterName") == cluster else SLURM


def states(lines: Iterable[tuple[int, str]], reading: Reading, slurm_user: str = SLURM) -> Iterator[State]:
    """Yield (cluster, node, start, end, state, reason, user, set by).

    Args:
        slurm_user: user named in Slurm's own states.
    """
    for number, row in rows(lines, STATE_COLUMNS, reading, "|"):
        node = row["nodename"]
        if not node:
            continue
        try:
            start, end = reading.seconds(row["timestart"]), reading.optional_seconds(row["timeend"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if end is not None and end < start:
            reading.unread(number, f"the state of {node} ends before it starts")
            continue
        reading.read(1)
        if not reading.is_in_period(start, end):
            continue
        user, reason = row.get("user"), row.get("reason", "")
        user = None if user is None else user.partition("(")[0]
        cluster = reading.resolve_cluster(row.get("cluster"))
        stored_user = reading.user(user) if user else None
        yield cluster, node, start, end, row["state"], reason or None, stored_user, set_by(user, reason, slurm_user)


def _ingest_states(run: Run, files: list[str]) -> None:
    """Ingest the node states.

    Without files, reread the last hour, to add the ends of states that ended in the meantime.
    """
    ingest_files(run, files, "node_states", states)
    if not files:
        ingest_new_period(run, "sacctmgr show event", "node_states", states_command, _local_states)


def _local_states(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[State]:
    return states(lines, reading, slurm_user(reading.cluster))


NODE_STATES = Source(
    "node_states",
    "--node-states",
    "FILE",
    "output of `sacctmgr show event`; without FILE, healthd runs it here",
    _ingest_states,
    runs_without_files=True,
)

# --- reservations

RESERVATION_COLUMNS = Columns(("name", "timestart", "timeend", "flags", "nodename"), ("cluster",))
MAINTENANCE = "MAINT"
Reservation: TypeAlias = "tuple[str, str, str | None, int, int | None, str, bool]"


def reservations_command(from_time: int, to_time: int, cluster: str) -> list[str]:
    """Return the command that lists all reservations in force at any time between the two times."""
    where = (f"start=uts{from_time}", f"end=uts{to_time}", f"clusters={cluster}")
    form = "format=Cluster,Name,TimeStart,TimeEnd,Flags,NodeNames"
    return [*SACCTMGR, "reservation", *where, form]


def reservations(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Reservation]:
    """Yield (cluster, name, node, start, end, flags, is maintenance). The node of a license reservation is None."""
    for number, row in rows(lines, RESERVATION_COLUMNS, reading, "|"):
        try:
            start, end = reading.seconds(row["timestart"]), reading.optional_seconds(row["timeend"])
            nodes = expand(row["nodename"]) if row["nodename"] else (None,)
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if end is not None and end < start:
            reading.unread(number, f"the reservation {row['name']} ends before it starts")
            continue
        maintenance = MAINTENANCE in row["flags"].split(",")
        reading.read(1)
        for node in nodes if reading.is_in_period(start, end) else ():
            yield reading.resolve_cluster(row.get("cluster")), row["name"], node, start, end, row["flags"], maintenance


def _ingest_reservations(run: Run, files: list[str]) -> None:
    """Ingest the reservations.

    Without files, reread the last hour, to add the ends of reservations that ended in the meantime.
    """
    ingest_files(run, files, "reservations", reservations)
    if not files:
        ingest_new_period(run, "sacctmgr show reservation", "reservations", reservations_command, reservations)


RESERVATIONS = Source(
    "reservations",
    "--reservations",
    "FILE",
    "output of `sacctmgr show reservation`; without FILE, healthd runs it here",
    _ingest_reservations,
    runs_without_files=True,
)
