"""The plan for this node: the step that its causes need, and the obstacles to it. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

from msgspec.structs import replace

from healthd.agent.conditions.ledger import Ledger
from healthd.agent.repair.attempt import ActContext, act_obstacles, is_active
from healthd.agent.repair.ladder import cause_text, plan
from healthd.agent.repair.obstacles import obstacles
from healthd.agent.settings.config import Settings
from healthd.common.model import ConditionState, DrainRecord, NodeState, Remedy, Severity, Verdict
from healthd.common.repair_plan import Plan, RepairRecord


def node_plan(
    verdict: Verdict,
    ledger: Ledger,
    record: RepairRecord,
    node: NodeState | None,
    settings: Settings,
    remedies: Mapping[str, Remedy],
    context: ActContext,
) -> Plan | None:
    """Return the plan, or None if no cause needs a step.

    `record` is the repair so far, which may be newer than the ledger's. `remedies` has each code's declared remedy.
    """
    repair, drain = settings.repair, ledger.slurm
    found = plan(verdict.causes, ledger.cleared, remedies, repair.order, repair.first_step, record.failed)
    if found is None:
        return None
    is_booted = record.booted == context.boot_id
    present = list(obstacles(verdict, drain, node, settings.mode, ledger.pause is not None, is_booted))
    if is_active(record, repair):
        present += act_obstacles(record, found, drain, context)
    return replace(found, obstacles=tuple(present))


def with_drain_causes(verdict: Verdict, known: Container[str], drain: DrainRecord, paused_at: float) -> Verdict:
    """Return the verdict with all open faults of healthd's drain among its causes.

    After a pause, a fault from before its end drains the node only if a check finds it again. A drain from before the
    pause remains, and so do its repair and its evidence: no check finds a fault again that only the kernel log
    reported. `known` has these faults ("CODE SUBJECT"). Faults that opened during the pause are left out.
    """
    if not drain.drained_at or not (drain.reason or drain.pending_reason):
        return verdict
    causes = tuple(
        c
        for c in verdict.conditions
        if c in verdict.causes
        or (
            cause_text(c.code, c.subject) in known
            and c.state is ConditionState.OPEN
            and c.severity >= Severity.DEGRADED
            and not c.observed
            and c.opened_at <= max(drain.drained_at, paused_at)
        )
    )
    return verdict if causes == verdict.causes else replace(verdict, causes=causes)
