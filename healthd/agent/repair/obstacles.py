"""States that prevent a step of the repair ladder now. All functions are pure.

A step may end jobs, and destroys the state that an engineer may be examining. healthd therefore takes a step only on a
node that it has drained itself, that runs no job, and that no person works on.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.agent.slurm.policy import Owner, drain_owner, is_idle
from healthd.common.model import ConditionState, DrainRecord, Mode, NodeState, Severity, Verdict
from healthd.common.repair_plan import Obstacle
from healthd.common.slurm.node_states import MAINTENANCE, POWER, REBOOT, UNSETTLED


def obstacles(
    verdict: Verdict, record: DrainRecord, node: NodeState | None, mode: Mode, is_paused: bool, is_booted: bool = False
) -> tuple[Obstacle, ...]:
    """Return everything that prevents a step now. `node` is None if its state in Slurm is not known.

    `is_booted` is True if healthd's own step has booted the machine: the boot may be the reason for DOWN.
    """
    return tuple(dict.fromkeys((*_own(verdict, mode, is_paused), *_in_slurm(record, node, mode, is_booted))))


def _own(verdict: Verdict, mode: Mode, is_paused: bool) -> Iterator[Obstacle]:
    if mode is Mode.OBSERVE:
        yield Obstacle.OBSERVE
    if is_paused:
        yield Obstacle.PAUSED
    if any(cause.shared_cause for cause in verdict.causes):
        yield Obstacle.SHARED_CAUSE
    if any(
        c.state is ConditionState.ACKNOWLEDGED and c.severity >= Severity.DEGRADED and not c.observed
        for c in verdict.conditions
    ):
        yield Obstacle.ACKNOWLEDGED


def _in_slurm(record: DrainRecord, node: NodeState | None, mode: Mode, is_booted: bool) -> Iterator[Obstacle]:
    if mode is Mode.OBSERVE:
        return  # Slurm is not queried
    if node is None:
        yield Obstacle.SLURM_UNKNOWN
        return
    owner = drain_owner(node, record)
    if owner is Owner.NONE:
        yield Obstacle.NOT_DRAINED
    elif owner is not Owner.HEALTHD:
        yield Obstacle.FOREIGN_DRAIN
    if node.flags & MAINTENANCE:
        yield Obstacle.MAINTENANCE
    if is_booted and is_idle(node, is_booted):
        return
    if node.flags & (REBOOT | POWER):
        yield Obstacle.POWER
    elif "DOWN" in node.flags:
        yield Obstacle.DOWN
    elif node.flags & UNSETTLED:
        yield Obstacle.NOT_RESPONDING
    elif owner is not Owner.NONE and not is_idle(node):
        yield Obstacle.JOBS
