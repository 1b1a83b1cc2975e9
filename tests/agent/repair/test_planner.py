"""Which faults a repair keeps to after a pause."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from slurm_look import XID, condition

from healthd.agent.repair.planner import with_drain_causes
from healthd.common.model import Condition, ConditionState, DrainRecord, Health, Severity, Verdict

FAULT = condition(code="gpu_xid/119", opened_at=5.0)
DRAIN = DrainRecord(XID, drained_at=10.0)
KNOWN = ("gpu_xid/119 0000:1b:00.0",)
PAUSED_AT = 20.0
AFTER_PAUSE = Verdict(Health.UNHEALTHY, conditions=(FAULT,))


def test_fault_of_the_drain_is_still_repaired_after_a_pause() -> None:
    assert with_drain_causes(AFTER_PAUSE, KNOWN, DRAIN, PAUSED_AT).causes == (FAULT,)


def test_fault_between_the_drain_and_the_pause_is_still_repaired() -> None:
    fault = replace(FAULT, opened_at=15.0)
    after = Verdict(Health.UNHEALTHY, conditions=(fault,))
    assert with_drain_causes(after, KNOWN, DRAIN, PAUSED_AT).causes == (fault,)
    assert with_drain_causes(after, KNOWN, DRAIN, 0.0).causes == ()


def test_verdict_with_all_causes_is_unchanged() -> None:
    verdict = Verdict(Health.UNHEALTHY, conditions=(FAULT,), causes=(FAULT,))
    assert with_drain_causes(verdict, KNOWN, DRAIN, PAUSED_AT) is verdict


@pytest.mark.parametrize(
    "fault",
    [
        condition(code="gpu_xid/79", opened_at=5.0),
        replace(FAULT, opened_at=21.0),
        replace(FAULT, state=ConditionState.ACKNOWLEDGED),
        replace(FAULT, severity=Severity.WARNING),
        replace(FAULT, observed=True),
    ],
    ids=["not_known", "during_the_pause", "acknowledged", "warning", "observed"],
)
def test_other_conditions_are_not_repaired_after_a_pause(fault: Condition) -> None:
    assert with_drain_causes(Verdict(Health.UNHEALTHY, conditions=(fault,)), KNOWN, DRAIN, PAUSED_AT).causes == ()


@pytest.mark.parametrize("drain", [DrainRecord(), DrainRecord(XID)], ids=["no_drain", "unknown_time"])
def test_node_without_own_drain_has_no_other_causes(drain: DrainRecord) -> None:
    assert with_drain_causes(AFTER_PAUSE, KNOWN, drain, PAUSED_AT).causes == ()
    assert with_drain_causes(AFTER_PAUSE, (), DRAIN, PAUSED_AT).causes == ()
