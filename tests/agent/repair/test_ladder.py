"""The repair ladder: each cause's first step, the step after a relapse, and the step of the node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from life import DAY, FEWER, GPU, RATE, RESET, ROWS, XID, Node
from msgspec.structs import replace

from healthd.agent.repair.ladder import cause_step, plan, step_after
from healthd.common.model import LADDER, Clears, Condition, Finding, Remedy, Repair, RepairStep, Severity
from healthd.common.repair_plan import FailedStep, Plan, Reason

GPU_RESET, REBOOT, POWER_CYCLE, PERSON = RepairStep
ORDER = (GPU_RESET, REBOOT, POWER_CYCLE)
OTHER_GPU = "0000:43:00.0"


def planned(
    node: Node,
    order: Sequence[RepairStep] = ORDER,
    remedies: dict[str, Remedy] | None = None,
    first_steps: dict[str, RepairStep] | None = None,
    failed: Sequence[FailedStep] = (),
) -> Plan | None:
    return plan(list(node.conditions.values()), node.cleared, remedies or {}, order, first_steps or {}, failed)


def step_and_reason(node: Node, order: Sequence[RepairStep] = ORDER) -> tuple[RepairStep, Reason]:
    found = planned(node, order)
    assert found is not None
    return found.step, found.causes[0].reason


@pytest.mark.parametrize(
    ("finding", "step", "reason"),
    [
        (RESET, GPU_RESET, Reason.REMEDY),
        (XID, REBOOT, Reason.REMEDY),
        (ROWS, PERSON, Reason.PART),
        (FEWER, PERSON, Reason.CAUSE),
    ],
)
def test_first_step_follows_from_ending(finding: Finding, step: RepairStep, reason: Reason) -> None:
    assert step_and_reason(Node().run(finding)) == (step, reason)


def test_fault_that_ends_by_time_needs_person_until_repair() -> None:
    """On a drained node, its time passes only after a repair, or for a shared cause."""
    assert step_and_reason(Node().run(RATE)) == (PERSON, Reason.WINDOW)
    assert planned(Node().run(replace(RATE, shared_cause=True))) is None
    assert planned(Node().run(RATE).reboot()) is None
    assert planned(Node()) is None


def test_declared_power_cycle_starts_with_reboot() -> None:
    found = planned(Node().run(XID), remedies={XID.code: Remedy.POWER_CYCLE})
    assert found is not None
    assert (found.step, found.next, found.causes[0].reason) == (REBOOT, POWER_CYCLE, Reason.MILDER)


@pytest.mark.parametrize(
    ("order", "step", "after"),
    [
        (ORDER, GPU_RESET, REBOOT),
        ((GPU_RESET, REBOOT), GPU_RESET, REBOOT),
        ((REBOOT,), REBOOT, PERSON),
        ((GPU_RESET,), GPU_RESET, PERSON),
        ((), PERSON, PERSON),
    ],
)
def test_step_that_site_does_not_allow_is_left_out(
    order: Sequence[RepairStep], step: RepairStep, after: RepairStep
) -> None:
    found = planned(Node().run(RESET), order)
    assert found is not None
    assert (found.step, found.next) == (step, after)


def test_step_that_is_not_allowed_has_its_reason() -> None:
    assert step_and_reason(Node().run(XID), (GPU_RESET,)) == (PERSON, Reason.NOT_ALLOWED)


def test_relapse_after_reset_needs_reboot() -> None:
    node = Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]).run(RESET, after=6 * DAY)
    assert step_and_reason(node) == (REBOOT, Reason.RELAPSE)


def test_fault_that_returns_during_boot_is_a_relapse() -> None:
    """The daemon ends the earlier fault when it starts, after the kernel line of the same boot."""
    node = Node().run(XID).reboot()
    node.event(XID, after=0.0)
    early = replace(node.only, opened_at=node.now - 40, first_seen=node.now - 40)
    node.conditions = {early.key: early}
    assert early.opened_at < node.cleared[-1].cleared_at
    assert step_and_reason(node) == (POWER_CYCLE, Reason.RELAPSE)


def test_forged_line_is_no_relapse() -> None:
    node = Node().run(XID).reboot()
    node.cleared = [replace(c, observed=True) for c in node.cleared]
    assert step_and_reason(node.run(XID, after=DAY))[0] is not POWER_CYCLE


def test_boot_after_relapse_that_waits_for_operator_is_a_tried_step() -> None:
    node = Node().run(XID).reboot().run(XID, after=DAY)
    assert step_and_reason(node) == (POWER_CYCLE, Reason.RELAPSE)
    assert step_and_reason(node.reboot()) == (PERSON, Reason.EXHAUSTED)


def test_relapse_after_a_week_starts_over() -> None:
    node = Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]).run(RESET, after=8 * DAY)
    assert step_and_reason(node) == (GPU_RESET, Reason.REMEDY)


def test_plan_for_relapse_stays_while_fault_is_open() -> None:
    node = Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]).run(RESET, after=6 * DAY)
    node.now += 20 * DAY
    assert step_and_reason(node) == (REBOOT, Reason.RELAPSE)


def test_relapse_after_reboot_needs_power_cycle_then_person() -> None:
    """A fault that returns after a reboot waits for an operator; the ladder still knows the remedy."""
    node = Node().run(XID).reboot().run(XID, after=DAY)
    assert node.only.clears is Clears.OPERATOR
    assert step_and_reason(node) == (POWER_CYCLE, Reason.RELAPSE)
    assert step_and_reason(node, (GPU_RESET, REBOOT)) == (PERSON, Reason.EXHAUSTED)


def test_relapse_after_reset_without_reboot_in_order_needs_person() -> None:
    node = Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]).run(RESET, after=DAY)
    assert step_and_reason(node, (GPU_RESET,)) == (PERSON, Reason.EXHAUSTED)


def test_repair_by_operator_is_no_step() -> None:
    node = Node().run(RESET).repaired(RESET.code).run(RESET, after=DAY)
    assert step_and_reason(node) == (GPU_RESET, Reason.REMEDY)


def test_fault_of_other_gpu_is_no_relapse() -> None:
    other = replace(RESET, subject=OTHER_GPU)
    node = Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]).run(other, after=DAY)
    assert step_and_reason(node) == (GPU_RESET, Reason.REMEDY)


def test_configured_first_step_replaces_remedy() -> None:
    found = planned(Node().run(RESET), first_steps={RESET.code: REBOOT})
    assert found is not None
    assert (found.step, found.causes[0].reason) == (REBOOT, Reason.CONFIGURED)


def test_configured_step_below_remedy_is_not_taken() -> None:
    found = planned(Node().run(XID), first_steps={XID.code: GPU_RESET})
    assert found is not None
    assert (found.step, found.causes[0].reason) == (REBOOT, Reason.REMEDY)


def test_configured_step_replaces_person_for_cause() -> None:
    found = planned(Node().run(FEWER), first_steps={FEWER.code: REBOOT})
    assert found is not None
    assert (found.step, found.causes[0].reason) == (REBOOT, Reason.CONFIGURED)


def test_symptom_of_lost_gpu_does_not_hide_reboot() -> None:
    found = planned(Node().run(XID, check="gpu_xid").run(FEWER, check="gpu_count"))
    assert found is not None
    assert found.step is REBOOT
    assert [(cause.code, cause.step) for cause in found.causes] == [(XID.code, REBOOT), (FEWER.code, PERSON)]


def test_broken_part_needs_person_before_any_step() -> None:
    found = planned(Node().run(ROWS, check="gpu_row_remap").run(RESET, check="gpu_ecc"))
    assert found is not None
    assert found.step is PERSON


def test_configured_person_takes_no_step() -> None:
    found = planned(Node().run(RESET), first_steps={RESET.code: PERSON})
    assert found is not None
    assert (found.step, found.causes[0].reason) == (PERSON, Reason.CONFIGURED)


def test_node_needs_highest_step_of_all_causes() -> None:
    found = planned(Node().run(RESET, check="gpu_ecc").run(XID, check="gpu_xid"))
    assert found is not None
    assert [(cause.code, cause.step) for cause in found.causes] == [(XID.code, REBOOT), (RESET.code, GPU_RESET)]
    assert (found.step, found.parts) == (REBOOT, ())


def test_reset_names_each_gpu_once() -> None:
    other = replace(RESET, subject=OTHER_GPU)
    again = replace(RESET, code="gpu_ecc/other")
    found = planned(Node().run(RESET, other, again))
    assert found is not None
    assert sorted(found.parts) == [GPU, OTHER_GPU]


def test_reset_without_gpu_is_for_all_gpus() -> None:
    for subject in ("", "others"):
        found = planned(Node().run(RESET, replace(RESET, subject=subject)))
        assert found is not None
        assert (found.step, found.parts) == (GPU_RESET, ())


ENDING = st.sampled_from([Clears.PASS, Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR, Clears.WINDOW])


@given(
    clears=ENDING,
    severity=st.sampled_from([Severity.DEGRADED, Severity.CRITICAL]),
    declared=st.sampled_from([None, *Remedy]),
    configured=st.sampled_from([None, GPU_RESET, REBOOT, PERSON]),
    order=st.sampled_from([(), (GPU_RESET,), (REBOOT,), (GPU_RESET, REBOOT), (REBOOT, POWER_CYCLE), ORDER]),
    history=st.lists(st.tuples(st.booleans(), st.floats(0, 20 * DAY)), max_size=4),
)
def test_power_cycle_only_follows_reboot(
    clears: Clears,
    severity: Severity,
    declared: Remedy | None,
    configured: RepairStep | None,
    order: tuple[RepairStep, ...],
    history: list[tuple[bool, float]],
) -> None:
    finding = Finding(severity, "gpu_ecc/uncorrected", GPU, "m", clears, window_seconds=3600.0)
    node = Node().run(finding)
    for by_reboot, after in history:
        if by_reboot:
            node.reboot()
        else:
            node.run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)])
        node.run(finding, after=after)
    cause: Condition = node.only
    remedies = {} if declared is None else {cause.code: declared}
    first_steps = {} if configured is None else {cause.code: configured}
    found = cause_step(cause, node.cleared, remedies, order, first_steps)
    if found is None:
        return
    assert found.step is PERSON or found.step in order
    assert (found.reason is Reason.CONFIGURED) <= (configured is not None)
    has_rebooted = any(c.ending is not None and c.ending.value == "reboot" for c in node.cleared)
    if found.step is POWER_CYCLE:
        assert has_rebooted
    assert LADDER.index(step_after(found.step, order)) > LADDER.index(found.step) or found.step is PERSON


@pytest.mark.parametrize(
    ("failed", "order", "step", "reason"),
    [
        ([GPU_RESET], ORDER, REBOOT, Reason.FAILED),
        ([GPU_RESET], (GPU_RESET,), PERSON, Reason.EXHAUSTED),
        ([GPU_RESET, REBOOT], ORDER, POWER_CYCLE, Reason.FAILED),
        ([GPU_RESET, REBOOT, POWER_CYCLE], ORDER, PERSON, Reason.EXHAUSTED),
    ],
)
def test_failed_step_leads_to_next_one(
    failed: list[RepairStep], order: Sequence[RepairStep], step: RepairStep, reason: Reason
) -> None:
    causes = (f"{RESET.code} {RESET.subject}".strip(),)
    found = planned(Node().run(RESET), order, failed=[FailedStep(each, 1.0, causes, "no effect") for each in failed])
    assert found is not None
    assert (found.step, found.causes[0].reason) == (step, reason)


def test_failed_step_of_other_fault_does_not_count() -> None:
    failed = [FailedStep(GPU_RESET, 1.0, ("gpu_xid/48 0000:43:00.0",), "no effect")]
    found = planned(Node().run(RESET), failed=failed)
    assert found is not None
    assert found.step is GPU_RESET


def test_power_cycle_does_not_follow_impossible_reboot() -> None:
    causes = (f"{RESET.code} {RESET.subject}".strip(),)
    found = planned(Node().run(RESET), failed=[FailedStep(REBOOT, 1.0, causes, "22.05", was_taken=False)])
    assert found is not None
    assert found.step is PERSON
