"""A condition and its life cycle. All functions are pure and take `now` as an argument.

States:

    finding -> PENDING (for its confirm time) -> OPEN -> CLEARED, by the event that `clears` names
                                                  |  ^
                    an operator resumes the node  v  |  reported again, with different evidence
                                  `healthd ack`   |  |  the ack has expired, or the severity has risen
                                             ACKNOWLEDGED
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from healthd.common.model import Clears, Condition, ConditionKey, ConditionState, Ending, KernelEvent, Severity

Conditions = Mapping[ConditionKey, Condition]
MAX_SUPPRESSION_SECONDS = 7 * 24 * 3600.0  # the longest pause or ack
ACTIVE_STATES = (ConditionState.OPEN, ConditionState.ACKNOWLEDGED)
LATCHED = (Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR)


class EvidenceLevel(enum.IntEnum):
    """Strength of the evidence for a condition.

    Stronger evidence restarts a condition. Weaker evidence does not change the condition.
    """

    HISTORY = 0
    OBSERVED = 1
    PROVEN = 2


def evidence_level(source: Condition | KernelEvent) -> EvidenceLevel:
    if source.history:
        return EvidenceLevel.HISTORY
    return EvidenceLevel.OBSERVED if source.observed else EvidenceLevel.PROVEN


def with_open_times(condition: Condition, now: float) -> Condition:
    """Return the condition with two times set: when it first opened, and when it was first CRITICAL while open."""
    if condition.state is not ConditionState.OPEN:
        return condition
    return replace(
        condition,
        opened_at=condition.opened_at or now,
        critical_at=condition.critical_at or (now if condition.severity is Severity.CRITICAL else 0.0),
    )


def ended(condition: Condition, ending: Ending, now: float, text: str | None = None) -> Condition:
    """Return the condition as cleared. `text` is only displayed, and defaults to the ending's value."""
    by = ending.value if text is None else text
    return replace(condition, state=ConditionState.CLEARED, cleared_at=now, cleared_by=by, ending=ending)


def found_severity(condition: Condition) -> Severity:
    return condition.severity if condition.found_severity is None else condition.found_severity


def update_matching(
    conditions: Conditions, matches: Callable[[Condition], bool], change: Callable[[Condition], Condition]
) -> dict[ConditionKey, Condition]:
    return {key: change(c) if matches(c) else c for key, c in conditions.items()}


def acknowledged(condition: Condition, now: float) -> Condition:
    return replace(
        condition,
        state=ConditionState.ACKNOWLEDGED,
        acknowledged_at=now,
        acknowledged_evidence=condition.evidence,
        ack=None,
    )


def may_drain(condition: Condition, trusted_since: float) -> bool:
    """Return True if a condition may drain the node. It must be open, severe enough, proven and reported after
    `trusted_since`.
    """
    since = max(trusted_since, condition.acknowledged_at)
    is_serious = condition.state is ConditionState.OPEN and condition.severity >= Severity.DEGRADED
    return is_serious and not condition.observed and last_evidence_time(condition) > since


def fault_time(cause: Condition) -> float:
    """Return the time of a CRITICAL fault's last report. Jobs that started later were not affected."""
    return max(cause.critical_at, cause.last_event)


def last_evidence_time(condition: Condition) -> float:
    """Return the last time at which the fault was known to be present."""
    return max(condition.last_level_seen, condition.last_event)
