"""The daemon's Slurm controller, which decides when to reconcile the node and applies operators' changes in Slurm.

A pure function makes the decision (agent/slurm/policy.py), and a generator of commands carries it out
(agent/slurm/reconcile.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from healthd.agent.conditions import absorb, endings
from healthd.agent.conditions.store import ConditionStore, write_log_lines
from healthd.agent.settings.config import Settings
from healthd.agent.slurm import action_log, fleet_limit, repair_claim
from healthd.agent.slurm.affected_jobs import rack_gpus, requeuing
from healthd.agent.slurm.driver import SlurmDriver, SlurmdStartDetector
from healthd.agent.slurm.flapping import Flapping, reset_count
from healthd.agent.slurm.policy import (
    Policy,
    decide,
    is_allocated,
    is_idle,
    is_resume_in_flight,
    jobs_blocked_since,
    needs_no_query,
)
from healthd.agent.slurm.prolog_files import read_node_gpus, refusal_times
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.common.model import (
    Condition,
    Decision,
    DrainRecord,
    Leave,
    Mode,
    NodeState,
    RepairClaim,
    SlurmStatus,
    Verdict,
)
from healthd.common.repair_plan import AttemptStage
from healthd.common.slurm.commands import Command, CommandResult
from healthd.common.slurm.drain_reason import domain_id, parse_claim
from healthd.host.wakeup import FOREVER


class SlurmController:
    """The Slurm controller. A reload replaces `settings`. `decision` is the last decision.

    `claim` is the repair that this node claims in Slurm. The daemon sets it.
    """

    def __init__(
        self,
        settings: Settings,
        store: ConditionStore,
        boot_id: str,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.decision: Decision = Leave("no check has run yet")
        self.claim: RepairClaim | None = None
        self._store = store
        self._boot_id = boot_id
        self._now = now
        self._monotonic = monotonic
        self._driver = SlurmDriver(
            settings, boot_id, self._save_record, self.may_change, now, monotonic, self._refusals, self._log_command
        )
        self._slurmd = SlurmdStartDetector(settings.root, monotonic)
        self._goal: object = None  # the last reconciliation's goal
        self._retry_at = FOREVER
        self._decision_inputs: object = None
        self._logged_jobs: set[tuple[str, str]] = set()  # jobs that are not requeued, and why; each is logged once
        self.requeued: tuple[str, ...] = ()  # jobs that this process requeued since healthd's current drain was set
        self._causes: tuple[Condition, ...] = ()  # causes of the last reconciliation
        self._initial_record = DrainRecord()  # the record when the last reconciliation started

    # --- waiting

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._driver.waits()

    @property
    def deadline(self) -> float:
        return min(self._driver.deadline, self._slurmd.deadline, self._retry_at)

    def close(self) -> None:
        """Stop, but do not interrupt a running scontrol. It finishes on its own, and the next start reads its
        result.
        """
        self._driver.abandon()

    # --- state

    @property
    def status(self) -> SlurmStatus:
        return self._driver.status

    @property
    def is_busy(self) -> bool:
        return self._driver.is_busy

    def may_change(self) -> bool:
        return self.settings.mode is not Mode.OBSERVE and self._store.ledger.pause is None

    @property
    def is_node_current(self) -> bool:
        """True if Slurm has shown this node's state since the last round. Older answers are ignored."""
        slurm = self.status
        return slurm.node is not None and self._now() - slurm.read_at <= 2 * self.settings.interval_seconds

    def is_drained_and_idle(self, verdict: Verdict) -> bool:
        """Return True if Slurm has shown this node drained and idle since the last round.

        Slurm is queried in each round only while a drain by healthd is desired or set. It is never queried in mode
        observe.
        """
        node = self.status.node
        if node is None or not self.is_node_current or self.settings.mode is Mode.OBSERVE:
            return False
        is_booted = self.claim is not None and self.claim.is_booted
        return not needs_no_query(verdict, self._store.ledger.slurm) and is_idle(node, is_booted)

    @property
    def jobs_blocked_since(self) -> float:
        """Time since which Slurm itself has kept jobs from this node (epoch seconds), or infinity if it does not."""
        return jobs_blocked_since(self.status.node, self._store.ledger.slurm, self._boot_id)

    @property
    def refusal_ends_at(self) -> float:
        """Time at which `must_refuse_jobs` may become False without other input (epoch seconds), or infinity."""
        since = self.jobs_blocked_since
        return since if since > self._now() else FOREVER

    def must_refuse_jobs(self, verdict: Verdict) -> bool:
        """Return True if the prolog must refuse jobs.

        This is the case if a drain is desired and Slurm does not yet keep jobs from the node, and during a repair.
        """
        if self.settings.mode is not Mode.OBSERVE and self._must_refuse_for_repair():
            return True
        if not verdict.causes or not self.may_change() or self._now() >= self.jobs_blocked_since:
            return False
        settings, record = self.settings, self._store.ledger.slurm
        name, limits, now = settings.node_name, settings.fleet, self._now()
        return not fleet_limit.is_withheld(verdict.causes, record, name, limits, now)

    def _must_refuse_for_repair(self) -> bool:
        """Return True if the prolog must refuse jobs because of the repair that this node claims.

        It refuses every job until the step has ended, even if an operator resumes the node meanwhile. After the step,
        it refuses jobs only until Slurm itself keeps them from the node. It refuses none from healthd's resume on:
        Slurm may start a job before healthd has read that the drain is gone.
        """
        ledger = self._store.ledger
        record, attempt = ledger.slurm, ledger.repair.attempt
        if not repair_claim.is_counted(record.claim) or is_resume_in_flight(record, self._policy(), self._now()):
            return False
        is_taken = attempt is None or attempt.stage is AttemptStage.VERIFY
        return not is_taken or self._now() < self.jobs_blocked_since

    def is_drain_undecided(self, verdict: Verdict) -> bool:
        """Return True if a drain is desired and Slurm has not answered yet."""
        slurm = self.status
        return bool(verdict.causes) and self.may_change() and bool(self.is_busy or not slurm.read_at or slurm.problem)

    # --- deciding

    def step(self) -> ReconcileReport | None:
        """Continue a running reconciliation. Return its report when it ends.

        Operators may have changed conditions through Slurm, so the verdict must be computed again after a report.
        """
        if self._is_inactive:
            return None
        if self._slurmd.step():
            self._driver.expect_registration()
            self._retry_at = self._monotonic()
        return self._apply_report(self._driver.step())

    def reconcile_if_due(self, verdict: Verdict, round_ended: bool) -> ReconcileReport | None:
        """Start a reconciliation if one is due. Return the report if it needed no command.

        Also call this right after a reconciliation, because no later event reports a change during the reconciliation.
        """
        if self._is_inactive:
            self._decide_without_slurm(verdict)
            return None
        if self._driver.is_busy or not self._is_due(verdict, round_ended):
            return None
        self._retry_at = FOREVER
        self._causes = verdict.causes
        ledger, settings = self._store.ledger, self.settings
        self._initial_record = ledger.slurm
        gpus = read_node_gpus(ledger.inventory, ledger.whole_gpus, settings.runtime_dir, settings.root)
        return self._apply_report(self._driver.start(verdict, ledger.slurm, self._policy(), gpus))

    @property
    def _is_inactive(self) -> bool:
        """True if Slurm is not queried, because of mode "observe".

        If the Reason still claims a repair, Slurm is queried in this mode too, until the claim is removed: other nodes
        count it.
        """
        record = self._store.ledger.slurm
        claims = map(parse_claim, (record.reason, record.pending_reason))
        return self.settings.mode is Mode.OBSERVE and not any(map(repair_claim.is_counted, claims))

    def _decide_without_slurm(self, verdict: Verdict) -> None:
        """Decide what healthd would do with an undrained node, without running a Slurm command."""
        self._driver.abandon()
        self._driver.step()
        self._retry_at, self._goal = FOREVER, None
        self._slurmd.watch(False)
        policy, now = self._policy(), self._now()
        inputs = (verdict, policy, requeuing(verdict.causes, policy.rack_gpus, now))
        if inputs != self._decision_inputs:
            self._decision_inputs = inputs
            idle_node = NodeState(self.settings.node_name, frozenset({"IDLE"}))
            self.decision = decide(verdict, idle_node, DrainRecord(), policy, now)

    def _policy(self) -> Policy:
        pause, slurm = self._store.ledger.pause, self.settings.slurm
        inventory = self._store.ledger.inventory
        return Policy(
            self.settings.mode,
            pause.until if pause else 0.0,
            slurm.command_timeout_seconds,
            slurm.requeue_retry_seconds,
            slurm.max_restarts,
            slurm.admin_comment,
            Flapping(slurm.own_faults_per_hour, slurm.shared_wait_seconds, slurm.shared_max_wait_seconds),
            self.settings.fleet,
            slurm.requeue,
            self.claim,
            self._now() - time.clock_gettime(time.CLOCK_BOOTTIME) if self.claim and self.claim.is_booted else 0.0,
            is_allocated(self.status.node),
            domain_id(inventory.domain),
            rack_gpus(inventory),
        )

    def _is_due(self, verdict: Verdict, round_ended: bool) -> bool:
        """Return True if a reconciliation is due.

        A reconciliation is due at startup, when the goal changes, and for a retry. While a drain is desired or set, it
        is also due in each round.
        """
        ledger = self._store.ledger
        is_involved = not needs_no_query(verdict, ledger.slurm)
        # Exclude the time of the last event, because a storm of events must not query Slurm repeatedly.
        causes = tuple((c.key, c.severity, c.critical_at, c.shared_cause) for c in verdict.causes)
        goal = (causes, is_involved and verdict.may_resume, ledger.pause, self.settings.mode, self.claim)
        is_retry_due = self._monotonic() >= self._retry_at
        own_hardware = fleet_limit.is_own_hardware(verdict.causes)
        is_waiting = fleet_limit.must_wait(ledger.slurm.hold, own_hardware, self._now())  # a hold has its own schedule
        if goal == self._goal and not is_retry_due and not (is_involved and round_ended and not is_waiting):
            return False
        self._goal = goal
        return True

    # --- results

    def _apply_report(self, report: ReconcileReport | None) -> ReconcileReport | None:
        """Save the changes that operators made in Slurm, in one transaction. Set the time of the next
        reconciliation."""
        if report is None:
            return None
        previous = self._store.ledger.slurm
        self._apply_operator_actions(report)
        self._store.stream.emit(
            action_log.report_events(previous.reason, report.resumed, report.acknowledged, report.requeued)
        )
        write_log_lines(action_log.hold_lines(previous.hold, report.record.hold, self._now()))
        write_log_lines(action_log.claim_lines(previous.claim_hold, report.record.claim_hold, self._now()))
        self._save_record(report.record)
        write_log_lines(action_log.report_lines(report, previous.reason, self._logged_jobs, self._context))
        is_drained = bool(report.record.reason)
        self.requeued = tuple(dict.fromkeys((*self.requeued, *report.requeued))) if is_drained else ()
        # after a problem, some jobs may not have been read
        self._logged_jobs = set(report.not_requeued) | (self._logged_jobs if report.problem else set())
        self._decision_inputs = None
        self.decision = report.decision
        next_claim_read = repair_claim.read_again_at(self.claim, report.record, self._now()) - self._now()
        retry = self._driver.retry_seconds(report)
        self._retry_at = self._monotonic() + (retry if report.problem else min(retry, next_claim_read))
        self._slurmd.watch(self._driver.awaits_slurmd(report))
        return report

    def _apply_operator_actions(self, report: ReconcileReport) -> None:
        store, now = self._store, self._now()
        conditions = previous = store.conditions
        if report.acknowledged:
            write_log_lines(action_log.operator_resume_line(self._context))
            conditions = endings.acknowledge_resumed(conditions, report.acknowledged_before, now)
            store.reset_growth(c for key, c in conditions.items() if c != previous.get(key))
        if report.adopted:
            conditions = absorb.adopted(conditions, report.adopted.code, report.adopted.subject, self._boot_id, now)
        store.set_conditions(conditions)

    def _refusals(self) -> tuple[float, ...]:
        return refusal_times(self.settings.runtime_dir)

    def _log_command(self, command: Command, result: CommandResult | None) -> None:
        """Emit the event for a command, before the command starts.

        The event is therefore saved even if the daemon is killed right after the command starts.
        """
        self._store.stream.emit(action_log.command_events(command.argv, result))
        if result is None:
            self._store.save()

    def _save_record(self, slurm: DrainRecord) -> None:
        """Save the record before the next command is sent, so that a daemon that is killed here can recognise its drain
        later.

        If an operator reported a repair during the reconciliation, the count of repeated drains stays reset.
        """
        recorded = self._store.ledger.slurm
        previous_reason = recorded.reason
        was_repaired = bool(self._initial_record.resumed_drains) and not recorded.resumed_drains
        self._store.change(slurm=reset_count(slurm) if was_repaired else slurm)
        self._store.save()
        write_log_lines(action_log.drain_lines(previous_reason, self._context))

    @property
    def _context(self) -> action_log.LineContext:
        return action_log.LineContext(self._causes, self._store.ledger)
