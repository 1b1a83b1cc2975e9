"""Tests of the log lines about Slurm: one sentence each, with journal fields."""

from __future__ import annotations

from msgspec.structs import replace

from healthd.agent.conditions.log_lines import Line
from healthd.agent.slurm.action_log import LineContext, drain_lines, hold_lines, operator_resume_line, report_lines
from healthd.agent.slurm.reconcile import HELD_REASON, ReconcileReport
from healthd.common.model import DrainRecord, FleetHold, Severity
from healthd.common.slurm.drain_reason import reason_start
from tests.agent.conditions.test_store import LIVE

(STANDS,) = LIVE.conditions
REASON = f"{reason_start(STANDS)}m"
OURS = LineContext((STANDS,), replace(LIVE, slurm=DrainRecord(reason=REASON)))
REPORT = ReconcileReport(OURS.ledger.slurm)
OF_CAUSE = {"CODE": STANDS.code, "SUBJECT": STANDS.subject, "SEVERITY": STANDS.severity.name.lower()}


def words(report: ReconcileReport, told: tuple[tuple[str, str], ...] = ()) -> list[str]:
    return [line.text for line in report_lines(report, REASON, told, OURS)]


def test_a_drain_is_told_when_the_ledger_has_it_and_once() -> None:
    fields = {"NODE_ACTION": "drain", **OF_CAUSE}
    assert list(drain_lines("", OURS)) == [Line(Severity.WARNING, f"drained the node: {REASON}", fields)]
    assert list(drain_lines(REASON, OURS)) == []
    assert list(drain_lines(REASON, LineContext((), LIVE))) == []


def test_the_end_of_our_drain_is_told_with_the_cause_that_it_had_though_nothing_stands_any_more() -> None:
    cleared = LineContext((), replace(LIVE, conditions=(), cleared=(STANDS,)))
    (line,) = report_lines(replace(REPORT, resumed=True), REASON, (), cleared)
    assert line == Line(Severity.WARNING, f"resumed the node: {REASON}", {"NODE_ACTION": "resume", **OF_CAUSE})
    forgotten = LineContext((), replace(LIVE, conditions=()))
    (line,) = report_lines(replace(REPORT, resumed=True), REASON, (), forgotten)
    assert line.fields == {"NODE_ACTION": "resume", "CODE": STANDS.code, "SUBJECT": STANDS.subject}


def test_of_a_node_that_our_prolog_drained_the_resume_names_slurms_words() -> None:
    (line,) = report_lines(replace(REPORT, resumed=True), "", (), LineContext((), LIVE))
    assert line.text == "resumed the node: Prolog error"


def test_an_operators_resume_is_another_action() -> None:
    (line,) = operator_resume_line(OURS)
    assert line.fields == {"NODE_ACTION": "operator_resume", **OF_CAUSE}


def test_each_job_that_was_requeued_is_named_in_its_line_and_one_that_was_spared_is_told_once() -> None:
    report = replace(REPORT, requeued=("7", "8"), held_jobs=("8",), not_requeued=(("9", "its GPUs are well"),))
    lines = list(report_lines(report, REASON, (), OURS))
    assert [line.text for line in lines] == [
        "job 7 was requeued",
        f"job 8 was requeued, held: {HELD_REASON}",
        "job 9 is not requeued: its GPUs are well",
    ]
    assert [line.fields.get("JOB") for line in lines] == ["7", "8", None]
    assert [line.severity for line in lines] == [Severity.WARNING, Severity.WARNING, Severity.INFO]
    assert words(report, told=(("9", "its GPUs are well"),)) == [line.text for line in lines[:2]]


def test_what_is_wrong_with_slurm_is_told() -> None:
    assert words(replace(REPORT, problem="sinfo: away")) == ["slurm: sinfo: away"]
    assert words(REPORT) == []


def test_a_wait_for_the_fleet_is_told_at_each_try_and_is_an_error_when_the_limit_holds() -> None:
    first = FleetHold(100.0, 160.0)
    held = FleetHold(100.0, 400.0, 1, False, "batch", 10, 3, 3)
    (line,) = hold_lines(None, first, 100.0)
    assert line.severity is Severity.INFO
    assert line.text.endswith("; next try in 60 s")
    (line,) = hold_lines(first, held, 160.0)
    assert line.severity > Severity.WARNING
    assert line.text.startswith("delayed by the fleet limit: healthd keeps 3 of 10 nodes in partition batch")
    assert list(hold_lines(held, held, 170.0)) == list(hold_lines(held, None, 170.0)) == []
