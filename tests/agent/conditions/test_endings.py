"""Tests of what ends a condition: clean runs, a reboot, a reset, a quiet window, an operator."""

from __future__ import annotations

import pytest
from life import (
    ACKNOWLEDGED,
    DAY,
    FEWER,
    GONE,
    GPU,
    HANG,
    LINK,
    OPEN,
    PENDING,
    RATE,
    RESET,
    ROWS,
    RUN_SECONDS,
    XID,
    Node,
)
from msgspec.structs import replace

from healthd.agent.conditions import absorb, endings
from healthd.common.model import (
    Clears,
    Ending,
    Finding,
    Outcome,
    Repair,
    Severity,
)


@pytest.mark.parametrize(
    ("node", "ending", "text"),
    [
        (Node().run(FEWER).run().run(), Ending.PASS, "pass"),
        (Node().run(RATE).run().quiet(3600.0), Ending.WINDOW, "window"),
        (Node().run(RESET).run(repairs=[Repair(Clears.GPU_RESET, GPU, "fell", 1e12)]), Ending.RESET, "gpu_reset: fell"),
        (Node().run(GONE).reboot(), Ending.REBOOT, "reboot"),
        (Node().run(RESET).reboot(), Ending.REBOOT, "reboot"),
        (Node().run(GONE).run(repairs=[Repair(Clears.REBOOT, GPU, "anew", 1e12)]), Ending.REBOOT, "reboot: anew"),
        (Node().run(FEWER).repaired(FEWER.code), Ending.REPAIRED, "repaired by root"),
    ],
)
def test_cleared_condition_has_ending_and_text(node: Node, ending: Ending, text: str) -> None:
    assert node.conditions == {}
    assert [(c.ending, c.cleared_by) for c in node.cleared] == [(ending, text)]


# --- PASS


def test_pass_clears_after_clear_after_clean_runs() -> None:
    node = Node().run(FEWER).run(clear_after=3).run(clear_after=3)
    assert node.only.clean_runs == 2
    node.run(clear_after=3)
    assert (node.conditions, node.cleared_by) == ({}, ["pass"])


def test_fault_between_clean_runs_restarts_count() -> None:
    node = Node().run(FEWER).run().run(FEWER).run()
    assert node.only.clean_runs == 1
    assert node.only.state is OPEN


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMED_OUT, Outcome.STUCK])
def test_incomplete_run_clears_nothing(outcome: Outcome) -> None:
    node = Node().run(FEWER).run(outcome=outcome).run(outcome=outcome).run(outcome=outcome)
    assert node.only.clean_runs == 0
    assert node.only.state is OPEN


def test_run_from_other_check_or_instance_clears_nothing() -> None:
    data = Finding(Severity.DEGRADED, "mount/missing", "/data", "not mounted")
    node = Node().run(data, instance="/data")
    for _ in range(3):
        node.run(check="mount", instance="/home").run(check="gpu_count")
    assert node.only.state is OPEN
    node.run(check="mount", instance="/data").run(check="mount", instance="/data")
    assert node.conditions == {}


def test_pass_clears_only_recovered_part() -> None:
    other = replace(FEWER, subject="other")
    node = Node().run(FEWER, other).run(other).run(other)
    assert node.only.subject == "other"


# --- REBOOT, GPU_RESET, OPERATOR


@pytest.mark.parametrize("finding", [GONE, RESET, ROWS], ids=lambda f: f.clears.value)
def test_latched_condition_is_not_cleared_by_clean_runs(finding: Finding) -> None:
    node = Node().run(finding)
    for _ in range(10):
        node.run()
    assert node.only.state is OPEN


@pytest.mark.parametrize("finding", [GONE, RESET], ids=lambda f: f.clears.value)
def test_reboot_clears_reboot_and_reset_faults(finding: Finding) -> None:
    assert Node().run(finding).reboot().cleared_by == ["reboot"]


@pytest.mark.parametrize("finding", [FEWER, ROWS, RATE], ids=lambda f: f.clears.value)
def test_reboot_keeps_other_faults(finding: Finding) -> None:
    assert Node().run(finding).reboot().only.state is OPEN


def test_after_boot_in_same_boot_clears_nothing() -> None:
    node = Node().run(GONE)
    assert endings.after_boot(node.conditions, node.boot, node.now) == node.conditions


def test_reboot_removes_pending_condition() -> None:
    """Time while the machine was down confirms nothing."""
    node = Node().run(LINK).reboot()
    assert (node.conditions, node.cleared) == ({}, [])
    assert node.run(LINK).only.state is PENDING


def test_reboot_restarts_time_until_worse() -> None:
    assert Node().run(HANG).reboot().run(HANG, after=60).only.severity is Severity.WARNING


def test_reset_evidence_clears_fault_from_compared_run() -> None:
    node = Node().run(RESET)
    compared_at = node.now - RUN_SECONDS
    node.run(repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", compared_at)])
    assert node.cleared_by == ["gpu_reset: volatile count fell"]


def test_reset_evidence_keeps_event_after_compared_reading() -> None:
    """The event came after the earlier reading, so possibly after the reset."""
    node = Node().run()
    compared_at = node.now
    node.event(replace(XID, clears=Clears.GPU_RESET))
    node.run(check="gpu_ecc", repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", compared_at)])
    assert node.only.state is OPEN


def test_reset_evidence_from_failing_run_clears_nothing() -> None:
    node = Node().run(RESET)
    node.run(RESET, repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", node.now)])
    assert node.only.state is OPEN


def test_reset_evidence_clears_only_reset_faults_on_that_part() -> None:
    other = replace(RESET, subject="0000:2a:00.0")
    node = Node().run(RESET, other).run(GONE)
    repair = Repair(Clears.GPU_RESET, GPU, "recovery action back to none", node.now)
    node.run(check="gpu_recovery_action", repairs=[repair])
    assert {(c.code, c.subject) for c in node.conditions.values()} == {
        ("gpu_ecc/uncorrected", "0000:2a:00.0"),
        ("gpu_count/missing", GPU),
    }


def test_reset_evidence_keeps_event_during_compared_reading() -> None:
    node = Node().run()
    compared_at = node.now - RUN_SECONDS
    node.event(replace(XID, clears=Clears.GPU_RESET), after=-RUN_SECONDS / 2)
    node.run(check="gpu_ecc", repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", compared_at)])
    assert node.only.state is OPEN


def test_run_that_began_before_resume_does_not_drain() -> None:
    node = Node().run(GONE)
    resumed = node.now + 100.0 - RUN_SECONDS / 2
    node.take(endings.acknowledge_resumed(node.conditions, node.now, resumed))
    assert node.run(GONE, after=100.0).judge().causes == ()
    assert node.run(GONE).judge().causes == (node.only,)


def test_acknowledge_resumed_keeps_later_conditions_open() -> None:
    node = Node().run(GONE)
    seen_at = node.now
    node.event(XID)
    node.take(endings.acknowledge_resumed(node.conditions, seen_at, node.now + 10.0))
    assert {c.code: c.state for c in node.conditions.values()} == {GONE.code: ACKNOWLEDGED, XID.code: OPEN}
    assert [c.code for c in node.judge().causes] == [XID.code]


@pytest.mark.parametrize("finding", [GONE, RESET, FEWER, RATE], ids=lambda f: f.clears.value)
def test_repaired_clears_every_condition_kind(finding: Finding) -> None:
    assert Node().run(finding).repaired(finding.code).cleared_by == ["repaired by root"]


def test_repaired_clears_given_part_or_all() -> None:
    other = replace(GONE, subject="0000:2a:00.0")
    node = Node().run(GONE, other).repaired(GONE.code, GPU)
    assert node.only.subject == "0000:2a:00.0"
    assert Node().run(GONE, other).repaired(GONE.code).conditions == {}
    assert len(Node().run(GONE, other).repaired("gpu_count/other").conditions) == 2


# --- WINDOW


def test_window_counts_time_under_load() -> None:
    node = Node().run(RATE).run().quiet(3599)
    assert node.only.quiet_seconds == 3599
    assert node.quiet(1).cleared_by == ["window"]


def test_window_does_not_count_time_without_load() -> None:
    assert Node().run(RATE).run().quiet(DAY, loaded=False).only.state is OPEN


@pytest.mark.parametrize("end", ["reboot", "reset"])
def test_window_counts_without_load_after_repair(end: str) -> None:
    node = Node().run(RATE)
    if end == "reboot":
        node.reboot().run(check="pcie_aer")
    else:
        node.run(check="pcie_aer", repairs=[Repair(Clears.GPU_RESET, GPU, "fell", node.now)])
    assert node.quiet(3600, loaded=False).cleared_by == ["window"]


def test_new_evidence_restarts_window() -> None:
    node = Node().run(RATE).run().quiet(3000).run(RATE).run().quiet(3000)
    assert node.only.state is OPEN
    event = replace(RATE, clears=Clears.GPU_RESET)
    other = Node()
    other.event(event)
    other.quiet(3000).event(event)
    assert other.quiet(3000).only.state is OPEN
    assert other.quiet(600).cleared_by == ["window"], "the window also ends a fault that waits for a reset"


def test_time_before_new_event_is_not_quiet() -> None:
    node = Node()
    node.event(replace(RATE, clears=Clears.GPU_RESET))
    node.now += 5
    node.take(endings.after_quiet_time(node.conditions, 300.0, True, node.now))
    assert node.only.quiet_seconds == 5


def test_window_does_not_run_between_failing_runs() -> None:
    node = Node().run(RATE).quiet(7200)
    assert node.only.quiet_seconds == 0


def test_window_does_not_begin_while_check_is_stuck() -> None:
    node = Node().run(RATE).run(outcome=Outcome.STUCK).quiet(DAY)
    assert node.only.state is OPEN


def test_clean_runs_do_not_clear_window_condition() -> None:
    """The drain removed the load: the error rate falls, but the fault is still there."""
    node = Node().run(RATE)
    for _ in range(20):
        node.run()
    assert node.only.state is OPEN


# --- operators


def test_resume_acknowledges_draining_conditions() -> None:
    node = Node().run(GONE).run(HANG).operator_resumes()
    assert node.conditions[GONE.code, GPU].state is ACKNOWLEDGED
    assert node.conditions[HANG.code, ""].state is OPEN
    assert node.judge().causes == ()
    assert node.judge().may_resume


def test_after_resume_only_new_event_drains() -> None:
    node = Node()
    event = node.event(XID)
    node.operator_resumes()
    node.absorb_events(XID, event)
    assert node.only.state is ACKNOWLEDGED, "the same event again"
    node.event(XID)
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_event_that_continues_after_resume_reopens_condition() -> None:
    """Lines of one fault are coalesced into one event, which keeps the number of its first line."""
    node = Node()
    event = node.event(XID)
    node.operator_resumes()
    node.now += 4
    node.absorb_events(XID, replace(event, last_time=node.now, lines=2))
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_late_event_from_before_resume_reopens_nothing() -> None:
    node = Node()
    event = node.event(XID)
    node.now += 60
    node.operator_resumes()
    node.absorb_events(
        XID, event, replace(event, sequence=2, time=event.time + 5, last_time=event.time + 5), touched=[2]
    )
    assert node.only.state is ACKNOWLEDGED


def test_check_that_still_fails_after_resume_drains_again() -> None:
    node = Node().run(GONE).operator_resumes().run(GONE)
    assert node.judge().causes == (node.only,)


def test_adopted_drain_requires_operator() -> None:
    node = Node()
    node.take(absorb.adopted({}, "gpu_xid/79", GPU, node.boot, node.now))
    assert (node.only.state, node.only.clears) == (ACKNOWLEDGED, Clears.OPERATOR)
    assert node.judge().causes == ()
    assert node.reboot().repaired("gpu_xid/79").cleared_by == ["repaired by root"]


def test_adopted_condition_that_is_found_clears_normally() -> None:
    """The ledger was lost while a file system was away. Once it is back, only the drain remains, for an operator."""
    node = Node()
    node.take(absorb.adopted({}, LINK.code, LINK.subject, node.boot, node.now))
    node.run(LINK, instance="mlx5_0/1")
    assert (node.only.state, node.only.clears, node.only.instance) == (OPEN, Clears.PASS, "mlx5_0/1")
    node.run(instance="mlx5_0/1").run(instance="mlx5_0/1")
    assert node.cleared_by == ["pass"]


def test_adopted_keeps_recorded_condition() -> None:
    node = Node().run(GONE)
    assert absorb.adopted(node.conditions, GONE.code, GPU, node.boot, node.now) == node.conditions
