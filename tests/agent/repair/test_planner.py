"""Which faults a repair keeps to after a pause."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from slurm_look import XID, condition

from healthd.agent.repair.planner import with_planned_causes
from healthd.common.model import Condition, ConditionState, DrainRecord, Health, RepairStep, Severity, Verdict
from healthd.common.repair_plan import CauseStep, Plan, Reason

FAULT = condition(code="gpu_xid/119", opened_at=5.0)
DRAIN = DrainRecord(XID, drained_at=10.0)
PLAN = Plan(
    RepairStep.GPU_RESET,
    RepairStep.REBOOT,
    (CauseStep(FAULT.code, FAULT.subject, RepairStep.GPU_RESET, Reason.REMEDY),),
)
AFTER_PAUSE = Verdict(Health.UNHEALTHY, conditions=(FAULT,))


def test_fault_of_the_drain_is_still_repaired_after_a_pause() -> None:
    assert with_planned_causes(AFTER_PAUSE, PLAN, DRAIN).causes == (FAULT,)


def test_verdict_with_all_causes_is_unchanged() -> None:
    verdict = Verdict(Health.UNHEALTHY, conditions=(FAULT,), causes=(FAULT,))
    assert with_planned_causes(verdict, PLAN, DRAIN) is verdict


@pytest.mark.parametrize(
    "fault",
    [
        condition(code="gpu_xid/79", opened_at=5.0),
        replace(FAULT, opened_at=11.0),
        replace(FAULT, state=ConditionState.ACKNOWLEDGED),
        replace(FAULT, severity=Severity.WARNING),
        replace(FAULT, observed=True),
    ],
    ids=["not_planned", "after_drain", "acknowledged", "warning", "observed"],
)
def test_other_conditions_are_not_repaired_after_a_pause(fault: Condition) -> None:
    assert with_planned_causes(Verdict(Health.UNHEALTHY, conditions=(fault,)), PLAN, DRAIN).causes == ()


@pytest.mark.parametrize("drain", [DrainRecord(), DrainRecord(XID)], ids=["no_drain", "unknown_time"])
def test_node_without_own_drain_has_no_planned_causes(drain: DrainRecord) -> None:
    assert with_planned_causes(AFTER_PAUSE, PLAN, drain).causes == ()
    assert with_planned_causes(AFTER_PAUSE, None, DRAIN).causes == ()
