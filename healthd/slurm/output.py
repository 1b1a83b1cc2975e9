"""Reads what Slurm's commands print: pure. Any text gives an answer or one sentence (SlurmTrouble), no other error."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime

from healthd.errors import HealthdError
from healthd.model import NodeState
from healthd.slurm.admin_comment import MAX_BYTES
from healthd.slurm.commands import FLEET_COLUMNS, JOB_COLUMNS, NODE_COLUMNS, OUT_COLUMNS, Argv, CommandResult
from healthd.slurm.fleet_limit import PartitionCount
from healthd.slurm.gres import gpus_of_node, gpus_of_one_type
from healthd.slurm.policy import TAKEN
from healthd.slurm.reason import LEMON, PREFIX
from healthd.text import is_decimal, regex
from healthd.values import dataclass

# These become words of a command. A name is "12", "12_3" or "20+1".
_JOB_ID = regex("[0-9]{1,10}")
_JOB_NAME = regex("[0-9][!-~]*")
_NODE_WIDTH = sum(width for _, width in NODE_COLUMNS)


@dataclass(frozen=True, slots=True)
class Job:
    """A job on this node. `name` is what scontrol requeues: "12", "12_3" for one task of an array (the plain number
    would be the whole array), the leader's number for a part of a heterogeneous job.
    `comment`: None = it cannot be read whole.
    """

    id: str
    name: str
    state: str
    batch: bool
    start: float
    restarts: int
    requeue: bool
    comment: str | None = ""


class SlurmTrouble(HealthdError):
    """One sentence about Slurm."""


class NoSuchNode(SlurmTrouble):
    """Slurm answered, and has no node of this name."""


def _split(text: str, columns: tuple[tuple[str, int], ...]) -> list[str]:
    """The values of the first record. Columns have fixed widths, so that no value can be taken for a separator."""
    values, at = [], 0
    for _, width in columns:
        values.append(" ".join(text[at : at + width].split()))
        at += width
    return values


def _number(text: str) -> int | None:
    """None: Slurm prints no such number; its numbers have 64 bits (int() raises at 5,000 digits)."""
    return int(text) if regex("[0-9]{1,20}").fullmatch(text) else None


def parse_node(text: str, name: str) -> NodeState:
    """sinfo's NODE_COLUMNS. Raises SlurmTrouble."""
    starts = [0, *(found.end() for found in regex("\n").finditer(text))]
    # Not line by line: a Reason may hold a line end. What comes after it is no record, and has no number of nodes.
    records = [_split(text[start : start + _NODE_WIDTH], NODE_COLUMNS) for start in starts]
    here = [record for record in records if _number(record[1])]
    if not here and (not text.strip() or any(record[1] == "0" for record in records)):
        raise NoSuchNode(f'Slurm has no node "{name}" in any partition')
    _, _, state, since, user, why, _ = here[0] if here else [""] * len(NODE_COLUMNS)
    # up to 20.x "*" and the like stand inside the state: "down*+drain"
    words = [word.strip("*~#%!$@^-").upper() for word in state.split("+")]
    if not all(regex(r"[A-Z_]+").fullmatch(word) for word in words):
        raise SlurmTrouble(f'sinfo printed no node state: "{_short(text)}"')
    if why == "none" and since in ("Unknown", ""):
        why = ""
    reason_user = "" if user == "Unknown" else regex(r"\(\d+\)$").sub("", user)
    partitions = frozenset(record[0] for record in here)
    gres = next(
        (_last_column(text[start:]) for start, record in zip(starts, records, strict=True) if _number(record[1])), ""
    )
    number, of_one_type = gpus_of_node(gres), gpus_of_one_type(gres)
    since_then = _time(since)
    return NodeState(
        name, frozenset(words), why, reason_user, since_then, partitions, number, gpus_of_one_type=of_one_type
    )


def _last_column(text: str) -> str:
    """The last of NODE_COLUMNS, behind a reason that is cut and padded by bytes; "" if it is not whole."""
    start, width = _NODE_WIDTH - NODE_COLUMNS[-1][1], NODE_COLUMNS[-1][1]
    column = text[:_NODE_WIDTH].encode(errors="replace")[start : start + width].decode(errors="replace")
    return column.strip() if column[-1:] in (" ", "\n") else ""


def parse_fleet(text: str, partitions: Collection[str], until: float) -> list[PartitionCount]:
    """sinfo's FLEET_COLUMNS for these partitions: how many nodes each has, and how many of them healthd (a daemon, or
    `fleet lemons --apply`) has drained up to `until`. The state decides: from 24.11 on a reason outlives its drain. If
    Slurm has replaced the words of our drain ("Kill task failed"), it looks from here like Slurm's own and is not
    counted. Raises SlurmTrouble."""
    nodes = dict.fromkeys(partitions, 0)
    drained = dict.fromkeys(partitions, 0)
    if not text.endswith("\n"):
        raise SlurmTrouble("sinfo's table of all nodes is not whole")
    for line in text.splitlines():
        name, state, since, why, number = _split(line, FLEET_COLUMNS)
        count = _number(number)
        if count is None:
            raise SlurmTrouble(f'sinfo printed no number of nodes: "{_short(line)}"')
        if name in nodes:
            is_drained = not TAKEN.isdisjoint(regex("[A-Z_]+").findall(state.upper()))
            is_ours = is_drained and (why == PREFIX.strip() or why.startswith(LEMON.strip())) and _time(since) <= until
            nodes[name] += count
            drained[name] += count if is_ours else 0
    if not partitions or not all(nodes.values()):
        raise SlurmTrouble(f"sinfo printed no nodes of the partitions {', '.join(sorted(partitions))}")
    return [PartitionCount(name, nodes[name], drained[name]) for name in sorted(partitions)]


def parse_lemons(text: str) -> frozenset[str]:
    """The nodes in sinfo's OUT_COLUMNS that `fleet lemons --apply` (or its line, typed) took out. Raises
    SlurmTrouble."""
    if text and not text.endswith("\n"):
        raise SlurmTrouble("sinfo's table of the nodes that are out is not whole")
    rows = (_split(line, OUT_COLUMNS) for line in text.splitlines())
    return frozenset(name for name, why in rows if why == LEMON.strip())


def parse_cluster_size(text: str) -> int:
    """The nodes of the largest partition in `scontrol -o show partition`; 0 = it does not say."""
    return max(map(int, regex(r"\bTotalNodes=([0-9]{1,20})\b").findall(text)), default=0)


def parse_listpids(text: str) -> list[str]:
    """The job ids of `scontrol listpids`, each once, in order. Raises SlurmTrouble.

    Whole lines only: in a line that was cut (scontrol was killed, or printed too much) the number may be another's."""
    lines = _whole_lines(text)
    if text.strip() and (not lines or lines[0].split()[:2] != ["PID", "JOBID"]):
        raise SlurmTrouble(f'scontrol listpids printed no table: "{_short(text)}"')
    rows = [line.split() for line in lines[1:]]
    return list(dict.fromkeys(row[1] for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])))


def _whole_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].splitlines()


def parse_processes(text: str) -> dict[int, str]:
    """pid -> job id, from `scontrol listpids`. A step whose processes are not known has the pid -1."""
    rows = [line.split() for line in _whole_lines(text)[1:]]
    pids = [(_number(row[0]), row[1]) for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])]
    return {pid: job for pid, job in pids if pid is not None}


def parse_job(text: str, job_id: str) -> Job | None:
    """The job with this id in squeue's JOB_COLUMNS (for an array's number squeue prints the other tasks too)."""
    for line in text.splitlines():
        values = _split(line, JOB_COLUMNS)
        if values[0] != job_id:
            continue
        _, name, state, batch, start, restarts, requeue, _ = values
        count = _number(restarts)
        if count is None or not _JOB_NAME.fullmatch(name) or not state:
            raise SlurmTrouble(f'squeue printed no job {job_id}: "{_short(line)}"')
        # A count: slurmctld adds one where it requeues a job that was missing on its node or could not be launched
        # (job_mgr.c: batch_flag++ in _job_complete() and _job_requeue_op()). Only 0 means no batch job there.
        is_batch = bool(_number(batch))
        return Job(job_id, name.partition("+")[0], state, is_batch, _time(start), count, requeue == "1", _comment(line))
    if text.strip():
        raise SlurmTrouble(f'squeue printed no job {job_id}: "{_short(text)}"')
    return None


def _comment(line: str) -> str | None:
    """The last of JOB_COLUMNS, exactly as others wrote it, for it is written again. squeue pads and cuts columns by
    bytes: a line of another length ends within a character, or holds only the text before a line end."""
    try:
        is_whole = len(line.encode()) == sum(width for _, width in JOB_COLUMNS)
    except UnicodeEncodeError:
        is_whole = False
    comment = line[sum(width for _, width in JOB_COLUMNS[:-1]) :].rstrip(" ")
    if not is_whole or "\0" in comment or len(comment.encode()) > MAX_BYTES:
        return None
    return "" if comment == "(null)" else comment


def parse_slurmctld_start(text: str) -> float:
    """When slurmctld started (BOOT_TIME of `scontrol show config`). Raises SlurmTrouble."""
    found = regex(r"^BOOT_TIME\s*=\s*(\S+)", re.MULTILINE).search(text)
    started = _time(found[1]) if found else 0.0
    if not started:
        raise SlurmTrouble("scontrol show config printed no BOOT_TIME")
    return started


def _time(text: str) -> float:
    """Epoch seconds, from a number or from the local time that Slurm prints by default; 0 = none."""
    if is_decimal(text):
        return float(text) if len(text) <= 11 else 0.0  # up to the year 5138
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def what_failed(argv: Argv, result: CommandResult) -> str:
    """One sentence: "scontrol update: slurm_update error: Invalid user id (...)"."""
    command = " ".join(word for word in argv[:2] if not word.startswith("-"))
    if result.status is None:
        late = "; slurmctld may still do it" if argv[1] in ("update", "requeue", "requeuehold") else ""
        return f"{command} did not end in time{late}"
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if "Invalid user id" in result.stderr:
        return f"{command}: Invalid user id: only root, SlurmUser or a Slurm administrator may change a node"
    return f"{command}: {_short(lines[-1]) if lines else f'ended with status {result.status}'}"


def never_arrived(result: CommandResult) -> bool:
    """Whether slurmctld surely did not get the request ("Socket timed out": it may have)."""
    not_sent = regex(r"\(connect failure\)|Munge encode failed").search(result.stderr)
    return result.status == 127 or not_sent is not None


def is_refused(result: CommandResult) -> bool:
    """Whether a change was surely not made and never will be: slurmctld said no, or never got it."""
    return result.status != 0 and (never_arrived(result) or not is_slurm_away(result))


def has_no_steps(result: CommandResult) -> bool:
    """Whether no job runs on the node, which scontrol listpids calls an error."""
    return result.status != 0 and regex("No job steps exist|There are no steps").search(result.stderr) is not None


def is_unknown_job(result: CommandResult) -> bool:
    return result.status != 0 and "Invalid job id" in result.stderr


def is_slurm_away(result: CommandResult) -> bool:
    """Whether nobody answered: the next command would wait as long for nothing."""
    unanswered = r"Unable to contact|timed out|Unexpected message received|Zero Bytes"
    return result.status is None or never_arrived(result) or regex(unanswered).search(result.stderr) is not None


def _short(text: str) -> str:
    return " ".join(text.split())[:160]
