"""The repair of this node: plans it and, in mode "act", claims, requests and verifies each step.

Pure functions decide (ladder.py, obstacles.py, attempt.py). The claim is written by the Slurm controller
(agent/slurm/repair_claim.py), and the step is taken by a separate program (step_program.py, executor.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from healthd.agent.conditions import endings
from healthd.agent.conditions.condition import last_evidence_time
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.evidence import stuck
from healthd.agent.evidence.case import Stage as CaseStage
from healthd.agent.repair.attempt import (
    ActContext,
    View,
    advance,
    after_mode,
    is_fresh,
    is_taking,
    must_withdraw,
    next_moment,
    resume_wait,
    unfinished,
    wanted_claim,
)
from healthd.agent.repair.journal import stopped_problem, survives_reboot, unused_id
from healthd.agent.repair.ladder import cause_text
from healthd.agent.repair.planner import node_plan, with_drain_causes
from healthd.agent.repair.step_program import StepProgram
from healthd.agent.reporting.repair import BOOTS
from healthd.agent.scheduler.gpu_event_process import GpuEventProcess
from healthd.agent.scheduler.replies import ReplyHandler
from healthd.agent.scheduler.scheduler import Scheduler
from healthd.agent.settings import registry
from healthd.agent.slurm.controller import SlurmController
from healthd.agent.slurm.policy import Owner
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.agent.worker.client import WorkerClient
from healthd.common.model import Clears, Condition, Repair, RepairMode, RepairStep, Verdict
from healthd.common.repair_plan import Attempt, AttemptStage, Plan, RepairRecord, TakenStep

log = logging.getLogger("healthd")


class NodeRepair:
    """Advances the repair in each turn of the daemon. On a healthy node, it does nothing.

    program  the program that takes the steps
    """

    def __init__(
        self,
        program: StepProgram,
        store: ConditionStore,
        controller: SlurmController,
        scheduler: Scheduler,
        replies: ReplyHandler,
        client: WorkerClient,
        gpu_events: GpuEventProcess,
        boot_id: str,
        now: Callable[[], float],
    ) -> None:
        self.program = program
        self._store, self._controller, self._scheduler = store, controller, scheduler
        self._replies, self._client, self._gpu_events = replies, client, gpu_events
        self._boot_id, self._now = boot_id, now
        self._inputs: tuple[object, ...] = ()
        self._plan: Plan | None = None
        self._is_taken_over = False  # another user changed the drain since the last turn
        self._is_driver_stuck = False  # as of the last turn

    @property
    def deadline(self) -> float:
        """Monotonic time at which `step` is due because of the program."""
        return self.program.deadline

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self.program.waits()

    @property
    def next_moment(self) -> float:
        """Time at which `step` is due without other input (epoch seconds)."""
        return next_moment(self._store.ledger.repair, self._scheduler.configured.settings.repair, self._now())

    @property
    def resume_wait(self) -> str:
        """What a resume must wait for because of a repair, as the end of "until ...", or ""."""
        record = self._store.ledger.repair
        return resume_wait(record, self._has_checked(record.taken), stopped_problem(self.program.journal))

    @property
    def step_to_validate(self) -> str:
        """Id of the step after which a validation must run before the resume, or ""."""
        taken = self._store.ledger.repair.taken
        return taken.id if taken is not None else ""

    def start(self) -> None:
        """Continue the repair of an earlier daemon. While GPUs are being reset, no process of the daemon uses them."""
        self._gpu_events.adopt_earlier()
        self._hold_gpus(self._store.ledger.repair.attempt)
        self.program.start()

    def note_report(self, report: ReconcileReport) -> None:
        """Record that an operator has resumed the node, or that another user's drain has replaced healthd's."""
        is_foreign = report.node is not None and report.owner in (Owner.OTHER, Owner.UNRECORDED_HEALTHD)
        self._is_taken_over = self._is_taken_over or report.acknowledged or is_foreign

    def step(self, verdict: Verdict) -> None:
        """Plan the repair, and in mode "act" advance it by one stage."""
        config, ledger = self._scheduler.configured.settings.repair, self._store.ledger
        record = after_mode(ledger.repair, config.mode, self._now())
        known = {cause_text(cause.code, cause.subject) for cause in record.plan.causes} if record.plan else ()
        verdict = with_drain_causes(verdict, known, ledger.slurm, ledger.paused_at)
        # In mode "off", healthd still finishes a step that is being taken or verified.
        is_begun = record.attempt is not None and record.attempt.stage is not AttemptStage.CLAIM
        is_used = config.mode is not RepairMode.OFF or bool(record.ordered_by) or is_begun
        if is_used or self.program.is_open or self.program.has_stopped:
            self.program.step()
        journal = self.program.journal
        if not is_used:
            is_drained = bool(ledger.slurm.reason or ledger.slurm.pending_reason)
            record = RepairRecord(concluded=record.concluded, taken=record.taken if is_drained else None)
        else:
            is_proven = survives_reboot(journal, self._boot_id) if journal is not None else None
            record = replace(record, is_state_dir_proven=is_proven)
            is_lost = ledger.slurm.reason != "" and unfinished(record, journal, self._now()) is not None
            if verdict.causes or is_lost or not is_fresh(record):
                record = self._advance(record, verdict)
        self._is_taken_over = False
        before = ledger.repair.attempt
        self._store.change(repair=record)
        if record.attempt != before:
            self._after_stage(before, record.attempt)
        self._controller.claim = wanted_claim(record, config, self._boot_id, self._now())
        self._take_step(record.attempt)

    def _advance(self, record: RepairRecord, verdict: Verdict) -> RepairRecord:
        settings, ledger, now = self._scheduler.configured.settings, self._store.ledger, self._now()
        record = replace(record, plan=self._make_plan(record, verdict))
        drain, taken, plan = ledger.slurm, record.taken, record.plan
        attempt, controller = record.attempt, self._controller
        self._is_driver_stuck = "nvml" in self._client.quarantined or self._gpu_events.is_hung
        if ledger.evidence is not None and ledger.evidence.stuck:
            self._is_driver_stuck = self._is_driver_stuck or bool(stuck.alive(ledger.evidence.stuck))
        resumed_at = drain.resumed_drains[-1].resumed_at if drain.resumed_drains else 0.0
        view = View(
            now,
            self._boot_id,
            plan,
            causes=_texts(verdict.causes),
            seen=_texts(c for c in verdict.causes if attempt and taken and self._is_after_step(c, attempt, taken)),
            waiting=_texts(c for c in verdict.causes if c.repaired),
            drain=drain,
            journal=self.program.journal,
            is_served=self.program.is_served,
            is_stalled=self.program.is_stalled,
            is_drained=bool(drain.reason or drain.pending_reason),
            was_resumed=taken is not None and taken.at <= resumed_at,
            is_taken_over=self._is_taken_over,
            is_clean=verdict.may_resume,
            has_checked=self._has_checked(taken),
            is_held=not (controller.may_change() and controller.is_node_current),
            is_driver_stuck=self._is_driver_stuck,
            stopped=stopped_problem(self.program.journal),
        )
        new_id = unused_id(self.program.journal, plan.step if plan else RepairStep.PERSON, now)
        record, found = advance(record, view, settings.repair, new_id)
        for event in found:
            text = " ".join(f"{name}={value}" for name, value in event.fields.items())
            log.warning("repair: %s", text)
        self._store.stream.emit(found)
        return record

    def _make_plan(self, record: RepairRecord, verdict: Verdict) -> Plan | None:
        """Return the step that this drained node needs, and what prevents it now."""
        if not verdict.causes:
            return None
        configured, ledger, now = self._scheduler.configured, self._store.ledger, self._now()
        settings, evidence, node = configured.settings, ledger.evidence, self._controller.status.node
        is_evidence_open = settings.evidence.enabled and (evidence is None or evidence.stage is not CaseStage.DONE)
        context = ActContext(self.program.journal, is_evidence_open, self.program.is_stalled, now, self._boot_id)
        drain, is_retry_due = ledger.slurm, now >= record.retry_at
        inputs = (verdict, ledger.cleared, drain, node, ledger.pause, settings, record, context[:3], is_retry_due)
        if inputs != self._inputs:
            self._inputs = inputs
            remedies = registry.remedies(configured.checks, (c.code for c in verdict.causes))
            self._plan = node_plan(verdict, ledger, record, node, settings, remedies, context)
        return self._plan

    def _is_after_step(self, condition: Condition, attempt: Attempt, taken: TakenStep) -> bool:
        """Return True if a fault was found after the step.

        healthd may notice a boot later than a fault of this boot, so each fault of a new boot counts.
        """
        is_of_this_boot = attempt.boot_id != self._boot_id and condition.boot_id == self._boot_id
        return is_of_this_boot or last_evidence_time(condition) >= taken.at

    def _has_checked(self, taken: TakenStep | None) -> bool:
        """Return True if every check that a resume requires has run since the step."""
        if taken is None:
            return False
        results, optional = self._replies.results, self._scheduler.configured.not_needed_for_resume
        required = [name for name in self._scheduler.expected() if name not in optional]
        return all(name in results and results[name].started >= taken.at for name in required)

    def _hold_gpus(self, attempt: Attempt | None) -> None:
        is_resetting = is_taking(attempt, RepairStep.GPU_RESET)
        self._scheduler.hold_gpus(is_resetting)
        self._gpu_events.keep_closed(is_resetting)

    @property
    def _is_using_gpus(self) -> bool:
        return self._scheduler.queue.is_using_gpus or self._gpu_events.may_use_gpus

    def _after_stage(self, before: Attempt | None, after: Attempt | None) -> None:
        """Act on a step that has begun or ended."""
        self._hold_gpus(after)
        if before is None or before.stage is not AttemptStage.STEP:
            return
        if after is not None and after.step is RepairStep.GPU_RESET:
            self._end_reset_conditions(after)
        self._scheduler.queue.run_all_now()

    def _end_reset_conditions(self, attempt: Attempt) -> None:
        """End the conditions that wait for a GPU reset, because the reset is proven. If a fault is still there, a check
        opens its condition again."""
        entry = self.program.journal.find(attempt.id) if self.program.journal is not None else None
        if entry is None:
            return
        conditions = self._store.conditions
        waiting: Iterable[str] = (c.subject for c in conditions.values() if c.clears is Clears.GPU_RESET)
        proof = entry.proof or "healthd reset the GPU"
        repairs = [Repair(Clears.GPU_RESET, part, proof, entry.at) for part in dict.fromkeys(attempt.parts or waiting)]
        self._store.set_conditions(endings.after_repairs(conditions, repairs, self._now()))

    def _take_step(self, attempt: Attempt | None) -> None:
        """Request the step, once its claim is saved and no process of the daemon uses the GPUs."""
        journal, ledger = self.program.journal, self._store.ledger
        config = self._scheduler.configured.settings.repair
        if not is_taking(attempt) or must_withdraw(ledger.repair, config, self._is_driver_stuck):
            self.program.withdraw()
            return
        if attempt.boot_id != self._boot_id or journal is None or journal.find(attempt.id) is not None:
            return
        if attempt.step is RepairStep.GPU_RESET and self._is_using_gpus:
            return
        if attempt.step in BOOTS and self._replies.ledger_copy.attempt != attempt:
            return  # after the boot, the ledger would not contain the step
        self._store.save()
        self.program.request(attempt, ledger.repair, ledger.slurm.reason, ledger.whole_gpus, ledger.evidence)


def _texts(causes: Iterable[Condition]) -> tuple[str, ...]:
    return tuple(cause_text(c.code, c.subject) for c in causes)
