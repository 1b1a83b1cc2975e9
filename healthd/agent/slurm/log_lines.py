"""What healthd's own log is told of a look at Slurm and of what stands there then: lines as values. Pure. What the
stream is told of the same is in events.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from healthd.agent.conditions import log_fields
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.log_fields import DRAIN, OPERATOR_RESUME, REQUEUE, RESUME, Fields
from healthd.agent.conditions.log_lines import Line
from healthd.agent.slurm import fleet_limit
from healthd.agent.slurm.reconcile import HELD, ReconcileReport
from healthd.common.model import Condition, FleetHold, Severity
from healthd.common.slurm.builtin_reasons import PROLOG_ERROR
from healthd.common.slurm.drain_reason import head, parse_reason


class Cause(NamedTuple):
    """Where the cause of a line is found. `wanted`: the causes that the look was made for."""

    wanted: Sequence[Condition]
    ledger: Ledger


def of_resume_by_operator(cause: Cause) -> Iterator[Line]:
    words = "an operator resumed the node: what stands is acknowledged, only what is seen again acts"
    yield Line(Severity.WARNING, words, _fields(OPERATOR_RESUME, cause.ledger.slurm.reason, cause))


def of_hold(before: FleetHold | None, after: FleetHold | None, now: float) -> Iterator[Line]:
    """Of the fleet limit, when it is met and at each further try. The first try is no fault yet."""
    if after is not None and after != before:
        severity = Severity.CRITICAL if after.times else Severity.INFO
        yield Line(severity, f"{fleet_limit.why(after)}; tried again in {after.until - now:.0f} s", {})


def of_drain(before: str, cause: Cause) -> Iterator[Line]:
    """`before`: our Reason as the ledger had it."""
    reason = cause.ledger.slurm.reason
    if reason not in ("", before):
        yield Line(Severity.WARNING, f"drained the node: {reason}", _fields(DRAIN, reason, cause))


def of_look(report: ReconcileReport, before: str, told: Collection[tuple[str, str]], cause: Cause) -> Iterator[Line]:
    """`before`: our Reason at its begin; told: (job, why) of jobs that are not requeued and were told of."""
    if report.lifted:
        yield Line(Severity.WARNING, f"resumed the node: {before or PROLOG_ERROR}", _fields(RESUME, before, cause))
    if report.trouble:
        yield Line(Severity.WARNING, f"slurm: {report.trouble}", {})
    for job in report.requeued:
        held = f", held: {HELD}" if job in report.held else ""
        fields = {**_fields(REQUEUE, cause.ledger.slurm.reason, cause), "JOB": job}
        yield Line(Severity.WARNING, f"job {job} was requeued{held}", fields)
    for job, why in report.spared:
        if (job, why) not in told:
            yield Line(Severity.INFO, f"job {job} is not requeued: {why}", {})


def _fields(action: str, reason: str, cause: Cause) -> Fields:
    """Of a line that tells what was done to the node. `reason`: our words there, which name the cause."""
    known = (*cause.wanted, *cause.ledger.conditions, *reversed(cause.ledger.cleared))
    found = next((c for c in known if reason.startswith(head(c))), None)
    if found is None and reason == "":
        found = next(iter(cause.wanted), None)  # somebody else holds the node
    if found is not None:
        return {"NODE_ACTION": action, **log_fields.of_condition(found)}
    code, part = parse_reason(reason) or ("", "")
    return {"NODE_ACTION": action, "CODE": code, "SUBJECT": part}
