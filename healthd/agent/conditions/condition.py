"""One condition, and the steps of its life. Pure; `now` is an argument.

A condition's life:

    finding -> PENDING (for its confirm time) -> OPEN -> CLEARED, by what `clears` names
                                                  |  ^
                    an operator resumes the node  v  |  seen again, with other evidence
          `healthd ack`: a person knows of it     |  |  its time is over, or it has become worse
                                             ACKNOWLEDGED
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from healthd.common.model import Clears, Condition, ConditionKey, ConditionState, Ending, KernelEvent, Severity

Conditions = Mapping[ConditionKey, Condition]
LONGEST_WISH_SECONDS = 7 * 24 * 3600.0  # the longest pause or ack
STANDING = (ConditionState.OPEN, ConditionState.ACKNOWLEDGED)
LATCHED = (Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR)


class Standing(enum.IntEnum):
    """How much a sight counts. A better one begins a condition anew, a weaker one adds nothing to it."""

    HISTORY = 0
    OBSERVED = 1
    PROVEN = 2


def standing(seen: Condition | KernelEvent) -> Standing:
    if seen.history:
        return Standing.HISTORY
    return Standing.OBSERVED if seen.observed else Standing.PROVEN


def opened(condition: Condition, now: float) -> Condition:
    """Note when a condition first was open, and when open and CRITICAL."""
    if condition.state is not ConditionState.OPEN:
        return condition
    return replace(
        condition,
        opened_at=condition.opened_at or now,
        critical_at=condition.critical_at or (now if condition.severity is Severity.CRITICAL else 0.0),
    )


def ended(condition: Condition, ending: Ending, now: float, text: str | None = None) -> Condition:
    """Return the condition as cleared. `text` is for people and decides nothing; by default the ending's value."""
    by = ending.value if text is None else text
    return replace(condition, state=ConditionState.CLEARED, cleared_at=now, cleared_by=by, ending=ending)


def found_severity(condition: Condition) -> Severity:
    return condition.severity if condition.found is None else condition.found


def changed(
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


def acts(condition: Condition, trusted_since: float) -> bool:
    """Whether a condition may drain: open, bad enough, proven, and seen by us since we may be trusted with it."""
    since = max(trusted_since, condition.acknowledged_at)
    is_bad = condition.state is ConditionState.OPEN and condition.severity >= Severity.DEGRADED
    return is_bad and not condition.observed and last_sight(condition) > since


def fault_time(cause: Condition) -> float:
    """When a CRITICAL fault was last seen happening: jobs that started later are not its victims."""
    return max(cause.critical_at, cause.last_event)


def last_sight(condition: Condition) -> float:
    """The last moment at which the fault is known to have been there."""
    return max(condition.last_level_seen, condition.last_event)
