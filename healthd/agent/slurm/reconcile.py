"""Slurm: reads this node, drains, requeues, resumes. Generators yield the commands to run, never through a shell, so
that the daemon drives them in its one wait and tests feed them values.

`reconcile` is one look: read what is, decide (policy.py), act, read back. It may be killed at any point and started
again: what must be known afterwards is written down (Remember) before the command that needs it.

In Slurm the last writer of a reason wins. So the node is read again right before a change of it, if anything was asked
since; if somebody else was faster, all is decided anew.

Cost for slurmctld: a look is 2 small RPCs (this node's record and the partitions), each job on the node 3 more, each
change 1 (a drain, a resume, a comment on a job, a requeue). A drain and a resume take 2 more for the identity of the
slurmctld that answers (BUILD_INFO, PING), and a drain is read once more after 15 s. The jobs on the node come from its
own slurmstepds, which answer without slurmctld and without slurmd, their GPUs from what the prolog wrote down; where it
did not, they are 3 RPCs for each run of a job. One of these reads the table of all nodes, and so do the counts of the
fleet before and after a new drain (fleet_limit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from healthd.agent.conditions.condition import fault_time
from healthd.agent.slurm import flapping, fleet_limit
from healthd.agent.slurm.affected_jobs import OnGpus, Reach, is_hit, is_hit_for_sure, on_which, reach
from healthd.agent.slurm.node_gpus import NOT_TOLD, NodeGpus
from healthd.agent.slurm.policy import (
    UNKNOWN_CONTROLLER,
    Owner,
    Policy,
    brought_back,
    decide,
    describe,
    forget,
    is_gone,
    is_lost_by_slurmctld,
    is_lost_for_sure,
    is_resume_under_way,
    look_at,
    never,
    our_text,
    owner,
    refusal_noted,
    refused_here,
    remember,
    settled_by_now,
    taken_back,
    unsaved_by,
)
from healthd.common.errors import HealthdError
from healthd.common.model import (
    Condition,
    Decision,
    Drain,
    FleetHold,
    Leave,
    NodeState,
    PartitionCount,
    Requeue,
    Requeued,
    Resume,
    Severity,
    SlurmMemory,
    Spared,
    Unsaved,
    Verdict,
)
from healthd.common.slurm import commands
from healthd.common.slurm.admin_comment import admin_comment
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.drain_reason import parse_reason, reason
from healthd.common.slurm.gres import GRES_CONF_BYTES, Given, ascends, given_in
from healthd.common.slurm.node_states import NOT_TO_RESUME, TAKEN, UNSETTLED
from healthd.common.slurm.output import (
    Job,
    SlurmTrouble,
    describe_unread,
    has_no_steps,
    is_invalid_state,
    is_refused,
    is_slurm_away,
    is_unknown_job,
    known_partitions,
    never_arrived,
    parse_cluster_size,
    parse_controller,
    parse_fleet,
    parse_job,
    parse_listpids,
    parse_node,
    parse_processes,
    parse_slurmctld_start,
    parse_whole_reason,
    what_failed,
)
from healthd.common.text import is_decimal
from healthd.common.values import Value

NOT_READ = Leave("the node's state in Slurm is not known")
REQUEUED_KEPT_SECONDS = 7 * 86400.0
TRIES = 3
HELD = "it was restarted as often as slurm.max_restarts allows; scontrol release lets it run again"


class Remember(Value, frozen=True):
    """The memory that must be in the ledger before the generator goes on."""

    memory: SlurmMemory


class Adopted(Value, frozen=True):
    """A drain in our words that the ledger does not know: a condition that this healthd never resumes."""

    code: str
    subject: str
    reason: str


class ReconcileReport(Value, frozen=True):
    """How one look ended.

    memory        to be kept; with `acknowledged`, in one transaction with the acknowledgement
    settled       nothing is left to do now. Otherwise look again, with backoff
    look_at       when to look again at a drain that waits for the fleet or is over, epoch seconds; 0 = not by itself
    problem       what is wrong with Slurm (never with the node), one sentence; "" = nothing
    acknowledged  an operator resumed the node: they know of the causes that were open at `acknowledged_before` (when
                  the drain was last read). The verdict that this look was made for is out of date
    lifted        our drain is over, by a resume of our own
    requeued      jobs that were requeued in this look; those in `held` wait for `scontrol release`
    spared        running jobs that were to be requeued, but are not: (job, why)
    """

    memory: SlurmMemory
    node: NodeState | None = None
    owner: Owner = Owner.NOBODY
    decision: Decision = NOT_READ
    settled: bool = False
    look_at: float = 0.0
    problem: str = ""
    acknowledged: bool = False
    acknowledged_before: float = 0.0
    adopted: Adopted | None = None
    lifted: bool = False
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
    gpus: NodeGpus = NOT_TOLD,
    refusals: Callable[[], tuple[float, ...]] = tuple,
) -> Steps[ReconcileReport]:
    """One look. A Command is answered with its CommandResult, a Remember with None. `refusals`: when this node's
    prolog refused jobs because of our verdict (epoch seconds)."""
    look = _Look(policy, node_name, boot_id, now, memory, gpus, refusals)
    look.decision = decide(verdict, None, memory, policy, now())
    try:
        yield from look.read_node()
        for _ in range(TRIES):
            if resumed := (yield from look.take_in()):
                return resumed
            with suppress(Overtaken):
                yield from look.act(verdict)
                return look.report(verdict, problem=look.no_count)
        raise SlurmTrouble("others change the node each time that healthd is about to")
    except SlurmTrouble as error:
        look.note_missing_count(verdict)
        return look.report(verdict, problem=str(error))


class Overtaken(HealthdError):
    """Somebody else changed the node meanwhile. It was read again, and what to do is decided anew."""


class _Look:
    """One look under way: what it was given, and what it has found so far."""

    def __init__(
        self,
        policy: Policy,
        node_name: str,
        boot_id: str,
        now: Callable[[], float],
        memory: SlurmMemory,
        gpus: NodeGpus,
        refusals: Callable[[], tuple[float, ...]],
    ) -> None:
        self.policy = policy
        self.node_name = node_name
        self.boot_id = boot_id
        self.now = now
        self.memory = memory
        self.gpus = gpus
        self.refusals = refusals
        self.node: NodeState | None = None
        self.is_fresh = False  # nothing was asked or sent since the node was read
        self.decision: Decision = NOT_READ
        self.requeued: list[str] = []
        self.held: list[str] = []
        self.refused = ""  # a change that slurmctld refused, which stops nothing else
        self.spared: list[tuple[str, str]] = []
        self.hit: set[str] = set()  # jobs to be requeued
        self.gres_conf: str | None = None  # not read yet
        self.controller: str | None = None  # not read yet
        self.lifted = False
        self.all_drains: list[PartitionCount] = []  # the last count of this look
        self.no_count = ""  # why the fleet cannot be counted
        self.jobs_left = False  # a requeue is due, but was not sent or does not show yet

    def report(self, verdict: Verdict, problem: str = "") -> ReconcileReport:
        node, whose = self.node, owner(self.node, self.memory) if self.node else Owner.NOBODY
        problem = problem or (describe_unread(node.unread_rows) if node else "")
        concerned = bool(verdict.causes or self.memory.reason or self.memory.refused)
        steady = node is not None and node.flags.isdisjoint(UNSETTLED)
        hold = None if problem else self.memory.hold
        may_stand = concerned or bool(self.memory.writing)  # not a drain that was refused, and is no longer wanted
        waits = hold is not None or (self.memory.uncounted and may_stand)
        settled = not problem and not self.jobs_left and not waits and (steady or not concerned)
        code = parse_reason(node.reason) if node and whose is Owner.FOREIGN_HEALTHD else None
        # one part of a heterogeneous job is requeued with all others
        spared = tuple(dict.fromkeys((job, why) for job, why in self.spared if job not in self.hit))
        return ReconcileReport(
            memory=self.memory,
            node=node,
            owner=whose,
            decision=replace(self.decision, spared=spared) if isinstance(self.decision, Drain) else self.decision,
            settled=settled,
            look_at=hold.until if hold else self.next_look() if settled else 0.0,
            problem=problem,
            adopted=Adopted(*code, node.reason) if node and code else None,
            lifted=self.lifted,
            requeued=tuple(self.requeued),
            held=tuple(self.held),
            spared=spared,
        )

    def take_in(self) -> Steps[ReconcileReport | None]:
        """Compare the node, just read, with what we know. A report: an operator resumed it."""
        assert self.node is not None
        self.memory = memory = refusal_noted(self.memory, self.node)
        now = self.now
        if is_gone(self.node, memory):
            lost = is_lost_for_sure(self.node, memory, self.boot_id, self.policy, now())
            lost = lost or (yield from self.slurmctld_lost_it(memory.confirmed_at, unsaved_by(memory)))
            at = now()
            self.memory = forget(memory, self.node, at)
            if is_resume_under_way(memory, self.policy, at):
                self.memory = flapping.lifted(self.memory, memory, at)
                self.lifted = True
            if not lost:
                why = Leave("an operator resumed the node")
                return ReconcileReport(
                    flapping.answered_for(self.memory),
                    self.node,
                    decision=why,
                    acknowledged=True,
                    acknowledged_before=memory.confirmed_at,
                )
            self.memory = replace(self.memory, hold=fleet_limit.no_wait(now()))
        elif (old := brought_back(self.node, memory)) and (yield from self.slurmctld_lost_it(old.time, old.controller)):
            self.memory = taken_back(memory, old, now())
        self.memory = settled_by_now(remember(self.memory, self.node, self.boot_id, now()), now())
        return None

    def act(self, verdict: Verdict) -> Steps[None]:
        """Decide, and do it. Raises Overtaken."""
        known = self.memory = flapping.noted(self.memory, verdict, self.now())
        wanted = decide(verdict, self.node, known, self.policy, self.now())
        self.decision = yield from self.within_limit(wanted, verdict)
        if not isinstance(self.decision, Drain) or not self.decision.requeue:
            self.memory = replace(self.memory, spared=())
        if isinstance(self.decision, Drain):
            yield from self.drain(self.decision, known)
            self.decision = yield from self.counted_again(self.decision, verdict)
        if isinstance(self.decision, Drain):
            if self.memory.uncounted:  # no requeue before a count
                self.decision = replace(self.decision, requeue=False)
            if self.decision.requeue:
                yield from self.requeue(verdict)
        elif isinstance(self.decision, Resume):
            try:
                yield from self.resume()
            finally:  # also where others changed the node right after it
                self.memory = flapping.lifted(self.memory, known, self.now())
        elif not isinstance(self.decision, Leave):
            never(self.decision)

    def next_look(self) -> float:
        """When to look once more, though nothing is left to do now (epoch seconds); 0 = not by itself."""
        waits_until = flapping.waits_until(self.memory, self.policy.flapping, self.now())
        return min((moment for moment in (look_at(self.memory), waits_until) if moment), default=0.0)

    # what is run

    def run(self, argv: Argv, changes: bool = False) -> Steps[CommandResult]:
        self.is_fresh = False
        result = yield Command(argv, self.policy.command_timeout_seconds, changes)
        assert result is not None, "a Command is answered with a CommandResult"
        return result

    def read(self, argv: Argv) -> Steps[CommandResult]:
        result = yield from self.run(argv)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return result

    def read_node(self) -> Steps[NodeState]:
        table = yield from self.read(commands.node(self.node_name))
        self.node = refused_here(parse_node(table.stdout, self.node_name), self.refusals(), self.memory)
        self.is_fresh = True
        return self.node

    def slurmctld_lost_it(self, since: float, controller: str) -> Steps[bool]:
        text = (yield from self.read(commands.config())).text
        self.controller = parse_controller(text)
        return is_lost_by_slurmctld(since, parse_slurmctld_start(text), controller, self.controller)

    def read_controller(self) -> Steps[str]:
        """Return which slurmctld answers, read at most once a look; UNKNOWN_CONTROLLER if it cannot be read."""
        if self.controller is None:
            self.controller = UNKNOWN_CONTROLLER
            with suppress(SlurmTrouble):
                self.controller = parse_controller((yield from self.read(commands.config())).text)
        return self.controller

    # the fleet

    def within_limit(self, wanted: Decision, verdict: Verdict) -> Steps[Decision]:
        """`wanted`; a new drain only if the fleet can spare this node by now, else Leave."""
        assert self.node is not None
        if not isinstance(wanted, Drain) or owner(self.node, self.memory) is not Owner.NOBODY:
            self.memory = replace(self.memory, hold=None)
            if not (self.memory.uncounted and isinstance(wanted, Drain)):
                self.memory = fleet_limit.count_succeeded(self.memory)
            return wanted
        self.decision = Leave("the nodes that healthd keeps drained are not counted yet", would=describe(wanted))
        own, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        hold, now = self.memory.hold, self.now()
        if hold is None and not own:
            hold = fleet_limit.first_wait(self.node_name, (yield from self.cluster_size()), limits, now)
        elif hold is not None and not own and fleet_limit.is_late(hold, now):
            hold = fleet_limit.spread_anew(hold, self.node_name, limits, now)
        if hold is not None and fleet_limit.must_wait(hold, own, now):
            return self.hold_back(hold, wanted)
        self.memory = replace(self.memory, hold=hold)  # also if the count fails now: the wait is over
        counts: Sequence[PartitionCount] | None = yield from self.count(own)
        if counts is None:
            counts = fleet_limit.stand_in(self.memory, self.node.partitions, self.now())
        if not counts:
            memory, at = self.memory, self.now()
            if not fleet_limit.is_uncounted_drain_due(verdict.causes, memory, self.node_name, limits, at):
                why = fleet_limit.why_uncounted(self.memory, verdict.causes, self.node_name, limits)
                return Leave(why, would=describe(wanted))
        elif not fleet_limit.has_room(strictest := fleet_limit.strictest(counts, limits, own), limits, own):
            self.store_count()
            return self.hold_back(fleet_limit.held(hold, strictest, limits, own, self.node_name, self.now()), wanted)
        self.memory = replace(self.memory, uncounted=True)
        return wanted

    def store_count(self) -> None:
        """Keep the count of this look, with all drains, to stand in for a later one."""
        if not self.no_count:
            self.memory = replace(self.memory, counted=fleet_limit.stored(self.all_drains, self.now()))

    def counted_again(self, done: Drain, verdict: Verdict) -> Steps[Decision]:
        """Count again, now that all see our drain. If others took the last room in the same moment, it is lifted."""
        assert self.node is not None
        is_healthds = owner(self.node, self.memory) is Owner.OURS
        if not self.memory.uncounted or not (is_healthds or self.memory.uncounted_since):
            self.memory = replace(self.memory, uncounted=False)
            return done
        own, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        counts = yield from self.count(own, until=self.node.reason_time)
        if counts is None:
            return done  # the next look counts
        self.store_count()
        count = fleet_limit.strictest(counts, limits, own)
        if not is_healthds:  # somebody took over a drain that was set without a count: requeue only if there is room
            self.memory = replace(self.memory, uncounted=fleet_limit.is_beyond(count, limits, own))
            return done
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

    def count(self, own_hardware: bool, until: float = float("inf")) -> Steps[list[PartitionCount] | None]:
        """Count the fleet: this node's partitions, with healthd's drains up to `until`.

        None: it cannot be counted, as `no_count` then explains. Raises SlurmTrouble instead for a shared cause, which
        waits for a count."""
        assert self.node is not None
        try:
            table = yield from self.read(commands.fleet())
            partitions = known_partitions(self.node)
            counts = parse_fleet(table.stdout, partitions, until)
            self.all_drains = parse_fleet(table.stdout, partitions, float("inf"))
        except SlurmTrouble as error:
            self.memory = fleet_limit.count_failed(self.memory, self.now())
            self.no_count = f"the nodes that healthd keeps drained cannot be counted: {error}"
            if not own_hardware:
                raise SlurmTrouble(self.no_count) from None
            return None
        self.no_count = ""
        self.memory = fleet_limit.count_succeeded(self.memory)
        return counts

    def note_missing_count(self, verdict: Verdict) -> None:
        """Treat a look that failed before the fleet was counted as a count that failed, if a drain is wanted."""
        if fleet_limit.needs_count(verdict.causes, self.memory) and self.now() >= self.policy.paused_until:
            self.memory = fleet_limit.count_failed(self.memory, self.now())

    def cluster_size(self) -> Steps[int]:
        """How many nodes the largest partition has; no node is read."""
        return parse_cluster_size((yield from self.read(commands.all_partitions())).text)

    # drain and resume

    def drain(self, wanted: Drain, known: SlurmMemory) -> Steps[None]:
        """Drain the node and read it back as drained. Nothing is sent if our reason stands already. `known`: what is to
        be remembered if nothing was sent."""
        assert self.node is not None
        if owner(self.node, self.memory) is not Owner.NOBODY and self.node.reason == wanted.reason:
            return
        unsaved = Unsaved(self.now(), (yield from self.read_controller()))
        self.memory = replace(self.memory, writing=wanted.reason, written_at=self.now(), unsaved=unsaved)
        yield Remember(self.memory)
        yield from self.read_again(known)
        argv = commands.drain(self.node_name, wanted.reason)
        whose = yield from self.read_back(argv, (yield from self.run(argv, changes=True)))
        if whose is Owner.NOBODY:
            raise SlurmTrouble("scontrol drained the node without an error, but Slurm does not show it drained")
        if whose is not Owner.OURS:
            uncounted = self.memory.uncounted and self.memory.uncounted_since > 0
            self.memory = replace(self.memory, writing="", written_at=0.0, uncounted=uncounted, unsaved=None)
            raise Overtaken

    def resume(self) -> Steps[None]:
        assert self.node is not None
        before, known, argv = self.node, self.memory, commands.undrain(self.node_name)
        unsaved = Unsaved(self.now(), (yield from self.read_controller()))
        self.memory = replace(known, resumed_at=self.now(), unsaved=unsaved)
        yield Remember(self.memory)
        yield from self.read_again(known)
        result = yield from self.run(argv, changes=True)
        if is_refused(result):
            self.memory = known
        if is_invalid_state(result):
            whose = yield from self.read_owner()
        else:
            whose = yield from self.read_back(argv, result)
        if whose is Owner.OURS:
            if result.status != 0:
                self.memory = known
                raise SlurmTrouble(what_failed(argv, result))
            raise SlurmTrouble("scontrol resumed the node without an error, but Slurm still shows it drained")
        self.memory = replace(self.memory, resumed_at=0.0)
        if whose is not Owner.NOBODY:
            raise Overtaken
        theirs = "" if our_text(self.node, self.memory) or self.node.reason == before.reason else self.node.reason
        self.memory = forget(self.memory, before, self.now())
        self.lifted = True
        if theirs:  # from 24.11 on a resume leaves the words, also those that came after our last reading
            argv = commands.drain(self.node_name, (yield from self.exact_reason(theirs)))
            yield from self.read_back(argv, (yield from self.run(argv, changes=True)))
            raise Overtaken

    def exact_reason(self, displayed: str) -> Steps[str]:
        """Return the node's Reason byte for byte, to write it back; `displayed` if that cannot be read."""
        with suppress(SlurmTrouble):
            table = yield from self.read(commands.whole_reason(self.node_name))
            return parse_whole_reason(table.stdout) or displayed
        return displayed

    def read_again(self, known: SlurmMemory) -> Steps[None]:
        """Right before a change, read the node once more if anything was asked since: the last writer wins, and Slurm
        keeps no trace of words that are written over. `known`: what is to be remembered if the change is not sent."""
        assert self.node is not None
        before = self.node
        if not self.is_fresh and _drain_of((yield from self.read_node())) != _drain_of(before):
            self.memory = known
            raise Overtaken

    def read_back(self, argv: Argv, result: CommandResult) -> Steps[Owner]:
        """Read the node again after a change of it and return whose drain it has now."""
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return (yield from self.read_owner())

    def read_owner(self) -> Steps[Owner]:
        """Read the node and return whose drain it has now."""
        node = yield from self.read_node()
        self.memory = remember(self.memory, node, self.boot_id, self.now())
        return owner(node, self.memory)

    # requeue

    def requeue(self, verdict: Verdict) -> Steps[None]:
        """Requeue the batch jobs that have run here since before a fault that hits them. Only on a node that was read
        as held: a job that is requeued while its node is open comes back to it.
        """
        argv = commands.listpids(self.node_name)
        result = yield from self.run(argv)
        if result.status != 0 and not has_no_steps(result):
            if result.stdout.count(b"\n") < 2:  # no more than the table's head
                raise SlurmTrouble(what_failed(argv, result))
            # A slurmstepd has died or just ends: 22.05 fails, but prints the jobs of the others.
            self.refused, self.jobs_left = what_failed(argv, result), True
        by_part = self.policy.requeue is Requeue.PART
        open_by = self.gpus.open_by(parse_processes(result.text) if by_part else {})
        known = {run.id: run for run in self.memory.spared} if by_part else {}
        self.memory = replace(self.memory, spared=())
        for job_id in parse_listpids(result.text):
            before = known.get(job_id)
            if before:
                yield from self.read_gres_conf(before.given)
            if before and not self.faults_on(before, open_by(job_id), verdict):
                self.spare(before)
                continue
            job = yield from self.read_job(job_id)
            if job is None or not _is_running(job):
                continue
            if not any(_is_victim_of(job.start, cause, verdict) for cause in _critical(verdict)):
                self.spared.append((job.name, "started after the fault"))
                continue
            faults = (
                (yield from self.faults_of(job, before, open_by(job_id), verdict)) if by_part else _critical(verdict)
            )
            if not faults:
                continue
            yield from self.comment(job, faults, verdict)
            if why := spared(job):
                self.spared.append((job.name, why))
            else:
                self.hit.add(job.name)
                yield from self.requeue_job(job)
        if self.refused:
            raise SlurmTrouble(self.refused)

    def faults_of(self, job: Job, before: Spared | None, on: OnGpus, verdict: Verdict) -> Steps[list[Condition]]:
        """The faults that hit a job. Slurm is asked for its GPUs only where the answer can spare it. `before`: what is
        known of a run that was spared."""
        timely = [cause for cause in _critical(verdict) if _is_victim_of(job.start, cause, verdict)]
        if sure := [cause for cause in timely if self.is_sure(cause, job.id, on)]:
            return sure
        given = self.gpus.given(job.id, job.start)
        if given is None and before and before.start == job.start:
            given = before.given
        if given is None:
            given = yield from self.ask_given(job.id)
        if given is None:
            assert self.node is not None
            if self.node.gpus is None:
                self.spared.append((job.name, "neither its GPUs nor the node's number of GPUs in Slurm are known"))
                return []
            return timely
        yield from self.read_gres_conf(given)
        run = Spared(job.id, job.name, job.start, given, "")
        if not (faults := self.faults_on(run, on, verdict)):
            self.spare(replace(run, why=self.why_spared(self.with_given(on, given))))
        return faults

    def faults_on(self, run: Spared, on: OnGpus, verdict: Verdict) -> list[Condition]:
        """The faults that hit a run of a job whose GPUs are known."""
        assert self.node is not None
        known = self.with_given(on, run.given)
        return [
            cause
            for cause in _critical(verdict)
            if _is_victim_of(run.start, cause, verdict)
            and (self.is_sure(cause, run.id, on) or is_hit(self.reach(cause), known, self.node.gpus))
        ]

    def is_sure(self, cause: Condition, job_id: str, on: OnGpus) -> bool:
        """Whether the fault hits the job, whatever Slurm gave it."""
        assert self.node is not None
        return job_id in cause.job.split(",") or is_hit_for_sure(self.reach(cause), on, self.node.gpus)

    def with_given(self, on: OnGpus, given: Given) -> OnGpus:
        assert self.node is not None
        is_ascending = partial(ascends, self.gres_conf or "", self.node_name)
        return self.gpus.with_given(on, given, self.node.gpus_of_one_type, is_ascending)

    def reach(self, cause: Condition) -> Reach:
        return reach(cause, self.gpus.known, self.gpus.inventory.devices)

    def why_spared(self, on: OnGpus) -> str:
        assert self.node is not None
        if self.node.gpus is None and on.has_given and on.given is None:
            return "which GPUs it has is not known: the node's number of GPUs in Slurm could not be read"
        return on_which(on)

    def spare(self, run: Spared) -> None:
        self.spared.append((run.name, run.why))
        self.memory = replace(self.memory, spared=(*self.memory.spared, run))

    def ask_given(self, job_id: str) -> Steps[Given | None]:
        """What Slurm gave the job of this node's GPUs; None: it does not say."""
        argv = commands.job_gres(job_id)
        result = yield from self.run(argv)
        if is_slurm_away(result):
            raise SlurmTrouble(what_failed(argv, result))
        return given_in(result.text, job_id, self.node_name) if result.status == 0 else None

    def read_gres_conf(self, given: Given) -> Steps[None]:
        """Read it, once a look, where Slurm names GPUs by its numbers. What cannot be read is as good as none."""
        if self.gres_conf is None and any(map(is_decimal, given)):
            result = yield from self.run(commands.gres_conf(GRES_CONF_BYTES))
            self.gres_conf = result.text if result.status == 0 else ""

    def comment(self, job: Job, faults: list[Condition], verdict: Verdict) -> Steps[None]:
        """Tell the job's user, before the requeue ends this run of it. Best effort: if it fails all goes on."""
        if not self.policy.admin_comment or job.comment is None:
            return
        when = max(map(fault_time, faults)) or verdict.fault_time
        told = admin_comment(job.comment, self.node_name, reason(faults), when, job.start)
        if told != job.comment:
            yield from self.run(commands.comment(job.name, told), changes=True)

    def requeue_job(self, job: Job) -> Steps[None]:
        """Requeue a run of a job at most once, unless the job is still in that run when an earlier requeue can no
        longer be under way.
        """
        before = next((r for r in self.memory.requeued if (r.job, r.restarts) == (job.name, job.restarts)), None)
        if before and self.now() < before.time + self.policy.requeue_retry_seconds:
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


def _drain_of(node: NodeState) -> tuple[frozenset[str], str, float]:
    """What others change of a node that concerns a drain or a resume."""
    return node.flags & (TAKEN | NOT_TO_RESUME), node.reason, node.reason_time


def _critical(verdict: Verdict) -> list[Condition]:
    return [cause for cause in verdict.causes if cause.severity >= Severity.CRITICAL]


def _is_victim_of(start: float, cause: Condition, verdict: Verdict) -> bool:
    """Whether a run that began at `start` was there when the fault was last seen."""
    return start <= (fault_time(cause) or verdict.fault_time)


def _is_running(job: Job) -> bool:
    return job.state in ("RUNNING", "SUSPENDED")


def spared(job: Job) -> str:
    """Why a running job that the fault hit is not requeued; "" = it can be."""
    if not job.batch:
        return "srun or salloc: only batch jobs can be requeued"
    if not job.requeue:
        return "submitted with --no-requeue"
    return ""
