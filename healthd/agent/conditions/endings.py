"""Events that clear or acknowledge conditions: boot, reset, quiet time, operator. All functions are pure and take `now`
as an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from healthd.agent.conditions.condition import (
    ACTIVE_STATES,
    Conditions,
    acknowledged,
    ended,
    last_evidence_time,
    update_matching,
    with_open_times,
)
from healthd.common.model import Ack, Clears, Condition, ConditionKey, ConditionState, Ending, Repair, Severity


def after_boot(conditions: Conditions, boot_id: str, now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions after a boot. Conditions that wait for a reboot or reset are cleared, and windows restart.

    Checks that read the state themselves run again. Pending conditions are dropped, and conditions that worsen over
    time start over, because downtime is not evidence.
    """

    def after_reboot(condition: Condition) -> Condition:
        if condition.clears in (Clears.REBOOT, Clears.GPU_RESET):
            return ended(condition, Ending.REBOOT, now)
        return replace(condition, repaired=True, persists_since=now)

    remaining = {
        key: c for key, c in conditions.items() if c.boot_id == boot_id or c.state is not ConditionState.PENDING
    }
    return update_matching(
        remaining, lambda c: c.boot_id != boot_id and c.state is not ConditionState.CLEARED, after_reboot
    )


def after_repairs(conditions: Conditions, repairs: Iterable[Repair], now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions after evidence of a reset.

    The reset part's conditions that wait for a reset are cleared, unless they were reported after the earlier reading.
    """
    new = dict(conditions)
    for repair in repairs:
        for key, c in new.items():
            if c.subject == repair.subject and last_evidence_time(c) <= repair.before and c.state in ACTIVE_STATES:
                if c.clears is repair.clears:
                    ending = Ending.REBOOT if repair.clears is Clears.REBOOT else Ending.RESET
                    new[key] = ended(c, ending, now, f"{repair.clears.name.lower()}: {repair.message}")
                elif c.window_seconds:
                    new[key] = replace(c, repaired=True)
    return new


def after_quiet_time(
    conditions: Conditions, seconds: float, under_load: bool, now: float
) -> dict[ConditionKey, Condition]:
    """Return the conditions after `seconds` have passed.

    Only time in which the fault could have appeared counts towards a window: time under load, or after a repair. For a
    shared cause all time counts, because an operator cannot run "healthd repaired" on a thousand nodes. If the fault
    returns under load, agent/slurm/flapping.py limits the number of drains and resumes. The window for a check's
    finding starts when the check completes without the finding, not between two runs.
    """

    def add_quiet_time(condition: Condition) -> Condition:
        quiet_seconds = condition.quiet_seconds + max(0.0, min(seconds, now - condition.last_seen))
        if quiet_seconds >= condition.window_seconds:
            return ended(condition, Ending.WINDOW, now)
        return replace(condition, quiet_seconds=quiet_seconds)

    return update_matching(
        conditions,
        lambda c: (
            c.window_seconds > 0
            and c.state in ACTIVE_STATES
            and (under_load or c.repaired or (c.shared_cause and c.clears is Clears.WINDOW))
            and (c.clean_runs > 0 or not c.last_level_seen)
        ),
        add_quiet_time,
    )


def repaired(
    conditions: Conditions, code: str, subject: str | None, by: str, now: float
) -> dict[ConditionKey, Condition]:
    """Return the conditions after `healthd repaired`: the condition is cleared, regardless of its normal ending.

    If `subject` is None, every part with that code is included. If a check still reads a sticky flag (the condition has
    evidence), the condition is acknowledged instead, until the flag changes.
    """

    def settle(condition: Condition) -> Condition:
        if condition.evidence and condition.last_level_seen:
            return acknowledged(condition, now)
        return ended(condition, Ending.REPAIRED, now, f"repaired by {by}")

    return update_matching(
        conditions,
        lambda c: c.code == code and subject in (None, c.subject) and c.state is not ConditionState.CLEARED,
        settle,
    )


def acknowledge(conditions: Conditions, code: str, subject: str | None, ack: Ack) -> dict[ConditionKey, Condition]:
    """Return the conditions after `healthd ack`. They do not drain until `ack.until`. If `subject` is None, every part
    is included."""
    return update_matching(
        conditions,
        lambda c: c.code == code and subject in (None, c.subject) and c.state is not ConditionState.CLEARED,
        lambda c: replace(c, state=ConditionState.ACKNOWLEDGED, ack=replace(ack, severity=c.severity)),
    )


def end_expired_acks(conditions: Conditions, now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions, without acks that have expired or whose condition has worsened."""
    return update_matching(
        conditions,
        lambda c: c.ack is not None and (now >= c.ack.until or c.severity > c.ack.severity),
        lambda c: with_open_times(replace(c, state=_state_without_ack(c), ack=None), now),
    )


def withdraw_acks(conditions: Conditions, code: str, subject: str | None, now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions after `healthd unack`, which removes a code's acks. If `subject` is None, every part is
    included.
    """
    return update_matching(
        conditions,
        lambda c: c.ack is not None and c.code == code and subject in (None, c.subject),
        lambda c: with_open_times(replace(c, state=_state_without_ack(c), ack=None), now),
    )


def next_ack_expiry(conditions: Iterable[Condition]) -> float:
    """Return the time at which the next ack ends, in epoch seconds, or infinity if there are no acks. 0 means now."""
    ends = (0.0 if c.severity > c.ack.severity else c.ack.until for c in conditions if c.ack is not None)
    return min(ends, default=float("inf"))


def _state_without_ack(c: Condition) -> ConditionState:
    """Return the state that the condition would have without the ack.

    If an operator's resume acknowledged the condition, it remains acknowledged until it is reported again.
    """
    if not c.opened_at and max(0.0, c.last_level_seen - c.persists_since) < c.confirm_seconds:
        return ConditionState.PENDING
    is_same_evidence = bool(c.evidence) and c.evidence == c.acknowledged_evidence
    last_evidence = max(c.last_event, 0.0 if is_same_evidence else c.last_level_seen)
    return ConditionState.ACKNOWLEDGED if last_evidence <= c.acknowledged_at else ConditionState.OPEN


def acknowledge_resumed(conditions: Conditions, before: float, now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions after an operator resumed the node. Conditions that were open at `before` are acknowledged.

    `before` is the time at which the drain was last read. Conditions that opened later, or that are reported after
    `now`, can drain again.
    """
    return update_matching(
        conditions,
        lambda c: c.state is ConditionState.OPEN and c.severity >= Severity.DEGRADED and c.opened_at <= before,
        lambda c: acknowledged(c, now),
    )
