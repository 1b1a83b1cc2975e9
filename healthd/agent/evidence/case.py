"""The case of an incident: which part of the evidence is saved, and when. All functions are pure.

    FIRST     kernel log, journal and `healthd record` are being saved, even while jobs run
    WAITING   the rest waits until the node is drained and idle
    FULL      the rest is being saved: it disturbs jobs
    DONE      the case is closed

There is one case per drain. It begins when a fault drains the node or would drain it (mode "observe", a pause, the
fleet limit). It ends when everything is saved, or when the drain has ended and no open fault drains the node any more.
While the drain is in force without such a fault (a fault that comes and goes, a check before the resume), the case
waits: the node may be resumed at any time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from healthd.common.moments import Moment
from healthd.common.text import regex
from healthd.common.values import Value, Whole

FIRST, FULL = "first", "full"  # the parts of the evidence
_NOT_IN_ID = regex(r"[^a-z0-9_-]+")
REPEAT_SECONDS = 3600.0  # a fault that returns without a drain within this time belongs to the same case
MAX_ATTEMPTS = 3  # requests for a part, including those that a job interrupted
MAX_CAUSES = 20
MAX_STUCK = 20


class Stage(enum.Enum):
    FIRST = "first"
    WAITING = "waiting"
    FULL = "full"
    DONE = "done"


RUNNING = (Stage.FIRST, Stage.FULL)  # stages in which the collector works


class Process(Value, frozen=True):
    """A process that SIGKILL did not end. `start` is its start time in clock ticks since boot (proc_pid_stat(5))."""

    pid: Whole
    start: Whole


class Result(Value, frozen=True):
    """Result of one part. `attempt` is the number of its request.

    path, bytes  the file, or "" and 0 if nothing was saved
    problems     programs that failed; the file has the rest
    error        why nothing was saved, or ""
    stopped      why the part is incomplete (a job, an operator), or ""
    stuck        processes that hang in the kernel
    """

    id: str
    part: str
    attempt: Whole = 1
    path: str = ""
    bytes: Whole = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    error: str = ""
    stopped: str = ""
    stuck: tuple[Process, ...] = ()


class Cause(Value, frozen=True):
    """A fault that drains. `text` is its code and part, and `event` its name in the event stream.

    `shared_cause` is true if the cause may be outside this node, such as a file server.
    """

    text: str
    event: str = ""
    shared_cause: bool = False


class Case(Value, frozen=True):
    """One incident.

    fault_at     time of the first fault; the journal is saved from before this time
    reason       reason of the drain
    has_drained  True if healthd's drain was in force
    is_released  True if that drain has ended
    attempts     requests for the current part
    is_requested  True until the result of the last request has been read
    error        why a part was not saved, or ""; `problems` are programs that failed
    stuck        processes that hang in the kernel, also those of earlier cases
    """

    id: str
    stage: Stage
    began: Moment
    fault_at: Moment
    causes: tuple[Cause, ...]
    reason: str = ""
    has_drained: bool = False
    is_released: bool = False
    attempts: Whole = 0
    is_requested: bool = False
    path: str = ""
    bytes: Whole = 0
    problems: tuple[str, ...] = ()
    error: str = ""
    stuck: tuple[Process, ...] = ()


class View(NamedTuple):
    """The daemon's view of the node.

    causes       faults that drain the node, or would drain it
    fault_at     time of the first of them
    reason       healthd's reason, or ""
    is_drained   healthd's drain is in force
    is_idle      Slurm has just shown the node drained and without a job
    is_in_use    Slurm has shown the node not drained, or with a job
    """

    causes: tuple[Cause, ...]
    fault_at: float
    reason: str
    is_drained: bool
    is_idle: bool
    is_in_use: bool


def next_case(case: Case | None, view: View, new_id: str, now: float) -> Case | None:
    """Return the case after a change of the node. A case in stage FIRST stays there until its result."""
    if case is None or case.stage is Stage.DONE:
        return _after_end(case, view, new_id, now)
    case = replace(
        case,
        causes=_union(case.causes, view.causes),
        reason=view.reason or case.reason,
        has_drained=case.has_drained or view.is_drained,
    )
    if case.stage is Stage.FIRST:
        return case
    if not view.causes and not view.is_drained:
        return replace(case, stage=Stage.DONE, is_requested=False)
    if case.stage is Stage.FULL and (view.is_in_use or not view.causes):
        return replace(case, stage=Stage.WAITING, is_requested=False)
    if case.stage is Stage.WAITING and view.is_idle and view.causes:
        return replace(case, stage=Stage.FULL)
    return case


def _after_end(case: Case | None, view: View, new_id: str, now: float) -> Case | None:
    """Return the closed case, or a new case for new faults."""
    if case is not None and case.has_drained and not view.is_drained and not case.is_released:
        case = replace(case, is_released=True)
    if not view.causes or (case is not None and _is_same_incident(case, view, now)):
        return case
    stuck = case.stuck if case is not None else ()  # they still exist, and a GPU reset must still wait for their end
    causes = view.causes[:MAX_CAUSES]
    return Case(new_id, Stage.FIRST, now, view.fault_at, causes, view.reason, view.is_drained, stuck=stuck)


def _is_same_incident(case: Case, view: View, now: float) -> bool:
    texts = {cause.text for cause in case.causes}
    if not all(cause.text in texts for cause in view.causes[:MAX_CAUSES]):
        return False
    if case.has_drained:
        return not case.is_released
    return 0.0 <= now - case.began < REPEAT_SECONDS  # if the clock was set back, save too much rather than too little


def _union(before: Sequence[Cause], causes: Sequence[Cause]) -> tuple[Cause, ...]:
    texts = {cause.text for cause in before}
    return (*before, *(cause for cause in causes if cause.text not in texts))[:MAX_CAUSES]


def after_request(case: Case) -> Case:
    return replace(case, attempts=case.attempts + 1, is_requested=True)


def after_result(case: Case, result: Result | None) -> Case:
    """Return the case after a request has been served. `result` is the last result that the collector left.

    A part without a result, or one that was stopped, is requested again, at most MAX_ATTEMPTS times in total.
    """
    if result is not None and result.id == case.id and case.stage not in RUNNING:
        return _with_file(case, result) if result.part == FULL else case  # the daemon stopped the part earlier
    part = case.stage.value
    case = replace(case, is_requested=False)
    is_last = case.attempts >= MAX_ATTEMPTS
    if result is None or (result.id, result.part, result.attempt) != (case.id, part, case.attempts):
        if not is_last:
            return case
        case = replace(case, error=f"the {part} part of {case.id} was not saved: the collector left no result")
    else:
        case = replace(_with_file(case, result), error=result.error)
        if case.stage is Stage.FULL and result.stopped and not is_last:
            return replace(case, stage=Stage.WAITING)
    if case.stage is Stage.FIRST:
        return replace(case, stage=Stage.WAITING, attempts=0)
    return replace(case, stage=Stage.DONE)


def _with_file(case: Case, result: Result) -> Case:
    stuck = (*case.stuck, *(process for process in result.stuck if process not in case.stuck))
    case = replace(case, problems=result.problems, stuck=stuck[-MAX_STUCK:])
    return replace(case, path=result.path, bytes=result.bytes) if result.path else case


def make_id(time_text: str, causes: Sequence[Cause]) -> str:
    """Return a case's id from a time such as "20261129T060000Z" and its worst fault."""
    code = causes[0].text.partition(" ")[0] if causes else "manual"
    name = _NOT_IN_ID.sub("-", code.lower())[:40].strip("-")
    return f"{time_text}-{name or 'fault'}"
