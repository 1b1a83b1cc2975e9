"""The plan for this node: the step that its causes need, and the obstacles to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from healthd.agent.conditions.ledger import Ledger
from healthd.agent.repair.ladder import plan
from healthd.agent.repair.obstacles import obstacles
from healthd.agent.settings.config import Settings
from healthd.common.model import NodeState, Remedy, Verdict
from healthd.common.repair_plan import Plan


def node_plan(
    verdict: Verdict,
    ledger: Ledger,
    node: NodeState | None,
    settings: Settings,
    remedies: Mapping[str, Remedy],
) -> Plan | None:
    """Return the plan, or None if no cause needs a step. `remedies` are the remedies that codes declare."""
    repair = settings.repair
    found = plan(verdict.causes, ledger.cleared, remedies, repair.order, repair.first_step)
    if found is None:
        return None
    return replace(found, obstacles=obstacles(verdict, ledger.slurm, node, settings.mode, ledger.pause is not None))
