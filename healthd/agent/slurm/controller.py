"""The daemon's hand on Slurm: when the node is looked at there, what is decided, and what people did to it meanwhile.

What is decided is pure (agent/slurm/policy.py), how it is done is a generator of commands (agent/slurm/reconcile.py).
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
    """`settings`: the present ones; a reload replaces them. `decision`: the last one."""

    def __init__(
        self,
        settings: Settings,
        memory: Memory,
        boot_id: str,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.decision: Decision = Leave("nothing has been looked at yet")
        self._memory = memory
        self._boot_id = boot_id
        self._now = now
        self._monotonic = monotonic
        self._driver = SlurmDriver(
            settings, boot_id, self._remember, self.may_change, now, monotonic, self._refusals, self._tell_command
        )
        self._slurmd = SlurmdStart(settings.root, monotonic)
        self._aim: object = None  # what was wanted of Slurm when it was last looked at
        self._again_at = FOREVER
        self._decided_on: object = None
        self._told: set[tuple[str, str]] = set()  # jobs that are not requeued, and why: told once
        self.requeued: tuple[str, ...] = ()  # jobs that this process requeued since healthd's drain in force was set
        self._causes: tuple[Condition, ...] = ()  # for which Slurm was last looked at
        self._began_with = SlurmMemory()  # what the last look was given

    # --- waiting

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._driver.waits()

    @property
    def deadline(self) -> float:
        return min(self._driver.deadline, self._slurmd.deadline, self._again_at)

    def close(self) -> None:
        """Leave a running scontrol alone: it ends by itself, and the next start reads what it did."""
        self._driver.drop()

    # --- what is known

    @property
    def status(self) -> SlurmStatus:
        return self._driver.status

    @property
    def is_busy(self) -> bool:
        return self._driver.busy

    def may_change(self) -> bool:
        return self.settings.mode is not Mode.OBSERVE and self._memory.ledger.pause is None

    def shows_drained(self, verdict: Verdict) -> bool:
        """Whether Slurm has shown this node drained and idle since the last round: an older answer may be out of date.
        Slurm is asked each round only while we want or hold a drain, and never in mode observe."""
        slurm = self.status
        if slurm.node is None or self.settings.mode is Mode.OBSERVE:
            return False
        if self._now() - slurm.read_at > 2 * self.settings.interval_seconds:
            return False
        return not is_quiet(verdict, self._memory.ledger.slurm) and is_idle(slurm.node)

    @property
    def held_from(self) -> float:
        """The moment since which Slurm itself keeps jobs from this node (epoch; infinity: it does not)."""
        return held_from(self.status.node, self._memory.ledger.slurm, self._boot_id)

    def keeps_jobs_out(self, verdict: Verdict) -> bool:
        """Whether the prolog shall keep jobs out: a drain is wanted, and Slurm does not hold the node yet."""
        if not verdict.causes or not self.may_change() or self._now() >= self.held_from:
            return False
        settings, memory = self.settings, self._memory.ledger.slurm
        name, limits, now = settings.node_name, settings.fleet, self._now()
        return not fleet_limit.is_withheld(verdict.causes, memory, name, limits, now)

    def must_be_waited_for(self, verdict: Verdict) -> bool:
        """Whether a drain is wanted, and Slurm's answer is not known yet."""
        slurm = self.status
        return bool(verdict.causes) and self.may_change() and bool(self.is_busy or not slurm.read_at or slurm.problem)

    # --- deciding

    def step(self) -> ReconcileReport | None:
        """Go on with a look that is under way. Returns the report of one that ended: what people did in Slurm may have
        changed conditions, so the verdict must be made anew."""
        if self.settings.mode is Mode.OBSERVE:
            return None
        if self._slurmd.step():
            self._driver.expect_registration()
            self._again_at = self._monotonic()
        return self._take(self._driver.step())

    def look(self, verdict: Verdict, round_ended: bool) -> ReconcileReport | None:
        """Look at the node in Slurm and act, if that is due. Called also in the pass in which a look ended, since a
        change during that look wakes nobody later. Returns the report if this look is over already."""
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
        """Run no Slurm command: decide what would be done to a node that nobody holds."""
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
        """At the start, when what we want changed, each round while a drain is wanted or held, and to try again."""
        known = self._memory.ledger
        concerned = not is_quiet(verdict, known.slurm)
        # Without the time of the last sight: a storm of events is no reason to ask Slurm again and again.
        causes = tuple((c.key, c.severity, c.critical_at) for c in verdict.causes)
        aim = (causes, concerned and verdict.may_resume, known.pause, self.settings.mode)
        again = self._monotonic() >= self._again_at
        own = fleet_limit.is_own_hardware(verdict.causes)
        waits = fleet_limit.must_wait(known.slurm.hold, own, self._now())  # not each round: the hold has its own time
        if aim == self._aim and not again and not (concerned and round_ended and not waits):
            return False
        self._aim = aim
        return True

    # --- what Slurm said

    def _take(self, report: ReconcileReport | None) -> ReconcileReport | None:
        """Keep, in one save, what a look found that people did to the node; and set when to look again."""
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
        # a look that ended in trouble has not seen all jobs
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
        """The stream knows of a command before it begins, also where we are killed right after."""
        self._memory.stream.emit(action_log.command_events(command.argv, result))
        if result is None:
            self._memory.save()

    def _remember(self, slurm: SlurmMemory) -> None:
        """Save this before the next command is sent: a daemon that is killed now knows later what it did. A look does
        not hear what people say to the daemon meanwhile: that they answer for the node is no less true after it."""
        known = self._memory.ledger.slurm
        before = known.reason
        was_answered_for = bool(self._began_with.resumed) and not known.resumed
        self._memory.change(slurm=answered_for(slurm) if was_answered_for else slurm)
        self._memory.save()
        tell(action_log.drain_lines(before, self._cause))

    @property
    def _cause(self) -> action_log.Cause:
        return action_log.Cause(self._causes, self._memory.ledger)
