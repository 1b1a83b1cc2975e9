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


def test_nothing_wrong_is_healthy_and_may_resume() -> None:
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
def test_the_worst_open_condition_is_what_the_node_is(severity: Severity, health: Health) -> None:
    note = Finding(Severity.INFO, "gpu_count/note", "", "m")
    assert Node().run(replace(GONE, severity=severity), note).judge().health is health


def test_a_known_fault_that_drains_wins_over_what_could_not_be_looked_at() -> None:
    node = Node().run(FEWER).run(check="mount", outcome=Outcome.TIMED_OUT)
    assert node.judge(RunName("mount")).health is Health.DEGRADED
    assert not node.judge(RunName("mount")).may_resume


def test_a_resume_does_not_wait_for_a_check_that_cannot_drain_or_says_so() -> None:
    node = Node().run(check="gpu_count").run(check="ipmi_sel", outcome=Outcome.FAILED)
    expected = [RunName("gpu_count"), RunName("ipmi_sel")]
    found = verdict.judge(node.conditions, node.results, expected, 0.0, optional={RunName("ipmi_sel")})
    assert (found.health, found.unknown, found.may_resume) == (Health.UNKNOWN, ("ipmi_sel failed",), True)
    assert not verdict.judge(node.conditions, node.results, expected, 0.0, optional={RunName("gpu_count")}).may_resume


def test_what_could_not_be_looked_at_wins_over_warnings() -> None:
    node = Node().run(ODD).run(check="mount", outcome=Outcome.FAILED)
    found = node.judge(RunName("gpu_count"), RunName("mount"), RunName("ib_link"))
    assert found.health is Health.UNKNOWN
    assert found.unknown == ("ib_link has not run yet", "mount failed")
    assert not found.may_resume
    assert found.causes == ()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome.FAILED, "mount /data failed: boom"),
        (Outcome.TIMED_OUT, "mount /data did not answer in time: boom"),
        (Outcome.STUCK, "mount /data waits for a hung worker: boom"),
    ],
)
def test_what_could_not_look_says_why(outcome: Outcome, words: str) -> None:
    result = CheckResult("mount", "/data", outcome, T0, 0.1, error="boom")
    assert verdict.judge({}, {RunName("mount", "/data"): result}, [RunName("mount", "/data")], T0).unknown == (words,)


def test_a_pending_or_acknowledged_fault_is_a_warning() -> None:
    assert Node().run(LINK).judge().health is Health.WARNING
    assert Node().run(GONE).operator_resumes().judge().health is Health.WARNING


def test_a_pending_fault_holds_up_the_resume_and_an_acknowledged_one_does_not() -> None:
    assert not Node().run(LINK).judge().may_resume
    assert Node().run(GONE).operator_resumes().judge().may_resume


def test_repaired_resumes_only_after_the_check_that_found_it_has_looked_again() -> None:
    node = Node().run(GONE).repaired(GONE.code)
    assert node.conditions == {}
    assert not node.judge().may_resume
    assert node.run(check="gpu_count").judge().may_resume


def test_what_was_seen_before_healthd_was_trusted_never_acts() -> None:
    node = Node().run(GONE)
    node.event(XID)
    node.trusted_since = node.now
    found = node.judge()
    assert found.causes == ()
    assert found.health is Health.UNHEALTHY, "it is still reported"
    assert node.run(GONE).judge().causes == (node.conditions[GONE.code, GPU],), "a check finds it now"


def test_causes_are_told_worst_first_and_the_newest_critical_one_gives_the_time_of_the_fault() -> None:
    node = Node().run(FEWER).run(GONE)
    node.event(XID)
    found = node.judge()
    assert [c.code for c in found.causes] == ["gpu_xid/79", "gpu_count/missing", "gpu_count/fewer_than_expected"]
    assert found.fault_time == node.now


def test_a_degraded_fault_has_no_victims() -> None:
    assert Node().run(FEWER).judge().fault_time == 0.0


# --- early runs


def test_a_pending_fault_is_looked_at_when_its_confirm_time_ends() -> None:
    node = Node().run(LINK)
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 60}
    assert verdict.early_run_times(node.run(LINK, after=60).conditions) == {}


def test_a_fault_that_worsens_is_looked_at_when_it_would() -> None:
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL)))
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 240}


def test_the_earliest_reason_to_look_counts() -> None:
    both = replace(LINK, worsens=Worsens(30.0, Severity.CRITICAL))
    node = Node().run(both, replace(LINK, subject="mlx5_1/1"))
    assert verdict.early_run_times(node.conditions) == {("ib_link", ""): node.now + 30}


def test_what_only_the_log_said_or_a_clean_run_followed_is_not_looked_at_early() -> None:
    node = Node()
    node.event(XID)
    assert verdict.early_run_times(node.conditions) == {}
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL))).run()
    assert verdict.early_run_times(node.conditions) == {}


# --- invariants


FINDINGS = [GONE, RESET, LINK, ROWS, RATE, FEWER, ODD, replace(RESET, subject="other")]


class Life(RuleBasedStateMachine):
    """Random histories of a node. The invariants hold after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()

    def before(self) -> dict[tuple[str, str], Condition]:
        return dict(self.node.conditions)

    @rule(finding=st.sampled_from(FINDINGS), after=st.sampled_from([1.0, 60.0, 300.0]))
    def seen(self, finding: Finding, after: float) -> None:
        self.node.run(finding, after=after)
        assert (finding.code, finding.subject) in self.node.conditions

    @rule(finding=st.sampled_from(FINDINGS), outcome=st.sampled_from([o for o in Outcome if o.value != "completed"]))
    def not_measured(self, finding: Finding, outcome: Outcome) -> None:
        before = self.before()
        self.node.run(check=finding.code.partition("/")[0], outcome=outcome)
        assert self.node.conditions == before, "a run that did not complete never clears anything"

    @rule(finding=st.sampled_from(FINDINGS))
    def looked_and_clean(self, finding: Finding) -> None:
        before = self.before()
        self.node.run(check=finding.code.partition("/")[0])
        for key, old in before.items():
            if old.state is OPEN and old.clears is not Clears.PASS:
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
        before = self.before()
        when = T0 - 1 if late else self.node.now
        self.node.run(check="gpu_recovery_action", repairs=[Repair(Clears.GPU_RESET, GPU, "reset", when)])
        for key, old in before.items():
            ended = key not in self.node.conditions
            assert ended == (
                not late and old.state in (OPEN, ACKNOWLEDGED) and old.clears is Clears.GPU_RESET and key[1] == GPU
            )

    @rule(seconds=st.sampled_from([10.0, 3600.0, 2 * DAY]), loaded=st.booleans())
    def quiet(self, seconds: float, loaded: bool) -> None:
        before = self.before()
        self.node.quiet(seconds, loaded)
        for key, old in before.items():
            if key not in self.node.conditions:
                assert old.window_seconds
                assert loaded or old.repaired

    @rule()
    def resumed(self) -> None:
        self.node.operator_resumes()
        assert self.node.judge().causes == ()

    @precondition(lambda self: self.node.conditions)
    @rule(data=st.data())
    def repaired(self, data: st.DataObject) -> None:
        code, subject = data.draw(st.sampled_from(sorted(self.node.conditions)))
        self.node.repaired(code, subject)
        left = self.node.conditions.get((code, subject))
        assert left is None or (left.state is ACKNOWLEDGED and left.evidence)

    @invariant()
    def times_are_in_order(self) -> None:
        for c in self.node.conditions.values():
            assert c.first_seen <= c.last_seen <= self.node.now
            assert c.first_seen <= c.persists_since
            assert (c.opened_at > 0) == (c.state is not PENDING)
            assert c.critical_at == 0.0 or c.critical_at >= c.opened_at
            assert 0 <= c.quiet_seconds <= max(c.window_seconds, 0)

    @invariant()
    def the_verdict_is_consistent(self) -> None:
        found = self.node.judge()
        assert all(c.state is OPEN and c.severity >= Severity.DEGRADED for c in found.causes)
        assert not (found.causes and found.may_resume)
        assert not found.causes or found.health in (Health.UNHEALTHY, Health.DEGRADED)
        assert found.fault_time <= self.node.now
        assert sorted(found.conditions, key=lambda c: -c.severity) == list(found.conditions)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_whatever_happens_the_rules_hold = Life.TestCase


@given(
    st.lists(st.sampled_from(["clean", "failed", "seen", "stuck"]), max_size=30),
    st.integers(1, 4),
)
def test_no_sequence_of_runs_clears_a_fault_that_waits_for_a_reset(runs: list[str], clear_after: int) -> None:
    node = Node().run(RESET)
    for run in runs:
        outcome = {"failed": Outcome.FAILED, "stuck": Outcome.STUCK}.get(run, Outcome.COMPLETED)
        node.run(*([RESET] if run == "seen" else []), outcome=outcome, clear_after=clear_after)
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)
