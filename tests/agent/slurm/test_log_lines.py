"""Tests of the log lines about Slurm: one sentence each, with journal fields."""

from __future__ import annotations

from msgspec.structs import replace

from healthd.agent.conditions.log_lines import Line
from healthd.agent.slurm.action_log import (
    LineContext,
    claim_lines,
    drain_lines,
    hold_lines,
    operator_resume_line,
    report_lines,
)
from healthd.agent.slurm.reconcile import HELD_REASON, ReconcileReport
from healthd.common.model import ClaimHold, DrainRecord, FleetHold, RepairStep, Severity
from healthd.common.slurm.drain_reason import reason_start, with_claim
from tests.agent.conditions.test_store import LIVE

(CONDITION,) = LIVE.conditions
REASON = f"{reason_start(CONDITION)}m"
CONTEXT = LineContext((CONDITION,), replace(LIVE, slurm=DrainRecord(reason=REASON)))
REPORT = ReconcileReport(CONTEXT.ledger.slurm)
CONDITION_FIELDS = {"CODE": CONDITION.code, "SUBJECT": CONDITION.subject, "SEVERITY": CONDITION.severity.name.lower()}


def line_texts(report: ReconcileReport, already_logged: tuple[tuple[str, str], ...] = ()) -> list[str]:
    return [line.text for line in report_lines(report, REASON, already_logged, CONTEXT)]


def test_drain_lines_are_logged_once() -> None:
    fields = {"NODE_ACTION": "drain", **CONDITION_FIELDS}
    assert list(drain_lines("", CONTEXT)) == [Line(Severity.WARNING, f"drained the node: {REASON}", fields)]
    assert list(drain_lines(REASON, CONTEXT)) == []
    assert list(drain_lines(REASON, LineContext((), LIVE))) == []


def test_resume_line_has_cause_from_cleared_condition() -> None:
    cleared = LineContext((), replace(LIVE, conditions=(), cleared=(CONDITION,)))
    (line,) = report_lines(replace(REPORT, resumed=True), REASON, (), cleared)
    assert line == Line(Severity.WARNING, f"resumed the node: {REASON}", {"NODE_ACTION": "resume", **CONDITION_FIELDS})
    unknown_condition = LineContext((), replace(LIVE, conditions=()))
    (line,) = report_lines(replace(REPORT, resumed=True), REASON, (), unknown_condition)
    assert line.fields == {"NODE_ACTION": "resume", "CODE": CONDITION.code, "SUBJECT": CONDITION.subject}


def test_resume_line_after_prolog_drain_has_slurm_reason() -> None:
    (line,) = report_lines(replace(REPORT, resumed=True), "", (), LineContext((), LIVE))
    assert line.text == "resumed the node: Prolog error"


def test_resume_line_without_own_drain_has_last_reason() -> None:
    report = replace(REPORT, resumed=True, resumed_reason="Node unexpectedly rebooted")
    (line,) = report_lines(report, "", (), LineContext((), LIVE))
    assert line.text == "resumed the node: Node unexpectedly rebooted"


def test_claim_of_a_repair_is_no_new_drain() -> None:
    claimed = with_claim(REASON, RepairStep.REBOOT)
    in_repair = LineContext((CONDITION,), replace(LIVE, slurm=replace(LIVE.slurm, reason=claimed)))
    assert list(drain_lines(REASON, in_repair)) == list(drain_lines(claimed, CONTEXT)) == []
    assert len(list(drain_lines("", in_repair))) == 1


def test_claim_lines_are_logged_at_each_try() -> None:
    first, second = ClaimHold(160.0, 1, "n2 is being repaired"), ClaimHold(300.0, 2, "n2 is being repaired")
    (line,) = claim_lines(None, first, 100.0)
    assert line.severity is Severity.INFO
    assert line.text.endswith("; next try in 60 s")
    assert len(list(claim_lines(first, second, 160.0))) == 1
    assert list(claim_lines(second, second, 170.0)) == list(claim_lines(second, None, 170.0)) == []


def test_operator_resume_line_has_own_action() -> None:
    (line,) = operator_resume_line(CONTEXT)
    assert line.fields == {"NODE_ACTION": "operator_resume", **CONDITION_FIELDS}


def test_requeue_lines_name_each_job() -> None:
    report = replace(REPORT, requeued=("7", "8"), held_jobs=("8",), not_requeued=(("9", "its GPUs are well"),))
    lines = list(report_lines(report, REASON, (), CONTEXT))
    assert [line.text for line in lines] == [
        "job 7 was requeued",
        f"job 8 was requeued, held: {HELD_REASON}",
        "job 9 is not requeued: its GPUs are well",
    ]
    assert [line.fields.get("JOB") for line in lines] == ["7", "8", None]
    assert [line.severity for line in lines] == [Severity.WARNING, Severity.WARNING, Severity.INFO]
    assert line_texts(report, already_logged=(("9", "its GPUs are well"),)) == [line.text for line in lines[:2]]


def test_slurm_problem_is_logged() -> None:
    assert line_texts(replace(REPORT, problem="sinfo: away")) == ["slurm: sinfo: away"]
    assert line_texts(REPORT) == []


def test_hold_lines_are_logged_at_each_try() -> None:
    first = FleetHold(100.0, 160.0)
    limit_hold = FleetHold(100.0, 400.0, 1, False, "batch", 10, 3, 3)
    (line,) = hold_lines(None, first, 100.0)
    assert line.severity is Severity.INFO
    assert line.text.endswith("; next try in 60 s")
    (line,) = hold_lines(first, limit_hold, 160.0)
    assert line.severity > Severity.WARNING
    assert line.text.startswith("delayed by the fleet limit: healthd keeps 3 of 10 nodes in partition batch")
    assert list(hold_lines(limit_hold, limit_hold, 170.0)) == list(hold_lines(limit_hold, None, 170.0)) == []
