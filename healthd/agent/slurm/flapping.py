"""Limit for faults that come and go, so that they do not drain and resume a node repeatedly. Pure.

drain                                                 resume, once every check is clean
----------------------------------------------------  ---------------------------------------------------------------
for the node's own hardware, the third in an hour     by an operator: the node kills job after job
for a cause that nodes share, the second in a row     after 10 minutes, the third after 20, ... at most 4 hours, without
                                                      an operator, who cannot fix a file server on each of 1,000 nodes
any other                                             at once

In a row: each drain began within an hour after the resume of the previous one. Only drains that healthd lifted itself
count. An operator who resumes the node, or runs `healthd repaired` for the cause, resets the count. `healthd repaired`
also works when the fault is over and only the count keeps the node drained.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from healthd.agent.slurm.fleet_limit import is_own_hardware
from healthd.common.model import Condition, ConditionState, Resumed, Severity, SlurmMemory, Verdict
from healthd.common.slurm.drain_reason import parse_reason
from healthd.common.values import Value

IN_A_ROW_SECONDS = 3600.0
KEPT = 20  # the maximum wait is reached long before


class Flapping(Value, frozen=True):
    """Limits.

    own_faults_per_hour      this many drains for own hardware in an hour need an operator; 0: no limit
    shared_wait_seconds      wait after the second drain in a row for a shared cause; doubles with each further one
    shared_max_wait_seconds  maximum of that wait
    """

    own_faults_per_hour: int = 3
    shared_wait_seconds: float = 600.0
    shared_max_wait_seconds: float = 4 * 3600.0


def noted(memory: SlurmMemory, verdict: Verdict, now: float) -> SlurmMemory:
    """Return the record after a reading of the node: start and cause of the drain, and how long all has been clean.

    Only an open fault resets the clean time. Unknown states (a check that timed out, a pending finding, a restart) do
    not count as clean time either.
    """
    if not memory.reason and not verdict.causes:
        return replace(memory, drained_at=0.0, own_hardware=False, clean_seconds=0.0, clean_since=0.0)
    is_clean = verdict.may_resume and not verdict.causes
    went_by = max(now - memory.clean_since, 0.0) if is_clean and memory.clean_since else 0.0
    return replace(
        memory,
        drained_at=(memory.reason and memory.drained_at) or now,
        own_hardware=bool(memory.reason and memory.own_hardware) or is_own_hardware(verdict.causes),
        clean_seconds=0.0 if _stands(verdict) else memory.clean_seconds + went_by,
        clean_since=now if is_clean else 0.0,
    )


def _stands(verdict: Verdict) -> bool:
    return bool(verdict.causes) or any(
        c.state is ConditionState.OPEN and c.severity >= Severity.DEGRADED and not c.observed
        for c in verdict.conditions
    )


def lifted(memory: SlurmMemory, before: SlurmMemory, now: float) -> SlurmMemory:
    """Return the record after a resume by healthd. `previous`: the record during the drain."""
    if memory.reason or not before.reason:
        return memory
    ended = Resumed(before.drained_at, now, before.own_hardware)
    return replace(memory, resumed=(*memory.resumed, ended)[-KEPT:])


def answered_for(memory: SlurmMemory) -> SlurmMemory:
    """Return the record after an operator repaired or resumed the node."""
    return replace(memory, resumed=())


def ended_in_drain(memory: SlurmMemory, cleared: Iterable[Condition]) -> list[Condition]:
    """Return the faults that drained this node and have ended, while the drain remains because of flapping.

    `healthd repaired` is still possible for them.
    """
    if not memory.reason or not memory.resumed:
        return []
    return [c for c in cleared if c.cleared_at >= memory.drained_at and _drained(memory, c)]


def has_drained(memory: SlurmMemory, conditions: Iterable[Condition]) -> bool:
    """Return True if one of these conditions may have drained the node. Repairing a mere warning resets nothing."""
    return any(_drained(memory, c) for c in conditions)


def _drained(memory: SlurmMemory, c: Condition) -> bool:
    is_bad = c.severity >= Severity.DEGRADED and c.state is not ConditionState.PENDING and not c.observed
    return is_bad or c.key == parse_reason(memory.reason)


def own_faults(memory: SlurmMemory) -> int:
    """Count the drains for own hardware that began within an hour before this one, including this one."""
    since = memory.drained_at - IN_A_ROW_SECONDS
    return 1 + sum(1 for old in memory.resumed if old.own_hardware and since < old.drained_at <= memory.drained_at)


def in_a_row(memory: SlurmMemory) -> int:
    """Count the drains in a row, including this one."""
    began, count = memory.drained_at, 1
    for old in reversed(memory.resumed):
        if began - old.time > IN_A_ROW_SECONDS:
            break
        began, count = old.drained_at, count + 1
    return count


def wait_seconds(memory: SlurmMemory, limits: Flapping) -> float:
    """Return how long all must be clean before the drain is lifted; infinity: until an operator resumes the node."""
    if memory.own_hardware:
        is_too_often = 0 < limits.own_faults_per_hour <= own_faults(memory)
        return float("inf") if is_too_often else 0.0
    times = in_a_row(memory)
    longest = limits.shared_max_wait_seconds
    return min(limits.shared_wait_seconds * 2.0 ** (times - 2), longest) if times > 1 else 0.0


def waits_until(memory: SlurmMemory, limits: Flapping, now: float) -> float:
    """Return when the drain may be lifted if all stays clean (epoch seconds); 0 = now, or only by an operator."""
    until = _goes_at(memory, limits, now)
    return until if memory.reason and memory.clean_since and now < until < float("inf") else 0.0


def _goes_at(memory: SlurmMemory, limits: Flapping, now: float) -> float:
    return min(memory.clean_since or now, now) + wait_seconds(memory, limits) - memory.clean_seconds


def why_waits(memory: SlurmMemory, limits: Flapping, now: float) -> str:
    """Return why the drain is not lifted although every check is clean; "" = it may be lifted."""
    seconds = wait_seconds(memory, limits)
    if seconds == float("inf"):
        known = parse_reason(memory.reason)
        command = f', or run "healthd repaired {known[0]}"' if known else ""
        often = f"drained {own_faults(memory)} times within an hour for the node's own hardware"
        return f"clean, but {often}: an operator must resume it{command}"
    if now >= _goes_at(memory, limits, now):
        return ""
    times, minutes = in_a_row(memory), seconds / 60
    return f"clean, but drained {times} times in a row: resumed after {minutes:.3g} min without a fault"


def note(memory: SlurmMemory, limits: Flapping) -> str:
    """Return the note for the Reason that only an operator lifts the drain, "" = none. `sinfo -R` shows it."""
    if wait_seconds(memory, limits) < float("inf"):
        return ""
    return f"{own_faults(memory)} times in an hour: an operator must resume it"
