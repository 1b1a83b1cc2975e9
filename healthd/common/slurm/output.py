"""Parsers for the output of Slurm's commands. They are pure, and for any input they return a value or raise SlurmError.

Tables come from sinfo and squeue, with columns of a fixed width in bytes (commands.py). They are parsed as bytes. A
record is found by its length, and a value by its offset. No text that a person entered in Slurm (a Reason, a comment, a
partition's name) can therefore shift another value or end a record.

Displays skip and count rows that cannot be read. A limit is never computed from an incomplete table: a single
unreadable row raises SlurmError.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime

from healthd.common.errors import HealthdError
from healthd.common.model import NodeState, PartitionCount, RepairStep
from healthd.common.slurm.admin_comment import MAX_BYTES
from healthd.common.slurm.builtin_reasons import APPENDED, REMOVED_DRAIN, replaces_drain_reason
from healthd.common.slurm.commands import (
    CLAIM_COLUMNS,
    DRAINED_COLUMNS,
    FLEET_COLUMNS,
    JOB_COLUMNS,
    NAME_COLUMNS,
    NODE_COLUMNS,
    PARTITION_BYTES,
    REASON_COLUMNS,
    Argv,
    Columns,
    CommandResult,
)
from healthd.common.slurm.drain_reason import LEMON, PREFIX, parse_claim, parse_domain
from healthd.common.slurm.gres import count_gpus, count_single_type_gpus
from healthd.common.slurm.node_states import DRAINED_STATES, IN_SERVICE, MAINTENANCE, REBOOT, UNSETTLED
from healthd.common.text import is_decimal, regex
from healthd.common.values import Value

# These become a command's arguments. A name is "12", "12_3" or "20+1".
_JOB_ID = regex("[0-9]{1,10}")
_JOB_NAME = regex(r"[0-9][0-9_+,%\[\]-]*")


class Job(Value, frozen=True):
    """A job on this node.

    name     the argument for `scontrol requeue`: "12"; "12_3" for one of an array's tasks (the plain number would mean
             the whole array); the leader's number for a component of a heterogeneous job
    comment  the AdminComment, or None if it cannot be written back unchanged
    """

    id: str
    name: str
    state: str
    batch: bool
    start: float
    restarts: int
    requeue: bool
    comment: str | None = ""


class Claim(Value, frozen=True):
    """A node that is being repaired, according to its Reason.

    time        Slurm's time stamp of the Reason
    is_renewed  True if the node reboots, or if Slurm has appended a suffix, such as "reboot issued". Slurm then also
                renews the time stamp
    is_hidden   True if Slurm has replaced the Reason of a drained node, which may have had a claim
    """

    node: str
    time: float
    is_renewed: bool = False
    is_hidden: bool = False


class PartitionService(Value, frozen=True):
    """Size of a partition and how many of its nodes are in service."""

    name: str
    nodes: int
    in_service: int


class SlurmError(HealthdError):
    """Raised for a problem with Slurm. The message is one sentence."""


class NoSuchNode(SlurmError):
    """Raised if Slurm answered, but has no node with this name."""


def readable_records(data: bytes, columns: Columns) -> tuple[list[list[bytes]], int]:
    """Split a table into records, and the records into values without padding.

    Return the records, and the number of missing records. The records stop before the first record that does not end
    where its columns end, because the output was truncated or has a different format. The number of missing records is
    the length of the rest divided by a record's length, rounded up.
    """
    width = sum(size for _, size in columns)
    found: list[list[bytes]] = []
    for start in range(0, len(data), width + 1):
        if data[start + width : start + width + 1] != b"\n":
            return found, -(-(len(data) - start) // (width + 1))
        values, offset = [], start
        for _, size in columns:
            values.append(data[offset : offset + size].rstrip(b" "))
            offset += size
        found.append(values)
    return found, 0


def records(data: bytes, columns: Columns, command: str = "sinfo") -> list[list[bytes]]:
    """Return a table's records. Raises SlurmError if `data` is not a whole number of records."""
    found, unread = readable_records(data, columns)
    if unread:
        raise SlurmError(f'{command} printed an incomplete table: "{_short(data)}"')
    return found


def describe_unread(rows: int) -> str:
    """Return a sentence for a display that lacks this many rows, or "" if no rows are missing."""
    return f"{rows} {'row' if rows == 1 else 'rows'} from sinfo could not be read" if rows else ""


def _text(value: bytes) -> str:
    r"""Decode a value for display and comparison. Invalid UTF-8 becomes \xff, and a run of blanks becomes one blank."""
    return " ".join(value.decode("utf-8", "backslashreplace").split())


def _number(text: str) -> int | None:
    """Parse a decimal number of at most 20 digits, or return None for other text. int() itself raises at 5,000
    digits."""
    return int(text) if regex("[0-9]{1,20}").fullmatch(text) else None


def parse_node(data: bytes, name: str) -> NodeState:
    """Parse one node's NODE_COLUMNS, one row for each partition. Unreadable rows are skipped and counted.

    Raises NoSuchNode if no partition contains the node, SlurmError if none of its rows can be read.
    """
    table, unread = readable_records(data, NODE_COLUMNS)
    counts = [_number(_text(row[1])) for row in table]
    node_rows = [(row, flags) for row, count in zip(table, counts, strict=True) if count and (flags := _flags(row[2]))]
    unread += len(table) - len(node_rows) - counts.count(0)
    if not node_rows and unread:
        raise SlurmError(f'sinfo printed no readable row for the node: "{_short(data)}"')
    if not node_rows:
        raise NoSuchNode(f'Slurm has no node "{name}" in any partition')
    row, flags = node_rows[0]
    _, _, _, since, user, reason, _ = map(_text, row)
    if reason == "none" and since in ("Unknown", ""):
        reason = ""
    gres = _untruncated(row[-1], NODE_COLUMNS[-1][1])
    return NodeState(
        name,
        flags,
        reason,
        reason_user="" if user == "Unknown" else regex(r"\(\d+\)$").sub("", user),
        reason_time=_time(since),
        partitions=frozenset(_text(row[0]) for row, _ in node_rows),
        gpu_count=None if gres is None else count_gpus(gres),
        single_type_gpu_count=None if gres is None else count_single_type_gpus(gres),
        unread_rows=unread,
    )


def _flags(state: bytes) -> frozenset[str] | None:
    """Split a node's state at "+" and convert it to upper case. Return None if it is not a state."""
    # up to 20.x, "*" and similar marks may be inside the state: "down*+drain"
    flags = [word.strip("*~#%!$@^-").upper() for word in _text(state).split("+")]
    return frozenset(flags) if all(regex(r"[A-Z_]+").fullmatch(word) for word in flags) else None


def _untruncated(value: bytes, width: int) -> str | None:
    """Return a value's text, or None if the value fills its column and may have been truncated."""
    return _text(value) if len(value) < width else None


def parse_whole_reason(data: bytes) -> str | None:
    """Parse REASON_COLUMNS. Return the exact Reason, so that it can be written back, or None if it may have been
    truncated.

    Bytes that are not UTF-8 become lone surrogates ("surrogateescape"). Raises SlurmError.
    """
    reasons = {reason for nodes, reason in records(data, REASON_COLUMNS) if _number(_text(nodes))}
    if len(reasons) != 1:
        raise SlurmError(f'sinfo printed no reason for one node: "{_short(data)}"')
    (reason,) = reasons
    return reason.decode("utf-8", "surrogateescape") if len(reason) < REASON_COLUMNS[-1][1] else None


def require_partitions(node: NodeState) -> frozenset[str]:
    """Return all partitions of a node. Raises SlurmError if a row of the node could not be read."""
    if node.unread_rows:
        raise SlurmError(f"the partitions of {node.name} are unknown: {describe_unread(node.unread_rows)}")
    return node.partitions


def parse_fleet(data: bytes, partitions: Collection[str], until: float) -> list[PartitionCount]:
    """Parse FLEET_COLUMNS. Return the size of each of these partitions, and the number of its nodes that healthd has
    drained.

    Drains by daemons and by `fleet lemons --apply` are counted up to `until` (epoch seconds). A node's state shows
    whether it is drained, because from 24.11 on a Reason outlives its drain. If Slurm replaced healthd's Reason ("Kill
    task failed"), the drain looks like Slurm's own and is not counted.

    Raises SlurmError, and returns no count, if one record cannot be read or a partition is missing.
    """
    nodes = dict.fromkeys(partitions, 0)
    drained = dict.fromkeys(partitions, 0)
    if cut := [name for name in partitions if len(name.encode("utf-8", "replace")) >= PARTITION_BYTES]:
        raise SlurmError(f"the name of partition {cut[0][:40]}... is longer than {PARTITION_BYTES - 1} bytes")
    for record in records(data, FLEET_COLUMNS):
        name, state, since, _, number = map(_text, record)
        count = _number(number)
        if count is None:
            raise SlurmError(f'sinfo printed no number of nodes: "{_short(b" ".join(record))}"')
        if name in nodes:
            is_drained = not DRAINED_STATES.isdisjoint(regex("[A-Z_]+").findall(state.upper()))
            is_healthds = _is_healthds(record[3]) and _time(since) <= until
            nodes[name] += count
            drained[name] += count if is_drained and is_healthds else 0
    if not partitions or not all(nodes.values()):
        raise SlurmError(f"sinfo printed no nodes for the partitions {', '.join(sorted(partitions))}")
    return [PartitionCount(name, nodes[name], drained[name]) for name in sorted(partitions)]


def _is_healthds(reason: bytes) -> bool:
    """Return True if a healthd daemon or `fleet lemons --apply` set this Reason, which is truncated to len(PREFIX)
    bytes.
    """
    return reason == PREFIX.strip().encode() or reason.startswith(LEMON.strip().encode())


def parse_lemons(data: bytes) -> frozenset[str]:
    """Parse DRAINED_COLUMNS. Return the nodes that `fleet lemons --apply` drained.

    Raises SlurmError if a record cannot be read, or if a lemon's name fills its column. Two truncated names may be
    equal, and the limit would count them as one node.
    """
    names = [name for name, reason in records(data, DRAINED_COLUMNS) if reason == LEMON.strip().encode()]
    width = DRAINED_COLUMNS[0][1]
    if cut := [name for name in names if len(name) >= width or not name]:
        raise SlurmError(f'sinfo printed no node name of less than {width} bytes: "{_short(cut[0])}"')
    return frozenset(map(_text, names))


def parse_claims(data: bytes) -> list[Claim]:
    """Parse CLAIM_COLUMNS. Return the nodes whose drain claims a step of a repair, one Claim per node.

    A drain whose repair has failed is not included. A drained node whose Reason Slurm has replaced is included with
    `is_hidden`. Slurm keeps the Reason of an ended drain (24.11), so a node without
    a drain is included only if Slurm itself removed the drain at a reboot.

    Raises SlurmError if a record cannot be read, or if a claiming node's name fills its column, because two truncated
    names may be equal.
    """
    found: dict[str, Claim] = {}
    width = CLAIM_COLUMNS[0][1]
    for record in records(data, CLAIM_COLUMNS):
        name, state, since, reason = map(_text, record)
        is_hidden = replaces_drain_reason(reason)
        if parse_claim(reason) in (None, RepairStep.PERSON) and not is_hidden:
            continue
        if len(record[0]) >= width or not name:
            raise SlurmError(f'sinfo printed no node name of less than {width} bytes: "{_short(record[0])}"')
        flags = frozenset(regex("[A-Z_]+").findall(state.upper()))
        if flags & (DRAINED_STATES | REBOOT) or ("DOWN" in flags and reason.endswith(REMOVED_DRAIN)):
            is_renewed = reason.endswith(APPENDED) or not REBOOT.isdisjoint(flags)
            found[name] = Claim(name, _time(since), is_renewed, is_hidden)
    return list(found.values())


def parse_domain_drains(data: bytes, domain: str, until: float) -> PartitionCount:
    """Parse CLAIM_COLUMNS. Return the count for the NVLink domain with this short id: its nodes that healthd has
    drained up to `until` (epoch seconds), according to their Reasons.

    Drains without a domain in the Reason are not counted: drains by `fleet lemons --apply`, by a healthd that had not
    read the domain yet, and drains whose Reason Slurm or an operator has replaced. Raises SlurmError if a record cannot
    be read, or if a counted node's name fills its column, because two truncated names may be equal.
    """
    drained: set[str] = set()
    width = CLAIM_COLUMNS[0][1]
    for record in records(data, CLAIM_COLUMNS):
        name, state, since, reason = map(_text, record)
        is_drained = not DRAINED_STATES.isdisjoint(regex("[A-Z_]+").findall(state.upper()))
        if not is_drained or parse_domain(reason) != domain or _time(since) > until:
            continue
        if len(record[0]) >= width or not name:
            raise SlurmError(f'sinfo printed no node name of less than {width} bytes: "{_short(record[0])}"')
        drained.add(name)
    return PartitionCount(domain, 0, len(drained), is_domain=True)


def parse_node_names(data: bytes) -> frozenset[str]:
    """Parse NAME_COLUMNS. Raises SlurmError if a record cannot be read, or if a name fills its column."""
    names = [name for (name,) in records(data, NAME_COLUMNS)]
    width = NAME_COLUMNS[0][1]
    if cut := [name for name in names if len(name) >= width or not name]:
        raise SlurmError(f'sinfo printed no node name of less than {width} bytes: "{_short(cut[0])}"')
    return frozenset(map(_text, names))


def parse_in_service(data: bytes, partitions: Collection[str]) -> list[PartitionService]:
    """Parse FLEET_COLUMNS. Return the size of each of these partitions, and the number of its nodes in service.

    A node is in service if it responds and may start jobs: it is not drained, down, rebooting, powered off or reserved
    for maintenance. Raises SlurmError if one record cannot be read or a partition is missing.
    """
    nodes, in_service = dict.fromkeys(partitions, 0), dict.fromkeys(partitions, 0)
    width = FLEET_COLUMNS[1][1]
    for record in records(data, FLEET_COLUMNS):
        name, _, _, _, number = map(_text, record)
        count = _number(number)
        if count is None:
            raise SlurmError(f'sinfo printed no number of nodes: "{_short(b" ".join(record))}"')
        if name in nodes:
            flags = _flags(record[1]) or frozenset()
            is_whole = len(record[1]) < width
            is_usable = bool(flags & IN_SERVICE) and flags.isdisjoint(DRAINED_STATES | UNSETTLED | MAINTENANCE)
            nodes[name] += count
            in_service[name] += count if is_usable and is_whole else 0
    if not partitions or not all(nodes.values()):
        raise SlurmError(f"sinfo printed no nodes for the partitions {', '.join(sorted(partitions))}")
    return [PartitionService(name, nodes[name], in_service[name]) for name in sorted(partitions)]


def parse_cluster_size(text: str) -> int:
    """Return the number of nodes in the largest partition from `scontrol -o show partition`, or 0 if there is none."""
    return max(map(int, regex(r"\bTotalNodes=([0-9]{1,20})\b").findall(text)), default=0)


def parse_listpids(text: str) -> list[str]:
    """Return the job ids from `scontrol listpids`, in order and without duplicates. Raises SlurmError.

    A last line without a newline is dropped, because scontrol may have been killed or printed too much, and the number
    may be truncated.
    """
    lines = _whole_lines(text)
    if text.strip() and (not lines or lines[0].split()[:2] != ["PID", "JOBID"]):
        raise SlurmError(f'scontrol listpids printed no table: "{_short(text)}"')
    rows = [line.split() for line in lines[1:]]
    return list(dict.fromkeys(row[1] for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])))


def _whole_lines(text: str) -> list[str]:
    return text.split("\n")[:-1]


def parse_job_numbers(text: str) -> list[str]:
    """Return the job ids from `squeue -o %A`, one on each line. Raises SlurmError."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if any(not _JOB_ID.fullmatch(line) for line in lines):
        raise SlurmError(f'squeue printed no numbers of jobs: "{_short(text)}"')
    return list(dict.fromkeys(lines))


def parse_processes(text: str) -> dict[int, str]:
    """Return a dict that maps pids to job ids, from `scontrol listpids`. If a step's processes are unknown, its pid is
    -1."""
    rows = [line.split() for line in _whole_lines(text)[1:]]
    pids = [(_number(row[0]), row[1]) for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])]
    return {pid: job for pid, job in pids if pid is not None}


def parse_job(data: bytes, job_id: str) -> Job | None:
    """Parse JOB_COLUMNS and return the job with this id (for an array, squeue also prints the other tasks).

    Returns None if squeue printed nothing. Raises SlurmError.
    """
    for record in records(data, JOB_COLUMNS, "squeue"):
        number, name, state, batch, start, restarts, requeue, _ = map(_text, record)
        if number != job_id:
            continue
        count = _number(restarts)
        if count is None or not _JOB_NAME.fullmatch(name) or not state:
            raise SlurmError(f'squeue printed no job {job_id}: "{_short(b" ".join(record))}"')
        # A count: slurmctld adds 1 when it requeues a job that was missing on its node or could not be launched
        # (job_mgr.c: batch_flag++ in _job_complete() and _job_requeue_op()). Only 0 means that it is not a batch job.
        is_batch = bool(_number(batch))
        comment = _comment(record[-1])
        return Job(job_id, name.partition("+")[0], state, is_batch, _time(start), count, requeue == "1", comment)
    if data:
        raise SlurmError(f'squeue printed no job {job_id}: "{_short(data)}"')
    return None


def _comment(value: bytes) -> str | None:
    """Decode an AdminComment exactly, because it will be written back. Return None if it may be truncated or is not
    UTF-8."""
    try:
        comment = value.decode()
    except UnicodeDecodeError:
        return None
    if len(value) > MAX_BYTES or "\0" in comment:
        return None
    return "" if comment == "(null)" else comment


def parse_slurmctld_start(text: str) -> float:
    """Return slurmctld's start time (BOOT_TIME in `scontrol show config`). Raises SlurmError."""
    found = regex(r"^BOOT_TIME\s*=\s*(\S+)", re.MULTILINE).search(text)
    started = _time(found[1]) if found else 0.0
    if not started:
        raise SlurmError("scontrol show config printed no BOOT_TIME")
    return started


def parse_controller(text: str) -> str:
    """Return an identity for the slurmctld that answered `scontrol show config`: "BOOT_TIME HOST".

    BOOT_TIME is the start of slurmctld's process (22.05 to 26.05, src/slurmctld/controller.c:
    slurmctld_config.boot_time). A backup keeps its BOOT_TIME when it takes over. HOST is the first controller that
    responds. It is included because two controllers may have started in the same second. A standby backup responds too.
    Raises SlurmError.
    """
    up = regex(r"^Slurmctld\([^()]*\) at (\S+) is UP", re.MULTILINE).search(text)
    return f"{parse_slurmctld_start(text):.0f} {up[1] if up else ''}".rstrip()


def parse_setting(text: str, name: str) -> str:
    """Return a setting from `scontrol show config`, or "" if it is missing.

    Newer versions print some settings as an array ("Epilog[0] = /a"), which is treated like the plain setting.
    """
    for line in text.split("\n"):
        label, _, value = line.partition("=")
        if label.strip().removesuffix("[0]") == name:
            return value.strip()
    return ""


def parse_boot_time(text: str) -> float:
    """Return when a node booted according to its slurmd's last registration, from `scontrol -o show node`, or 0 if it
    has not registered.

    slurmctld computes it from the uptime, so its own clock counts (node_mgr.c: `now - reg_msg->up_time`). Raises
    SlurmError.
    """
    found = regex(r" BootTime=(\S+) SlurmdStartTime=").search(text)
    if found is None:
        raise SlurmError("scontrol show node printed no BootTime")
    return _time(found[1])


def parse_reservation_names(text: str) -> frozenset[str]:
    """Return the names in `scontrol -o show reservation`, which prints one line for each. Raises SlurmError."""
    lines = [line for line in text.split("\n") if line.strip()]
    if lines == ["No reservations in the system"]:
        return frozenset()
    names = [regex(r"ReservationName=(\S+) ").match(line) for line in lines]
    found = frozenset(name[1] for name in names if name)
    if len(lines) != len([name for name in names if name]) or not lines:
        raise SlurmError(f"scontrol show reservation printed an unknown line: {text.strip()[:100]!r}")
    return found


def _time(text: str) -> float:
    """Return epoch seconds, from a number or from the local time that Slurm prints by default, or 0 for other text."""
    if is_decimal(text):
        return float(text) if len(text) <= 11 else 0.0  # up to the year 5138
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def describe_failure(argv: Argv, result: CommandResult) -> str:
    """Describe a failed command, as in "scontrol update: slurm_update error: Invalid user id (...)"."""
    command = " ".join(word for word in argv[:2] if not word.startswith("-"))
    if result.status is None:
        note = "; slurmctld may still execute it" if argv[1] in ("update", "requeue", "requeuehold", "reboot") else ""
        return f"{command} did not end in time{note}"
    lines = [line.strip() for line in result.stderr.split("\n") if line.strip()]
    if "Invalid user id" in result.stderr:
        return f"{command}: Invalid user id: only root, SlurmUser or a Slurm administrator may change a node"
    return f"{command}: {_short(lines[-1]) if lines else f'ended with status {result.status}'}"


def is_not_sent(result: CommandResult) -> bool:
    """Return True if slurmctld certainly did not receive the request. After "Socket timed out", it may have received
    the request.
    """
    not_sent = regex(r"\(connect failure\)|Munge encode failed").search(result.stderr)
    return result.status == 127 or not_sent is not None


def is_refused(result: CommandResult) -> bool:
    """Return True if a change was certainly not made, because slurmctld refused it or never received it."""
    if is_invalid_state(result):
        return False
    return result.status != 0 and (is_not_sent(result) or not is_slurmctld_unreachable(result))


def is_invalid_state(result: CommandResult) -> bool:
    """Return True for the answer "Invalid node state specified", after which the change may or may not have been made.

    For a node in state UNKNOWN+DRAIN, UNDRAIN gives this answer but still removes the drain (22.05.8).
    """
    return result.status != 0 and "Invalid node state specified" in result.stderr


def has_no_steps(result: CommandResult) -> bool:
    """Return True if no job runs on the node. `scontrol listpids` reports this as an error."""
    return result.status != 0 and regex("No job steps exist|There are no steps").search(result.stderr) is not None


def is_unknown_job(result: CommandResult) -> bool:
    return result.status != 0 and "Invalid job id" in result.stderr


def is_slurmctld_unreachable(result: CommandResult) -> bool:
    """Return True if slurmctld did not answer. The next command would then time out, too."""
    unanswered = r"Unable to contact|timed out|Unexpected message received|Zero Bytes"
    return result.status is None or is_not_sent(result) or regex(unanswered).search(result.stderr) is not None


def _short(printed: str | bytes) -> str:
    """Return the beginning of the output as one line."""
    if isinstance(printed, bytes):
        printed = printed[:4096].decode("utf-8", "backslashreplace")
    return " ".join(printed.split())[:160]
