"""Reconciliation of this node in Slurm: read the node, then drain, requeue or resume. Generators yield the commands to
run.

Commands never run through a shell. The daemon runs the commands in its event loop; tests pass values.

`reconcile` reads the node, decides (policy.py), acts, and reads the node again. It may be killed at any point and
started again: data for a later run is saved (SaveRecord) before the command that depends on the data.

In Slurm, the last writer of a Reason wins. If another command ran since the last reading, the node is therefore read
again right before a change. If another user or tool changed the node first, a new decision is made.

Cost for slurmctld: a reconciliation takes 2 small RPCs, for this node's record and the partitions. Each job on the node
takes 3 more, and each change (a drain, a resume, a comment on a job, a requeue) takes 1. A drain and a resume each take
2 more, to identify the slurmctld that answers (BUILD_INFO, PING), and a drain is read once more after 15 s. The node's
own slurmstepds report its jobs, without slurmctld and slurmd, and the prolog's files contain the jobs' GPUs. Without
those files, reading the GPUs takes 3 RPCs for each run of a job. One of these RPCs reads the table of all nodes, as do
the fleet counts before and after a new drain (fleet_limit.py) and before and after a claim (repair_claim.py). In an
NVLink domain of several nodes, each fleet count reads this table twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from healthd.agent.conditions.condition import fault_time
from healthd.agent.slurm import flapping, fleet_limit, repair_claim
from healthd.agent.slurm.affected_jobs import (
    FaultReach,
    JobGpus,
    describe_gpus,
    fault_reach,
    is_certain_hit,
    is_hit,
    requeuing,
    undecided_until,
)
from healthd.agent.slurm.node_gpus import UNKNOWN_GPUS, NodeGpus
from healthd.agent.slurm.policy import (
    UNKNOWN_CONTROLLER,
    Owner,
    Policy,
    after_drain_ended,
    after_reading,
    after_refusal,
    after_restored_drain,
    decide,
    describe,
    drain_owner,
    is_certainly_lost,
    is_drain_gone,
    is_lost_by_slurmctld,
    is_resume_in_flight,
    mark_prolog_drain,
    mark_saved,
    next_read_at,
    own_reason,
    restored_drain,
    unreachable,
    unsaved_controller,
)
from healthd.common.errors import HealthdError
from healthd.common.model import (
    Condition,
    Decision,
    Drain,
    DrainRecord,
    FleetHold,
    Leave,
    NodeState,
    PartitionCount,
    Requeue,
    Resume,
    SentRequeue,
    UnaffectedJob,
    UnsavedChange,
    Verdict,
)
from healthd.common.slurm import commands
from healthd.common.slurm.admin_comment import admin_comment
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.drain_reason import parse_claim, parse_reason, reason, with_claim
from healthd.common.slurm.gres import GRES_CONF_BYTES, AllocatedGpus, lists_gpus_in_order, parse_job_gpus
from healthd.common.slurm.node_states import DRAINED_STATES, NOT_RESUMABLE, UNSETTLED
from healthd.common.slurm.output import (
    Job,
    SlurmError,
    describe_failure,
    describe_unread,
    has_no_steps,
    is_invalid_state,
    is_not_sent,
    is_refused,
    is_slurmctld_unreachable,
    is_unknown_job,
    parse_boot_time,
    parse_claims,
    parse_cluster_size,
    parse_controller,
    parse_domain_drains,
    parse_fleet,
    parse_in_service,
    parse_job,
    parse_listpids,
    parse_node,
    parse_node_names,
    parse_processes,
    parse_slurmctld_start,
    parse_whole_reason,
    require_partitions,
)
from healthd.common.text import is_decimal
from healthd.common.values import Value

NOT_READ = Leave("the node's state in Slurm is unknown")
REQUEUED_KEPT_SECONDS = 7 * 86400.0
TRIES = 3
# Munge accepts no larger clock skew between this node and slurmctld. An earlier boot is older than that.
MAX_CLOCK_SKEW_SECONDS = 300.0
HELD_REASON = "it reached slurm.max_restarts; run scontrol release to start it again"


class SaveRecord(Value, frozen=True):
    """A request to save the record in the ledger before the generator continues."""

    record: DrainRecord


class AdoptedDrain(Value, frozen=True):
    """A drain with healthd's Reason that is not in the ledger. It becomes a condition, and healthd never lifts it."""

    code: str
    subject: str
    reason: str


class ReconcileReport(Value, frozen=True):
    """Result of a reconciliation.

    record        the record to save; with `acknowledged`, in one transaction with the acknowledgement
    settled       True if nothing is left to do now. Otherwise reconcile again, with backoff
    next_read_at  next reconciliation for a drain that waits for the fleet limit or has ended, or for a fault that may
                  still requeue jobs, in epoch seconds; 0 if none is scheduled
    problem       a problem with Slurm (never with the node) as one sentence, or ""
    acknowledged  True if an operator resumed the node, and thereby accepted the causes that were open at
                  `acknowledged_before` (when the drain was last read). This reconciliation's verdict is then out of
                  date
    resumed       True if a resume by healthd ended the drain
    resumed_reason  the node's Reason before that resume, or ""
    requeued      jobs that this reconciliation requeued; those in `held_jobs` wait for `scontrol release`
    not_requeued  running jobs that should be requeued, but are not, as (job, why)
    """

    record: DrainRecord
    node: NodeState | None = None
    owner: Owner = Owner.NONE
    decision: Decision = NOT_READ
    settled: bool = False
    next_read_at: float = 0.0
    problem: str = ""
    acknowledged: bool = False
    acknowledged_before: float = 0.0
    adopted: AdoptedDrain | None = None
    resumed: bool = False
    resumed_reason: str = ""
    requeued: tuple[str, ...] = ()
    held_jobs: tuple[str, ...] = ()
    not_requeued: tuple[tuple[str, str], ...] = ()


T = TypeVar("T")
Step = Command | SaveRecord
Steps = Generator[Step, CommandResult | None, T]


def reconcile(
    verdict: Verdict,
    record: DrainRecord,
    policy: Policy,
    node_name: str,
    boot_id: str,
    now: Callable[[], float],
    gpus: NodeGpus = UNKNOWN_GPUS,
    refusals: Callable[[], tuple[float, ...]] = tuple,
) -> Steps[ReconcileReport]:
    """Reconcile the node once. The caller sends a CommandResult for a Command, and None for a SaveRecord.

    `refusals` returns the times at which this node's prolog refused jobs because of healthd's verdict (epoch seconds).
    """
    reconciliation = _Reconciliation(policy, node_name, boot_id, now, record, gpus, refusals)
    reconciliation.decision = decide(verdict, None, record, policy, now())
    try:
        if policy.was_allocated:
            yield from reconciliation.refresh_allocation()
        yield from reconciliation.read_node()
        for _ in range(TRIES):
            if report := (yield from reconciliation.apply_reading()):
                return report
            with suppress(Overtaken):
                yield from reconciliation.act(verdict)
                return reconciliation.report(verdict, problem=reconciliation.count_problem)
        raise SlurmError("another user or tool changed the node each time healthd was about to change it")
    except SlurmError as error:
        reconciliation.note_missing_count(verdict)
        return reconciliation.report(verdict, problem=str(error))


class Overtaken(HealthdError):
    """Raised if another user or tool changed the node in the meantime. The node was read again and needs a new
    decision.
    """


class _Reconciliation:
    """State of one reconciliation: its inputs and its results so far."""

    def __init__(
        self,
        policy: Policy,
        node_name: str,
        boot_id: str,
        now: Callable[[], float],
        record: DrainRecord,
        gpus: NodeGpus,
        refusals: Callable[[], tuple[float, ...]],
    ) -> None:
        self.policy = policy
        self.node_name = node_name
        self.boot_id = boot_id
        self.now = now
        self.record = record
        self.gpus = gpus
        self.refusals = refusals
        self.node: NodeState | None = None
        self.is_fresh = False  # no command has run since the node was read
        self.decision: Decision = NOT_READ
        self.requeued: list[str] = []
        self.held_jobs: list[str] = []
        self.refused_change = ""  # a change that slurmctld refused; other changes continue
        self.not_requeued: list[tuple[str, str]] = []
        self.hit_jobs: set[str] = set()  # jobs to requeue
        self.gres_conf: str | None = None  # not read yet
        self.controller: str | None = None  # not read yet
        self.resumed = False
        self.resumed_reason = ""
        self.full_count: list[PartitionCount] = []  # the last count of this reconciliation
        self.count_problem = ""  # why the fleet cannot be counted
        self.has_pending_jobs = False  # a requeue is due, but was not sent or is not visible yet

    def report(self, verdict: Verdict, problem: str = "") -> ReconcileReport:
        node, owner = self.node, drain_owner(self.node, self.record) if self.node else Owner.NONE
        problem = problem or (describe_unread(node.unread_rows) if node else "")
        is_involved = bool(verdict.causes or self.record.reason or self.record.prolog_drain_time)
        is_stable = node is not None and node.flags.isdisjoint(UNSETTLED)
        hold = None if problem else self.record.hold
        may_be_drained = is_involved or bool(
            self.record.pending_reason
        )  # excludes a refused drain that is no longer desired
        is_waiting = hold is not None or (self.record.awaits_count and may_be_drained)
        settled = not problem and not self.has_pending_jobs and not is_waiting and (is_stable or not is_involved)
        code = parse_reason(node.reason) if node and owner is Owner.UNRECORDED_HEALTHD else None
        # a component of a heterogeneous job is requeued with all others
        not_requeued = tuple(dict.fromkeys((job, why) for job, why in self.not_requeued if job not in self.hit_jobs))
        return ReconcileReport(
            record=self.record,
            node=node,
            owner=owner,
            decision=replace(self.decision, not_requeued=not_requeued)
            if isinstance(self.decision, Drain)
            else self.decision,
            settled=settled,
            next_read_at=hold.until if hold else self.next_read_at(verdict) if settled else 0.0,
            problem=problem,
            adopted=AdoptedDrain(*code, node.reason) if node and code else None,
            resumed=self.resumed,
            resumed_reason=self.resumed_reason,
            requeued=tuple(self.requeued),
            held_jobs=tuple(self.held_jobs),
            not_requeued=not_requeued,
        )

    def apply_reading(self) -> Steps[ReconcileReport | None]:
        """Compare the node's new state with the record. Return a report if an operator resumed the node."""
        assert self.node is not None
        self.record = record = after_refusal(self.record, self.node)
        now = self.now
        if is_drain_gone(self.node, record):
            lost = is_certainly_lost(self.node, record, self.boot_id, self.policy, now())
            lost = lost or (yield from self.was_lost_by_slurmctld(record.confirmed_at, unsaved_controller(record)))
            ended_at = now()
            self.record = after_drain_ended(record, self.node, ended_at)
            if is_resume_in_flight(record, self.policy, ended_at):
                self.record = flapping.after_resume(self.record, record, ended_at)
                self.resumed = True
            if not lost:
                decision = Leave("an operator resumed the node")
                return ReconcileReport(
                    flapping.reset_count(self.record),
                    self.node,
                    decision=decision,
                    acknowledged=True,
                    acknowledged_before=record.confirmed_at,
                )
            self.record = replace(self.record, hold=fleet_limit.no_wait(now()))
        elif (old := restored_drain(self.node, record)) and (
            yield from self.was_lost_by_slurmctld(old.ended_at, old.controller)
        ):
            self.record = after_restored_drain(record, old, now())
        self.record = mark_saved(after_reading(self.record, self.node, self.boot_id, now()), now())
        return None

    def act(self, verdict: Verdict) -> Steps[None]:
        """Make the decision and carry it out. Raises Overtaken."""
        self.record = flapping.after_reading(self.record, verdict, self.now())
        if self.policy.claim is None:
            self.record = replace(self.record, claim_hold=None)
        desired = decide(verdict, self.node, self.record, self.policy, self.now())
        if self.adds_claim(desired) and (problem := (yield from self.claim_problem())):
            self.hold_claim(problem)
            desired = decide(verdict, self.node, self.record, self.policy, self.now())
        unchanged = self.record
        if isinstance(desired, Resume) and not (yield from self.has_registered()):
            desired = Leave("repaired, but slurmd has not registered since the boot")
        self.decision = yield from self.within_limit(desired, verdict)
        if not isinstance(self.decision, Drain) or not self.decision.requeue:
            self.record = replace(self.record, unaffected_jobs=())
        if isinstance(self.decision, Drain):
            yield from self.drain(self.decision, unchanged)
            self.decision = yield from self.recount(self.decision, verdict)
        if isinstance(self.decision, Drain):
            if self.record.awaits_count:  # no requeue before a count
                self.decision = replace(self.decision, requeue=False)
            if self.decision.requeue:
                yield from self.requeue(verdict)
            yield from self.confirm_claim(verdict)
        elif isinstance(self.decision, Resume):
            try:
                yield from self.resume()
            finally:  # record the resume even if others changed the node right afterwards
                self.record = flapping.after_resume(self.record, unchanged, self.now())
        elif isinstance(self.decision, Leave):
            yield from self.confirm_claim(verdict)
        else:
            unreachable(self.decision)

    def next_read_at(self, verdict: Verdict) -> float:
        """Return the time to reconcile again even though nothing is left to do (epoch seconds), or 0."""
        now = self.now()
        moments = (
            next_read_at(self.record),
            flapping.waits_until(self.record, self.policy.flapping, now),
            undecided_until(verdict.causes, self.policy.rack_gpus, now),
        )
        return min((moment for moment in moments if moment), default=0.0)

    # commands

    def run(self, argv: Argv, changes: bool = False, in_pause: bool = False) -> Steps[CommandResult]:
        self.is_fresh = False
        result = yield Command(argv, self.policy.command_timeout_seconds, changes, in_pause)
        assert result is not None, "a Command is answered with a CommandResult"
        return result

    def read(self, argv: Argv) -> Steps[CommandResult]:
        result = yield from self.run(argv)
        if result.status != 0:
            raise SlurmError(describe_failure(argv, result))
        return result

    def read_node(self) -> Steps[NodeState]:
        table = yield from self.read(commands.node(self.node_name))
        self.node = mark_prolog_drain(parse_node(table.stdout, self.node_name), self.refusals(), self.record)
        self.is_fresh = True
        return self.node

    def refresh_allocation(self) -> Steps[None]:
        """Make slurmctld compute the node's allocation again.

        sinfo of Slurm 24.11 may show the allocation of a job that has ended until any client runs `scontrol show node`,
        for minutes on a cluster without other changes (tests/e2e/test_repair_reboot.py).
        """
        with suppress(SlurmError):  # sinfo comes next, and reports the problem
            yield from self.read(commands.node_record(self.node_name))

    def was_lost_by_slurmctld(self, since: float, controller: str) -> Steps[bool]:
        text = (yield from self.read(commands.config())).text
        self.controller = parse_controller(text)
        return is_lost_by_slurmctld(since, parse_slurmctld_start(text), controller, self.controller)

    def read_controller(self) -> Steps[str]:
        """Return the identity of the slurmctld that answers, or UNKNOWN_CONTROLLER if it cannot be determined. Slurm is
        queried at most once.
        """
        if self.controller is None:
            self.controller = UNKNOWN_CONTROLLER
            with suppress(SlurmError):
                self.controller = parse_controller((yield from self.read(commands.config())).text)
        return self.controller

    def has_registered(self) -> Steps[bool]:
        """Return True if slurmd has registered since a boot by healthd's step, or if there was none.

        At the registration, slurmctld detects the boot. With ReturnToService 0 or 1, it then sets a node DOWN that is
        not drained, so a resume before the registration would not last.
        """
        claim, booted_at = self.policy.claim, self.policy.booted_at
        if claim is None or not claim.is_booted or not booted_at:
            return True
        text = (yield from self.read(commands.node_record(self.node_name))).text
        return parse_boot_time(text) >= booted_at - MAX_CLOCK_SKEW_SECONDS

    # the fleet

    def within_limit(self, desired: Decision, verdict: Verdict) -> Steps[Decision]:
        """Return `desired`, or Leave if it is a new drain that the fleet limit does not allow now."""
        assert self.node is not None
        if not isinstance(desired, Drain) or drain_owner(self.node, self.record) is not Owner.NONE:
            self.record = replace(self.record, hold=None)
            if not (self.record.awaits_count and isinstance(desired, Drain)):
                self.record = fleet_limit.after_count(self.record)
            return desired
        self.decision = Leave("the drained nodes in the fleet have not been counted yet", would=describe(desired))
        own_hardware, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        hold, now = self.record.hold, self.now()
        if hold is None and not own_hardware:
            hold = fleet_limit.first_wait(self.node_name, (yield from self.cluster_size()), limits, now)
        elif hold is not None and not own_hardware and fleet_limit.is_late(hold, now):
            hold = fleet_limit.spread_again(hold, self.node_name, limits, now)
        if hold is not None and fleet_limit.must_wait(hold, own_hardware, now):
            return self.delay(hold, desired)
        self.record = replace(self.record, hold=hold)  # even if the count fails now, because the wait is over
        counts: Sequence[PartitionCount] | None = yield from self.count(own_hardware)
        if counts is None:
            counts = fleet_limit.recent_count(self.record, self.node.partitions, self.policy.domain, self.now())
        if not counts:
            record, time = self.record, self.now()
            if not fleet_limit.is_uncounted_drain_due(verdict.causes, record, self.node_name, limits, time):
                why = fleet_limit.describe_uncounted(self.record, verdict.causes, self.node_name, limits)
                return Leave(why, would=describe(desired))
        elif not fleet_limit.has_room(
            tightest := fleet_limit.tightest(counts, limits, own_hardware), limits, own_hardware
        ):
            self.store_count()
            return self.delay(
                fleet_limit.backoff(hold, tightest, limits, own_hardware, self.node_name, self.now()), desired
            )
        self.record = replace(self.record, awaits_count=True)
        return desired

    def store_count(self) -> None:
        """Store this count, including all drains, so that it can replace a later count that fails."""
        if not self.count_problem:
            self.record = replace(self.record, stored_count=fleet_limit.fleet_count(self.full_count, self.now()))

    def recount(self, decision: Drain, verdict: Verdict) -> Steps[Decision]:
        """Count again, now that other nodes see our drain. Lift the drain if other nodes used up the limit at the same
        moment.
        """
        assert self.node is not None
        is_healthds = drain_owner(self.node, self.record) is Owner.HEALTHD
        if not self.record.awaits_count or not (is_healthds or self.record.count_failing_since):
            self.record = replace(self.record, awaits_count=False)
            return decision
        own_hardware, limits = fleet_limit.is_own_hardware(verdict.causes), self.policy.fleet
        counts = yield from self.count(own_hardware, until=self.node.reason_time)
        if counts is None:
            return decision  # the next reconciliation will count
        self.store_count()
        count = fleet_limit.tightest(counts, limits, own_hardware)
        if not is_healthds:  # an operator took over a drain that was set without a count: requeue only within the limit
            self.record = replace(self.record, awaits_count=fleet_limit.is_exceeded(count, limits, own_hardware))
            return decision
        if not fleet_limit.is_exceeded(count, limits, own_hardware) or not self.node.flags.isdisjoint(NOT_RESUMABLE):
            self.record = replace(self.record, awaits_count=False, hold=None)
            return decision
        without_this_node = replace(count, drained=count.drained - 1)
        hold = fleet_limit.backoff(
            self.record.hold, without_this_node, limits, own_hardware, self.node_name, self.now()
        )
        yield from self.resume()
        return self.delay(hold, decision)

    def delay(self, hold: FleetHold, desired: Drain) -> Leave:
        self.record = replace(self.record, hold=hold)
        return Leave(fleet_limit.describe(hold), would=describe(desired))

    def count(self, own_hardware: bool, until: float = float("inf")) -> Steps[list[PartitionCount] | None]:
        """Count the nodes in this node's partitions, and healthd's drains up to `until` there and in its NVLink domain.

        Returns None, with the reason in `count_problem`, if the nodes cannot be counted. For a shared cause, which
        waits for a count, raises SlurmError instead.
        """
        assert self.node is not None
        try:
            table = yield from self.read(commands.fleet())
            partitions = require_partitions(self.node)
            counts = parse_fleet(table.stdout, partitions, until)
            full_count = parse_fleet(table.stdout, partitions, float("inf"))
            if domain := self.policy.domain:
                drains = (yield from self.read(commands.claims())).stdout
                counts.append(parse_domain_drains(drains, domain, until))
                full_count.append(parse_domain_drains(drains, domain, float("inf")))
            self.full_count = full_count
        except SlurmError as error:
            self.record = fleet_limit.after_failed_count(self.record, self.now())
            self.count_problem = f"the nodes that healthd keeps drained cannot be counted: {error}"
            if not own_hardware:
                raise SlurmError(self.count_problem) from None
            return None
        self.count_problem = ""
        self.record = fleet_limit.after_count(self.record)
        return counts

    def note_missing_count(self, verdict: Verdict) -> None:
        """If a drain is desired, treat a failure before the fleet was counted as a failed count."""
        if fleet_limit.needs_count(verdict.causes, self.record) and self.now() >= self.policy.paused_until:
            self.record = fleet_limit.after_failed_count(self.record, self.now())

    def cluster_size(self) -> Steps[int]:
        """Return the number of nodes in the largest partition, without reading any node's record."""
        return parse_cluster_size((yield from self.read(commands.all_partitions())).text)

    # the claim of a repair

    def adds_claim(self, desired: Decision) -> bool:
        """Return True if the decision adds a claim to the Reason that must be counted first."""
        assert self.node is not None
        step = parse_claim(desired.reason) if isinstance(desired, Drain) else None
        is_standing = step is parse_claim(self.node.reason) or step is self.record.claim
        return repair_claim.is_counted(step) and not is_standing

    def claim_problem(self) -> Steps[str]:
        """Return why this node must not claim a repair now, or ""."""
        assert self.node is not None
        try:
            if problem := (yield from self.count_claims(0.0)):
                return problem
            table = yield from self.read(commands.fleet())
            return repair_claim.service_problem(parse_in_service(table.stdout, require_partitions(self.node)))
        except SlurmError as error:
            return f"the repairs in the cluster cannot be counted: {error}"

    def count_claims(self, claimed_at: float) -> Steps[str]:
        """Return why the claims of other nodes leave no room for a claim of this time, or "". 0 counts all claims."""
        assert self.policy.claim is not None
        max_concurrent = self.policy.claim.max_concurrent
        claims = parse_claims((yield from self.read(commands.claims())).stdout)
        others = repair_claim.earlier_claims(claims, self.node_name, claimed_at)
        nodes = 0
        if others and repair_claim.needs_cluster_size(max_concurrent):
            nodes = len(parse_node_names((yield from self.read(commands.node_names())).stdout))
        return repair_claim.count_problem(others, repair_claim.limit_for(max_concurrent, nodes))

    def confirm_claim(self, verdict: Verdict) -> Steps[None]:
        """Count again, now that other nodes see the claim. Remove the claim if there are too many."""
        assert self.node is not None
        claim, record = self.policy.claim, self.record
        is_own = drain_owner(self.node, record) is Owner.HEALTHD and self.now() >= self.policy.paused_until
        if claim is None or not is_own or parse_claim(self.node.reason) is not claim.step:
            return
        if record.claim is claim.step or record.awaits_count:
            return
        if repair_claim.is_counted(claim.step):
            try:
                problem = yield from self.count_claims(self.node.reason_time)
            except SlurmError as error:
                problem = f"the repairs in the cluster cannot be counted: {error}"
            if problem:
                self.hold_claim(problem)
                self.decision = decide(verdict, self.node, self.record, self.policy, self.now())
                if isinstance(self.decision, Drain):
                    yield from self.drain(self.decision, self.record)
                return
        self.record = replace(self.record, claim=claim.step, claim_hold=None)

    def hold_claim(self, problem: str) -> None:
        hold = repair_claim.backoff(self.record.claim_hold, problem, self.node_name, self.now())
        self.record = replace(self.record, claim=None, claim_hold=hold)

    # drain and resume

    def drain(self, desired: Drain, unchanged: DrainRecord) -> Steps[None]:
        """Drain the node, and confirm the drain by reading the node again. If the node already has our Reason, send
        nothing.

        `unchanged` is the record to keep if nothing was sent.
        """
        assert self.node is not None
        owner, removes_claim = drain_owner(self.node, self.record), desired.reason == with_claim(self.node.reason, None)
        if owner is not Owner.NONE and self.node.reason == desired.reason:
            return
        in_pause = owner is Owner.HEALTHD and removes_claim
        unsaved_change = UnsavedChange(self.now(), (yield from self.read_controller()))
        self.record = replace(
            self.record, pending_reason=desired.reason, pending_since=self.now(), unsaved_change=unsaved_change
        )
        yield SaveRecord(self.record)
        yield from self.read_again(unchanged)
        argv = commands.drain(self.node_name, desired.reason)
        owner = yield from self.read_back(argv, (yield from self.run(argv, changes=True, in_pause=in_pause)))
        if owner is Owner.NONE:
            raise SlurmError("scontrol reported a successful drain, but Slurm does not show the node drained")
        if owner is not Owner.HEALTHD:
            awaits_count = self.record.awaits_count and self.record.count_failing_since > 0
            self.record = replace(
                self.record, pending_reason="", pending_since=0.0, awaits_count=awaits_count, unsaved_change=None
            )
            raise Overtaken

    def resume(self) -> Steps[None]:
        assert self.node is not None
        is_down = "DOWN" in self.node.flags  # decide() resumes such a node only if healthd's own step rebooted it
        argv = (commands.resume if is_down else commands.undrain)(self.node_name)
        previous, unchanged = self.node, self.record
        unsaved_change = UnsavedChange(self.now(), (yield from self.read_controller()))
        self.record = replace(unchanged, resume_sent_at=self.now(), unsaved_change=unsaved_change)
        yield SaveRecord(self.record)
        # The daemon publishes the verdict file between two commands. Read the node again in any case, so that the
        # prolog no longer refuses jobs when Slurm may start one.
        self.is_fresh = False
        yield from self.read_again(unchanged)
        result = yield from self.run(argv, changes=True)
        if is_refused(result):
            self.record = unchanged
        if is_invalid_state(result):
            owner = yield from self.read_owner()
        else:
            owner = yield from self.read_back(argv, result)
        if owner is Owner.HEALTHD:
            if result.status != 0:
                self.record = unchanged
                raise SlurmError(describe_failure(argv, result))
            raise SlurmError("scontrol reported a successful resume, but Slurm still shows the node drained")
        self.record = replace(self.record, resume_sent_at=0.0)
        if owner is not Owner.NONE:
            raise Overtaken
        foreign_reason = (
            "" if own_reason(self.node, self.record) or self.node.reason == previous.reason else self.node.reason
        )
        self.record = after_drain_ended(self.record, previous, self.now())
        self.resumed, self.resumed_reason = True, previous.reason
        if foreign_reason:  # from 24.11 on, a resume keeps the Reason, even one that was set after our last reading
            argv = commands.drain(self.node_name, (yield from self.exact_reason(foreign_reason)))
            yield from self.read_back(argv, (yield from self.run(argv, changes=True)))
            raise Overtaken

    def exact_reason(self, displayed: str) -> Steps[str]:
        """Return the node's exact Reason in bytes, so that it can be written back, or `displayed` if it cannot be
        read.
        """
        with suppress(SlurmError):
            table = yield from self.read(commands.whole_reason(self.node_name))
            return parse_whole_reason(table.stdout) or displayed
        return displayed

    def read_again(self, unchanged: DrainRecord) -> Steps[None]:
        """Read the node once more right before a change, if another command ran since the last reading.

        The last writer wins, and Slurm keeps no trace of an overwritten Reason. `unchanged` is the record to keep if
        the change is not sent.
        """
        assert self.node is not None
        previous = self.node
        if not self.is_fresh and _drain_state((yield from self.read_node())) != _drain_state(previous):
            self.record = unchanged
            raise Overtaken

    def read_back(self, argv: Argv, result: CommandResult) -> Steps[Owner]:
        """Read the node after a change and return the owner of its drain."""
        if result.status != 0:
            raise SlurmError(describe_failure(argv, result))
        return (yield from self.read_owner())

    def read_owner(self) -> Steps[Owner]:
        """Read the node and return the owner of its drain."""
        node = yield from self.read_node()
        self.record = after_reading(self.record, node, self.boot_id, self.now())
        return drain_owner(node, self.record)

    # requeue

    def requeue(self, verdict: Verdict) -> Steps[None]:
        """Requeue the batch jobs that were already running here when a fault hit them.

        Call this only after reading the node as drained. A job that is requeued before the drain may return to the same
        node.
        """
        argv = commands.listpids(self.node_name)
        result = yield from self.run(argv)
        if result.status != 0 and not has_no_steps(result):
            if result.stdout.count(b"\n") < 2:  # scontrol printed only the table's header
                raise SlurmError(describe_failure(argv, result))
            # A slurmstepd has died or is ending. 22.05 then fails, but prints the other slurmstepds' jobs.
            self.refused_change, self.has_pending_jobs = describe_failure(argv, result), True
        by_part = self.policy.requeue is Requeue.PART
        opened_by = self.gpus.opened_by(parse_processes(result.text) if by_part else {})
        unaffected = {run.id: run for run in self.record.unaffected_jobs} if by_part else {}
        self.record = replace(self.record, unaffected_jobs=())
        for job_id in parse_listpids(result.text):
            previous = unaffected.get(job_id)
            if previous:
                yield from self.read_gres_conf(previous.allocated_gpus)
            if previous and not self.faults_hitting(previous, opened_by(job_id), verdict):
                self.keep_running(previous)
                continue
            job = yield from self.read_job(job_id)
            if job is None or not _is_running(job):
                continue
            if not any(_was_running_during(job.start, cause, verdict) for cause in self.requeuing(verdict)):
                self.not_requeued.append((job.name, "started after the fault"))
                continue
            faults = (
                (yield from self.find_faults(job, previous, opened_by(job_id), verdict))
                if by_part
                else self.requeuing(verdict)
            )
            if not faults:
                continue
            yield from self.comment(job, faults, verdict)
            if why := not_requeued_reason(job):
                self.not_requeued.append((job.name, why))
            else:
                self.hit_jobs.add(job.name)
                yield from self.requeue_job(job)
        if self.refused_change:
            raise SlurmError(self.refused_change)

    def requeuing(self, verdict: Verdict) -> list[Condition]:
        return requeuing(verdict.causes, self.policy.rack_gpus, self.now())

    def find_faults(
        self, job: Job, previous: UnaffectedJob | None, opened: JobGpus, verdict: Verdict
    ) -> Steps[list[Condition]]:
        """Return the faults that hit a job. Slurm is queried for the job's GPUs only if the result depends on them.

        `previous` is the record of a run that earlier faults did not hit.
        """
        timely = [cause for cause in self.requeuing(verdict) if _was_running_during(job.start, cause, verdict)]
        if certain := [cause for cause in timely if self.is_certain(cause, job.id, opened)]:
            return certain
        allocated = self.gpus.allocation(job.id, job.start)
        if allocated is None and previous and previous.start == job.start:
            allocated = previous.allocated_gpus
        if allocated is None:
            allocated = yield from self.query_allocation(job.id)
        if allocated is None:
            assert self.node is not None
            if self.node.gpu_count is None:
                self.not_requeued.append((job.name, "its GPUs and the node's number of GPUs in Slurm are unknown"))
                return []
            return timely
        yield from self.read_gres_conf(allocated)
        run = UnaffectedJob(job.id, job.name, job.start, allocated, "")
        if not (faults := self.faults_hitting(run, opened, verdict)):
            self.keep_running(replace(run, why=self.unaffected_reason(self.with_allocation(opened, allocated))))
        return faults

    def faults_hitting(self, run: UnaffectedJob, opened: JobGpus, verdict: Verdict) -> list[Condition]:
        """Return the faults that hit a run of a job whose GPUs are known."""
        assert self.node is not None
        job_gpus = self.with_allocation(opened, run.allocated_gpus)
        return [
            cause
            for cause in self.requeuing(verdict)
            if _was_running_during(run.start, cause, verdict)
            and (self.is_certain(cause, run.id, opened) or is_hit(self.reach(cause), job_gpus, self.node.gpu_count))
        ]

    def is_certain(self, cause: Condition, job_id: str, opened: JobGpus) -> bool:
        """Return True if the fault hits the job, regardless of its allocation."""
        assert self.node is not None
        return job_id in cause.job.split(",") or is_certain_hit(self.reach(cause), opened, self.node.gpu_count)

    def with_allocation(self, opened: JobGpus, allocated: AllocatedGpus) -> JobGpus:
        assert self.node is not None
        is_ascending = partial(lists_gpus_in_order, self.gres_conf or "", self.node_name)
        return self.gpus.with_allocation(opened, allocated, self.node.single_type_gpu_count, is_ascending)

    def reach(self, cause: Condition) -> FaultReach:
        return fault_reach(cause, self.gpus.all_gpus, self.gpus.inventory.devices)

    def unaffected_reason(self, job_gpus: JobGpus) -> str:
        assert self.node is not None
        if self.node.gpu_count is None and job_gpus.has_allocation and job_gpus.allocated is None:
            return "its GPUs are unknown: the node's number of GPUs in Slurm could not be read"
        return describe_gpus(job_gpus)

    def keep_running(self, run: UnaffectedJob) -> None:
        self.not_requeued.append((run.name, run.why))
        self.record = replace(self.record, unaffected_jobs=(*self.record.unaffected_jobs, run))

    def query_allocation(self, job_id: str) -> Steps[AllocatedGpus | None]:
        """Return the GPUs of this node that Slurm allocated to the job, or None if Slurm does not show them."""
        argv = commands.job_gres(job_id)
        result = yield from self.run(argv)
        if is_slurmctld_unreachable(result):
            raise SlurmError(describe_failure(argv, result))
        return parse_job_gpus(result.text, job_id, self.node_name) if result.status == 0 else None

    def read_gres_conf(self, allocated: AllocatedGpus) -> Steps[None]:
        """Read gres.conf, at most once, if Slurm refers to GPUs by number. An unreadable file is treated as empty."""
        if self.gres_conf is None and any(map(is_decimal, allocated)):
            result = yield from self.run(commands.gres_conf(GRES_CONF_BYTES))
            self.gres_conf = result.text if result.status == 0 else ""

    def comment(self, job: Job, faults: list[Condition], verdict: Verdict) -> Steps[None]:
        """Write the fault into the AdminComment before the requeue ends this run. Errors are ignored."""
        if not self.policy.admin_comment or job.comment is None:
            return
        when = max(map(fault_time, faults)) or verdict.fault_time
        text = admin_comment(job.comment, self.node_name, reason(faults), when, job.start)
        if text != job.comment:
            yield from self.run(commands.comment(job.name, text), changes=True)

    def requeue_job(self, job: Job) -> Steps[None]:
        """Requeue a job's run once.

        Repeat the requeue only if the job is still in that run when the earlier requeue has expired.
        """
        previous = next((r for r in self.record.sent_requeues if (r.job, r.restarts) == (job.name, job.restarts)), None)
        if previous and self.now() < previous.time + self.policy.requeue_retry_seconds:
            self.has_pending_jobs = True
            return
        other_requeues = tuple(
            r for r in self.record.sent_requeues if r is not previous and self.now() < r.time + REQUEUED_KEPT_SECONDS
        )
        intent = SentRequeue(job.name, job.restarts, self.now())
        self.record = replace(self.record, sent_requeues=(*other_requeues, intent))
        yield SaveRecord(self.record)
        hold = job.restarts >= self.policy.max_restarts
        argv = commands.requeue(job.name, hold)
        result = yield from self.run(argv, changes=True)
        if result.status != 0:
            if is_not_sent(result):
                self.record = replace(self.record, sent_requeues=other_requeues)
            if is_slurmctld_unreachable(result):
                raise SlurmError(describe_failure(argv, result))
            self.refused_change, self.has_pending_jobs = describe_failure(argv, result), True
            return
        after = yield from self.read_job(job.id)
        if after and _is_running(after) and after.restarts == job.restarts:
            self.has_pending_jobs = True  # scontrol also exits with 0 when it did nothing
        elif after and after.restarts > job.restarts:
            self.requeued.append(job.name)
            if hold:
                self.held_jobs.append(job.name)

    def read_job(self, job_id: str) -> Steps[Job | None]:
        """Return the job, or None if Slurm no longer has it."""
        argv = commands.job(job_id)
        result = yield from self.run(argv)
        if is_unknown_job(result):
            return None
        if result.status != 0:
            raise SlurmError(describe_failure(argv, result))
        return parse_job(result.stdout, job_id)


def _drain_state(node: NodeState) -> tuple[frozenset[str], str, float]:
    """Return the fields of a node that affect a drain or a resume."""
    return node.flags & (DRAINED_STATES | NOT_RESUMABLE), node.reason, node.reason_time


def _was_running_during(start: float, cause: Condition, verdict: Verdict) -> bool:
    """Return True if a run that began at `start` existed when the fault was last seen."""
    return start <= (fault_time(cause) or verdict.fault_time)


def _is_running(job: Job) -> bool:
    return job.state in ("RUNNING", "SUSPENDED")


def not_requeued_reason(job: Job) -> str:
    """Return the reason why a running job that the fault hit is not requeued, or "" if it can be."""
    if not job.batch:
        return "started by srun or salloc: only batch jobs can be requeued"
    if not job.requeue:
        return "submitted with --no-requeue"
    return ""
