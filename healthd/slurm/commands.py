"""The commands that go to Slurm: what is run, what is asked of each table, and how one ended."""

from __future__ import annotations

from dataclasses import dataclass

from healthd.slurm.admin_comment import MAX_BYTES
from healthd.slurm.reason import PREFIX

# Times as epoch seconds, without a time zone's repeated hour. For every command; without it they are still read.
ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}

NODE_COLUMNS = (("StateComplete", 200), ("Timestamp", 40), ("UserLong", 80), ("Reason", 400))
JOB_COLUMNS = (
    *(("JobID", 20), ("JobArrayID", 60), ("State", 30), ("BatchFlag", 20)),
    *(("StartTime", 40), ("RestartCnt", 20), ("Requeue", 20), ("admin_comment", MAX_BYTES + 1)),
)
# sinfo makes one record of nodes that are alike in all of these; 10,000 nodes fit into what is read of a command.
FLEET_COLUMNS = (
    *(("PartitionName", 50), ("StateComplete", 60), ("Timestamp", 12), ("Reason", len(PREFIX)), ("Nodes", 9)),
)
# Asked for one node sinfo lists every partition, those without it with no nodes.
PARTITION_COLUMNS = (("PartitionName", 50), ("Nodes", 9))


@dataclass(frozen=True, slots=True)
class Command:
    """To be run with ENVIRONMENT added, standard input closed. Past its deadline it is killed."""

    argv: tuple[str, ...]
    deadline_seconds: float
    changes: bool = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """status: None = the deadline passed; 127 = it could not be started (why is in stderr)."""

    status: int | None
    stdout: str = ""
    stderr: str = ""
    started: float = 0.0
    seconds: float = 0.0


def format_of(columns: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"{name}:{width}" for name, width in columns)
