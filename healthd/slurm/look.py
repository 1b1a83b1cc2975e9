"""Slurm: reads this node, drains, requeues, resumes. Generators that yield what is to be run, so that the daemon
drives them in its one wait and tests feed them values; never a shell.

`reconcile` is one look: read what is, decide (policy.py), act, read back. It may be killed at any point and started
again: what must be known afterwards is written down (Remember) before the command that needs it.

Cost for slurmctld: a look is 2 small RPCs (this node's record and the partitions), each job on the node 3 more, each
change 1 (a drain, a resume, a comment on a job, a requeue). The jobs on the node come from its own slurmstepds, which
answer without slurmctld and without slurmd. Before and after a new drain the fleet is counted (fleet_limit.py): the one
whole-table read that there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from healthd.model import (
    Decision,
    Drain,
    FleetHold,
    Leave,
    NodeState,
    Requeued,
    Resume,
    SlurmMemory,
    Verdict,
)
from healthd.slurm import fleet_limit
from healthd.slurm.admin_comment import MAX_BYTES, admin_comment
from healthd.slurm.fleet_limit import PartitionCount
from healthd.slurm.policy import (
    NOT_TO_RESUME,
    TAKEN,
    UNSETTLED,
    Owner,
    Policy,
    decide,
    describe,
    forget,
    is_back,
    is_gone,
    is_lost_by_slurmctld,
    is_lost_for_sure,
    look_at,
    never,
    owner,
    remember,
    settled_by_now,
    taken_back,
)
from healthd.slurm.reason import PREFIX as PREFIX
from healthd.slurm.reason import parse_reason as parse_reason  # part of what this module offers
from healthd.slurm.reason import reason as reason

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
NOT_READ = Leave("the node's state in Slurm is not known")
REQUEUED_KEPT_SECONDS = 7 * 86400.0
# They become words of a command. A name is "12", "12_3" or "20+1".
_JOB_ID = re.compile("[0-9]{1,10}")
_JOB_NAME = re.compile("[0-9][!-~]*")
HELD = "it was restarted as often as slurm.max_restarts allows; scontrol release lets it run again"


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


@dataclass(frozen=True, slots=True)
class Remember:
    """To be in the ledger before the generator goes on."""

    memory: SlurmMemory


@dataclass(frozen=True, slots=True)
class Adopted:
    """A drain in our words that the ledger does not know: a condition that this healthd never resumes."""

    code: str
    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """How one look ended.

    memory        to be kept; with `acknowledged`, in one transaction with the acknowledgement
    settled       nothing is left to do now. Otherwise look again, with backoff
    look_at       when to look again at a drain that waits for the fleet or is over, epoch seconds; 0 = not by itself
    trouble       what is wrong with Slurm (never with the node), one sentence; "" = nothing
    acknowledged  an operator resumed the node: event-latched causes last seen up to `acknowledged_before` (when the
                  drain was last read) are known to them. The verdict that this look was made for is out of date
    foreign_reason   whose words stand where the drain is not ours; "" = no such drain
    requeued      jobs that were requeued in this look; those of them that are `held` wait for `scontrol release`
    spared        running jobs that a requeue was wanted for but cannot be: (job, why)
    """

    memory: SlurmMemory
    node: NodeState | None = None
    owner: Owner = Owner.NOBODY
    decision: Decision = NOT_READ
    settled: bool = False
    look_at: float = 0.0
    trouble: str = ""
    acknowledged: bool = False
    acknowledged_before: float = 0.0
    adopted: Adopted | None = None
    foreign_reason: str = ""
    requeued: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    spared: tuple[tuple[str, str], ...] = ()


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


class SlurmTrouble(Exception):
    """One sentence about Slurm."""


T = TypeVar("T")
Step = Command | Remember
Steps = Generator[Step, CommandResult | None, T]


def reconcile(
    verdict: Verdict,
    memory: SlurmMemory,
    policy: Policy,
    node_name: str,
    boot_id: str,
    now: Callable[[], float],
) -> Steps[ReconcileReport]:
    """One look. A Command is answered with its CommandResult, a Remember with None."""
    look = _Look(policy, node_name, boot_id, now, memory)
    look.decision = decide(verdict, None, memory, policy, now())
    try:
        node = yield from look.read_node()
        if is_gone(node, memory):
            lost = is_lost_for_sure(node, memory, boot_id, policy, now())
            lost = lost or (yield from look.slurmctld_lost_it(memory.confirmed_at))
            look.memory = forget(memory, node, now())
            if not lost:
                why = Leave("an operator resumed the node")
                return ReconcileReport(
                    look.memory,
                    node,
                    decision=why,
                    acknowledged=True,
                    acknowledged_before=memory.confirmed_at,
                )
            look.memory = replace(look.memory, hold=fleet_limit.no_wait(now()))
        elif memory.lifted and is_back(node, memory) and (yield from look.slurmctld_lost_it(memory.lifted.time)):
            look.memory = taken_back(memory)
        look.memory = settled_by_now(remember(look.memory, node, boot_id, now()), now())
        look.decision = yield from look.within_limit(decide(verdict, node, look.memory, policy, now()), verdict)
        if isinstance(look.decision, Drain):
            yield from look.drain(look.decision)
            look.decision = yield from look.counted_again(look.decision, verdict)
        if isinstance(look.decision, Drain):
            if look.decision.requeue:
                yield from look.requeue(verdict)
        elif isinstance(look.decision, Resume):
            yield from look.resume()
        elif not isinstance(look.decision, Leave):
            never(look.decision)
    except SlurmTrouble as error:
        return look.report(verdict, trouble=str(error))
    return look.report(verdict)


class _Look:
    """One look under way: what it was given, and what it has found so far."""

    def __init__(
        self, policy: Policy, node_name: str, boot_id: str, now: Callable[[], float], memory: SlurmMemory
    ) -> None:
        self.policy = policy
        self.node_name = node_name
        self.boot_id = boot_id
        self.now = now
        self.memory = memory
        self.node: NodeState | None = None
        self.partitions: frozenset[str] = frozenset()  # of this node; read where the fleet is counted
        self.decision: Decision = NOT_READ
        self.requeued: list[str] = []
        self.held: list[str] = []
        self.refused = ""  # a change that slurmctld answered with no, which keeps us from nothing else
        self.spared: list[tuple[str, str]] = []
        self.jobs_left = False  # a requeue is due that was not sent or has not shown yet

    def report(self, verdict: Verdict, trouble: str = "") -> ReconcileReport:
        node, whose = self.node, owner(self.node, self.memory) if self.node else Owner.NOBODY
        concerned = bool(verdict.causes or self.memory.reason)
        steady = node is not None and node.flags.isdisjoint(UNSETTLED)
        hold = None if trouble else self.memory.hold
        waits = hold is not None or self.memory.uncounted
        settled = not trouble and not self.jobs_left and not waits and (steady or not concerned)
        code = parse_reason(node.reason) if node and whose is Owner.FOREIGN_HEALTHD else None
        return ReconcileReport(
            memory=self.memory,
            node=node,
            owner=whose,
            decision=self.decision,
            settled=settled,
            look_at=hold.until if hold else look_at(self.memory) if settled else 0.0,
            trouble=trouble,
            adopted=Adopted(*code, node.reason) if node and code else None,
            foreign_reason=node.reason if node and whose in (Owner.FOREIGN, Owner.FOREIGN_HEALTHD) else "",
            requeued=tuple(self.requeued),
            held=tuple(self.held),
            spared=tuple(self.spared),
        )

    # commands

    def run(self, *argv: str, changes: bool = False) -> Steps[CommandResult]:
        result = yield Command(argv, self.policy.command_seconds, changes)
        assert result is not None, "a Command is answered with a CommandResult"
        return result

    def read(self, *argv: str) -> Steps[str]:
        result = yield from self.run(*argv)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return result.stdout

    def read_node(self) -> Steps[NodeState]:
        text = yield from self.read("sinfo", "-h", "-a", "-n", self.node_name, "-O", _format(NODE_COLUMNS))
        self.node = parse_node(text, self.node_name)
        return self.node

    def slurmctld_lost_it(self, since: float) -> Steps[bool]:
        text = yield from self.read("scontrol", "show", "config")
        return is_lost_by_slurmctld(since, parse_slurmctld_start(text))

    # the fleet

    def within_limit(self, wanted: Decision, verdict: Verdict) -> Steps[Decision]:
        """A new drain, if the fleet can spare this node by now; else it is left, for now."""
        assert self.node is not None
        if not isinstance(wanted, Drain) or owner(self.node, self.memory) is not Owner.NOBODY:
            self.memory = replace(self.memory, hold=None)
            return wanted
        self.decision = Leave("Slurm has not told how many nodes healthd holds drained", would=describe(wanted))
        own, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        hold, now = self.memory.hold, self.now()
        if hold is None and not own:
            hold = fleet_limit.first_wait(self.node_name, (yield from self.cluster_size()), limits, now)
        elif hold is not None and not own and fleet_limit.is_late(hold, now):
            hold = fleet_limit.spread_anew(hold, self.node_name, limits, now)
        if hold is not None and fleet_limit.must_wait(hold, own, now):
            return self.hold_back(hold, wanted)
        self.memory = replace(self.memory, hold=hold)  # also where it cannot be counted: it has had its wait
        count = yield from self.strictest(own)
        if count is not None and not fleet_limit.has_room(count, limits, own):
            return self.hold_back(fleet_limit.held(hold, count, limits, own, self.node_name, self.now()), wanted)
        self.memory = replace(self.memory, uncounted=True)
        return wanted

    def counted_again(self, done: Drain, verdict: Verdict) -> Steps[Decision]:
        """The drain stands, and all know it. If others took the last room at the same moment, it is taken back."""
        assert self.node is not None
        if not self.memory.uncounted or owner(self.node, self.memory) is not Owner.OURS:
            self.memory = replace(self.memory, uncounted=False)
            return done
        own, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        count = yield from self.strictest(own, until=self.node.reason_time)
        if count is None:
            return done  # and counted at the next look
        if not fleet_limit.is_beyond(count, limits, own) or not self.node.flags.isdisjoint(NOT_TO_RESUME):
            self.memory = replace(self.memory, uncounted=False, hold=None)
            return done
        others = replace(count, drained=count.drained - 1)
        hold = fleet_limit.held(self.memory.hold, others, limits, own, self.node_name, self.now())
        yield from self.resume()
        return self.hold_back(hold, done)

    def hold_back(self, hold: FleetHold, wanted: Drain) -> Leave:
        self.memory = replace(self.memory, hold=hold)
        return Leave(fleet_limit.why(hold), would=describe(wanted))

    def strictest(self, own_hardware: bool, until: float = float("inf")) -> Steps[PartitionCount | None]:
        """The partition of this node with the least room, counting drains up to `until`. None: it cannot be read, and a
        fault of the node's own does not wait for that. Raises SlurmTrouble for a shared cause."""
        try:
            if not self.partitions:
                columns = _format(PARTITION_COLUMNS)
                text = yield from self.read("sinfo", "-h", "-a", "-n", self.node_name, "-O", columns)
                self.partitions = parse_partitions(text)
            table = yield from self.read("sinfo", "-h", "-a", "-O", _format(FLEET_COLUMNS))
            counts = parse_fleet(table, self.partitions, until)
        except SlurmTrouble:
            if not own_hardware:
                raise
            return None
        return fleet_limit.strictest(counts, self.policy.fleet, own_hardware)

    def cluster_size(self) -> Steps[int]:
        """The nodes of the largest partition: without reading one of them."""
        return parse_cluster_size((yield from self.read("scontrol", "-a", "-o", "show", "partition")))

    # drain and resume

    def drain(self, wanted: Drain) -> Steps[None]:
        """Until the node is read back as drained; nothing is sent if it is so already."""
        assert self.node is not None
        if owner(self.node, self.memory) is not Owner.NOBODY and self.node.reason == wanted.reason:
            return
        self.memory = replace(self.memory, writing=wanted.reason, written_at=self.now())
        yield Remember(self.memory)
        yield from self.update("State=DRAIN", f"Reason={wanted.reason}")
        if owner(self.node, self.memory) is Owner.NOBODY:
            raise SlurmTrouble("scontrol drained the node without an error, but Slurm does not show it drained")

    def resume(self) -> Steps[None]:
        """UNDRAIN takes away the drain only: RESUME would also end DOWN and cancel a reboot."""
        assert self.node is not None
        before = self.node
        self.memory = replace(self.memory, resumed_at=self.now())
        yield Remember(self.memory)
        yield from self.update("State=UNDRAIN")
        whose = owner(self.node, self.memory)
        if whose is Owner.OURS:
            raise SlurmTrouble("scontrol resumed the node without an error, but Slurm still shows it drained")
        if whose is Owner.NOBODY:
            self.memory = forget(self.memory, before, self.now())

    def update(self, *words: str) -> Steps[None]:
        """Change the node and read it back."""
        argv = ("scontrol", "update", f"NodeName={self.node_name}", *words)
        result = yield from self.run(*argv, changes=True)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        node = yield from self.read_node()
        self.memory = remember(self.memory, node, self.boot_id, self.now())

    # requeue

    def requeue(self, verdict: Verdict) -> Steps[None]:
        """The batch jobs that run here since before the fault. Only on a node that was read as held: a job
        that is requeued while its node is open comes back to it.
        """
        argv = ("scontrol", "listpids", "*", self.node_name)
        result = yield from self.run(*argv)
        if result.status != 0 and not re.search(r"No job steps exist|There are no steps", result.stderr):
            if result.stdout.count("\n") < 2:  # the table's head at most
                raise SlurmTrouble(what_failed(argv, result))
            # A slurmstepd has died or just ends: 22.05 fails, and tells the others' jobs all the same.
            self.refused, self.jobs_left = what_failed(argv, result), True
        for job_id in parse_listpids(result.stdout):
            job = yield from self.read_job(job_id)
            if job is None or not _is_running(job):
                continue
            if job.start > verdict.fault_time:
                self.spared.append((job.name, "started after the fault"))
                continue
            yield from self.comment(job, verdict)
            if why := spared(job):
                self.spared.append((job.name, why))
            else:
                yield from self.requeue_job(job)
        if self.refused:
            raise SlurmTrouble(self.refused)

    def comment(self, job: Job, verdict: Verdict) -> Steps[None]:
        """Tell the job's user, before the requeue ends this run of it. Best effort: without it all goes on."""
        if not self.policy.admin_comment or job.comment is None:
            return
        told = admin_comment(job.comment, self.node_name, reason(verdict.causes), verdict.fault_time, job.start)
        if told != job.comment:
            yield from self.run("scontrol", "update", f"JobId={job.name}", f"AdminComment={told}", changes=True)

    def requeue_job(self, job: Job) -> Steps[None]:
        """At most one for the same run of a job, unless the job is read again in that run when an earlier one
        can no longer be under way.
        """
        before = next((r for r in self.memory.requeued if (r.job, r.restarts) == (job.name, job.restarts)), None)
        if before and self.now() < before.time + self.policy.requeue_again_seconds:
            self.jobs_left = True
            return
        others = tuple(
            r for r in self.memory.requeued if r is not before and self.now() < r.time + REQUEUED_KEPT_SECONDS
        )
        intent = Requeued(job.name, job.restarts, self.now())
        self.memory = replace(self.memory, requeued=(*others, intent))
        yield Remember(self.memory)
        held = job.restarts >= self.policy.max_restarts
        # "incomplete": a job that ended meanwhile would be run again without it
        argv = ("scontrol", "requeuehold" if held else "requeue", "incomplete", job.name)
        result = yield from self.run(*argv, changes=True)
        if result.status != 0:
            if never_arrived(result):
                self.memory = replace(self.memory, requeued=others)
            if is_slurm_away(result):
                raise SlurmTrouble(what_failed(argv, result))
            self.refused, self.jobs_left = what_failed(argv, result), True
            return
        after = yield from self.read_job(job.id)
        if after and _is_running(after) and after.restarts == job.restarts:
            self.jobs_left = True  # status 0 also when it did nothing
        elif after and after.restarts > job.restarts:
            self.requeued.append(job.name)
            if held:
                self.held.append(job.name)

    def read_job(self, job_id: str) -> Steps[Job | None]:
        """None: Slurm no longer knows it."""
        argv = ("squeue", "-h", "-a", "-t", "all", "-j", job_id, "-O", _format(JOB_COLUMNS))
        result = yield from self.run(*argv)
        if result.status != 0 and "Invalid job id" in result.stderr:
            return None
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return parse_job(result.stdout, job_id)


def _is_running(job: Job) -> bool:
    return job.state in ("RUNNING", "SUSPENDED")


def spared(job: Job) -> str:
    """Why a running job that the fault hit is not requeued; "" = it can be."""
    if not job.batch:
        return "srun or salloc: only batch jobs can be requeued"
    if not job.requeue:
        return "submitted with --no-requeue"
    return ""


# reading what Slurm prints


def _format(columns: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"{name}:{width}" for name, width in columns)


def _split(text: str, columns: tuple[tuple[str, int], ...]) -> list[str]:
    """The values of the first record: columns have fixed widths, so that no value can be taken for a separator."""
    values, at = [], 0
    for _, width in columns:
        values.append(" ".join(text[at : at + width].split()))
        at += width
    return values


def _number(text: str) -> int | None:
    """None: it is none that Slurm prints, whose numbers have 64 bits (int() raises for one of 5,000 digits)."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def parse_node(text: str, name: str) -> NodeState:
    """sinfo's NODE_COLUMNS. Raises SlurmTrouble."""
    if not text.strip():
        raise SlurmTrouble(f'Slurm has no node "{name}" in any partition')
    state, since, user, why = _split(text, NODE_COLUMNS)
    # up to 20.x "*" and the like stand inside the state: "down*+drain"
    words = [word.strip("*~#%!$@^-").upper() for word in state.split("+")]
    if not all(re.fullmatch(r"[A-Z_]+", word) for word in words):
        raise SlurmTrouble(f'sinfo printed no node state: "{_short(text)}"')
    if why == "none" and since in ("Unknown", ""):
        why = ""
    reason_user = "" if user == "Unknown" else re.sub(r"\(\d+\)$", "", user)
    return NodeState(name, frozenset(words), why, reason_user, _time(since))


def parse_partitions(text: str) -> frozenset[str]:
    """The partitions of the node that sinfo's PARTITION_COLUMNS were asked for."""
    rows = (_split(line, PARTITION_COLUMNS) for line in text.splitlines())
    return frozenset(name for name, nodes in rows if nodes != "0")


def parse_fleet(text: str, partitions: Collection[str], until: float) -> list[PartitionCount]:
    """What sinfo's FLEET_COLUMNS say of these partitions: how many nodes each has, and how many of them healthd has
    drained up to then. The state counts: from 24.11 on a reason outlives its drain. A drain of ours whose words Slurm
    has replaced ("Kill task failed") looks from here like Slurm's own, and is not counted. Raises SlurmTrouble."""
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
            is_drained = not TAKEN.isdisjoint(re.findall("[A-Z_]+", state.upper()))
            is_ours = is_drained and why == PREFIX.strip() and _time(since) <= until
            nodes[name] += count
            drained[name] += count if is_ours else 0
    if not partitions or not all(nodes.values()):
        raise SlurmTrouble(f"sinfo printed no nodes of the partitions {', '.join(sorted(partitions))}")
    return [PartitionCount(name, nodes[name], drained[name]) for name in sorted(partitions)]


def parse_cluster_size(text: str) -> int:
    """The nodes of the largest partition in `scontrol -o show partition`; 0 = it does not say."""
    return max(map(int, re.findall(r"\bTotalNodes=([0-9]{1,20})\b", text)), default=0)


def parse_listpids(text: str) -> list[str]:
    """The job ids of `scontrol listpids`, each once, in order. Raises SlurmTrouble.

    Whole lines only: in one that was cut (it was killed, or too long) the number may be another job's."""
    lines = _whole_lines(text)
    if text.strip() and (not lines or lines[0].split()[:2] != ["PID", "JOBID"]):
        raise SlurmTrouble(f'scontrol listpids printed no table: "{_short(text)}"')
    rows = [line.split() for line in lines[1:]]
    return list(dict.fromkeys(row[1] for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])))


def _whole_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].splitlines()


def parse_processes(text: str) -> dict[int, str]:
    """pid -> job id of `scontrol listpids`; a step whose processes are not known has the pid -1."""
    rows = [line.split() for line in _whole_lines(text)[1:]]
    pids = [(_number(row[0]), row[1]) for row in rows if len(row) > 1 and _JOB_ID.fullmatch(row[1])]
    return {pid: job for pid, job in pids if pid is not None}


def parse_job(text: str, job_id: str) -> Job | None:
    """This job of squeue's JOB_COLUMNS (asked for an array's number it prints the other tasks too)."""
    for line in text.splitlines():
        values = _split(line, JOB_COLUMNS)
        if values[0] != job_id:
            continue
        _, name, state, batch, start, restarts, requeue, _ = values
        count = _number(restarts)
        if count is None or not _JOB_NAME.fullmatch(name) or not state:
            raise SlurmTrouble(f'squeue printed no job {job_id}: "{_short(line)}"')
        # A count: slurmctld adds one where it requeues a job that was missing on its node or could not be launched
        # (job_mgr.c: batch_flag++ in _job_complete() and _job_requeue_op()). To it 0 alone is no batch job.
        is_batch = bool(_number(batch))
        return Job(job_id, name.partition("+")[0], state, is_batch, _time(start), count, requeue == "1", _comment(line))
    if text.strip():
        raise SlurmTrouble(f'squeue printed no job {job_id}: "{_short(text)}"')
    return None


def _comment(line: str) -> str | None:
    """The last of JOB_COLUMNS as others wrote it, for it is written again. squeue fills and cuts columns by bytes: a
    line of another length holds half a character, or only what stands before a line end."""
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
    found = re.search(r"^BOOT_TIME\s*=\s*(\S+)", text, re.MULTILINE)
    started = _time(found[1]) if found else 0.0
    if not started:
        raise SlurmTrouble("scontrol show config printed no BOOT_TIME")
    return started


def _time(text: str) -> float:
    """Epoch seconds, from those or from local time as Slurm prints it by default; 0 = none."""
    if text.isascii() and text.isdigit():
        return float(text) if len(text) <= 11 else 0.0  # up to the year 5138
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def what_failed(argv: tuple[str, ...], result: CommandResult) -> str:
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
    """slurmctld surely has not got the request ("Socket timed out": it may have)."""
    not_sent = re.search(r"\(connect failure\)|Munge encode failed", result.stderr)
    return result.status == 127 or not_sent is not None


def is_slurm_away(result: CommandResult) -> bool:
    """Nobody answered: the next command would wait as long for nothing."""
    unanswered = r"Unable to contact|timed out|Unexpected message received|Zero Bytes"
    return result.status is None or never_arrived(result) or re.search(unanswered, result.stderr) is not None


def _short(text: str) -> str:
    return " ".join(text.split())[:160]
