"""Slurm commands: queries with their columns, changes, and results."""

from __future__ import annotations

from typing import TypeAlias

from healthd.common.slurm.admin_comment import MAX_BYTES
from healthd.common.slurm.drain_reason import LEMON, PREFIX
from healthd.common.text import printable
from healthd.common.values import Value

Argv: TypeAlias = "tuple[str, ...]"
Columns: TypeAlias = "tuple[tuple[str, int], ...]"

# All commands print times as epoch seconds. Local times can be read too, but an hour may occur twice in a time zone.
ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}

# Columns are (name, width in bytes). sinfo and squeue truncate a value to that many bytes and pad it with blanks to
# that width, even in the last column (SchedMD/slurm src/sinfo/print.c, src/squeue/print.c: _print_str()). A record
# consists of the columns and a newline. A value may contain newlines too.
# Slurm does not limit the length of a partition's name. A name that fills the column may be truncated.
PARTITION_BYTES = 128
# For one node, sinfo prints a record for each partition. In partitions without that node, the node count is 0.
NODE_COLUMNS = (
    *(("PartitionName", PARTITION_BYTES), ("Nodes", 9)),
    *(("StateComplete", 200), ("Timestamp", 40), ("UserLong", 80), ("Reason", 400), ("Gres", 400)),
)
JOB_COLUMNS = (
    *(("JobID", 20), ("JobArrayID", 60), ("State", 30), ("BatchFlag", 20)),
    *(("StartTime", 40), ("RestartCnt", 20), ("Requeue", 20), ("admin_comment", MAX_BYTES + 1)),
)
# sinfo prints one record for nodes that are equal in all of these columns; 10,000 nodes fit into the output limit.
FLEET_COLUMNS = (
    *(("PartitionName", PARTITION_BYTES), ("StateComplete", 60), ("Timestamp", 12), ("Reason", len(PREFIX))),
    ("Nodes", 9),
)
# The whole Reason, up to 16 KiB.
REASON_COLUMNS = (("Nodes", 9), ("Reason", 16384))
DRAINED_COLUMNS = (("NodeList", 65), ("Reason", len(LEMON)))
# healthd's Reasons have at most 255 characters, and Slurm appends a few suffixes of at most 20.
CLAIM_COLUMNS = (("NodeList", 65), ("StateComplete", 100), ("Timestamp", 12), ("Reason", 400))
NAME_COLUMNS = (("NodeList", 65),)


class Command(Value, frozen=True):
    """A command. It is run with ENVIRONMENT added and standard input closed, and is killed at its deadline.

    changes   it changes Slurm's state
    in_pause  it may do so during a pause and in mode "observe"
    """

    argv: Argv
    deadline_seconds: float
    changes: bool = False
    in_pause: bool = False


class CommandResult(Value, frozen=True):
    """Outcome of a command.

    status  None = the deadline passed; 127 = it could not be started (stderr has the error)
    stdout  bytes: Slurm pads and truncates columns by bytes, and a Reason may contain any byte except NUL
    """

    status: int | None
    stdout: bytes = b""
    stderr: str = ""
    started: float = 0.0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Standard output as text, for output without fixed-width columns."""
        return self.stdout.decode("utf-8", "backslashreplace")


# --- queries


def node(name: str) -> Argv:
    """Return the query for one node's NODE_COLUMNS."""
    return ("sinfo", "-h", "-a", "-n", name, "-O", column_format(NODE_COLUMNS))


def node_record(name: str) -> Argv:
    """Return the query for one node's record, which has the time of its boot. sinfo has no column for it."""
    return ("scontrol", "-o", "show", "node", name)


def whole_reason(name: str) -> Argv:
    """Return the query for one node's REASON_COLUMNS."""
    return ("sinfo", "-h", "-a", "-n", name, "-O", column_format(REASON_COLUMNS))


def fleet() -> Argv:
    """Return the query for all nodes' FLEET_COLUMNS."""
    return ("sinfo", "-h", "-a", "-O", column_format(FLEET_COLUMNS))


def drained_nodes() -> Argv:
    """Return the query for the DRAINED_COLUMNS of drained and down nodes, one record per node and partition."""
    return ("sinfo", "-h", "-a", "-N", "-t", "drain,down", "-O", column_format(DRAINED_COLUMNS))


def claims() -> Argv:
    """Return the query for the CLAIM_COLUMNS of drained and down nodes, one record per node and partition. It includes
    nodes that reboot. The Reasons also contain the nodes' NVLink domains."""
    return ("sinfo", "-h", "-a", "-N", "-t", "drain,down", "-O", column_format(CLAIM_COLUMNS))


def node_names() -> Argv:
    """Return the query for the NAME_COLUMNS of all nodes, one record per node and partition."""
    return ("sinfo", "-h", "-a", "-N", "-O", column_format(NAME_COLUMNS))


def all_partitions() -> Argv:
    """Return the query for each partition's size, which reads no nodes."""
    return ("scontrol", "-a", "-o", "show", "partition")


def reservations() -> Argv:
    """Return the query for all reservations. For a single one, the exit status is 1 both if it is absent and if
    slurmctld does not answer."""
    return ("scontrol", "-o", "show", "reservation")


def config() -> Argv:
    """Return the query for slurmctld's settings, which include its start time."""
    return ("scontrol", "show", "config")


def listpids(name: str) -> Argv:
    """Return the query for the processes of this node's jobs. The node's slurmstepds answer the query."""
    return ("scontrol", "listpids", "*", name)


def jobs_on_node(name: str) -> Argv:
    """Return the query for the numbers of the jobs that have this node: running, suspended, starting or completing."""
    return ("squeue", "-h", "-a", "-w", name, "-t", "RUNNING,SUSPENDED,CONFIGURING,COMPLETING", "-o", "%A")


def job(job_id: str) -> Argv:
    """Return the query for one job's JOB_COLUMNS, even if the job has ended."""
    return ("squeue", "-h", "-a", "-t", "all", "-j", job_id, "-O", column_format(JOB_COLUMNS))


def job_gres(job_id: str) -> Argv:
    """Return the query for a job's GPUs on each of its nodes. squeue has no column for these.

    scontrol also reads the table of all nodes, to show the job's CPUs (job_info.c: _threads_per_core()).
    """
    return ("scontrol", "-d", "-o", "show", "job", job_id)


# Where Slurm finds its files. The folder depends on the build of Slurm, so gres.conf is read from all usual folders. If
# two files differ, the order of the GPUs is unknown.
_GRES_CONF = """\
if [ -n "$SLURM_CONF" ]; then exec head -c "$1" "$(dirname "$SLURM_CONF")/gres.conf"; fi
for folder in /etc/slurm /run/slurm/conf /usr/local/etc /usr/local/slurm/etc /opt/slurm/etc; do
    readlink -e "$folder/gres.conf"
done | sort -u | xargs -r -d '\\n' sed -s '' | head -c "$1"
"""


def gres_conf(max_bytes: int) -> Argv:
    """Return a command that prints gres.conf.

    A command is used because it has a deadline: the folder may be on a network file system.
    """
    return ("sh", "-c", _GRES_CONF, "sh", str(max_bytes))


def printable_argument(text: str) -> str:
    """Return a command's argument for a log or the stream, as one line without lone surrogates."""
    return printable(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def describe_change(argv: Argv) -> tuple[str, str]:
    """Return a command's change: ("drain", its Reason), ("resume", "") or ("requeue", the job), or else ("", "")."""
    if argv[1] in ("requeue", "requeuehold"):
        return "requeue", argv[-1]
    if "State=DRAIN" in argv:
        return "drain", printable_argument(argv[-1].removeprefix("Reason="))
    return ("resume", "") if "State=UNDRAIN" in argv or "State=RESUME" in argv else ("", "")


def column_format(columns: Columns) -> str:
    """Return the argument to `-O` for these columns."""
    return ",".join(f"{name}:{width}" for name, width in columns)


# --- changes


def drain(name: str, reason: str) -> Argv:
    return ("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")


def undrain(name: str) -> Argv:
    """Return the command that only removes the drain. State=RESUME would also end DOWN and cancel a reboot."""
    return ("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")


def resume(name: str) -> Argv:
    """Return the command that removes the drain and also ends DOWN. It cancels a reboot that is pending."""
    return ("scontrol", "update", f"NodeName={name}", "State=RESUME")


def reboot(name: str, reason: str) -> Argv:
    """Return the command that reboots an idle, drained node and keeps its drain.

    ASAP and nextstate would remove the drain (docs/adr/0043). Without `reason`, Slurm 22.05 may replace the Reason.
    """
    return ("scontrol", "reboot", f"reason={reason}", name)


def comment(job_name: str, text: str) -> Argv:
    return ("scontrol", "update", f"JobId={job_name}", f"AdminComment={text}")


def requeue(job_name: str, hold: bool) -> Argv:
    """Return the command that requeues a job only if it has not ended ("incomplete").

    Otherwise an ended job would run again.
    """
    return ("scontrol", "requeuehold" if hold else "requeue", "incomplete", job_name)
