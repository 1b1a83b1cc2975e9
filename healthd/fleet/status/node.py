"""One node as healthd's metrics tell of it now, and in which group it counts. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from healthd.common.text import regex

SEVERITIES = ("info", "warning", "degraded", "critical")
OURS = ("healthd", "unrecorded_healthd")  # policy.Owner: our drain, also one of a ledger that is gone
_NUMBERS = regex(r"([0-9]+)")


class Group(enum.Enum):
    """Where a node counts, the most urgent first: each node in one."""

    HELD = "drain_waiting"  # a drain is wanted and none stands: jobs start on a broken node
    NOT_SEEN = "not_seen"
    DRAINED = "drained"  # by healthd
    BROKEN = "broken"  # degraded or unhealthy, but nothing wants it drained: mostly since a person knows of it
    UNKNOWN = "unknown"  # healthd cannot say, or has looked at nothing for a while
    WARNING = "warning"
    DRAINED_BY_OTHERS = "drained_by_others"
    HEALTHY = "healthy"


STATUS_OF = {  # the exit status
    Group.HELD: 2,
    Group.NOT_SEEN: 2,
    Group.DRAINED: 2,
    Group.BROKEN: 2,
    Group.UNKNOWN: 1,
    Group.WARNING: 1,
    Group.DRAINED_BY_OTHERS: 1,
    Group.HEALTHY: 0,
}


@dataclass(frozen=True, slots=True)
class Standing:
    """A condition that stands. severity: 0 to 3, an index of SEVERITIES; since: epoch seconds, 0 = not known."""

    check: str
    code: str
    subject: str
    severity: int
    open: bool = True
    acknowledged: bool = False
    enforced: bool = True
    since: float = 0.0

    @property
    def acts(self) -> bool:
        """Whether it counts: confirmed, known to nobody, and from no log that is known to be open to users."""
        return self.open and self.enforced and not self.acknowledged


@dataclass(frozen=True, slots=True)
class NodeNow:
    """node          its name in Slurm, or the host's of its address
    seen          it answers Prometheus now
    last_seen     epoch seconds, to within some minutes; 0 = not in the last week (or it is seen)
    health, mode, version   "" = not known
    drained_by    "healthd", "unrecorded_healthd", "other", "" = no drain stands
    drained_since epoch seconds, 0 = not known
    paused_until, waiting_since   epoch seconds, 0 = not paused; no drain waits for the fleet
    limit_partition  the partition whose fleet limit holds the drain back
    stale_seconds how long ago its last round began, if that is too long
    conditions    the worst first
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
    conditions: tuple[Standing, ...] = ()

    @property
    def group(self) -> Group:
        if not self.seen:
            return Group.NOT_SEEN
        if self.drained_by in OURS:
            return Group.DRAINED
        if self.drain_desired and not self.drained_by:
            return Group.HELD
        if self.drained_by:
            return Group.DRAINED_BY_OTHERS
        if self.health in ("degraded", "unhealthy"):
            return Group.BROKEN
        if self.health in ("", "unknown") or self.stale_seconds:
            return Group.UNKNOWN
        return Group.WARNING if self.health == "warning" or self.slurm_problem else Group.HEALTHY

    @property
    def acknowledged(self) -> bool:
        """Whether a person knows of all that makes it broken."""
        bad = [c for c in self.conditions if c.severity >= SEVERITIES.index("degraded")]
        return any(c.acknowledged for c in bad) and not any(c.acts for c in bad)

    @property
    def since(self) -> float:
        """Since when it is so: the drain, the worst condition, when it was last seen; 0 = not known."""
        if not self.seen:
            return self.last_seen
        if self.drained_by:
            return self.drained_since
        return next((c.since for c in self.conditions if c.since), 0.0)

    @property
    def delayed_by(self) -> tuple[str, ...]:
        """What keeps a wanted drain from being set."""
        if self.group is not Group.HELD:
            return ()
        holds = {
            "observe": self.mode == "observe",
            "pause": bool(self.paused_until),
            "limit": bool(self.limit_partition or self.waiting_since),
            "slurm": self.slurm_problem,
        }
        return tuple(name for name, it_does in holds.items() if it_does)

    @property
    def name_order(self) -> tuple[Any, ...]:
        """gpu2 before gpu10."""
        parts = _NUMBERS.split(self.node)
        return self.cluster, [(int(p[:18]), p) if at % 2 else (0, p) for at, p in enumerate(parts)], self.instance


ORDERS = {
    "worst": lambda n: (list(Group).index(n.group), n.name_order),
    "since": lambda n: (not n.since, n.since, n.name_order),
    "node": lambda n: n.name_order,
}
