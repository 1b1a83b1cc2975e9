"""Log lines and stream events about changes in Slurm by healthd and by operators, as values. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from healthd.agent.conditions import log_fields
from healthd.agent.conditions.events import OPERATOR
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.log_fields import DRAIN, OPERATOR_RESUME, REQUEUE, RESUME, Fields
from healthd.agent.conditions.log_lines import Line
from healthd.agent.slurm import fleet_limit
from healthd.agent.slurm.reconcile import HELD_REASON, ReconcileReport
from healthd.common.model import ClaimHold, Condition, FleetHold, Severity
from healthd.common.slurm.builtin_reasons import PROLOG_ERROR
from healthd.common.slurm.commands import Argv, CommandResult, describe_change
from healthd.common.slurm.drain_reason import parse_reason, reason_start, with_claim
from healthd.common.slurm.output import describe_failure
from healthd.events.schema import Event

# --- events


def command_events(argv: Argv, result: CommandResult | None) -> list[Event]:
    """Return the event for a command that starts (`result` is None) or fails. The reconciliation reports success."""
    action, detail = describe_change(argv)
    if not action or (result is not None and result.status == 0):
        return []
    fields = {"drain": {"reason": detail}, "requeue": {"job": detail}}.get(action, {})
    outcome = {"stage": "sent"} if result is None else {"stage": "refused", "error": describe_failure(argv, result)}
    return [Event(action, {**fields, **outcome})]


def report_events(reason: str, resumed: bool, acknowledged: bool, requeued: tuple[str, ...]) -> Iterator[Event]:
    """Yield the events for a reconciliation. `reason` is the Reason of healthd's drain before the reconciliation.

    A new drain is not included, because its event is emitted when the ledger changes. The claim of a repair, which
    other nodes count, is left out of the Reason.
    """
    if resumed or acknowledged:
        user_field = {} if resumed else {"who": OPERATOR}
        yield Event("resume", {"stage": "confirmed", "reason": with_claim(reason, None), **user_field})
    for job in requeued:
        yield Event("requeue", {"stage": "confirmed", "job": job})


# --- log lines


class LineContext(NamedTuple):
    """Data for naming a line's cause. `causes` are the conditions for which the reconciliation was started."""

    causes: Sequence[Condition]
    ledger: Ledger


def operator_resume_line(context: LineContext) -> Iterator[Line]:
    text = "an operator resumed the node: open conditions are acknowledged, and drain it only if they are found again"
    yield Line(Severity.WARNING, text, _fields(OPERATOR_RESUME, context.ledger.slurm.reason, context))


def hold_lines(previous: FleetHold | None, current: FleetHold | None, now: float) -> Iterator[Line]:
    """Yield a line when the fleet limit delays a drain, and at each retry. The first wait is no fault and is logged as
    INFO.
    """
    if current is not None and current != previous:
        severity = Severity.CRITICAL if current.times else Severity.INFO
        yield Line(severity, f"{fleet_limit.describe(current)}; next try in {current.until - now:.0f} s", {})


def claim_lines(previous: ClaimHold | None, current: ClaimHold | None, now: float) -> Iterator[Line]:
    """Yield a line when the claim of a repair waits, and at each retry."""
    if current is not None and current != previous:
        yield Line(Severity.INFO, f"the repair waits: {current.problem}; next try in {current.until - now:.0f} s", {})


def drain_lines(previous: str, context: LineContext) -> Iterator[Line]:
    """Yield a line if the ledger has a new Reason. `previous` is the ledger's earlier Reason."""
    reason = context.ledger.slurm.reason
    if reason and with_claim(reason, None) != with_claim(previous, None):
        yield Line(Severity.WARNING, f"drained the node: {reason}", _fields(DRAIN, reason, context))


def report_lines(
    report: ReconcileReport, previous: str, logged: Collection[tuple[str, str]], context: LineContext
) -> Iterator[Line]:
    """Yield the log lines for a reconciliation.

    `previous` is healthd's Reason when the reconciliation started. `logged` contains (job, why) for jobs that were
    already logged as not requeued.
    """
    if report.resumed:
        reason = previous or report.resumed_reason or PROLOG_ERROR
        yield Line(Severity.WARNING, f"resumed the node: {reason}", _fields(RESUME, previous, context))
    if report.problem:
        yield Line(Severity.WARNING, f"slurm: {report.problem}", {})
    for job in report.requeued:
        hold_note = f", held: {HELD_REASON}" if job in report.held_jobs else ""
        fields = {**_fields(REQUEUE, context.ledger.slurm.reason, context), "JOB": job}
        yield Line(Severity.WARNING, f"job {job} was requeued{hold_note}", fields)
    for job, why in report.not_requeued:
        if (job, why) not in logged:
            yield Line(Severity.INFO, f"job {job} is not requeued: {why}", {})


def _fields(action: str, reason: str, context: LineContext) -> Fields:
    """Return the journal fields for a change to the node. `reason` is healthd's Reason, which names the cause."""
    candidates = (*context.causes, *context.ledger.conditions, *reversed(context.ledger.cleared))
    found = next((c for c in candidates if reason.startswith(reason_start(c))), None)
    if found is None and reason == "":
        found = next(iter(context.causes), None)  # another user or tool drained the node
    if found is not None:
        return {"NODE_ACTION": action, **log_fields.condition_fields(found)}
    code, part = parse_reason(reason) or ("", "")
    return {"NODE_ACTION": action, "CODE": code, "SUBJECT": part}
