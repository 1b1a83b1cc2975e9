"""Slurm controller of the daemon: decides when to reconcile the node, and applies what operators did in Slurm.

The decision is pure (agent/slurm/policy.py); a generator of commands carries it out (agent/slurm/reconcile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from healthd.agent.conditions import absorb, endings
from healthd.agent.conditions.store import Memory, tell
from healthd.agent.settings.config import Settings
from healthd.agent.slurm import action_log, fleet_limit
from healthd.agent.slurm.driver import SlurmDriver, SlurmdStart
from healthd.agent.slurm.flapping import Flapping, answered_for
from healthd.agent.slurm.policy import Policy, decide, held_from, is_idle, is_quiet
from healthd.agent.slurm.prolog_files import of_this_node, refusal_times
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.common.model import (
    Condition,
    Decision,
    Leave,
    Mode,
    NodeState,
    SlurmMemory,
    SlurmStatus,
    Verdict,
)
from healthd.common.slurm.commands import Command, CommandResult
from healthd.host.wakeup import FOREVER


class Hand:
    """Slurm controller. `settings`: the current ones, replaced by a reload. `decision`: the last one."""

    def __init__(
        self,
        settings: Settings,
        memory: Memory,
        boot_id: str,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.decision: Decision = Leave("no check has run yet")
        self._memory = memory
        self._boot_id = boot_id
        self._now = now
        self._monotonic = monotonic
        self._driver = SlurmDriver(
            settings, boot_id, self._remember, self.may_change, now, monotonic, self._refusals, self._tell_command
        )
        self._slurmd = SlurmdStart(settings.root, monotonic)
        self._aim: object = None  # the goal of the last reconciliation
        self._again_at = FOREVER
        self._decided_on: object = None
        self._told: set[tuple[str, str]] = set()  # jobs that are not requeued, and why: logged once
        self.requeued: tuple[str, ...] = ()  # jobs that this process requeued since healthd's drain in force was set
        self._causes: tuple[Condition, ...] = ()  # causes of the last reconciliation
        self._began_with = SlurmMemory()  # the record at the start of the last reconciliation

    # --- waiting

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._driver.waits()

    @property
    def deadline(self) -> float:
        return min(self._driver.deadline, self._slurmd.deadline, self._again_at)

    def close(self) -> None:
        """Leave a running scontrol alone: it ends by itself, and the next start reads its result."""
        self._driver.drop()

    # --- state

    @property
    def status(self) -> SlurmStatus:
        return self._driver.status

    @property
    def is_busy(self) -> bool:
        return self._driver.busy

    def may_change(self) -> bool:
        return self.settings.mode is not Mode.OBSERVE and self._memory.ledger.pause is None

    def shows_drained(self, verdict: Verdict) -> bool:
        """Return True if Slurm has shown this node drained and idle since the last round. Older data may be outdated.

        Slurm is queried in each round only while healthd desires or has a drain, and never in mode observe.
        """
        slurm = self.status
        if slurm.node is None or self.settings.mode is Mode.OBSERVE:
            return False
        if self._now() - slurm.read_at > 2 * self.settings.interval_seconds:
            return False
        return not is_quiet(verdict, self._memory.ledger.slurm) and is_idle(slurm.node)

    @property
    def held_from(self) -> float:
        """Time since which Slurm itself keeps jobs from this node (epoch seconds; infinity: it does not)."""
        return held_from(self.status.node, self._memory.ledger.slurm, self._boot_id)

    def keeps_jobs_out(self, verdict: Verdict) -> bool:
        """Return True if the prolog must refuse jobs: a drain is desired, and Slurm does not yet keep jobs from the
        node.
        """
        if not verdict.causes or not self.may_change() or self._now() >= self.held_from:
            return False
        settings, memory = self.settings, self._memory.ledger.slurm
        name, limits, now = settings.node_name, settings.fleet, self._now()
        return not fleet_limit.is_withheld(verdict.causes, memory, name, limits, now)

    def must_be_waited_for(self, verdict: Verdict) -> bool:
        """Return True if a drain is desired and Slurm's answer is not known yet."""
        slurm = self.status
        return bool(verdict.causes) and self.may_change() and bool(self.is_busy or not slurm.read_at or slurm.problem)

    # --- deciding

    def step(self) -> ReconcileReport | None:
        """Continue a running reconciliation. Return its report when it ends.

        Operators may have changed conditions through Slurm, so the verdict must be computed again after a report.
        """
        if self.settings.mode is Mode.OBSERVE:
            return None
        if self._slurmd.step():
            self._driver.expect_registration()
            self._again_at = self._monotonic()
        return self._take(self._driver.step())

    def look(self, verdict: Verdict, round_ended: bool) -> ReconcileReport | None:
        """Start a reconciliation if one is due. Return the report if it needed no command.

        Called also right after a reconciliation has ended, because no later event signals a change during it.
        """
        if self.settings.mode is Mode.OBSERVE:
            self._only_say(verdict)
            return None
        if self._driver.busy or not self._must_look(verdict, round_ended):
            return None
        self._again_at = FOREVER
        self._causes = verdict.causes
        known, settings = self._memory.ledger, self.settings
        self._began_with = known.slurm
        gpus = of_this_node(known.inventory, known.whole_gpus, settings.runtime_dir, settings.root)
        return self._take(self._driver.begin(verdict, known.slurm, self._policy(), gpus))

    def _only_say(self, verdict: Verdict) -> None:
        """Decide what healthd would do to a node without a drain. Runs no Slurm command."""
        self._driver.drop()
        self._driver.step()
        self._again_at, self._aim = FOREVER, None
        self._slurmd.watch(False)
        rests_on = (verdict, self._policy())
        if rests_on != self._decided_on:
            self._decided_on = rests_on
            free = NodeState(self.settings.node_name, frozenset({"IDLE"}))
            self.decision = decide(verdict, free, SlurmMemory(), self._policy(), self._now())

    def _policy(self) -> Policy:
        pause, slurm = self._memory.ledger.pause, self.settings.slurm
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
        )

    def _must_look(self, verdict: Verdict, round_ended: bool) -> bool:
        """Return True at the start, after a change of the goal, in each round with a drain desired or set, and for a
        retry.
        """
        known = self._memory.ledger
        concerned = not is_quiet(verdict, known.slurm)
        # Without the time of the last event: a storm of events must not query Slurm repeatedly.
        causes = tuple((c.key, c.severity, c.critical_at) for c in verdict.causes)
        aim = (causes, concerned and verdict.may_resume, known.pause, self.settings.mode)
        again = self._monotonic() >= self._again_at
        own = fleet_limit.is_own_hardware(verdict.causes)
        waits = fleet_limit.must_wait(known.slurm.hold, own, self._now())  # a hold has its own time
        if aim == self._aim and not again and not (concerned and round_ended and not waits):
            return False
        self._aim = aim
        return True

    # --- results

    def _take(self, report: ReconcileReport | None) -> ReconcileReport | None:
        """Save the changes that operators made in Slurm in one transaction, and set the time of the next
        reconciliation.
        """
        if report is None:
            return None
        known = self._memory.ledger.slurm
        self._take_peoples_word(report)
        self._memory.stream.emit(
            action_log.report_events(known.reason, report.lifted, report.acknowledged, report.requeued)
        )
        tell(action_log.hold_lines(known.hold, report.memory.hold, self._now()))
        self._remember(report.memory)
        tell(action_log.report_lines(report, known.reason, self._told, self._cause))
        drains = bool(report.memory.reason)
        self.requeued = tuple(dict.fromkeys((*self.requeued, *report.requeued))) if drains else ()
        # after a problem not all jobs were read
        self._told = set(report.spared) | (self._told if report.problem else set())
        self._decided_on = None
        self.decision = report.decision
        self._again_at = self._monotonic() + self._driver.retry_seconds(report)
        self._slurmd.watch(self._driver.waits_for_slurmd(report))
        return report

    def _take_peoples_word(self, report: ReconcileReport) -> None:
        memory, now = self._memory, self._now()
        conditions = before = memory.conditions
        if report.acknowledged:
            tell(action_log.operator_resume_line(self._cause))
            conditions = endings.resumed_by_operator(conditions, report.acknowledged_before, now)
            memory.forget_growth(c for key, c in conditions.items() if c != before.get(key))
        if report.adopted:
            conditions = absorb.adopted(conditions, report.adopted.code, report.adopted.subject, self._boot_id, now)
        memory.set_conditions(conditions)

    def _refusals(self) -> tuple[float, ...]:
        return refusal_times(self.settings.runtime_dir)

    def _tell_command(self, command: Command, result: CommandResult | None) -> None:
        """Emit the event before the command starts, so that it is saved even if the daemon is killed right after."""
        self._memory.stream.emit(action_log.command_events(command.argv, result))
        if result is None:
            self._memory.save()

    def _remember(self, slurm: SlurmMemory) -> None:
        """Save the record before the next command is sent, so that a daemon that is killed now can recognise its drain
        later.

        If an operator reported a repair during the reconciliation, the reset of the count is kept.
        """
        known = self._memory.ledger.slurm
        before = known.reason
        was_answered_for = bool(self._began_with.resumed) and not known.resumed
        self._memory.change(slurm=answered_for(slurm) if was_answered_for else slurm)
        self._memory.save()
        tell(action_log.drain_lines(before, self._cause))

    @property
    def _cause(self) -> action_log.Cause:
        return action_log.Cause(self._causes, self._memory.ledger)
