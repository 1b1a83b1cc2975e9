"""Operators' orders about the repair of this node: `healthd repair now` and `healthd repair stop`."""

from __future__ import annotations

from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control.commands import CommandRefused
from healthd.agent.control.protocol import REPAIR_NOW, REPAIR_STOP
from healthd.agent.repair.attempt import ON_ORDER, after_order, after_stop, cause_texts, is_taking
from healthd.agent.reporting.repair import OBSTACLE_TEXTS, plan_text
from healthd.common.model import RepairStep
from healthd.common.repair_plan import Obstacle
from healthd.events.schema import Event

WAITED_FOR = (Obstacle.NOT_DRAINED, Obstacle.JOBS)  # an ordered repair waits for the end of these states


def repair_now(store: ConditionStore, user: str) -> str:
    """Order the step that the node needs, without the waits of mode "act". All protections of jobs apply.

    Raises CommandRefused.
    """
    record, plan = store.ledger.repair, store.ledger.repair.plan
    if plan is None:
        raise CommandRefused("this node needs no repair step, or repair.mode is off")
    if record.attempt is not None:
        raise CommandRefused(f"the step {record.attempt.step.value} is already in progress")
    if plan.step is RepairStep.PERSON:
        raise CommandRefused(f"healthd cannot repair this node: {plan_text(plan)}")
    if refused := [obstacle for obstacle in plan.obstacles if obstacle not in ON_ORDER]:
        raise CommandRefused("; ".join(OBSTACLE_TEXTS[obstacle] for obstacle in refused))
    if not record.is_state_dir_proven:
        is_unknown = record.is_state_dir_proven is None
        raise CommandRefused(OBSTACLE_TEXTS[Obstacle.JOURNAL if is_unknown else Obstacle.STATE_DIR])
    store.change(repair=after_order(record, user))
    store.stream.emit(
        [Event("repair", {"stage": "ordered", "step": plan.step.value, "causes": cause_texts(plan), "who": user})]
    )
    waits = "; ".join(OBSTACLE_TEXTS[o] for o in plan.obstacles if o in WAITED_FOR)
    return f"ordered: {plan_text(plan)}{f'; the step waits: {waits}' if waits else ''}"


def repair_stop(store: ConditionStore, user: str) -> str:
    """Stop the repair until the drain ends. A step that has begun continues. Raises CommandRefused."""
    record = store.ledger.repair
    if record.plan is None and record.attempt is None:
        raise CommandRefused("no repair is in progress, and this node needs none")
    if record.stopped_by:
        raise CommandRefused(f"already stopped by {record.stopped_by}")
    change = after_stop(record, user)
    store.change(repair=change.record)
    store.stream.emit(change.events)
    is_late = "; a step that has begun continues" if is_taking(record.attempt) else ""
    return f"repair stopped by {user} until this drain ends, or until healthd repair now{is_late}"


ORDERS = {REPAIR_NOW: repair_now, REPAIR_STOP: repair_stop}
