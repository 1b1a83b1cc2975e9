"""Tests of the verdict line, which the prolog reads and the user of a refused job sees."""

from __future__ import annotations

from msgspec.structs import replace

from healthd.agent.reporting.status import verdict_line
from healthd.common.model import ConditionState, Health, RepairStep, Severity, Verdict
from healthd.common.repair_plan import Attempt, AttemptStage, RepairRecord
from tests.docs.test_json_doc import CONDITION, SNAPSHOT

ACKNOWLEDGED_FAULT = replace(CONDITION, code="gpu_xid/79", subject="0000:1b:00.0", state=ConditionState.ACKNOWLEDGED)
CAUSE = replace(CONDITION, severity=Severity.DEGRADED)


def test_verdict_line_names_cause_and_not_acknowledged_fault() -> None:
    snapshot = replace(SNAPSHOT, verdict=Verdict(Health.DEGRADED, (ACKNOWLEDGED_FAULT, CAUSE), (CAUSE,)))
    assert verdict_line(snapshot, True, 900.0) == "drain 900 mount/missing /data: /data is not mounted\n"


def test_verdict_line_names_repair_without_open_cause() -> None:
    snapshot = replace(SNAPSHOT, verdict=Verdict(Health.HEALTHY), repair=RepairRecord())
    assert verdict_line(snapshot, True, 900.0) == "drain 900 being repaired\n"
    attempt = Attempt("1", RepairStep.GPU_RESET, AttemptStage.VERIFY, 1.0, "b1", (), (), ())
    snapshot = replace(snapshot, repair=RepairRecord(attempt=attempt))
    assert verdict_line(snapshot, True, 900.0) == "drain 900 being repaired: gpu_reset\n"
    cause = replace(snapshot, verdict=Verdict(Health.DEGRADED, (CAUSE,), (CAUSE,)))
    assert verdict_line(cause, True, 900.0).startswith("drain 900 mount/missing ")


def test_verdict_line_without_drain_names_worst_open_condition() -> None:
    snapshot = replace(SNAPSHOT, verdict=Verdict(Health.WARNING, (ACKNOWLEDGED_FAULT,)))
    assert verdict_line(snapshot, False, 900.0).startswith("warning 900 gpu_xid/79 0000:1b:00.0: ")


def test_verdict_line_is_single_ascii_line() -> None:
    odd_cause = replace(CAUSE, message="a\nb\x1b[2J\u00e9" + "x" * 9999)
    line = verdict_line(replace(SNAPSHOT, verdict=Verdict(Health.DEGRADED, (odd_cause,), (odd_cause,))), True, 900.0)
    assert line.startswith("drain 900 mount/missing /data: a?b?[2J?xxx")
    assert line.count("\n") == 1
    assert len(line) < 320
