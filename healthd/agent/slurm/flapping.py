"""A fault that comes and goes must not drain and resume its node thirty times: pure.

the drain is                                          its resume, once every check is clean
----------------------------------------------------  ---------------------------------------------------------------
for the node's own hardware, the third in an hour     waits for a person: the node kills job after job
for a cause that nodes share, the second in a row     waits 10 minutes, the third 20, ... at most 4 hours, then goes by
                                                      itself: a person cannot mend a file server on each of 1,000 nodes
any other                                             goes at once

In a row: each began within an hour after the resume of the one before. Only drains that we lifted ourselves count. A
person who resumes the node, or says "repaired" of what drained it, answers for it: the count begins anew. That can be
said also when the fault is over and only the count still holds the node.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from healthd.agent.slurm.fleet_limit import is_own_hardware
from healthd.common.model import Condition, ConditionState, Resumed, Severity, SlurmMemory, Verdict
from healthd.common.slurm.drain_reason import parse_reason
from healthd.common.values import Value

IN_A_ROW_SECONDS = 3600.0
KEPT = 20  # the longest wait is reached long before


class Flapping(Value, frozen=True):
    """own_faults_per_hour           this many drains for own hardware in an hour wait for a person; 0: none does
    shared_wait_seconds          the wait of the second drain in a row for a shared cause; each further one's is twice
                                 as long
    shared_max_wait_seconds  but not longer than this
    """

    own_faults_per_hour: int = 3
    shared_wait_seconds: float = 600.0
    shared_max_wait_seconds: float = 4 * 3600.0


def noted(memory: SlurmMemory, verdict: Verdict, now: float) -> SlurmMemory:
    """The memory after a reading of the node: since when our drain stands or is wanted, for what, and how long all has
    been clean.

    Only a fault that stands lets that begin anew. What is unknown (a check that timed out, a finding that must last
    first, a restart) is not clean either: the time until the next clean look does not count.
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
    """The memory after a resume by ourselves. `before`: while the drain stood."""
    if memory.reason or not before.reason:
        return memory
    ended = Resumed(before.drained_at, now, before.own_hardware)
    return replace(memory, resumed=(*memory.resumed, ended)[-KEPT:])


def answered_for(memory: SlurmMemory) -> SlurmMemory:
    """A person answers for the node."""
    return replace(memory, resumed=())


def ended_in_drain(memory: SlurmMemory, cleared: Iterable[Condition]) -> list[Condition]:
    """Faults that are over and drained this node, where our drain still stands because it was not the first one: a
    person may still say "repaired". They ended while it stood."""
    if not memory.reason or not memory.resumed:
        return []
    return [c for c in cleared if c.cleared_at >= memory.drained_at and _drained(memory, c)]


def has_drained(memory: SlurmMemory, conditions: Iterable[Condition]) -> bool:
    """Whether one of these may have drained the node: who repairs only what warned answers for nothing else."""
    return any(_drained(memory, c) for c in conditions)


def _drained(memory: SlurmMemory, c: Condition) -> bool:
    is_bad = c.severity >= Severity.DEGRADED and c.state is not ConditionState.PENDING and not c.observed
    return is_bad or c.key == parse_reason(memory.reason)


def own_faults(memory: SlurmMemory) -> int:
    """How many of our drains for own hardware began within an hour before this one, and this one."""
    since = memory.drained_at - IN_A_ROW_SECONDS
    return 1 + sum(1 for old in memory.resumed if old.own_hardware and since < old.drained_at <= memory.drained_at)


def in_a_row(memory: SlurmMemory) -> int:
    """How many of our drains came in a row, this one included."""
    began, count = memory.drained_at, 1
    for old in reversed(memory.resumed):
        if began - old.time > IN_A_ROW_SECONDS:
            break
        began, count = old.drained_at, count + 1
    return count


def wait_seconds(memory: SlurmMemory, limits: Flapping) -> float:
    """How long all must be clean before the drain that stands is lifted; infinity: until a person does it."""
    if memory.own_hardware:
        is_too_often = 0 < limits.own_faults_per_hour <= own_faults(memory)
        return float("inf") if is_too_often else 0.0
    times = in_a_row(memory)
    longest = limits.shared_max_wait_seconds
    return min(limits.shared_wait_seconds * 2.0 ** (times - 2), longest) if times > 1 else 0.0


def waits_until(memory: SlurmMemory, limits: Flapping, now: float) -> float:
    """When the drain that stands may be lifted, if all stays clean (epoch seconds); 0 = now, or only a person may."""
    until = _goes_at(memory, limits, now)
    return until if memory.reason and memory.clean_since and now < until < float("inf") else 0.0


def _goes_at(memory: SlurmMemory, limits: Flapping, now: float) -> float:
    return min(memory.clean_since or now, now) + wait_seconds(memory, limits) - memory.clean_seconds


def why_waits(memory: SlurmMemory, limits: Flapping, now: float) -> str:
    """Why the drain that stands is not lifted, though every check is clean; "" = it may be lifted."""
    seconds = wait_seconds(memory, limits)
    if seconds == float("inf"):
        known = parse_reason(memory.reason)
        command = f', or say "healthd repaired {known[0]}"' if known else ""
        often = f"drained {own_faults(memory)} times within an hour for the node's own hardware"
        return f"clean, but {often}: a person must resume it{command}"
    if now >= _goes_at(memory, limits, now):
        return ""
    times, minutes = in_a_row(memory), seconds / 60
    return f"clean, but it came and went {times} times in a row: resumed once it has stayed clean for {minutes:.3g} min"


def note(memory: SlurmMemory, limits: Flapping) -> str:
    """What the Reason of a drain says that only a person ends, "" = nothing: who is woken at night sees `sinfo -R`."""
    if wait_seconds(memory, limits) < float("inf"):
        return ""
    return f"{own_faults(memory)} times in an hour: a person must resume it"
