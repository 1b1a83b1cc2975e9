"""The progress of a repair: which step is claimed, taken and verified, and what follows. All functions are pure.

    none ---> CLAIM ------> STEP -----------> VERIFY ------> none: the node is back in service
              the Reason    healthd-repair    all checks
              in Slurm      takes the step    and a validation
                               |                 |
                               | failed          | a fault is still there
                               v                 v
                            the next step of the ladder; after the last one, a person must act

    a stopped service does   none; the step has neither failed nor succeeded, and a person must act
    not start
    refused, an obstacle     none; the next try follows after a while
    an operator acts         none; the repair of this drain is stopped

On a node with a fault, the daemon calls `advance` in each turn, and acts on the stage of the result: from CLAIM on it
keeps the claim in Slurm, and in STEP it requests the step from healthd-repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

from msgspec.structs import replace

from healthd.agent.repair.journal import Entry, Journal, Outcome, survives_reboot, tried_within_day
from healthd.agent.repair.ladder import cause_text
from healthd.agent.reporting.repair import BOOTS, deadline
from healthd.agent.settings.config import RepairConfig
from healthd.common.model import LADDER, DrainRecord, RepairClaim, RepairMode, RepairStep
from healthd.common.repair_plan import Attempt, AttemptStage, FailedStep, Obstacle, Plan, RepairRecord, TakenStep
from healthd.events.schema import Event

FIRST_RETRY_SECONDS = 60.0
MAX_RETRY_SECONDS = 900.0
RETRY_REQUEST_SECONDS = 30.0  # until a request without a result is written again
REQUEST_SECONDS = 600.0  # after this time, a step that could not be requested counts as refused
ADOPT_SECONDS = 86400.0  # a step in the journal that is older than this is not in progress
# Obstacles that do not refuse an order: it skips the waits of mode "act", and waits until the node is drained and idle.
ON_ORDER = (
    *(Obstacle.NOT_DRAINED, Obstacle.JOBS),
    *(Obstacle.EVIDENCE, Obstacle.BEFORE_ACT, Obstacle.TRIED, Obstacle.RETRY, Obstacle.STOPPED),
)


class View(NamedTuple):
    """The daemon's view of the node.

    plan          the step that the causes need, with its obstacles, or None
    causes        the faults that drain the node, as "CODE PART"
    seen          the causes that were found after the step
    waiting       the causes that end by time, because a step has repaired them
    journal       the journal, or None if it has not been read yet
    is_served     healthd-repair has no open request
    is_stalled    healthd-repair has an open request, but does not run
    is_drained    healthd's drain is in force, or is being set again
    was_resumed   healthd has resumed the node since the step
    is_taken_over  an operator resumed the node, or another user's drain is in force
    is_clean      every check that can drain has completed clean, and the validation has ended
    has_checked   every check has run since the step
    is_held       healthd cannot resume the node now: a pause, or no answer from Slurm
    is_driver_stuck  a process hangs in the kernel, so a GPU reset may hang too
    stopped       what is still stopped because of a reset, as one sentence, or ""
    """

    now: float
    boot_id: str
    plan: Plan | None
    causes: tuple[str, ...]
    seen: tuple[str, ...]
    waiting: tuple[str, ...]
    drain: DrainRecord
    journal: Journal | None
    is_served: bool
    is_stalled: bool
    is_drained: bool
    was_resumed: bool
    is_taken_over: bool
    is_clean: bool
    has_checked: bool
    is_held: bool
    is_driver_stuck: bool
    stopped: str


class Change(NamedTuple):
    record: RepairRecord
    events: tuple[Event, ...] = ()


def is_active(record: RepairRecord, config: RepairConfig) -> bool:
    """Return True if healthd takes steps: in mode "act", or because an operator ordered it."""
    return config.mode is RepairMode.ACT or bool(record.ordered_by)


WITHDRAWING = (Obstacle.OBSERVE, Obstacle.PAUSED, Obstacle.ACKNOWLEDGED, Obstacle.SHARED_CAUSE, Obstacle.STOPPED)


def must_withdraw(record: RepairRecord, config: RepairConfig, is_driver_stuck: bool) -> bool:
    """Return True if the request for the step in progress must be withdrawn. A step that has begun continues."""
    attempt, plan = record.attempt, record.plan
    if attempt is None or attempt.stage is not AttemptStage.STEP:
        return False
    is_prevented = plan is None or not set(WITHDRAWING).isdisjoint(plan.obstacles)
    is_prevented = is_prevented or attempt.is_taken_over or bool(record.stopped_by) or not is_active(record, config)
    return is_prevented or (attempt.step is RepairStep.GPU_RESET and is_driver_stuck)


def is_taking(attempt: Attempt | None, *steps: RepairStep) -> TypeGuard[Attempt]:
    """Return True if a step, or one of these steps, is being taken."""
    return attempt is not None and attempt.stage is AttemptStage.STEP and (not steps or attempt.step in steps)


def after_mode(record: RepairRecord, mode: RepairMode, now: float) -> RepairRecord:
    """Return the record with the time at which mode "act" was set. Older drains are not repaired.

    Mode "off" also withdraws an order.
    """
    if mode is RepairMode.OFF:
        return replace(record, act_since=0.0, ordered_by="")
    if mode is not RepairMode.ACT:
        return replace(record, act_since=0.0)
    return record if record.act_since else replace(record, act_since=now)


class ActContext(NamedTuple):
    """The daemon's state that may prevent a step in mode "act".

    journal           the journal, or None if it has not been read yet
    is_evidence_open  the evidence of the fault is not saved yet
    is_stalled        healthd-repair does not serve an open request
    """

    journal: Journal | None
    is_evidence_open: bool
    is_stalled: bool
    now: float
    boot_id: str


def act_obstacles(record: RepairRecord, plan: Plan, drain: DrainRecord, context: ActContext) -> Iterator[Obstacle]:
    """Yield what prevents a step in mode "act", in addition to obstacles.py. An operator's order skips the waits."""
    journal = context.journal
    if context.is_stalled:
        yield Obstacle.PROGRAM
    elif journal is None or journal.problem:
        yield Obstacle.JOURNAL
    if journal is not None and not survives_reboot(journal, context.boot_id):
        yield Obstacle.STATE_DIR
    if record.stopped_by:
        yield Obstacle.STOPPED
    if context.now < record.retry_at:
        yield Obstacle.RETRY
    if record.ordered_by:
        return
    if drain.drained_at and drain.drained_at < record.act_since:
        yield Obstacle.BEFORE_ACT
    if context.is_evidence_open:
        yield Obstacle.EVIDENCE
    if journal is not None and tried_within_day(journal, plan.step, _texts(plan)[0], context.now):
        yield Obstacle.TRIED


def wanted_claim(record: RepairRecord, config: RepairConfig, boot_id: str, now: float) -> RepairClaim | None:
    """Return the claim that the Reason of the drain should have, or None.

    While healthd has been unable to resume the node for repair.verify_timeout_seconds, such as in a pause of days, it
    claims nothing, so that other nodes can be repaired.
    """
    attempt, is_booted = record.attempt, record.booted == boot_id
    if record.held_since and now >= record.held_since + config.verify_timeout_seconds:
        attempt = None
    if attempt is not None:
        is_booted = is_booted or (attempt.step in BOOTS and attempt.boot_id != boot_id)
        return RepairClaim(attempt.step, config.max_concurrent, is_booted)
    if record.has_given_up:
        return RepairClaim(RepairStep.PERSON, is_booted=is_booted)
    return RepairClaim(None, is_booted=True) if is_booted else None


def next_moment(record: RepairRecord, config: RepairConfig, now: float) -> float:
    """Return the next time at which `advance` may have a new result without other input (epoch seconds)."""
    moments = [record.retry_at, record.verify_since + config.verify_timeout_seconds]
    if record.attempt is not None:
        since = record.attempt.since
        moments += [deadline(record, config), since + RETRY_REQUEST_SECONDS, since + REQUEST_SECONDS]
    return min((moment for moment in moments if moment > now), default=float("inf"))


def resume_wait(record: RepairRecord, has_checked: bool, stopped: str) -> str:
    """Return what a resume must wait for because of a repair, as the end of "until ...", or "".

    `has_checked` is True if every check has run since the last step. `stopped`: see View.
    """
    if record.attempt is not None and record.attempt.stage is not AttemptStage.VERIFY:
        return "the repair step has ended"
    if stopped:
        return f"everything runs again ({stopped})"
    return "" if record.taken is None or has_checked else "every check has run after the repair step"


def advance(record: RepairRecord, view: View, config: RepairConfig, new_id: str) -> Change:
    """Return the record after this turn, and the events to write."""
    if record.attempt is None:
        return _without_attempt(record, view, config, new_id)
    if record.attempt.stage is AttemptStage.CLAIM:
        return _claiming(record, record.attempt, view, config)
    if record.attempt.stage is AttemptStage.STEP:
        return _taking(record, record.attempt, view, config)
    return _verifying(record, record.attempt, view, config)


# --- no step in progress


def _without_attempt(record: RepairRecord, view: View, config: RepairConfig, new_id: str) -> Change:
    if view.is_taken_over and not record.stopped_by and (record.failed or record.has_given_up):
        record = _fresh(record)
    if view.was_resumed or (not view.is_drained and view.plan is None):
        return Change(_fresh(record))
    record = _after_late_boot(record, view)
    if view.is_drained and (entry := unfinished(record, view.journal, view.now)) is not None:
        return Change(replace(record, attempt=_adopted(entry), has_given_up=False))
    plan = view.plan
    if not view.is_drained or not is_active(record, config):
        return Change(record)
    if plan is None:
        return _without_plan(record, view, config)
    record = _without_verify_time(record)
    if plan.step is RepairStep.PERSON:
        if record.failed and not record.has_given_up:
            return Change(replace(record, has_given_up=True), (_event("gave_up", plan, problem=record.failed[-1].why),))
        return Change(record)
    if plan.obstacles:
        return Change(record)
    causes, others = _texts(plan)
    if plan.step is RepairStep.GPU_RESET and view.is_driver_stuck:
        failed = FailedStep(
            plan.step, view.now, causes, "a process hangs in the driver, so a reset may hang too", False
        )
        event = _event("failed", plan, problem=failed.why, was_taken=False)
        return Change(replace(record, failed=(*record.failed, failed)), (event,))
    attempt = Attempt(new_id, plan.step, AttemptStage.CLAIM, view.now, view.boot_id, causes, others, plan.parts)
    return Change(replace(record, attempt=attempt, has_given_up=False))


def _after_late_boot(record: RepairRecord, view: View) -> RepairRecord:
    """Return the record after a boot by a step that had counted as failed, because the boot took too long."""
    taken, journal = record.taken, view.journal
    entry = journal.find(taken.id) if taken is not None and journal is not None else None
    if record.booted or entry is None or entry.step not in BOOTS or view.boot_id == entry.boot_id:
        return record
    return replace(record, taken=TakenStep(entry.id, view.now), booted=view.boot_id)


def _without_plan(record: RepairRecord, view: View, config: RepairConfig) -> Change:
    """Give up if a step has failed and the node is not clean in time although no fault is open: a check may hang."""
    if not record.failed or record.has_given_up:
        return Change(record)
    if view.causes or view.is_clean:
        return Change(_without_verify_time(record))
    record = _with_verify_time(record, view)
    if not _is_late(record, view, config):
        return Change(record)
    failed, person = record.failed[-1], RepairStep.PERSON.value
    fields = {"stage": "gave_up", "step": person, "next": person, "causes": failed.causes, "problem": failed.why}
    return Change(replace(record, has_given_up=True), (Event("repair", fields),))


def is_fresh(record: RepairRecord) -> bool:
    """Return True if no repair has begun for a drain."""
    return record == _fresh(record) and record.plan is None


def _fresh(record: RepairRecord) -> RepairRecord:
    """Return the record for the next drain."""
    return RepairRecord(
        record.plan,
        act_since=record.act_since,
        concluded=record.concluded,
        is_state_dir_proven=record.is_state_dir_proven,
    )


def unfinished(record: RepairRecord, journal: Journal | None, now: float) -> Entry | None:
    """Return a step that only the journal has, because the ledger on disk was older than the reboot, or None."""
    entry = journal.entries[-1] if journal is not None and journal.entries else None
    if record.attempt is not None or entry is None or entry.id == record.concluded:
        return None
    return entry if now - entry.at < ADOPT_SECONDS else None


def _adopted(entry: Entry) -> Attempt:
    return Attempt(entry.id, entry.step, AttemptStage.STEP, entry.at, entry.boot_id, entry.causes, (), entry.parts)


# --- CLAIM


def _claiming(record: RepairRecord, attempt: Attempt, view: View, config: RepairConfig) -> Change:
    if view.is_taken_over:
        return _stopped(record, attempt, view)
    plan = view.plan
    if plan is None or plan.obstacles or plan.step is not attempt.step or plan.parts != attempt.parts:
        return Change(replace(record, attempt=None))
    is_hindered = attempt.step is RepairStep.GPU_RESET and view.is_driver_stuck
    if attempt.boot_id != view.boot_id or is_hindered or not is_active(record, config):
        return Change(replace(record, attempt=None))
    if view.drain.claim is not attempt.step:
        return Change(record)
    causes, others = _texts(plan)
    taking = replace(attempt, stage=AttemptStage.STEP, since=view.now, causes=causes, others=others)
    return Change(replace(record, attempt=taking), (_event("claimed", plan, taking),))


# --- STEP


def _taking(record: RepairRecord, attempt: Attempt, view: View, config: RepairConfig) -> Change:
    if view.is_taken_over and not attempt.is_taken_over:
        attempt = replace(attempt, is_taken_over=True)
        record = replace(record, attempt=attempt)
    change = _after_result(record, attempt, view, config)
    is_over = change.record.attempt is None or change.record.attempt.stage is AttemptStage.VERIFY
    if not attempt.is_taken_over or not is_over:
        return change
    stopped = _stopped(change.record, attempt, view)
    return Change(stopped.record, (*change.events, *stopped.events))


def _after_result(record: RepairRecord, attempt: Attempt, view: View, config: RepairConfig) -> Change:
    if view.is_stalled and view.now >= deadline(record, config):
        return _refused(record, attempt, "healthd-repair does not run", view)
    if view.journal is None or not view.is_served:
        return Change(record)
    entry = view.journal.find(attempt.id)
    if entry is None:  # nothing was recorded, so nothing was done
        if attempt.boot_id != view.boot_id or must_withdraw(record, config, view.is_driver_stuck):
            return Change(replace(record, attempt=None))
        if view.now >= attempt.since + REQUEST_SECONDS:
            return _refused(record, attempt, "the step could not be requested", view)
        return Change(record)  # the daemon requests it again
    if entry.outcome is Outcome.REFUSED:
        return _refused(record, attempt, entry.problem, view)
    if attempt.step in BOOTS and entry.outcome is Outcome.TAKING:
        if entry.boot_id != view.boot_id:
            return _taken(record, attempt, replace(entry, proof="the machine has booted"), view)
        if view.now - entry.at < config.boot_timeout_seconds:
            return Change(record)
        # This daemon runs in the boot of the step, so no shutdown has ended it: the command may have had no effect.
        why = f"the machine has not booted within {config.boot_timeout_seconds:g} s"
        late = replace(record, taken=TakenStep(attempt.id, view.now))  # it may still boot
        return _failed(late, attempt, why, view, was_taken=False)
    if entry.outcome is Outcome.DONE:
        return _taken(record, attempt, entry, view)
    if entry.outcome is Outcome.TAKING:  # the program was killed and starts again
        return Change(record)
    problem = entry.problem or "the program was killed during the step, which is not repeated"
    if entry.outcome is Outcome.IMPOSSIBLE:
        return _failed(record, attempt, problem, view, was_taken=False)
    return _failed(replace(record, taken=TakenStep(attempt.id, view.now)), attempt, problem, view)


def _refused(record: RepairRecord, attempt: Attempt, problem: str, view: View) -> Change:
    """Return the record after a refusal: nothing was changed, and the next try follows after a growing delay."""
    seconds = min(FIRST_RETRY_SECONDS * 2.0 ** min(record.refusals, 10), MAX_RETRY_SECONDS)
    events = () if problem == record.refused else (_attempt_event("refused", attempt, problem=problem),)
    after = replace(record, attempt=None, retry_at=view.now + seconds, refusals=record.refusals + 1, refused=problem)
    return Change(after, events)


def _taken(record: RepairRecord, attempt: Attempt, entry: Entry, view: View) -> Change:
    verifying = replace(attempt, stage=AttemptStage.VERIFY, since=view.now)
    event = _attempt_event("taken", attempt, proof=entry.proof, seconds=entry.seconds)
    booted = view.boot_id if attempt.step in BOOTS else record.booted
    after = replace(
        record,
        attempt=verifying,
        taken=TakenStep(attempt.id, view.now),
        refusals=0,
        refused="",
        booted=booted,
        verify_since=view.now,
        held_since=0.0,
    )
    return Change(after, (event,))


# --- VERIFY


def _verifying(record: RepairRecord, attempt: Attempt, view: View, config: RepairConfig) -> Change:
    if view.was_resumed:
        return _succeeded(record, attempt, view)
    if view.is_taken_over or not view.is_drained:
        return _stopped(record, attempt, view)
    record = _with_verify_time(record, view)
    # A new fault that only a person can end may still pass: services start again, and MIG instances are created.
    needs_step = view.plan is not None and view.plan.step is not RepairStep.PERSON
    unexpected = [text for text in view.seen if text in attempt.causes or (needs_step and text not in attempt.others)]
    if unexpected and view.has_checked:
        return _failed(record, attempt, f"{unexpected[0]} was found after the step", view)
    accepted = {*attempt.others, *view.waiting}
    if view.has_checked and view.causes and accepted.issuperset(view.causes):
        # The rest ends by a person or by time, and other nodes may be repaired now.
        return _succeeded(record, attempt, view)
    if not _is_late(record, view, config):
        return Change(record)
    if view.is_clean:
        # The resume waits for another reason, such as a fault that comes and goes.
        return _succeeded(record, attempt, view)
    left = set(view.causes) - accepted
    if view.stopped and view.has_checked and left.isdisjoint(attempt.causes) and not (left and needs_step):
        return _given_up(record, attempt, view.stopped)
    return _failed(record, attempt, "the checks were not clean in time", view)


def _with_verify_time(record: RepairRecord, view: View) -> RepairRecord:
    """Return the record with the start of the time for the verification. Time in which healthd could not resume the
    node does not count."""
    since = record.verify_since or view.now
    if view.is_held:
        return replace(record, verify_since=since, held_since=record.held_since or view.now)
    held_seconds = view.now - record.held_since if record.held_since else 0.0
    return replace(record, verify_since=since + held_seconds, held_since=0.0)


def _without_verify_time(record: RepairRecord) -> RepairRecord:
    return replace(record, verify_since=0.0, held_since=0.0)


def _is_late(record: RepairRecord, view: View, config: RepairConfig) -> bool:
    return not record.held_since and view.now >= record.verify_since + config.verify_timeout_seconds


# --- ends


def _succeeded(record: RepairRecord, attempt: Attempt, view: View) -> Change:
    after = replace(_fresh(record), concluded=attempt.id, booted=record.booted)
    if not view.was_resumed:  # the drain goes on
        after = replace(after, taken=record.taken, stopped_by=record.stopped_by)
    return Change(after, (_attempt_event("succeeded", attempt),))


def _failed(record: RepairRecord, attempt: Attempt, why: str, view: View, was_taken: bool = True) -> Change:
    failed = FailedStep(attempt.step, view.now, attempt.causes, why, was_taken)
    after = replace(
        record,
        attempt=None,
        failed=(*record.failed, failed),
        concluded=attempt.id,
        refusals=0,
        refused="",
        retry_at=0.0,
    )
    return Change(after, (_attempt_event("failed", attempt, problem=why, was_taken=was_taken),))


def _given_up(record: RepairRecord, attempt: Attempt, problem: str) -> Change:
    """Return the record after a reset that ended the faults, but whose stopped services do not start. The node stays
    drained until they run (resume_wait)."""
    after = replace(
        _without_verify_time(record),
        attempt=None,
        has_given_up=True,
        concluded=attempt.id,
        refusals=0,
        refused="",
        retry_at=0.0,
    )
    return Change(after, (_attempt_event("gave_up", attempt, problem=problem),))


def _stopped(record: RepairRecord, attempt: Attempt, view: View) -> Change:
    who = "another user in Slurm"
    is_recorded = view.journal is not None and any(entry.id == attempt.id for entry in view.journal.entries)
    concluded = attempt.id if is_recorded else record.concluded
    after = replace(record, attempt=None, concluded=concluded, stopped_by=who)
    return Change(after, (_attempt_event("stopped", attempt, who=who),))


# --- operators' commands


def after_stop(record: RepairRecord, user: str) -> Change:
    """Return the record after `healthd repair stop`. A step that is being taken continues, and is verified."""
    attempt = record.attempt
    after = replace(record, stopped_by=user, ordered_by="")
    if attempt is None:
        return Change(after)
    if attempt.stage is AttemptStage.CLAIM:
        after = replace(after, attempt=None)
    return Change(after, (_attempt_event("stopped", attempt, who=user),))


def after_order(record: RepairRecord, user: str) -> RepairRecord:
    """Return the record after `healthd repair now`."""
    return replace(record, stopped_by="", ordered_by=user, retry_at=0.0, refusals=0, refused="")


# --- events


def cause_texts(plan: Plan) -> tuple[str, ...]:
    return tuple(cause_text(c.code, c.subject) for c in plan.causes)


def _texts(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the causes that the plan's step should end, and the others. A step also ends what a lower step ends."""
    rank = LADDER.index(plan.step)
    ended = tuple(cause_text(c.code, c.subject) for c in plan.causes if LADDER.index(c.step) <= rank)
    others = tuple(cause_text(c.code, c.subject) for c in plan.causes if LADDER.index(c.step) > rank)
    return ended, others


def _event(
    stage: str, plan: Plan, attempt: Attempt | None = None, problem: str = "", was_taken: bool | None = None
) -> Event:
    fields: dict[str, object] = {
        "stage": stage,
        "step": plan.step.value,
        "next": plan.next.value,
        "why": plan.causes[0].reason.value,
        "causes": cause_texts(plan),
    }
    fields |= {"id": attempt.id} if attempt is not None else {}
    fields |= {"problem": problem} if problem else {}
    fields |= {"was_taken": was_taken} if was_taken is not None else {}
    return Event("repair", fields)


def _attempt_event(
    stage: str,
    attempt: Attempt,
    problem: str = "",
    proof: str = "",
    seconds: float = 0.0,
    who: str = "",
    was_taken: bool | None = None,
) -> Event:
    fields: dict[str, object] = {
        "stage": stage,
        "step": attempt.step.value,
        "causes": attempt.causes,
        "id": attempt.id,
    }
    optional = {"problem": problem, "proof": proof, "seconds": round(seconds, 1), "who": who}
    fields |= {name: value for name, value in optional.items() if value}
    fields |= {"was_taken": was_taken} if was_taken is not None else {}
    return Event("repair", fields)
