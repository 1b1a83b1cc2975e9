"""Tests of the verdict from conditions, and of invariants for any history of a node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from life import (
    ACKNOWLEDGED,
    DAY,
    FEWER,
    GONE,
    GPU,
    LINK,
    ODD,
    OPEN,
    PENDING,
    RATE,
    RESET,
    ROWS,
    T0,
    XID,
    Node,
)
from msgspec.structs import replace

from healthd.agent.conditions import verdict
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    Finding,
    Health,
    Outcome,
    Repair,
    RunName,
    Severity,
    Verdict,
    Worsens,
)

# --- judging


def test_judge_without_conditions_is_healthy() -> None:
    node = Node().run(check="gpu_count")
    assert node.judge(("gpu_count", "")) == Verdict(Health.HEALTHY, may_resume=True)


@pytest.mark.parametrize(
    ("severity", "health"),
    [
        (Severity.INFO, Health.HEALTHY),
        (Severity.WARNING, Health.WARNING),
        (Severity.DEGRADED, Health.DEGRADED),
        (Severity.CRITICAL, Health.UNHEALTHY),
    ],
)
def test_judge_health_follows_worst_open_condition(severity: Severity, health: Health) -> None:
    info = Finding(Severity.INFO, "gpu_count/note", "", "m")
    assert Node().run(replace(GONE, severity=severity), info).judge().health is health


def test_judge_draining_fault_outranks_unknown() -> None:
    node = Node().run(FEWER).run(check="mount", outcome=Outcome.TIMED_OUT)
    assert node.judge(RunName("mount")).health is Health.DEGRADED
    assert not node.judge(RunName("mount")).may_resume


def test_judge_may_resume_ignores_optional_checks() -> None:
    node = Node().run(check="gpu_count").run(check="ipmi_sel", outcome=Outcome.FAILED)
    expected = [RunName("gpu_count"), RunName("ipmi_sel")]
    node_verdict = verdict.judge(node.conditions, node.results, expected, 0.0, optional={RunName("ipmi_sel")})
    assert (node_verdict.health, node_verdict.unknown, node_verdict.may_resume) == (
        Health.UNKNOWN,
        ("ipmi_sel failed",),
        True,
    )
    assert not verdict.judge(node.conditions, node.results, expected, 0.0, optional={RunName("gpu_count")}).may_resume


def test_judge_unknown_outranks_warning() -> None:
    node = Node().run(ODD).run(check="mount", outcome=Outcome.FAILED)
    node_verdict = node.judge(RunName("gpu_count"), RunName("mount"), RunName("ib_link"))
    assert node_verdict.health is Health.UNKNOWN
    assert node_verdict.unknown == ("ib_link has not run yet", "mount failed")
    assert not node_verdict.may_resume
    assert node_verdict.causes == ()


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.FAILED, "mount /data failed: boom"),
        (Outcome.TIMED_OUT, "mount /data did not answer in time: boom"),
        (Outcome.STUCK, "mount /data waits for a hung worker: boom"),
    ],
)
def test_judge_unknown_says_why(outcome: Outcome, expected: str) -> None:
    result = CheckResult("mount", "/data", outcome, T0, 0.1, error="boom")
    assert verdict.judge({}, {RunName("mount", "/data"): result}, [RunName("mount", "/data")], T0).unknown == (
        expected,
    )


def test_judge_pending_or_acknowledged_fault_is_warning() -> None:
    assert Node().run(LINK).judge().health is Health.WARNING
    assert Node().run(GONE).operator_resumes().judge().health is Health.WARNING


def test_judge_pending_fault_prevents_resume_and_acknowledged_does_not() -> None:
    assert not Node().run(LINK).judge().may_resume
    assert Node().run(GONE).operator_resumes().judge().may_resume


def test_judge_after_repaired_waits_for_next_check_run() -> None:
    node = Node().run(GONE).repaired(GONE.code)
    assert node.conditions == {}
    assert not node.judge().may_resume
    assert node.run(check="gpu_count").judge().may_resume


def test_judge_ignores_faults_from_before_trusted_since() -> None:
    node = Node().run(GONE)
    node.event(XID)
    node.trusted_since = node.now
    node_verdict = node.judge()
    assert node_verdict.causes == ()
    assert node_verdict.health is Health.UNHEALTHY, "it is still reported"
    assert node.run(GONE).judge().causes == (node.conditions[GONE.code, GPU],), "a check finds it now"


def test_judge_sorts_causes_and_takes_newest_critical_time() -> None:
    node = Node().run(FEWER).run(GONE)
    node.event(XID)
    node_verdict = node.judge()
    assert [c.code for c in node_verdict.causes] == ["gpu_xid/79", "gpu_count/missing", "gpu_count/fewer_than_expected"]
    assert node_verdict.fault_time == node.now


def test_judge_degraded_fault_has_no_fault_time() -> None:
    assert Node().run(FEWER).judge().fault_time == 0.0


# --- early runs


def test_early_run_times_has_confirm_time_end() -> None:
    node = Node().run(LINK)
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 60}
    assert verdict.early_run_times(node.run(LINK, after=60).conditions) == {}


def test_early_run_times_has_worsening_time() -> None:
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL)))
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 240}


def test_early_run_times_takes_earliest_time() -> None:
    link = replace(LINK, worsens=Worsens(30.0, Severity.CRITICAL))
    node = Node().run(link, replace(LINK, subject="mlx5_1/1"))
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 30}


def test_early_run_times_has_end_of_shared_cause() -> None:
    shared = replace(LINK, shared_cause=True)
    node = Node().run(shared).run(shared).run(LINK)
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 60}
    assert verdict.early_run_times(node.run(LINK, after=60).conditions) == {}


def test_early_run_times_ignores_events_and_clean_runs() -> None:
    node = Node()
    node.event(XID)
    assert verdict.early_run_times(node.conditions) == {}
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL))).run()
    assert verdict.early_run_times(node.conditions) == {}


# --- invariants


FINDINGS = [GONE, RESET, LINK, ROWS, RATE, FEWER, ODD, replace(RESET, subject="other")]


class NodeLife(RuleBasedStateMachine):
    """Random histories of a node. The invariants hold after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()

    def conditions_before(self) -> dict[tuple[str, str], Condition]:
        return dict(self.node.conditions)

    @rule(finding=st.sampled_from(FINDINGS), after=st.sampled_from([1.0, 60.0, 300.0]))
    def find(self, finding: Finding, after: float) -> None:
        self.node.run(finding, after=after)
        assert (finding.code, finding.subject) in self.node.conditions

    @rule(finding=st.sampled_from(FINDINGS), outcome=st.sampled_from([o for o in Outcome if o.value != "completed"]))
    def run_incompletely(self, finding: Finding, outcome: Outcome) -> None:
        conditions = self.conditions_before()
        self.node.run(check=finding.code.partition("/")[0], outcome=outcome)
        assert self.node.conditions == conditions, "a run that did not complete never clears anything"

    @rule(finding=st.sampled_from(FINDINGS))
    def run_cleanly(self, finding: Finding) -> None:
        conditions = self.conditions_before()
        self.node.run(check=finding.code.partition("/")[0])
        for key, condition in conditions.items():
            if condition.state is OPEN and condition.clears is not Clears.PASS:
                assert key in self.node.conditions, "a clean run does not clear a condition that waits for evidence"

    @rule(finding=st.sampled_from([XID, replace(XID, code="gpu_xid/63", clears=Clears.GPU_RESET)]))
    def event(self, finding: Finding) -> None:
        self.node.event(finding)
        assert self.node.conditions[finding.code, GPU].state is OPEN

    @rule()
    def reboot(self) -> None:
        self.node.reboot()
        assert not [c for c in self.node.conditions.values() if c.clears in (Clears.REBOOT, Clears.GPU_RESET)]

    @rule(late=st.booleans())
    def reset(self, late: bool) -> None:
        """Report evidence of a reset. `late` compares with a reading from before the fault."""
        conditions = self.conditions_before()
        compared_at = T0 - 1 if late else self.node.now
        self.node.run(check="gpu_recovery_action", repairs=[Repair(Clears.GPU_RESET, GPU, "reset", compared_at)])
        for key, condition in conditions.items():
            is_cleared = key not in self.node.conditions
            assert is_cleared == (
                not late
                and condition.state in (OPEN, ACKNOWLEDGED)
                and condition.clears is Clears.GPU_RESET
                and key[1] == GPU
            )

    @rule(seconds=st.sampled_from([10.0, 3600.0, 2 * DAY]), loaded=st.booleans())
    def quiet(self, seconds: float, loaded: bool) -> None:
        conditions = self.conditions_before()
        self.node.quiet(seconds, loaded)
        for key, condition in conditions.items():
            if key not in self.node.conditions:
                assert condition.window_seconds
                assert loaded or condition.repaired

    @rule()
    def resume(self) -> None:
        self.node.operator_resumes()
        assert self.node.judge().causes == ()

    @precondition(lambda self: self.node.conditions)
    @rule(data=st.data())
    def repair(self, data: st.DataObject) -> None:
        code, subject = data.draw(st.sampled_from(sorted(self.node.conditions)))
        self.node.repaired(code, subject)
        remaining = self.node.conditions.get((code, subject))
        assert remaining is None or (remaining.state is ACKNOWLEDGED and remaining.evidence)

    @invariant()
    def times_are_in_order(self) -> None:
        for c in self.node.conditions.values():
            assert c.first_seen <= c.last_seen <= self.node.now
            assert c.first_seen <= c.persists_since
            assert (c.opened_at > 0) == (c.state is not PENDING)
            assert c.critical_at == 0.0 or c.critical_at >= c.opened_at
            assert 0 <= c.quiet_seconds <= max(c.window_seconds, 0)

    @invariant()
    def verdict_is_consistent(self) -> None:
        node_verdict = self.node.judge()
        assert all(c.state is OPEN and c.severity >= Severity.DEGRADED for c in node_verdict.causes)
        assert not (node_verdict.causes and node_verdict.may_resume)
        assert not node_verdict.causes or node_verdict.health in (Health.UNHEALTHY, Health.DEGRADED)
        assert node_verdict.fault_time <= self.node.now
        assert sorted(node_verdict.conditions, key=lambda c: -c.severity) == list(node_verdict.conditions)


NodeLife.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_judge_invariants_hold_for_any_history = NodeLife.TestCase


@given(
    st.lists(st.sampled_from(["clean", "failed", "seen", "stuck"]), max_size=30),
    st.integers(1, 4),
)
def test_runs_never_clear_fault_that_requires_reset(runs: list[str], clear_after: int) -> None:
    node = Node().run(RESET)
    for run_kind in runs:
        outcome = {"failed": Outcome.FAILED, "stuck": Outcome.STUCK}.get(run_kind, Outcome.COMPLETED)
        node.run(*([RESET] if run_kind == "seen" else []), outcome=outcome, clear_after=clear_after)
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)
