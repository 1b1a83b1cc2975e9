"""Defines the store's tables, which ingests write and queries read.

Times are whole seconds since the epoch, UTC. None (NULL) means "unknown" or "not yet". 0 and "" never mean this. All
types exist in both DuckDB and Spark.
"""

from __future__ import annotations

from dataclasses import dataclass

BIGINT, DOUBLE, TEXT, BOOLEAN = "BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN"


@dataclass(frozen=True, slots=True)
class Table:
    """The definition of a table.

    Attributes:
        columns: type of each column by name, in order.
        key_columns: the row's key; a row with equal values in these columns replaces an earlier row.
        month_column: the column whose month (UTC) determines the row's file; "" if the table is one file.
        preferred_columns: columns that decide which of two versions of a row is more complete and therefore kept: in
            the first of these columns that is None in only one version, the other version has a value and is kept. If
            no column decides, the version that was read later is kept.
        row_key_columns: further key columns, for keys with many rows.
    """

    name: str
    columns: dict[str, str]
    key_columns: tuple[str, ...]
    month_column: str = ""
    preferred_columns: tuple[str, ...] = ()
    row_key_columns: tuple[str, ...] = ()


# One row for each accounting record of a job. A requeued job keeps its job_id but gets a new record, with a new
# db_index.
JOBS = Table(
    "jobs",
    {
        "cluster": TEXT,
        # Slurm's 64 bits as a signed number. From 24.11 on, this is an SLUID, whose upper bit may be set
        # (src/common/sluid.c). A job history has no DBIndex; for its rows, this is 62 bits of a hash of the row's
        # identity.
        "db_index": BIGINT,
        "job_id": BIGINT,  # the raw id, also for an array task
        "array_job_id": BIGINT,
        "array_task_id": BIGINT,
        "restarts": BIGINT,
        "state": TEXT,  # COMPLETED, FAILED, NODE_FAIL, PREEMPTED, REQUEUED, TIMEOUT, OUT_OF_MEMORY, CANCELLED, ...
        "exit_code": BIGINT,
        "exit_signal": BIGINT,
        "submit_time": BIGINT,
        "eligible_time": BIGINT,
        "start_time": BIGINT,  # None if it never ran
        "end_time": BIGINT,  # None if it has not ended
        "nodes": BIGINT,
        "gpus": BIGINT,  # allocated GPUs, over all nodes
        "cpus": BIGINT,
        "node_list": TEXT,  # Slurm's host list
        "partition": TEXT,
        "account": TEXT,
        "qos": TEXT,
        "priority": BIGINT,
        "user_name": TEXT,  # the name, None or a hash, depending on --users
        "run_key": TEXT,  # equal for jobs with the same name and work directory; None if either is unknown
        "reservation": TEXT,
        "time_limit_seconds": BIGINT,
        "suspended_seconds": BIGINT,
        "exclusions_known": BOOLEAN,  # True if the user's exclusions could be determined
        "source": TEXT,  # sacct, sacct_json, jobs_file
    },
    ("cluster", "db_index"),
    "submit_time",
    ("end_time", "start_time"),
)

# The nodes of each job, derived from `jobs` during the ingest.
JOB_NODES = Table(
    "job_nodes",
    {
        "cluster": TEXT,
        "db_index": BIGINT,
        "node": TEXT,
        "submit_time": BIGINT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "gpus": DOUBLE,  # the job's GPUs divided by its nodes
    },
    ("cluster", "db_index"),
    "submit_time",
    ("end_time", "start_time"),
    row_key_columns=("node",),
)

# Lines of healthd's event streams (docs/events.md).
EVENTS = Table(
    "events",
    {
        "cluster": TEXT,
        "node": TEXT,
        "boot_id": TEXT,
        "stream_id": TEXT,
        "seq": BIGINT,
        "time": BIGINT,
        "mono": DOUBLE,
        "schema_version": BIGINT,
        "event": TEXT,
        "stage": TEXT,
        "condition_id": TEXT,
        "check_name": TEXT,
        "check_instance": TEXT,
        "code": TEXT,
        "subject": TEXT,
        "severity": TEXT,
        "was": TEXT,
        "kind": TEXT,  # edge: the problem happened at one moment; level: each run of the check finds the problem again
        "first_time": BIGINT,
        "last_time": BIGINT,
        "times": BIGINT,  # number of times the condition was seen so far (`count`)
        "jobs": TEXT,  # ids separated by blanks
        "message": TEXT,
        "cleared_by": TEXT,
        "decision": TEXT,
        "reason": TEXT,
        "who": TEXT,
        "why": TEXT,
        "until_time": BIGINT,
        "version": TEXT,
        "since_time": BIGINT,
        "last_alive_time": BIGINT,
        "dropped": BIGINT,
        "rest": TEXT,  # JSON of all fields without a column; the whole line if its schema or event is unknown
        # These two columns are None except for events about conditions. observed: reported only by a source that a user
        # can forge. history: reported only by log lines from before healthd's first start. Rows that were stored before
        # these columns existed have None.
        "observed": BOOLEAN,
        "history": BOOLEAN,
        # These two columns are None except for measured slowness. slowdown: 0.26 if an iteration takes 26 % longer.
        # onset: first slow iteration.
        "slowdown": DOUBLE,
        "onset_time": BIGINT,
        # Serial number of the GPU `subject`; None for other conditions and for rows that were stored before this column
        # existed.
        "serial": TEXT,
        # UUID of the NVLink domain of the node's GPUs; None if there is none and for rows that were stored before this
        # column existed.
        "nvlink_domain": TEXT,
    },
    ("cluster", "node", "stream_id", "seq"),
    "time",
)

# The GPUs of each node, from the events `gpus`: one row for each GPU in each event. These rows are never pruned,
# because a node lists its GPUs rarely.
GPUS = Table(
    "gpus",
    {
        "cluster": TEXT,
        "node": TEXT,
        "stream_id": TEXT,
        "seq": BIGINT,
        "time": BIGINT,
        "subject": TEXT,  # PCI address
        "serial": TEXT,  # of the board; None if unknown
        "uuid": TEXT,  # None if unknown
        "name": TEXT,
    },
    ("cluster", "node", "stream_id", "seq"),
    row_key_columns=("subject",),
)

# Slurm's record of node states: sacctmgr show event.
NODE_STATES = Table(
    "node_states",
    {
        "cluster": TEXT,
        "node": TEXT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "state": TEXT,
        "reason": TEXT,
        "user_name": TEXT,  # the name, None or a hash, depending on --users
        # healthd, slurm, person; None if unknown. Determined from the user's name before --users hashes or drops it
        "set_by": TEXT,
    },
    ("cluster", "node", "start_time"),
    "start_time",
    preferred_columns=("end_time",),
)

RESERVATIONS = Table(
    "reservations",
    {
        "cluster": TEXT,
        "name": TEXT,
        "node": TEXT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "flags": TEXT,  # separated by commas
        "maintenance": BOOLEAN,
    },
    ("cluster", "name", "start_time"),
    "start_time",
    row_key_columns=("node",),
)

# Pre-emptions logged by slurmctld. Inferred pre-emptions are computed by a query and not stored.
PREEMPTIONS = Table(
    "preemptions",
    {
        "cluster": TEXT,
        "time": BIGINT,
        "job_id": BIGINT,  # the pre-empted job
        "preemptor_job_id": BIGINT,
        "mode": TEXT,  # requeued, cancelled, suspended, checkpointed, signalled (the grace time began)
        # If the pre-emptor is a pending array task, preemptor_job_id is the array's id, because the task gets its own
        # id only when it starts (job_array_split in slurmctld's job_mgr.c). (array_job_id, array_task_id) then finds it
        # in `jobs`.
        "preemptor_array_task_id": BIGINT,
    },
    ("cluster", "time", "job_id"),
    "time",
)

# Nodes that users excluded from their jobs. (job_id, submit_time) identifies a job's record, as in slurmdbd's unique
# index: squeue does not print a DBIndex. A requeue keeps the job_id and the exclusions, so count distinct job_ids.
EXCLUSIONS = Table(
    "exclusions",
    {
        "cluster": TEXT,
        "db_index": BIGINT,  # None if from squeue
        "submit_time": BIGINT,
        "node": TEXT,
        "source": TEXT,  # submit_line, script, squeue
        "job_id": BIGINT,
    },
    ("cluster", "job_id", "submit_time", "source"),
    "submit_time",
    row_key_columns=("node",),
)

TICKETS = Table(
    "tickets",
    {"cluster": TEXT, "node": TEXT, "opened_time": BIGINT, "closed_time": BIGINT, "text": TEXT},
    ("cluster", "node", "opened_time"),
    "opened_time",
    preferred_columns=("closed_time",),
)

NODES = Table(
    "nodes",
    {
        "cluster": TEXT,
        "node": TEXT,
        "gpu_model": TEXT,
        "gpus": BIGINT,
        "partitions": TEXT,  # separated by commas
        "switch": TEXT,  # the leaf switch
        "rack": TEXT,
    },
    ("cluster", "node"),
)

# Node failures recorded by another tool.
FAILURES = Table(
    "failures",
    {"cluster": TEXT, "node": TEXT, "time": BIGINT, "kind": TEXT},
    ("cluster", "node", "time", "kind"),
    "time",
)

# Conditions in Prometheus, from the first to the last scrape that showed them. Conditions between two scrapes are
# missing. `severity` is the worst in any scrape.
SCRAPED_CONDITIONS = Table(
    "scraped_conditions",
    {
        "cluster": TEXT,
        "node": TEXT,
        "check_name": TEXT,
        "code": TEXT,
        "subject": TEXT,
        "severity": TEXT,
        "first_time": BIGINT,
        "last_time": BIGINT,
        "step_seconds": BIGINT,
        "first_severity": TEXT,  # severity in the first scrape
        "worst_time": BIGINT,  # time of the first scrape with `severity`
        "observed": BOOLEAN,  # reported only by a source that a user can forge
    },
    ("cluster", "node", "code", "subject", "first_time"),
    "first_time",
)

# The data that was read, with the time, and the data that could not be read. Queries about times that no source covers
# have no answer.
INGESTS = Table(
    "ingests",
    {
        "cluster": TEXT,
        "source": TEXT,
        # name of the piece: a file, a day (sacct), a period (sacctmgr or a server), or an ingest of event streams
        "name": TEXT,
        "from_time": BIGINT,
        "to_time": BIGINT,
        "read_time": BIGINT,
        "rows_read": BIGINT,
        "rows_unread": BIGINT,
    },
    ("cluster", "source", "name"),
)

TABLES = {
    table.name: table
    for table in (
        *(JOBS, JOB_NODES, EVENTS, GPUS, NODE_STATES, RESERVATIONS, PREEMPTIONS, EXCLUSIONS, TICKETS, NODES, FAILURES),
        *(SCRAPED_CONDITIONS, INGESTS),
    )
}
