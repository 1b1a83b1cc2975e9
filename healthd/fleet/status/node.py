"""The current state of one node according to healthd's metrics, and the group to which it belongs.

All functions are pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from healthd.common.text import regex

SEVERITIES = ("info", "warning", "degraded", "critical")
HEALTHD_OWNERS = (
    "healthd",
    "unrecorded_healthd",
)  # values of policy.Owner for drains by healthd, including drains that a lost ledger recorded
_NUMBERS = regex(r"([0-9]+)")


class Group(enum.Enum):
    """A node's group; the most urgent comes first. Each node is in exactly one group."""

    DRAIN_WAITING = "drain_waiting"  # healthd intends to drain the node but has not yet: jobs start on a broken node
    NOT_SEEN = "not_seen"
    DRAINED = "drained"  # by healthd
    # degraded or unhealthy, but healthd does not intend to drain it, usually because its conditions are acknowledged
    BROKEN = "broken"
    UNKNOWN = "unknown"  # health unknown, or no check has run for a while
    WARNING = "warning"
    DRAINED_BY_OTHERS = "drained_by_others"
    HEALTHY = "healthy"


EXIT_STATUS = {  # of `healthd fleet status`
    Group.DRAIN_WAITING: 2,
    Group.NOT_SEEN: 2,
    Group.DRAINED: 2,
    Group.BROKEN: 2,
    Group.UNKNOWN: 1,
    Group.WARNING: 1,
    Group.DRAINED_BY_OTHERS: 1,
    Group.HEALTHY: 0,
}


@dataclass(frozen=True, slots=True)
class OpenCondition:
    """An open condition.

    Attributes:
        severity: index of SEVERITIES, 0 to 3.
        since: epoch seconds, 0 if unknown.
    """

    check: str
    code: str
    subject: str
    severity: int
    open: bool = True
    acknowledged: bool = False
    enforced: bool = True
    since: float = 0.0

    @property
    def is_enforced(self) -> bool:
        """True if the condition can cause a drain: it is confirmed, not acknowledged, and not from a log that users can
        write."""
        return self.open and self.enforced and not self.acknowledged


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The current state of a node.

    Attributes:
        node: its name in Slurm, or the host in its address.
        seen: True if it currently answers Prometheus.
        last_seen: epoch seconds, accurate to a few minutes; 0 if not in the last week, or if the node is up.
        health, mode, version: "" if unknown.
        drained_by: "healthd", "unrecorded_healthd", "other"; "" if not drained.
        drained_since: epoch seconds, 0 if unknown.
        paused_until, waiting_since: epoch seconds; 0 if not paused, or if no drain waits for the fleet limit.
        limit_partition: the partition whose fleet limit delays the drain.
        stale_seconds: time since its last round of checks began, if this is too long.
        repair_step, repair_stage: the step in progress of a repair by healthd, "" if there is none or the node is not
            seen.
        repair_deadline: when the stage should have ended, in epoch seconds, or 0. For a node that does not report, when
            it should be back from a repair.
        repair_failed: True if the last step has failed.
        domain, domain_id: UUID and short id of its NVLink domain, as last reported; "" if it is in none.
        conditions: worst first.
    """

    node: str
    instance: str
    cluster: str = ""
    seen: bool = True
    last_seen: float = 0.0
    health: str = ""
    mode: str = ""
    version: str = ""
    drained_by: str = ""
    reason: str = ""
    drained_since: float = 0.0
    drain_desired: bool = False
    slurm_problem: bool = False
    paused_until: float = 0.0
    waiting_since: float = 0.0
    limit_partition: str = ""
    stale_seconds: float = 0.0
    repair_step: str = ""
    repair_stage: str = ""
    repair_deadline: float = 0.0
    repair_failed: bool = False
    domain: str = ""
    domain_id: str = ""
    conditions: tuple[OpenCondition, ...] = ()

    @property
    def group(self) -> Group:
        if not self.seen:
            return Group.NOT_SEEN
        if self.drained_by in HEALTHD_OWNERS:
            return Group.DRAINED
        if self.drain_desired and not self.drained_by:
            return Group.DRAIN_WAITING
        if self.drained_by:
            return Group.DRAINED_BY_OTHERS
        if self.health in ("degraded", "unhealthy"):
            return Group.BROKEN
        if self.health in ("", "unknown") or self.stale_seconds:
            return Group.UNKNOWN
        return Group.WARNING if self.health == "warning" or self.slurm_problem else Group.HEALTHY

    @property
    def is_in_repair(self) -> bool:
        """True if healthd repairs the node, or did so when the node was last seen."""
        return bool(self.repair_step or (not self.seen and self.repair_deadline))

    def is_repair_late(self, now: float) -> bool:
        return self.is_in_repair and 0.0 < self.repair_deadline < now

    @property
    def acknowledged(self) -> bool:
        """True if every severe condition is acknowledged."""
        severe = [c for c in self.conditions if c.severity >= SEVERITIES.index("degraded")]
        return any(c.acknowledged for c in severe) and not any(c.is_enforced for c in severe)

    @property
    def since(self) -> float:
        """Start of the current state in epoch seconds, or 0 if unknown.

        This is the start of the drain or of the worst condition, or the time when the node was last seen.
        """
        if not self.seen:
            return self.last_seen
        if self.drained_by:
            return self.drained_since
        return next((c.since for c in self.conditions if c.since), 0.0)

    @property
    def delayed_by(self) -> tuple[str, ...]:
        """The reasons why healthd delays a drain."""
        if self.group is not Group.DRAIN_WAITING:
            return ()
        causes = {
            "observe": self.mode == "observe",
            "pause": bool(self.paused_until),
            "limit": bool(self.limit_partition or self.waiting_since),
            "slurm": self.slurm_problem,
        }
        return tuple(name for name, is_active in causes.items() if is_active)

    @property
    def name_order(self) -> tuple[Any, ...]:
        """Key for natural sorting: gpu2 before gpu10."""
        parts = _NUMBERS.split(self.node)
        return self.cluster, [(int(p[:18]), p) if at % 2 else (0, p) for at, p in enumerate(parts)], self.instance


ORDERS = {
    "worst": lambda n: (list(Group).index(n.group), n.name_order),
    "since": lambda n: (not n.since, n.since, n.name_order),
    "node": lambda n: n.name_order,
}
