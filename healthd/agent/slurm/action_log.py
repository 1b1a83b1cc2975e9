"""Log lines and stream events about what healthd and operators change in Slurm, as values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from healthd.agent.conditions import log_fields
from healthd.agent.conditions.events import OPERATOR
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.log_fields import DRAIN, OPERATOR_RESUME, REQUEUE, RESUME, Fields
from healthd.agent.conditions.log_lines import Line
from healthd.agent.slurm import fleet_limit
from healthd.agent.slurm.reconcile import HELD, ReconcileReport
from healthd.common.model import Condition, FleetHold, Severity
from healthd.common.slurm.builtin_reasons import PROLOG_ERROR
from healthd.common.slurm.commands import Argv, CommandResult, change_of
from healthd.common.slurm.drain_reason import head, parse_reason
from healthd.common.slurm.output import what_failed
from healthd.events.schema import Event

# --- events


def command_events(argv: Argv, result: CommandResult | None) -> list[Event]:
    """Return the event of a command that starts (`result` is None) or fails. A reconciliation reports its success."""
    what, about = change_of(argv)
    if not what or (result is not None and result.status == 0):
        return []
    fields = {"drain": {"reason": about}, "requeue": {"job": about}}.get(what, {})
    how = {"stage": "sent"} if result is None else {"stage": "refused", "error": what_failed(argv, result)}
    return [Event(what, {**fields, **how})]


def report_events(reason: str, lifted: bool, acknowledged: bool, requeued: tuple[str, ...]) -> Iterator[Event]:
    """Yield the events of a reconciliation. `reason`: the Reason of healthd's drain before it. A new drain is not
    included: it has an event when the ledger changes."""
    if lifted or acknowledged:
        who = {} if lifted else {"who": OPERATOR}
        yield Event("resume", {"stage": "confirmed", "reason": reason, **who})
    for job in requeued:
        yield Event("requeue", {"stage": "confirmed", "job": job})


# --- log lines


class Cause(NamedTuple):
    """Where to find the cause of a line. `wanted`: the conditions that the reconciliation was started for."""

    wanted: Sequence[Condition]
    ledger: Ledger


def operator_resume_line(cause: Cause) -> Iterator[Line]:
    words = "an operator resumed the node: what stands is acknowledged, only what is seen again acts"
    yield Line(Severity.WARNING, words, _fields(OPERATOR_RESUME, cause.ledger.slurm.reason, cause))


def hold_lines(before: FleetHold | None, after: FleetHold | None, now: float) -> Iterator[Line]:
    """Yield a line when the fleet limit holds a drain, and at each retry. The first wait is INFO: it is no fault."""
    if after is not None and after != before:
        severity = Severity.CRITICAL if after.times else Severity.INFO
        yield Line(severity, f"{fleet_limit.why(after)}; tried again in {after.until - now:.0f} s", {})


def drain_lines(before: str, cause: Cause) -> Iterator[Line]:
    """Yield a line if the ledger has a new Reason. `before`: the previous Reason in the ledger."""
    reason = cause.ledger.slurm.reason
    if reason not in ("", before):
        yield Line(Severity.WARNING, f"drained the node: {reason}", _fields(DRAIN, reason, cause))


def report_lines(
    report: ReconcileReport, before: str, told: Collection[tuple[str, str]], cause: Cause
) -> Iterator[Line]:
    """Yield the lines of a reconciliation.

    before: healthd's Reason when it started. told: (job, why) of the jobs not requeued that were already logged.
    """
    if report.lifted:
        yield Line(Severity.WARNING, f"resumed the node: {before or PROLOG_ERROR}", _fields(RESUME, before, cause))
    if report.problem:
        yield Line(Severity.WARNING, f"slurm: {report.problem}", {})
    for job in report.requeued:
        held = f", held: {HELD}" if job in report.held else ""
        fields = {**_fields(REQUEUE, cause.ledger.slurm.reason, cause), "JOB": job}
        yield Line(Severity.WARNING, f"job {job} was requeued{held}", fields)
    for job, why in report.spared:
        if (job, why) not in told:
            yield Line(Severity.INFO, f"job {job} is not requeued: {why}", {})


def _fields(action: str, reason: str, cause: Cause) -> Fields:
    """Return the journal fields of a change to the node. `reason`: healthd's Reason, which names the cause."""
    known = (*cause.wanted, *cause.ledger.conditions, *reversed(cause.ledger.cleared))
    found = next((c for c in known if reason.startswith(head(c))), None)
    if found is None and reason == "":
        found = next(iter(cause.wanted), None)  # the node has a foreign drain
    if found is not None:
        return {"NODE_ACTION": action, **log_fields.of_condition(found)}
    code, part = parse_reason(reason) or ("", "")
    return {"NODE_ACTION": action, "CODE": code, "SUBJECT": part}
