"""The tables of the store: what an ingest writes and a question reads.

Times are whole seconds since the epoch, UTC. None (NULL) is "not known" or "not yet", never 0 or "". Types are those
that DuckDB and Spark have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

BIGINT, DOUBLE, TEXT, BOOLEAN = "BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN"


@dataclass(frozen=True, slots=True)
class Table:
    """columns     name -> type, in their order
    replace_by  rows that agree in these columns are one thing: what is ingested later replaces what is there
    month_of    the column whose month (UTC) a row is kept by; "" = the table is one file
    prefer      of two versions of one thing the one stays that knows more: the first of these columns that is None in
                only one of them decides, whichever was read first; where none decides, the one that was read later
    rows_by     one thing may have many rows: those that agree in these columns too are one row
    """

    name: str
    columns: dict[str, str]
    replace_by: tuple[str, ...]
    month_of: str = ""
    prefer: tuple[str, ...] = ()
    rows_by: tuple[str, ...] = ()


# One row for each time that Slurm started to account a job: a requeue gives the same job_id a new db_index.
JOBS = Table(
    "jobs",
    {
        "cluster": TEXT,
        # Slurm's, its 64 bits read as a signed number: from 24.11 on it is an SLUID, whose upper bit may be set
        # (src/common/sluid.c). Of a history without it: 62 bits of a hash of what names the row.
        "db_index": BIGINT,
        "job_id": BIGINT,  # the raw one, also of a task of an array
        "array_job_id": BIGINT,
        "array_task_id": BIGINT,
        "restarts": BIGINT,
        "state": TEXT,  # COMPLETED, FAILED, NODE_FAIL, PREEMPTED, REQUEUED, TIMEOUT, OUT_OF_MEMORY, CANCELLED, ...
        "exit_code": BIGINT,
        "exit_signal": BIGINT,
        "submit_time": BIGINT,
        "eligible_time": BIGINT,
        "start_time": BIGINT,  # None: it never ran
        "end_time": BIGINT,  # None: not yet
        "nodes": BIGINT,
        "gpus": BIGINT,  # allocated, of all nodes together
        "cpus": BIGINT,
        "node_list": TEXT,  # as Slurm writes host lists
        "partition": TEXT,
        "account": TEXT,
        "qos": TEXT,
        "priority": BIGINT,
        "user_name": TEXT,  # as --users says: kept, None, or a hash
        "run_key": TEXT,  # equal for jobs of one name and work directory; None: one of them is not known
        "reservation": TEXT,
        "time_limit_seconds": BIGINT,
        "suspended_seconds": BIGINT,
        "exclusions_known": BOOLEAN,  # whether what the user excluded could be looked up at all
        "source": TEXT,  # sacct, sacct_json, jobs_file
    },
    ("cluster", "db_index"),
    "submit_time",
    ("end_time", "start_time"),
)

# Which nodes a job ran on: made from `jobs` when they are ingested.
JOB_NODES = Table(
    "job_nodes",
    {
        "cluster": TEXT,
        "db_index": BIGINT,
        "node": TEXT,
        "submit_time": BIGINT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "gpus": DOUBLE,  # the job's GPUs / its nodes
    },
    ("cluster", "db_index"),
    "submit_time",
    ("end_time", "start_time"),
    rows_by=("node",),
)

# Our own stream (docs/events.md), line by line.
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
        "kind": TEXT,  # edge: it happened at a moment; level: it is seen at each look
        "first_time": BIGINT,
        "last_time": BIGINT,
        "times": BIGINT,  # how often it was seen until now (`count`)
        "jobs": TEXT,  # ids, blanks between them
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
        "rest": TEXT,  # JSON of all other fields; of an unknown schema or event: the whole line
        # Of an event of a condition, and None of any other: it rests only on a source that a user can forge; it rests
        # only on what the log held before healthd's first start. A store that was filled before this has None.
        "observed": BOOLEAN,
        "history": BOOLEAN,
        # Of a slowness that was measured, else None: 0.26 = an iteration takes 26 % longer; its first slow iteration.
        "slowdown": DOUBLE,
        "onset_time": BIGINT,
    },
    ("cluster", "node", "stream_id", "seq"),
    "time",
)

# What Slurm kept of a node's state: sacctmgr show event.
NODE_STATES = Table(
    "node_states",
    {
        "cluster": TEXT,
        "node": TEXT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "state": TEXT,
        "reason": TEXT,
        "user_name": TEXT,  # as --users says: kept, None, or a hash
        "set_by": TEXT,  # healthd, slurm, person; None: not known. Of the name itself, whatever is kept of it
    },
    ("cluster", "node", "start_time"),
    "start_time",
    prefer=("end_time",),
)

RESERVATIONS = Table(
    "reservations",
    {
        "cluster": TEXT,
        "name": TEXT,
        "node": TEXT,
        "start_time": BIGINT,
        "end_time": BIGINT,
        "flags": TEXT,  # commas between them
        "maintenance": BOOLEAN,
    },
    ("cluster", "name", "start_time"),
    "start_time",
    rows_by=("node",),
)

# Who pre-empted whom, as slurmctld's log says it. What is only inferred is a question's answer, not kept.
PREEMPTIONS = Table(
    "preemptions",
    {
        "cluster": TEXT,
        "time": BIGINT,
        "job_id": BIGINT,  # whose resources were taken
        "preemptor_job_id": BIGINT,
        "mode": TEXT,  # requeued, cancelled, suspended, checkpointed, signalled (told that its grace time runs)
        # Of a task of an array that still waits the log has the array's id for a raw one: the task gets its own when
        # it starts (job_array_split in slurmctld's job_mgr.c). Then (array_job_id, array_task_id) finds it in `jobs`.
        "preemptor_array_task_id": BIGINT,
    },
    ("cluster", "time", "job_id"),
    "time",
)

# Nodes that a job's user did not want. What names a job's record is (job_id, submit_time), as in slurmdbd's unique
# index: squeue does not print a DBIndex. A requeue keeps the job_id and what was excluded: count distinct job_ids.
EXCLUSIONS = Table(
    "exclusions",
    {
        "cluster": TEXT,
        "db_index": BIGINT,  # None: from squeue
        "submit_time": BIGINT,
        "node": TEXT,
        "source": TEXT,  # submit_line, script, squeue
        "job_id": BIGINT,
    },
    ("cluster", "job_id", "submit_time", "source"),
    "submit_time",
    rows_by=("node",),
)

TICKETS = Table(
    "tickets",
    {"cluster": TEXT, "node": TEXT, "opened_time": BIGINT, "closed_time": BIGINT, "text": TEXT},
    ("cluster", "node", "opened_time"),
    "opened_time",
    prefer=("closed_time",),
)

NODES = Table(
    "nodes",
    {
        "cluster": TEXT,
        "node": TEXT,
        "gpu_model": TEXT,
        "gpus": BIGINT,
        "partitions": TEXT,  # commas between them
        "switch": TEXT,  # the leaf
        "rack": TEXT,
    },
    ("cluster", "node"),
)

# Failures of nodes as another tool kept them.
FAILURES = Table(
    "failures",
    {"cluster": TEXT, "node": TEXT, "time": BIGINT, "kind": TEXT},
    ("cluster", "node", "time", "kind"),
    "time",
)

# Conditions as Prometheus saw them: from the first to the last scrape that showed one. Shorter ones are missing.
# `severity` is the worst that a scrape showed.
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
        "first_severity": TEXT,  # that of the first scrape
        "worst_time": BIGINT,  # the first scrape that showed `severity`
        "observed": BOOLEAN,  # it rests only on a source that a user can forge
    },
    ("cluster", "node", "code", "subject", "first_time"),
    "first_time",
)

# What was read, when, and what could not be: a question about a time that no source covers has no answer.
INGESTS = Table(
    "ingests",
    {
        "cluster": TEXT,
        "source": TEXT,
        "name": TEXT,  # a file, a day of sacct, a stretch of sacctmgr or of a server, an ingest of event streams
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
        *(JOBS, JOB_NODES, EVENTS, NODE_STATES, RESERVATIONS, PREEMPTIONS, EXCLUSIONS, TICKETS, NODES, FAILURES),
        *(SCRAPED_CONDITIONS, INGESTS),
    )
}
