"""Slurm: reads this node, drains, requeues, resumes. Generators yield the commands to run, never through a shell, so
that the daemon drives them in its one wait and tests feed them values.

`reconcile` is one look: read what is, decide (policy.py), act, read back. It may be killed at any point and started
again: what must be known afterwards is written down (Remember) before the command that needs it.

Cost for slurmctld: a look is 2 small RPCs (this node's record and the partitions), each job on the node 3 more, each
change 1 (a drain, a resume, a comment on a job, a requeue). The jobs on the node come from its own slurmstepds, which
answer without slurmctld and without slurmd. Before and after a new drain the fleet is counted (fleet_limit.py): that
is the only read of a whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
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
from healthd.slurm import commands, fleet_limit
from healthd.slurm.admin_comment import admin_comment
from healthd.slurm.commands import Argv, Command, CommandResult
from healthd.slurm.fleet_limit import PartitionCount
from healthd.slurm.output import (
    Job,
    SlurmTrouble,
    has_no_steps,
    is_slurm_away,
    is_unknown_job,
    never_arrived,
    parse_cluster_size,
    parse_fleet,
    parse_job,
    parse_listpids,
    parse_node,
    parse_partitions,
    parse_slurmctld_start,
    what_failed,
)
from healthd.slurm.policy import (
    NOT_TO_RESUME,
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
from healthd.slurm.reason import parse_reason, reason

NOT_READ = Leave("the node's state in Slurm is not known")
REQUEUED_KEPT_SECONDS = 7 * 86400.0
HELD = "it was restarted as often as slurm.max_restarts allows; scontrol release lets it run again"


@dataclass(frozen=True, slots=True)
class Remember:
    """The memory that must be in the ledger before the generator goes on."""

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
    acknowledged  an operator resumed the node: they know of the causes that were open at `acknowledged_before` (when
                  the drain was last read). The verdict that this look was made for is out of date
    requeued      jobs that were requeued in this look; those in `held` wait for `scontrol release`
    spared        running jobs that were to be requeued, but are not: (job, why)
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
    requeued: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    spared: tuple[tuple[str, str], ...] = ()


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
        self.partitions: frozenset[str] = frozenset()  # the node's; read when the fleet is counted
        self.decision: Decision = NOT_READ
        self.requeued: list[str] = []
        self.held: list[str] = []
        self.refused = ""  # a change that slurmctld refused, which stops nothing else
        self.spared: list[tuple[str, str]] = []
        self.jobs_left = False  # a requeue is due, but was not sent or does not show yet

    def report(self, verdict: Verdict, trouble: str = "") -> ReconcileReport:
        node, whose = self.node, owner(self.node, self.memory) if self.node else Owner.NOBODY
        concerned = bool(verdict.causes or self.memory.reason)
        steady = node is not None and node.flags.isdisjoint(UNSETTLED)
        hold = None if trouble else self.memory.hold
        may_stand = concerned or bool(self.memory.writing)  # not a drain that was refused, and is no longer wanted
        waits = hold is not None or (self.memory.uncounted and may_stand)
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
            requeued=tuple(self.requeued),
            held=tuple(self.held),
            spared=tuple(self.spared),
        )

    # what is run

    def run(self, argv: Argv, changes: bool = False) -> Steps[CommandResult]:
        result = yield Command(argv, self.policy.command_seconds, changes)
        assert result is not None, "a Command is answered with a CommandResult"
        return result

    def read(self, argv: Argv) -> Steps[str]:
        result = yield from self.run(argv)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return result.stdout

    def read_node(self) -> Steps[NodeState]:
        text = yield from self.read(commands.node(self.node_name))
        self.node = parse_node(text, self.node_name)
        return self.node

    def slurmctld_lost_it(self, since: float) -> Steps[bool]:
        text = yield from self.read(commands.config())
        return is_lost_by_slurmctld(since, parse_slurmctld_start(text))

    # the fleet

    def within_limit(self, wanted: Decision, verdict: Verdict) -> Steps[Decision]:
        """`wanted`; a new drain only if the fleet can spare this node by now, else Leave."""
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
        self.memory = replace(self.memory, hold=hold)  # also if the count fails now: the wait is over
        count = yield from self.strictest(own)
        if count is not None and not fleet_limit.has_room(count, limits, own):
            return self.hold_back(fleet_limit.held(hold, count, limits, own, self.node_name, self.now()), wanted)
        self.memory = replace(self.memory, uncounted=True)
        return wanted

    def counted_again(self, done: Drain, verdict: Verdict) -> Steps[Decision]:
        """Count again, now that all see our drain. If others took the last room in the same moment, it is lifted."""
        assert self.node is not None
        if not self.memory.uncounted or owner(self.node, self.memory) is not Owner.OURS:
            self.memory = replace(self.memory, uncounted=False)
            return done
        own, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        count = yield from self.strictest(own, until=self.node.reason_time)
        if count is None:
            return done  # the next look counts
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
        """The partition of this node with the least room, counting drains up to `until`. None: Slurm cannot
        tell, and a fault of the node's own does not wait for that. Raises SlurmTrouble for a shared cause."""
        try:
            if not self.partitions:
                text = yield from self.read(commands.partitions_of(self.node_name))
                self.partitions = parse_partitions(text)
            table = yield from self.read(commands.fleet())
            counts = parse_fleet(table, self.partitions, until)
        except SlurmTrouble:
            if not own_hardware:
                raise
            return None
        return fleet_limit.strictest(counts, self.policy.fleet, own_hardware)

    def cluster_size(self) -> Steps[int]:
        """How many nodes the largest partition has; no node is read."""
        return parse_cluster_size((yield from self.read(commands.all_partitions())))

    # drain and resume

    def drain(self, wanted: Drain) -> Steps[None]:
        """Drain the node and read it back as drained. Nothing is sent if our reason stands already."""
        assert self.node is not None
        if owner(self.node, self.memory) is not Owner.NOBODY and self.node.reason == wanted.reason:
            return
        self.memory = replace(self.memory, writing=wanted.reason, written_at=self.now())
        yield Remember(self.memory)
        yield from self.update(commands.drain(self.node_name, wanted.reason))
        if owner(self.node, self.memory) is Owner.NOBODY:
            raise SlurmTrouble("scontrol drained the node without an error, but Slurm does not show it drained")

    def resume(self) -> Steps[None]:
        assert self.node is not None
        before = self.node
        self.memory = replace(self.memory, resumed_at=self.now())
        yield Remember(self.memory)
        yield from self.update(commands.undrain(self.node_name))
        whose = owner(self.node, self.memory)
        if whose is Owner.OURS:
            raise SlurmTrouble("scontrol resumed the node without an error, but Slurm still shows it drained")
        if whose is Owner.NOBODY:
            self.memory = forget(self.memory, before, self.now())

    def update(self, argv: Argv) -> Steps[None]:
        """Change the node and read it back."""
        result = yield from self.run(argv, changes=True)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        node = yield from self.read_node()
        self.memory = remember(self.memory, node, self.boot_id, self.now())

    # requeue

    def requeue(self, verdict: Verdict) -> Steps[None]:
        """Requeue the batch jobs that have run here since before the fault. Only on a node that was read as held: a job
        that is requeued while its node is open comes back to it.
        """
        argv = commands.listpids(self.node_name)
        result = yield from self.run(argv)
        if result.status != 0 and not has_no_steps(result):
            if result.stdout.count("\n") < 2:  # no more than the table's head
                raise SlurmTrouble(what_failed(argv, result))
            # A slurmstepd has died or just ends: 22.05 fails, but prints the jobs of the others.
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
        """Tell the job's user, before the requeue ends this run of it. Best effort: if it fails all goes on."""
        if not self.policy.admin_comment or job.comment is None:
            return
        told = admin_comment(job.comment, self.node_name, reason(verdict.causes), verdict.fault_time, job.start)
        if told != job.comment:
            yield from self.run(commands.comment(job.name, told), changes=True)

    def requeue_job(self, job: Job) -> Steps[None]:
        """Requeue a run of a job at most once, unless the job is still in that run when an earlier requeue can no
        longer be under way.
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
        argv = commands.requeue(job.name, held)
        result = yield from self.run(argv, changes=True)
        if result.status != 0:
            if never_arrived(result):
                self.memory = replace(self.memory, requeued=others)
            if is_slurm_away(result):
                raise SlurmTrouble(what_failed(argv, result))
            self.refused, self.jobs_left = what_failed(argv, result), True
            return
        after = yield from self.read_job(job.id)
        if after and _is_running(after) and after.restarts == job.restarts:
            self.jobs_left = True  # scontrol exits with 0 also when it did nothing
        elif after and after.restarts > job.restarts:
            self.requeued.append(job.name)
            if held:
                self.held.append(job.name)

    def read_job(self, job_id: str) -> Steps[Job | None]:
        """None: Slurm no longer knows the job."""
        argv = commands.job(job_id)
        result = yield from self.run(argv)
        if is_unknown_job(result):
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
