"""Limits for intermittent faults, which would otherwise drain and resume a node repeatedly. The functions are pure.

drain                                                     resume, once every check is clean
--------------------------------------------------------  -----------------------------------------------------------
the third within an hour for the node's own hardware      by an operator, because the node kills job after job
the second in a row for a cause that nodes share          after 10 minutes, the third after 20, ... at most 4 hours. No
                                                          operator is needed: they cannot fix a file server on each of
                                                          1,000 nodes
any other                                                 at once

Drains are in a row if each began within an hour after the resume from the previous drain. Only drains that healthd
lifted itself are counted. An operator who resumes the node, or runs `healthd repaired` for the cause, resets the count.
`healthd repaired` also works once the fault is over and only the count keeps the node drained.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from healthd.agent.slurm.fleet_limit import is_own_hardware
from healthd.common.model import Condition, ConditionState, DrainRecord, ResumedDrain, Severity, Verdict
from healthd.common.slurm.drain_reason import parse_reason
from healthd.common.values import Value

IN_A_ROW_SECONDS = 3600.0
MAX_RESUMED = 20  # the maximum wait is reached long before that


class Flapping(Value, frozen=True):
    """Limits for intermittent faults.

    own_faults_per_hour      after this many drains in an hour for the node's own hardware, an operator must resume the
                             node; 0 = no limit
    shared_wait_seconds      wait after the second drain in a row for a shared cause; each further drain doubles it
    shared_max_wait_seconds  maximum of this wait
    """

    own_faults_per_hour: int = 3
    shared_wait_seconds: float = 600.0
    shared_max_wait_seconds: float = 4 * 3600.0


def after_reading(record: DrainRecord, verdict: Verdict, now: float) -> DrainRecord:
    """Return the record, updated after a reading of the node: the drain's start and cause, and the clean time.

    Only an open fault resets the clean time. Time in an unknown state (a check that timed out, a pending finding, a
    restart) is not clean time either.
    """
    if not record.reason and not verdict.causes:
        return replace(record, drained_at=0.0, own_hardware=False, clean_seconds=0.0, clean_since=0.0)
    is_clean = verdict.may_resume and not verdict.causes
    clean_time = max(now - record.clean_since, 0.0) if is_clean and record.clean_since else 0.0
    return replace(
        record,
        drained_at=(record.reason and record.drained_at) or now,
        own_hardware=bool(record.reason and record.own_hardware) or is_own_hardware(verdict.causes),
        clean_seconds=0.0 if _has_open_fault(verdict) else record.clean_seconds + clean_time,
        clean_since=now if is_clean else 0.0,
    )


def _has_open_fault(verdict: Verdict) -> bool:
    return bool(verdict.causes) or any(
        c.state is ConditionState.OPEN and c.severity >= Severity.DEGRADED and not c.observed
        for c in verdict.conditions
    )


def after_resume(record: DrainRecord, previous: DrainRecord, now: float) -> DrainRecord:
    """Return the record, updated after a resume by healthd. `previous` is the record during the drain."""
    if record.reason or not previous.reason:
        return record
    ended = ResumedDrain(previous.drained_at, now, previous.own_hardware)
    return replace(record, resumed_drains=(*record.resumed_drains, ended)[-MAX_RESUMED:])


def reset_count(record: DrainRecord) -> DrainRecord:
    """Return the record with the count reset after an operator repaired or resumed the node."""
    return replace(record, resumed_drains=())


def ended_causes(record: DrainRecord, cleared: Iterable[Condition]) -> list[Condition]:
    """Return the faults that drained this node and have ended, while the drain remains because of flapping.

    `healthd repaired` still accepts these faults.
    """
    if not record.reason or not record.resumed_drains:
        return []
    return [c for c in cleared if c.cleared_at >= record.drained_at and _may_have_drained(record, c)]


def may_have_drained(record: DrainRecord, conditions: Iterable[Condition]) -> bool:
    """Return True if one of these conditions may have drained the node. A repaired warning does not reset the count."""
    return any(_may_have_drained(record, c) for c in conditions)


def _may_have_drained(record: DrainRecord, c: Condition) -> bool:
    may_drain = c.severity >= Severity.DEGRADED and c.state is not ConditionState.PENDING and not c.observed
    return may_drain or c.key == parse_reason(record.reason)


def count_own_faults(record: DrainRecord) -> int:
    """Count the drains for the node's own hardware in the hour before this drain began, including this drain."""
    since = record.drained_at - IN_A_ROW_SECONDS
    return 1 + sum(
        1 for old in record.resumed_drains if old.own_hardware and since < old.drained_at <= record.drained_at
    )


def count_in_a_row(record: DrainRecord) -> int:
    """Count the drains in a row, including this one."""
    drained_at, count = record.drained_at, 1
    for old in reversed(record.resumed_drains):
        if drained_at - old.resumed_at > IN_A_ROW_SECONDS:
            break
        drained_at, count = old.drained_at, count + 1
    return count


def wait_seconds(record: DrainRecord, limits: Flapping) -> float:
    """Return the clean time in seconds that is required before the drain is lifted. Infinity means that an operator
    must resume the node.
    """
    if record.own_hardware:
        is_too_often = 0 < limits.own_faults_per_hour <= count_own_faults(record)
        return float("inf") if is_too_often else 0.0
    times = count_in_a_row(record)
    max_wait = limits.shared_max_wait_seconds
    return min(limits.shared_wait_seconds * 2.0 ** (times - 2), max_wait) if times > 1 else 0.0


def waits_until(record: DrainRecord, limits: Flapping, now: float) -> float:
    """Return the time at which the drain may be lifted if everything stays clean (epoch seconds).

    Return 0 if the drain may be lifted now, or only by an operator.
    """
    until = _resume_at(record, limits, now)
    return until if record.reason and record.clean_since and now < until < float("inf") else 0.0


def _resume_at(record: DrainRecord, limits: Flapping, now: float) -> float:
    return min(record.clean_since or now, now) + wait_seconds(record, limits) - record.clean_seconds


def wait_reason(record: DrainRecord, limits: Flapping, now: float) -> str:
    """Return the reason why the drain is not lifted even though all checks are clean, or "" if it may be lifted."""
    seconds = wait_seconds(record, limits)
    if seconds == float("inf"):
        cause = parse_reason(record.reason)
        command = f', or run "healthd repaired {cause[0]}"' if cause else ""
        text = f"drained {count_own_faults(record)} times within an hour for the node's own hardware"
        return f"clean, but {text}: an operator must resume it{command}"
    if now >= _resume_at(record, limits, now):
        return ""
    times, minutes = count_in_a_row(record), seconds / 60
    return f"clean, but drained {times} times in a row: resumed after {minutes:.3g} min without a fault"


def drain_note(record: DrainRecord, limits: Flapping) -> str:
    """Return a note for the Reason (`sinfo -R`) if only an operator can lift the drain, otherwise ""."""
    if wait_seconds(record, limits) < float("inf"):
        return ""
    return f"{count_own_faults(record)} times in an hour: an operator must resume it"
