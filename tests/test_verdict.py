"""From findings to a verdict: told as lives of conditions, with a clock that the test moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from healthd.checks import gpu_xid, sxid
from healthd.config import CheckConfig
from healthd.judge import absorb, endings, intake, verdict
from healthd.judge.condition import shifted
from healthd.judge.ledger import Ledger
from healthd.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Finding,
    Found,
    Health,
    KernelEvent,
    Outcome,
    Repair,
    RunName,
    Severity,
    Slowness,
    Verdict,
    Worsens,
)
from healthd.settings.registry import Check

T0 = 1_800_000_000.0
DAY = 86400.0
GPU = "0000:1b:00.0"
PENDING, OPEN, ACKNOWLEDGED, CLEARED = ConditionState

GONE = Finding(Severity.CRITICAL, "gpu_count/missing", GPU, "not shown by NVML", Clears.REBOOT)
RESET = Finding(Severity.CRITICAL, "gpu_ecc/uncorrected", GPU, "1 uncorrected error", Clears.GPU_RESET)
LINK = Finding(Severity.DEGRADED, "ib_link/down", "mlx5_0/1", "port is down", confirm_seconds=60.0)
FEWER = Finding(Severity.DEGRADED, "gpu_count/fewer_than_expected", "", "7 of 8")
ODD = Finding(Severity.WARNING, "gpu_count/odd", "", "m")
ROWS = Finding(Severity.CRITICAL, "gpu_row_remap/failed", GPU, "failed", Clears.OPERATOR, evidence="failure flag 1")
XID = Finding(Severity.CRITICAL, "gpu_xid/79", GPU, "fell off the bus", Clears.REBOOT)
HANG = Finding(Severity.WARNING, "gpu_access/hang", "", "no answer", worsens=Worsens(240.0, Severity.DEGRADED))
RATE = Finding(Severity.DEGRADED, "pcie_aer/rate", GPU, "many errors", Clears.WINDOW, window_seconds=3600.0)


RUN_SECONDS = 0.5


class Node:
    """A node's conditions, and what happens to them at a time. Cleared ones go to `cleared`, as the ledger has it."""

    def __init__(self) -> None:
        self.now = T0
        self.boot = "boot1"
        self.conditions: dict[tuple[str, str], Condition] = {}
        self.cleared: list[Condition] = []
        self.results: dict[tuple[str, str], CheckResult] = {}
        self.sequence = 0
        self.trusted_since = T0 - 1

    def take(self, conditions: dict[tuple[str, str], Condition]) -> None:
        self.cleared += [c for c in conditions.values() if c.state is CLEARED]
        self.conditions = {key: c for key, c in conditions.items() if c.state is not CLEARED}

    def run(
        self,
        *findings: Finding,
        check: str = "",
        instance: str = "",
        outcome: Outcome = Outcome.COMPLETED,
        clear_after: int = 2,
        repairs: Sequence[Repair] = (),
        after: float = 300.0,
    ) -> Node:
        """One run of a check, `after` seconds from now. Its name: that of its findings, else of what stands."""
        self.now += after
        codes = [f.code for f in findings] or [c.code for c in self.conditions.values()] or ["none/"]
        name = check or codes[0].partition("/")[0]
        began = self.now - RUN_SECONDS
        result = CheckResult(name, instance, outcome, began, RUN_SECONDS, findings, repairs=tuple(repairs))
        self.results[name, instance] = result
        self.take(absorb.absorb_result(self.conditions, result, clear_after, self.boot, self.cleared))
        if outcome in (Outcome.COMPLETED, Outcome.FAILED):
            self.take(endings.after_repairs(self.conditions, repairs, self.now))
        return self

    def event(self, finding: Finding, after: float = 10.0, **changes: Any) -> KernelEvent:
        """A kernel event on which a finding rests, absorbed when it happens."""
        self.now += after
        self.sequence += 1
        event = KernelEvent("xid", "79", GPU, self.now, boot_id=self.boot, last_time=self.now, sequence=self.sequence)
        event = replace(event, **changes)
        self.hear(finding, event)
        return event

    def hear(self, finding: Finding, *events: KernelEvent, touched: Sequence[int] | None = None) -> None:
        by_sequence = {event.sequence: event for event in events}
        finding = replace(finding, events=tuple(by_sequence))
        self.take(
            absorb.absorb_events(
                self.conditions,
                finding.code.partition("/")[0],
                [finding],
                by_sequence,
                frozenset(by_sequence if touched is None else touched),
                self.boot,
                self.cleared,
            )
        )

    def reboot(self, after: float = 600.0) -> Node:
        self.now += after
        self.boot += "+"
        self.take(endings.after_boot(self.conditions, self.boot, self.now))
        return self

    def quiet(self, seconds: float, loaded: bool = True) -> Node:
        self.now += seconds
        self.take(endings.after_quiet(self.conditions, seconds, loaded, self.now))
        return self

    def operator_resumes(self) -> Node:
        self.take(endings.resumed_by_operator(self.conditions, self.now, self.now))
        return self

    def repaired(self, code: str, subject: str | None = None) -> Node:
        self.take(endings.repaired(self.conditions, code, subject, "root", self.now))
        return self

    def judge(self, *expected: tuple[str, str]) -> Verdict:
        return verdict.judge(self.conditions, self.results, expected, self.trusted_since)

    @property
    def only(self) -> Condition:
        (condition,) = self.conditions.values()
        return condition

    @property
    def states(self) -> list[ConditionState]:
        return [c.state for c in self.conditions.values()]

    @property
    def cleared_by(self) -> list[str]:
        return [c.cleared_by for c in self.cleared]


# --- opening


def test_a_finding_without_a_confirm_time_is_open_at_once() -> None:
    node = Node().run(GONE)
    assert node.only.state is OPEN
    assert node.only.opened_at == node.only.critical_at == node.now
    assert node.judge().causes == (node.only,)


def test_a_finding_counts_only_after_its_confirm_time() -> None:
    node = Node().run(LINK)
    assert node.only.state is PENDING
    assert node.judge().causes == ()
    assert node.run(LINK, after=59).only.state is PENDING
    assert node.run(LINK, after=1).only.state is OPEN


def test_a_link_that_is_back_within_its_confirm_time_is_no_fault() -> None:
    node = Node().run(LINK).run(after=30)
    assert (node.conditions, node.cleared) == ({}, [])
    assert node.run(LINK, after=40).only.state is PENDING, "the next time begins anew"


def test_a_run_that_did_not_complete_does_not_end_a_pending_one() -> None:
    node = Node().run(LINK).run(outcome=Outcome.FAILED, after=30)
    assert node.only.state is PENDING
    assert node.run(LINK, after=40).only.state is OPEN


def test_what_a_run_gave_before_it_failed_counts() -> None:
    assert Node().run(GONE, outcome=Outcome.FAILED).only.state is OPEN


def test_of_two_findings_about_one_part_the_worse_counts() -> None:
    node = Node().run(GONE, replace(GONE, severity=Severity.WARNING))
    assert node.only.severity is Severity.CRITICAL


def test_a_finding_that_lasts_worsens() -> None:
    node = Node().run(HANG, outcome=Outcome.TIMED_OUT)
    assert node.only.severity is Severity.WARNING
    node.run(HANG, outcome=Outcome.STUCK, after=240)
    assert node.only.severity is Severity.DEGRADED
    assert node.judge().causes == (node.only,)


def test_a_clean_run_between_two_sights_begins_the_time_anew() -> None:
    node = Node().run(HANG).run(after=200).run(HANG, after=200)
    assert node.only.severity is Severity.WARNING
    assert node.run(HANG, after=240).only.severity is Severity.DEGRADED


def test_a_fault_that_becomes_critical_later_is_critical_since_then() -> None:
    node = Node().run(replace(GONE, severity=Severity.DEGRADED))
    opened = node.now
    node.run(GONE)
    assert (node.only.opened_at, node.only.critical_at) == (opened, node.now)


# --- as the site wants it


def test_enforce_false_caps_everything_at_warning() -> None:
    mild = absorb.as_configured(replace(GONE, worsens=Worsens(1.0, Severity.CRITICAL)), CheckConfig(enforce=False))
    assert mild.severity is Severity.WARNING
    assert mild.worsens == Worsens(1.0, Severity.WARNING)


def test_a_severity_that_the_site_sets_is_final() -> None:
    config = CheckConfig(severity={"gpu_access/hang": Severity.INFO, "gpu_count/missing": Severity.CRITICAL})
    found = Found(HANG.severity, HANG.worsens)
    assert absorb.as_configured(HANG, config) == replace(HANG, severity=Severity.INFO, worsens=None, found=found)
    capped = absorb.as_configured(GONE, replace(config, enforce=False))
    assert capped.severity is Severity.WARNING, "enforce = false wins"


def test_without_settings_a_finding_is_as_the_check_gave_it() -> None:
    assert absorb.as_configured(LINK, CheckConfig()) == LINK


# --- PASS


def test_pass_clears_after_as_many_clean_runs_as_the_site_wants() -> None:
    node = Node().run(FEWER).run(clear_after=3).run(clear_after=3)
    assert node.only.clean_runs == 2
    node.run(clear_after=3)
    assert (node.conditions, node.cleared_by) == ({}, ["pass"])


def test_a_fault_between_clean_runs_counts_them_anew() -> None:
    node = Node().run(FEWER).run().run(FEWER).run()
    assert node.only.clean_runs == 1
    assert node.only.state is OPEN


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMED_OUT, Outcome.STUCK])
def test_a_run_that_did_not_complete_clears_nothing(outcome: Outcome) -> None:
    node = Node().run(FEWER).run(outcome=outcome).run(outcome=outcome).run(outcome=outcome)
    assert node.only.clean_runs == 0
    assert node.only.state is OPEN


def test_another_check_or_instance_clears_nothing() -> None:
    data = Finding(Severity.DEGRADED, "mount/missing", "/data", "not mounted")
    node = Node().run(data, instance="/data")
    for _ in range(3):
        node.run(check="mount", instance="/home").run(check="gpu_count")
    assert node.only.state is OPEN
    node.run(check="mount", instance="/data").run(check="mount", instance="/data")
    assert node.conditions == {}


def test_only_the_part_that_is_well_again_is_cleared() -> None:
    other = replace(FEWER, subject="other")
    node = Node().run(FEWER, other).run(other).run(other)
    assert node.only.subject == "other"


# --- REBOOT, GPU_RESET, OPERATOR


@pytest.mark.parametrize("finding", [GONE, RESET, ROWS], ids=lambda f: f.clears.value)
def test_what_waits_for_evidence_is_not_cleared_by_clean_runs(finding: Finding) -> None:
    node = Node().run(finding)
    for _ in range(10):
        node.run()
    assert node.only.state is OPEN


@pytest.mark.parametrize("finding", [GONE, RESET], ids=lambda f: f.clears.value)
def test_a_reboot_clears_what_waits_for_it_or_for_a_reset(finding: Finding) -> None:
    assert Node().run(finding).reboot().cleared_by == ["reboot"]


@pytest.mark.parametrize("finding", [FEWER, ROWS, RATE], ids=lambda f: f.clears.value)
def test_a_reboot_does_not_clear_what_waits_for_something_else(finding: Finding) -> None:
    assert Node().run(finding).reboot().only.state is OPEN


def test_starting_again_in_the_same_boot_clears_nothing() -> None:
    node = Node().run(GONE)
    assert endings.after_boot(node.conditions, node.boot, node.now) == node.conditions


def test_what_was_pending_before_a_reboot_is_forgotten() -> None:
    """The time in which the machine was down confirms nothing."""
    node = Node().run(LINK).reboot()
    assert (node.conditions, node.cleared) == ({}, [])
    assert node.run(LINK).only.state is PENDING


def test_what_worsens_with_time_begins_anew_after_a_reboot() -> None:
    assert Node().run(HANG).reboot().run(HANG, after=60).only.severity is Severity.WARNING


def test_evidence_of_a_reset_clears_what_the_run_saw_whose_reading_it_compares_with() -> None:
    node = Node().run(RESET)
    before = node.now - RUN_SECONDS
    node.run(repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", before)])
    assert node.cleared_by == ["gpu_reset: volatile count fell"]


def test_evidence_of_a_reset_clears_nothing_seen_after_the_reading_that_it_compares_with() -> None:
    """The event came after the earlier reading: perhaps after the reset, too."""
    node = Node().run()
    before = node.now
    node.event(replace(XID, clears=Clears.GPU_RESET))
    node.run(check="gpu_ecc", repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", before)])
    assert node.only.state is OPEN


def test_a_run_that_sees_the_fault_still_is_not_cleared_by_its_own_evidence() -> None:
    node = Node().run(RESET)
    node.run(RESET, repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", node.now)])
    assert node.only.state is OPEN


def test_evidence_of_a_reset_concerns_that_part_and_those_faults_only() -> None:
    other = replace(RESET, subject="0000:2a:00.0")
    node = Node().run(RESET, other).run(GONE)
    repair = Repair(Clears.GPU_RESET, GPU, "recovery action back to none", node.now)
    node.run(check="gpu_recovery_action", repairs=[repair])
    assert {(c.code, c.subject) for c in node.conditions.values()} == {
        ("gpu_ecc/uncorrected", "0000:2a:00.0"),
        ("gpu_count/missing", GPU),
    }


def test_evidence_of_a_reset_clears_nothing_that_the_log_told_while_the_earlier_reading_was_taken() -> None:
    node = Node().run()
    before = node.now - RUN_SECONDS
    node.event(replace(XID, clears=Clears.GPU_RESET), after=-RUN_SECONDS / 2)
    node.run(check="gpu_ecc", repairs=[Repair(Clears.GPU_RESET, GPU, "volatile count fell", before)])
    assert node.only.state is OPEN


def test_what_a_run_saw_that_began_before_an_operator_resumed_acts_only_when_it_is_seen_again() -> None:
    node = Node().run(GONE)
    resumed = node.now + 100.0 - RUN_SECONDS / 2
    node.take(endings.resumed_by_operator(node.conditions, node.now, resumed))
    assert node.run(GONE, after=100.0).judge().causes == ()
    assert node.run(GONE).judge().causes == (node.only,)


@pytest.mark.parametrize("finding", [GONE, RESET, FEWER, RATE], ids=lambda f: f.clears.value)
def test_an_engineer_clears_whatever_it_waits_for(finding: Finding) -> None:
    assert Node().run(finding).repaired(finding.code).cleared_by == ["repaired by root"]


def test_an_engineer_may_clear_one_part_or_all() -> None:
    other = replace(GONE, subject="0000:2a:00.0")
    node = Node().run(GONE, other).repaired(GONE.code, GPU)
    assert node.only.subject == "0000:2a:00.0"
    assert Node().run(GONE, other).repaired(GONE.code).conditions == {}
    assert len(Node().run(GONE, other).repaired("gpu_count/other").conditions) == 2


# --- a sticky flag


def test_a_sticky_flag_stays_acknowledged_until_it_changes() -> None:
    node = Node().run(ROWS).repaired(ROWS.code)
    assert node.only.state is ACKNOWLEDGED
    for _ in range(3):
        assert node.run(ROWS).only.state is ACKNOWLEDGED
    assert node.judge().causes == ()
    worse = replace(ROWS, evidence="failure flag 2")
    assert node.run(worse).only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_what_changed_after_it_was_acknowledged_is_another_fault_with_victims_of_its_own() -> None:
    node = Node().run(ROWS).operator_resumes().run(ROWS).run(replace(ROWS, evidence="failure flag 2"))
    assert node.only.critical_at == node.now == node.judge().fault_time


def test_a_fault_that_was_resumed_and_still_fails_has_no_new_victims() -> None:
    """A job that started after the operator resumed the node is not requeued for the old fault."""
    node = Node().run(GONE)
    first = node.now
    node.operator_resumes().run(GONE)
    assert node.judge().causes == (node.only,)
    assert node.judge().fault_time == first


def test_an_acknowledged_fault_that_is_seen_no_more_clears_by_pass() -> None:
    assert Node().run(ROWS).repaired(ROWS.code).run().run().cleared_by == ["pass"]


# --- WINDOW


def test_a_window_counts_time_under_load() -> None:
    node = Node().run(RATE).run().quiet(3599)
    assert node.only.quiet_seconds == 3599
    assert node.quiet(1).cleared_by == ["window"]


def test_a_window_does_not_count_time_without_load() -> None:
    assert Node().run(RATE).run().quiet(DAY, loaded=False).only.state is OPEN


@pytest.mark.parametrize("end", ["reboot", "reset"])
def test_after_a_repair_a_window_counts_without_load_too(end: str) -> None:
    node = Node().run(RATE)
    if end == "reboot":
        node.reboot().run(check="pcie_aer")
    else:
        node.run(check="pcie_aer", repairs=[Repair(Clears.GPU_RESET, GPU, "fell", node.now)])
    assert node.quiet(3600, loaded=False).cleared_by == ["window"]


def test_news_begins_the_window_anew() -> None:
    node = Node().run(RATE).run().quiet(3000).run(RATE).run().quiet(3000)
    assert node.only.state is OPEN
    event = replace(RATE, clears=Clears.GPU_RESET)
    other = Node()
    other.event(event)
    other.quiet(3000).event(event)
    assert other.quiet(3000).only.state is OPEN
    assert other.quiet(600).cleared_by == ["window"], "the other way out of a fault that waits for a reset"


def test_the_time_before_the_news_is_not_quiet() -> None:
    node = Node()
    node.event(replace(RATE, clears=Clears.GPU_RESET))
    node.now += 5
    node.take(endings.after_quiet(node.conditions, 300.0, True, node.now))
    assert node.only.quiet_seconds == 5


def test_between_two_runs_that_see_the_fault_no_window_passes() -> None:
    node = Node().run(RATE).quiet(7200)
    assert node.only.quiet_seconds == 0


def test_while_a_check_cannot_look_the_window_does_not_begin() -> None:
    node = Node().run(RATE).run(outcome=Outcome.STUCK).quiet(DAY)
    assert node.only.state is OPEN


def test_clean_runs_alone_do_not_clear_a_window() -> None:
    """Draining took the load away: the rate falls, the fault is still there."""
    node = Node().run(RATE)
    for _ in range(20):
        node.run()
    assert node.only.state is OPEN


# --- relapse


def test_a_reboot_fault_that_opens_again_within_a_week_waits_for_an_operator() -> None:
    node = Node().run(GONE).reboot().run(GONE, after=6 * DAY)
    assert node.only.clears is Clears.OPERATOR
    assert node.reboot().only.state is OPEN


def test_after_more_than_a_week_it_is_a_fault_like_the_first() -> None:
    assert Node().run(GONE).reboot().run(GONE, after=8 * DAY).only.clears is Clears.REBOOT


def test_a_relapse_is_of_the_same_fault_on_the_same_part() -> None:
    other = replace(GONE, subject="0000:2a:00.0")
    assert Node().run(GONE).reboot().run(other).only.clears is Clears.REBOOT


def test_what_comes_back_after_an_engineer_repaired_it_waits_for_an_operator_too() -> None:
    assert Node().run(GONE).repaired(GONE.code).run(GONE).only.clears is Clears.OPERATOR
    assert Node().run(GONE).repaired(GONE.code).run(GONE, after=8 * DAY).only.clears is Clears.REBOOT


def test_a_fault_that_comes_back_within_its_relapse_time_waits_for_an_operator_and_no_clean_time_ends_it() -> None:
    slow = replace(RATE, relapse_seconds=DAY)
    node = Node().run(slow).run().quiet(3600.0)
    assert node.conditions == {}
    node.run(slow, after=0.9 * DAY).run().quiet(30 * DAY)
    assert (node.only.clears, node.only.state) == (Clears.OPERATOR, OPEN)
    assert node.repaired(slow.code).conditions == {}
    again = Node().run(slow).run().quiet(3600.0).run(slow, after=1.1 * DAY).run()
    assert again.only.clears is Clears.WINDOW


def test_a_reset_fault_that_comes_again_after_a_reboot_is_no_relapse() -> None:
    assert Node().run(RESET).reboot().run(RESET).only.clears is Clears.GPU_RESET


def test_an_xid_that_comes_again_after_a_reboot_waits_for_an_operator_and_stays_so() -> None:
    node = Node()
    node.event(XID)
    node.reboot().event(XID)
    assert node.only.clears is Clears.OPERATOR
    node.event(XID)
    assert node.only.clears is Clears.OPERATOR


# --- the kernel log


def test_an_event_opens_a_condition_with_its_own_time() -> None:
    node = Node()
    event = node.event(XID)
    assert (node.only.state, node.only.count, node.only.last_event) == (OPEN, 1, event.time)
    assert node.judge().fault_time == event.time


def test_a_slowness_is_as_the_last_look_had_it_and_names_its_jobs() -> None:
    slow = Finding(Severity.WARNING, "failslow/job", "", "slow", slowness=Slowness(0.2, T0, ("4711",)))
    node = Node().run(slow)
    (first,) = node.conditions.values()
    assert (first.slowness, first.job) == (slow.slowness, "4711")
    node.run(replace(slow, slowness=Slowness(0.4, T0, ("4711", "4712"))))
    (then,) = node.conditions.values()
    assert (then.slowness, then.job) == (Slowness(0.4, T0, ("4711", "4712")), "4711,4712")


def test_a_finding_that_rests_on_nothing_new_was_absorbed_before() -> None:
    node = Node()
    event = node.event(XID)
    before = node.conditions
    node.hear(XID, event, touched=[])
    assert node.conditions == before
    node.repaired(XID.code).hear(XID, event, touched=[])
    assert node.conditions == {}


def test_each_event_counts_once() -> None:
    node = Node()
    first = node.event(XID)
    second = replace(first, sequence=2, time=node.now + 5, last_time=node.now + 5)
    node.hear(XID, first, second, touched=[2])
    node.hear(XID, first, second, touched=[2])
    assert node.only.count == 2


def test_what_the_log_held_before_healthd_looked_is_only_information() -> None:
    node = Node()
    node.event(XID, history=True)
    assert (node.only.severity, node.only.history) == (Severity.INFO, True)
    assert node.judge().health is Health.HEALTHY
    assert node.judge().causes == ()


def test_an_event_of_now_makes_history_a_fault() -> None:
    node = Node()
    node.event(XID, history=True)
    node.event(XID)
    assert (node.only.severity, node.only.history) == (Severity.CRITICAL, False)
    assert node.judge().fault_time == node.now


def test_history_that_comes_late_does_not_soften_a_fault_of_now() -> None:
    node = Node()
    node.event(XID)
    node.event(XID, history=True)
    assert (node.only.severity, node.only.history) == (Severity.CRITICAL, False)


def test_clean_runs_do_not_clear_what_only_the_log_said() -> None:
    node = Node()
    node.event(replace(XID, clears=Clears.PASS))
    assert node.run(check="gpu_xid").run(check="gpu_xid").only.state is OPEN


def test_what_the_log_latched_is_not_undone_by_a_look_that_finds_less() -> None:
    node = Node()
    node.event(XID)
    milder = replace(XID, severity=Severity.WARNING, clears=Clears.PASS, window_seconds=60.0)
    node.run(milder).run(check="gpu_xid").quiet(3600.0).run(check="gpu_xid")
    assert (node.only.severity, node.only.clears, node.only.state) == (Severity.CRITICAL, Clears.REBOOT, OPEN)
    assert node.reboot().conditions == {}


def test_what_a_look_found_first_waits_for_the_reboot_that_the_log_asks_for() -> None:
    node = Node().run(replace(XID, severity=Severity.WARNING, clears=Clears.PASS))
    node.event(XID)
    node.run(check="gpu_xid").run(check="gpu_xid")
    assert (node.only.severity, node.only.clears, node.only.state) == (Severity.CRITICAL, Clears.REBOOT, OPEN)
    assert node.reboot().conditions == {}


def test_news_in_the_log_counts_clean_runs_anew() -> None:
    node = Node().run(FEWER).run()
    node.event(FEWER)
    assert node.run().only.state is OPEN
    assert node.run().conditions == {}


# --- operators


def test_an_operators_resume_acknowledges_what_would_drain() -> None:
    node = Node().run(GONE).run(HANG).operator_resumes()
    assert node.conditions[GONE.code, GPU].state is ACKNOWLEDGED
    assert node.conditions[HANG.code, ""].state is OPEN
    assert node.judge().causes == ()
    assert node.judge().may_resume


def test_after_an_operators_resume_only_what_is_seen_again_acts() -> None:
    node = Node()
    event = node.event(XID)
    node.operator_resumes()
    node.hear(XID, event)
    assert node.only.state is ACKNOWLEDGED, "the same event is no news"
    node.event(XID)
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_an_event_that_goes_on_after_the_resume_is_news() -> None:
    """Lines of one fault are folded into one event: it has the number of its first line."""
    node = Node()
    event = node.event(XID)
    node.operator_resumes()
    node.now += 4
    node.hear(XID, replace(event, last_time=node.now, lines=2))
    assert node.only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_an_event_from_before_the_resume_that_comes_late_is_no_news() -> None:
    node = Node()
    event = node.event(XID)
    node.now += 60
    node.operator_resumes()
    node.hear(XID, event, replace(event, sequence=2, time=event.time + 5, last_time=event.time + 5), touched=[2])
    assert node.only.state is ACKNOWLEDGED


def test_a_check_that_still_fails_after_the_resume_drains_again() -> None:
    node = Node().run(GONE).operator_resumes().run(GONE)
    assert node.judge().causes == (node.only,)


def test_a_drain_in_our_words_that_nobody_knows_waits_for_a_person() -> None:
    node = Node()
    node.take(absorb.adopted({}, "gpu_xid/79", GPU, node.boot, node.now))
    assert (node.only.state, node.only.clears) == (ACKNOWLEDGED, Clears.OPERATOR)
    assert node.judge().causes == ()
    assert node.reboot().repaired("gpu_xid/79").cleared_by == ["repaired by root"]


def test_what_was_adopted_and_is_then_seen_ends_as_if_it_had_always_been_known() -> None:
    """A lost ledger, a file system that is still away: when it is back nothing stands but the drain, for a person."""
    node = Node()
    node.take(absorb.adopted({}, LINK.code, LINK.subject, node.boot, node.now))
    node.run(LINK, instance="mlx5_0/1")
    assert (node.only.state, node.only.clears, node.only.instance) == (OPEN, Clears.PASS, "mlx5_0/1")
    node.run(instance="mlx5_0/1").run(instance="mlx5_0/1")
    assert node.cleared_by == ["pass"]


def test_adopting_what_is_known_changes_nothing() -> None:
    node = Node().run(GONE)
    assert absorb.adopted(node.conditions, GONE.code, GPU, node.boot, node.now) == node.conditions


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
    assert found.health is Health.UNHEALTHY, "it is told all the same"
    assert node.run(GONE).judge().causes == (node.conditions[GONE.code, GPU],), "a check finds it now"


def test_causes_are_told_worst_first_and_the_newest_critical_one_gives_the_time_of_the_fault() -> None:
    node = Node().run(FEWER).run(GONE)
    node.event(XID)
    found = node.judge()
    assert [c.code for c in found.causes] == ["gpu_xid/79", "gpu_count/missing", "gpu_count/fewer_than_expected"]
    assert found.fault_time == node.now


def test_a_degraded_fault_has_no_victims() -> None:
    assert Node().run(FEWER).judge().fault_time == 0.0


# --- when to look again


def test_a_pending_fault_is_looked_at_when_its_confirm_time_ends() -> None:
    node = Node().run(LINK)
    assert verdict.next_look(node.conditions) == {("ib_link", ""): node.now + 60}
    assert verdict.next_look(node.run(LINK, after=60).conditions) == {}


def test_a_fault_that_worsens_is_looked_at_when_it_would() -> None:
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL)))
    assert verdict.next_look(node.conditions) == {("ib_link", ""): node.now + 240}


def test_the_earliest_reason_to_look_counts() -> None:
    both = replace(LINK, worsens=Worsens(30.0, Severity.CRITICAL))
    node = Node().run(both, replace(LINK, subject="mlx5_1/1"))
    assert verdict.next_look(node.conditions) == {("ib_link", ""): node.now + 30}


def test_what_only_the_log_said_or_a_clean_run_followed_is_not_looked_at_early() -> None:
    node = Node()
    node.event(XID)
    assert verdict.next_look(node.conditions) == {}
    node = Node().run(replace(LINK, confirm_seconds=0.0, worsens=Worsens(240.0, Severity.CRITICAL))).run()
    assert verdict.next_look(node.conditions) == {}


# --- a clock that is set


def test_a_clock_step_moves_every_moment_and_only_moments() -> None:
    numbers = {f.name: 100.0 for f in dataclasses.fields(Condition) if f.type == "float"}
    condition = replace(Node().run(GONE).only, **numbers)  # type: ignore[arg-type]
    moved = shifted(condition, 50.0)
    durations = {"confirm_seconds", "window_seconds", "quiet_seconds"}
    assert {name: getattr(moved, name) for name in numbers} == {
        name: 100.0 if name in durations else 150.0 for name in numbers
    }


def test_a_moment_that_never_was_stays_so() -> None:
    assert shifted(Node().run(FEWER).only, 50.0).critical_at == 0.0


def test_a_clock_step_cuts_no_confirm_time_short() -> None:
    node = Node().run(LINK)
    node.now += 3600
    node.conditions = {key: shifted(c, 3600) for key, c in node.conditions.items()}
    assert node.run(LINK, after=30).only.state is PENDING


# --- whatever happens


FINDINGS = [GONE, RESET, LINK, ROWS, RATE, FEWER, ODD, replace(RESET, subject="other")]


class Life(RuleBasedStateMachine):
    """Anything may happen to a node, in any order: what must hold, holds."""

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
    def not_looked(self, finding: Finding, outcome: Outcome) -> None:
        before = self.before()
        self.node.run(check=finding.code.partition("/")[0], outcome=outcome)
        assert self.node.conditions == before, "a run that did not complete never clears anything"

    @rule(finding=st.sampled_from(FINDINGS))
    def looked_and_clean(self, finding: Finding) -> None:
        before = self.before()
        self.node.run(check=finding.code.partition("/")[0])
        for key, old in before.items():
            if old.state is OPEN and old.clears is not Clears.PASS:
                assert key in self.node.conditions, "no clean run ends what waits for evidence"

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
        """Evidence of a reset; `late`: it compares with a reading from before the fault."""
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


# --- kernel events that still count


SWITCH = "0000:85:00.0"
SXID = ("sxid/24007", SWITCH)


LISTENERS = [(Check(name, module), module.Config()) for name, module in (("gpu_xid", gpu_xid), ("sxid", sxid))]


class Listening(Node):
    """A node whose kernel lines gpu_xid or sxid judges."""

    events: tuple[KernelEvent, ...] = ()

    def line(self, kind: str, code: str, after: float = 3600.0, history: bool = False, **fields: str) -> Listening:
        self.now += after
        told = tuple(fields.items())
        return self.take_in(KernelEvent(kind, code, SWITCH, self.now, fields=told, boot_id=self.boot, history=history))

    def take_in(self, event: KernelEvent) -> Listening:
        known = Ledger(
            boot_id=self.boot,
            conditions=tuple(self.conditions.values()),
            cleared=tuple(self.cleared),
            events=self.events,
            next_sequence=len(self.events) + 1,
        )
        heard = intake.heard(known, [replace(event, last_time=self.now)], LISTENERS, self.now)
        assert not heard.mistakes
        self.conditions, self.cleared = heard.ledger.by_key(), list(heard.ledger.cleared)
        self.events = heard.ledger.events
        return self

    def repaired(self, key: tuple[str, str]) -> Listening:
        self.now += 60
        self.take(endings.repaired(self.conditions, *key, "ann", self.now))
        return self


def test_a_harmless_line_after_the_repair_of_a_fatal_one_is_harmless() -> None:
    node = Listening().line("sxid", "24007", fatal="true")
    assert node.conditions[SXID].severity is Severity.CRITICAL
    node.repaired(SXID).line("sxid", "24007", fatal="false")
    assert (node.conditions[SXID].severity, node.conditions[SXID].count) == (Severity.WARNING, 1)
    assert node.judge().causes == ()
    node.line("sxid", "24007", fatal="true")
    assert node.conditions[SXID].severity is Severity.CRITICAL


def test_without_a_repair_a_harmless_line_hides_no_fatal_one() -> None:
    node = Listening().line("sxid", "24007", fatal="true").line("sxid", "24007", fatal="false")
    assert node.conditions[SXID].severity is Severity.CRITICAL


def test_a_harmless_line_after_an_operator_resumed_does_not_drain_again() -> None:
    node = Listening().line("sxid", "24007", fatal="true")
    node.operator_resumes()
    node.line("sxid", "24007", fatal="false")
    assert node.conditions[SXID].severity is Severity.WARNING
    assert node.judge().causes == ()


def test_a_fatal_line_of_before_the_first_start_makes_no_live_one_fatal() -> None:
    node = Listening().line("sxid", "24007", history=True, fatal="true")
    assert node.conditions[SXID].severity is Severity.INFO
    node.line("sxid", "24007", fatal="false")
    assert (node.conditions[SXID].severity, node.conditions[SXID].history) == (Severity.WARNING, False)


@pytest.mark.parametrize("history", [True, False])
def test_an_nvlink_error_after_history_or_a_repair_is_no_repetition(history: bool) -> None:
    node = Listening().line("xid", "74", history=history)
    if not history:
        node.repaired(("gpu_xid/74", SWITCH))
    node.line("xid", "74")
    assert node.conditions["gpu_xid/74", SWITCH].severity is Severity.WARNING
    assert node.line("xid", "74").conditions["gpu_xid/74", SWITCH].severity is Severity.CRITICAL


def test_a_storm_that_goes_on_after_it_was_called_repaired_counts_again() -> None:
    node = Listening().line("xid", "95").repaired(("gpu_xid/95", SWITCH))
    assert node.conditions == {}
    node.now += 1
    (event,) = node.events = (replace(node.events[0], last_time=node.now, lines=900),)
    assert (
        node.take_in(replace(event, time=node.now, lines=1)).conditions["gpu_xid/95", SWITCH].severity
        is Severity.CRITICAL
    )


def test_a_condition_knows_the_job_whose_process_was_named_last() -> None:
    node = Listening().line("xid", "13", job="123").line("xid", "13")
    assert node.conditions["gpu_xid/13", SWITCH].job == "123"
    assert node.line("xid", "13", job="124").conditions["gpu_xid/13", SWITCH].job == "124"


def by_lines(*findings: Finding) -> dict[tuple[str, str], Condition]:
    """The conditions after one kernel line for each finding, a day apart."""
    conditions: dict[tuple[str, str], Condition] = {}
    for sequence, finding in enumerate(findings, 1):
        when = 90_000.0 * sequence
        event = KernelEvent("sxid", "1", finding.subject, time=when, last_time=when, sequence=sequence)
        finding = dataclasses.replace(finding, events=(sequence,))
        conditions = absorb.absorb_events(
            conditions, "gpu_xid", [finding], {sequence: event}, frozenset({sequence}), "b1", ()
        )
    return conditions


FATAL_LINE = Finding(Severity.CRITICAL, "sxid/1", "0000:c3:00.0", "fatal", clears=Clears.REBOOT)
HARMLESS_LINE = Finding(
    Severity.WARNING, "sxid/1", "0000:c3:00.0", "not fatal", clears=Clears.GPU_RESET, window_seconds=86400.0
)


def test_a_harmless_line_of_the_same_code_does_not_undo_a_fault_that_waits_for_a_reboot() -> None:
    conditions = by_lines(FATAL_LINE, HARMLESS_LINE)
    (fault,) = conditions.values()
    assert (fault.severity, fault.clears, fault.message, fault.count) == (Severity.CRITICAL, Clears.REBOOT, "fatal", 2)
    now = 400_000.0
    conditions = endings.after_quiet(conditions, 90_000.0, loaded=True, now=now)
    conditions = endings.after_repairs(conditions, [Repair(Clears.GPU_RESET, fault.subject, "reset", now)], now)
    assert [c.state for c in conditions.values()] == [ConditionState.OPEN]
    assert [c.state for c in endings.after_boot(conditions, "b2", now).values()] == [ConditionState.CLEARED]


def test_a_worse_line_of_the_same_code_raises_the_fault() -> None:
    (fault,) = by_lines(HARMLESS_LINE, FATAL_LINE).values()
    assert (fault.severity, fault.clears, fault.window_seconds) == (Severity.CRITICAL, Clears.REBOOT, 0.0)


def test_a_site_that_takes_a_check_back_takes_back_what_it_found() -> None:
    conditions = by_lines(FATAL_LINE)
    config = CheckConfig(enforce=False)
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): config}).values()
    assert fault.severity is Severity.WARNING
    config = CheckConfig(severity={FATAL_LINE.code: Severity.DEGRADED})
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): config}).values()
    assert fault.severity is Severity.DEGRADED
    assert absorb.reconfigured(conditions, {}) == conditions


BY_SITE = (
    CheckConfig(enforce=False),
    CheckConfig(severity={"sxid/1": Severity.INFO}),
    CheckConfig(severity={"sxid/1": Severity.CRITICAL}, enforce=False),
    CheckConfig(),
)


@pytest.mark.parametrize("heard_under", BY_SITE)
@pytest.mark.parametrize("then", BY_SITE)
def test_a_setting_that_is_taken_back_leaves_a_fault_as_it_was_found(
    heard_under: CheckConfig, then: CheckConfig
) -> None:
    conditions = by_lines(absorb.as_configured(FATAL_LINE, heard_under), absorb.as_configured(FATAL_LINE, then))
    for config in (then, heard_under, CheckConfig()):
        conditions = absorb.reconfigured(conditions, {("gpu_xid", ""): config})
        (fault,) = conditions.values()
        assert fault.severity is absorb.as_configured(FATAL_LINE, config).severity
    assert (fault.severity, fault.clears) == (Severity.CRITICAL, Clears.REBOOT)


def test_a_harmless_line_under_an_override_does_not_undo_how_bad_the_fault_was_found() -> None:
    quiet = CheckConfig(severity={"sxid/1": Severity.WARNING})
    conditions = by_lines(*(absorb.as_configured(line, quiet) for line in (FATAL_LINE, HARMLESS_LINE)))
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): CheckConfig()}).values()
    assert (fault.severity, fault.clears, fault.message) == (Severity.CRITICAL, Clears.REBOOT, "fatal")


def test_settings_that_are_read_again_do_not_undo_what_time_has_worsened() -> None:
    node, finding = Node(), replace(SLOW, worsens=Worsens(60.0, Severity.CRITICAL), expects="expected")
    lax = CheckConfig(enforce=False)
    for config in (CheckConfig(), lax):
        node.run(absorb.as_configured(finding, config))
    for config, severity in (
        (lax, Severity.WARNING),
        (CheckConfig(), Severity.CRITICAL),
        (CheckConfig(guessed=("expected",)), Severity.WARNING),
        (CheckConfig(severity={finding.code: Severity.DEGRADED}), Severity.DEGRADED),
    ):
        conditions = absorb.reconfigured(node.conditions, {(finding.code.partition("/")[0], ""): config})
        assert [c.severity for c in conditions.values()] == [severity]


def test_history_stays_history_whatever_the_site_makes_of_its_code() -> None:
    node = Node()
    node.event(FATAL_LINE, history=True)
    config = CheckConfig(severity={FATAL_LINE.code: Severity.CRITICAL})
    (old,) = absorb.reconfigured(node.conditions, {("sxid", ""): config}).values()
    assert (old.severity, old.history) == (Severity.INFO, True)


SLOW = Finding(Severity.DEGRADED, "disk/slow", "sda", "slow", Clears.WINDOW, window_seconds=DAY)
SILENT = Finding(Severity.WARNING, "filesystem/no_answer", "nas1", "does not answer", Clears.WINDOW, window_seconds=DAY)
ANSWERS = replace(SILENT, severity=Severity.INFO, message="the log says: it answers again", over=True)


def test_what_the_log_itself_takes_back_is_over_at_once_and_comes_back_with_the_next_line() -> None:
    node = Node()
    node.event(SILENT)
    node.event(ANSWERS)
    assert node.conditions == {}
    assert [(c.cleared_by, c.cleared_at) for c in node.cleared] == [("the log says: it answers again", node.now)]
    node.event(SILENT)
    assert [(c.state, c.count) for c in node.conditions.values()] == [(OPEN, 1)]


def test_a_log_that_says_that_something_is_over_which_nobody_knew_makes_no_condition() -> None:
    node = Node()
    node.event(ANSWERS)
    assert (node.conditions, node.cleared) == ({}, [])


def test_a_line_of_an_end_that_is_older_than_the_last_sight_of_the_fault_ends_nothing() -> None:
    node = Node()
    node.event(SILENT)
    late = KernelEvent("fs", "ok", time=node.now - 1, last_time=node.now - 1, sequence=99)
    node.hear(ANSWERS, late)
    assert [c.state for c in node.conditions.values()] == [OPEN]


def test_what_ended_while_the_daemon_was_down_is_over_when_it_reads_on() -> None:
    node = Node()
    silent = node.event(SILENT)
    answered = KernelEvent("fs", "ok", time=node.now + 5, last_time=node.now + 5, sequence=2, boot_id=node.boot)
    node.hear(ANSWERS, silent, answered, touched=[2])
    assert node.conditions == {}


def test_what_waits_for_a_reboot_is_not_taken_back_by_a_line_of_the_log() -> None:
    node = Node()
    node.event(GONE)
    node.event(replace(GONE, over=True))
    assert [c.state for c in node.conditions.values()] == [OPEN]


def test_a_job_that_becomes_known_later_is_no_new_fault_and_opens_nothing_again() -> None:
    node = Listening().line("xid", "13").line("xid", "31")
    before = node.conditions
    found = [Finding(Severity.WARNING, f"gpu_xid/{code}", SWITCH, "", events=(1, 2)) for code in (13, 31, 79)]
    after = absorb.with_jobs(before, found[::2], {2: "9", 1: "8"})
    assert after == {**before, ("gpu_xid/13", SWITCH): replace(before["gpu_xid/13", SWITCH], job="9")}
