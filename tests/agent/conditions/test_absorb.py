"""Tests of how findings and kernel events become conditions: confirmation, latching, worsening, relapse."""

from __future__ import annotations

import pytest
from life import (
    ACKNOWLEDGED,
    DAY,
    FEWER,
    GONE,
    HANG,
    LINK,
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

from healthd.agent.conditions import absorb, endings, intake
from healthd.agent.conditions.condition import ended
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.checks import gpu_xid, sxid
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Ending,
    Finding,
    FoundSeverity,
    Health,
    KernelEvent,
    Outcome,
    Repair,
    Severity,
    Slowness,
    Worsens,
)

# --- opening


def test_finding_without_confirm_time_opens_at_once() -> None:
    node = Node().run(GONE)
    assert node.only.state is OPEN
    assert node.only.opened_at == node.only.critical_at == node.now
    assert node.judge().causes == (node.only,)


def test_finding_opens_after_confirm_time() -> None:
    node = Node().run(LINK)
    assert node.only.state is PENDING
    assert node.judge().causes == ()
    assert node.run(LINK, after=59).only.state is PENDING
    assert node.run(LINK, after=1).only.state is OPEN


def test_link_that_recovers_within_confirm_time_is_forgotten() -> None:
    node = Node().run(LINK).run(after=30)
    assert (node.conditions, node.cleared) == ({}, [])
    assert node.run(LINK, after=40).only.state is PENDING, "the confirm time starts again"


@pytest.mark.parametrize(
    ("kernel", "state"),
    [({}, OPEN), ({"observed": True}, PENDING), ({"history": True}, PENDING)],
    ids=["proven", "observed", "history"],
)
def test_confirm_time_is_waived_only_by_proven_live_event(kernel: dict[str, bool], state: ConditionState) -> None:
    dead = replace(LINK, code="gpu_count/dead", subject=XID.subject, confirmed_by=(XID.code,))
    node = Node()
    node.event(XID, **kernel)
    node.run(dead, after=10.0)
    assert node.conditions[dead.key].state is state


def test_failed_run_does_not_end_pending_condition() -> None:
    node = Node().run(LINK).run(outcome=Outcome.FAILED, after=30)
    assert node.only.state is PENDING
    assert node.run(LINK, after=40).only.state is OPEN


def test_finding_counts_if_run_fails() -> None:
    assert Node().run(GONE, outcome=Outcome.FAILED).only.state is OPEN


def test_worst_finding_about_part_counts() -> None:
    node = Node().run(GONE, replace(GONE, severity=Severity.WARNING))
    assert node.only.severity is Severity.CRITICAL


def test_finding_worsens_with_time() -> None:
    node = Node().run(HANG, outcome=Outcome.TIMED_OUT)
    assert node.only.severity is Severity.WARNING
    node.run(HANG, outcome=Outcome.STUCK, after=240)
    assert node.only.severity is Severity.DEGRADED
    assert node.judge().causes == (node.only,)


def test_clean_run_restarts_time_until_worse() -> None:
    node = Node().run(HANG).run(after=200).run(HANG, after=200)
    assert node.only.severity is Severity.WARNING
    assert node.run(HANG, after=240).only.severity is Severity.DEGRADED


def test_critical_at_is_time_when_fault_became_critical() -> None:
    node = Node().run(replace(GONE, severity=Severity.DEGRADED))
    opened = node.now
    node.run(GONE)
    assert (node.only.opened_at, node.only.critical_at) == (opened, node.now)


def test_worsened_at_is_zero_for_fault_that_drains_from_the_start() -> None:
    node = Node().run(LINK).run(LINK, after=60)
    assert (node.only.state, node.only.worsened_at) == (OPEN, 0.0)
    assert node.run(replace(LINK, severity=Severity.CRITICAL)).only.worsened_at == 0.0


def test_worsened_at_is_time_when_warning_became_fault_that_drains() -> None:
    node = Node().run(HANG).run(HANG, after=240)
    began = node.now
    assert node.only.worsened_at == began
    assert node.run(HANG, after=60).only.worsened_at == began


def test_worsened_at_does_not_depend_on_settings_of_the_site() -> None:
    capped = absorb.as_configured(GONE, CheckConfig(enforce=False))
    node = Node().run(capped).run(GONE)
    assert (node.only.severity, node.only.worsened_at) == (Severity.CRITICAL, 0.0)


def test_worsened_at_is_time_of_new_evidence_after_ack() -> None:
    node = Node().run(ROWS).operator_resumes().run(ROWS).run(replace(ROWS, evidence="failure flag 2"))
    assert node.only.worsened_at == node.now


def test_worsened_at_is_time_of_first_event_after_history() -> None:
    node = Node()
    node.event(XID, history=True)
    assert node.only.worsened_at == 0.0
    node.now += 100
    node.event(XID)
    assert node.only.worsened_at == node.now


# --- settings of the site


def test_as_configured_caps_severity_at_warning_without_enforce() -> None:
    mild = absorb.as_configured(replace(GONE, worsens=Worsens(1.0, Severity.CRITICAL)), CheckConfig(enforce=False))
    assert mild.severity is Severity.WARNING
    assert mild.worsens == Worsens(1.0, Severity.WARNING)


def test_as_configured_severity_from_site_is_final() -> None:
    config = CheckConfig(severity={"gpu_access/hang": Severity.INFO, "gpu_count/missing": Severity.CRITICAL})
    found = FoundSeverity(HANG.severity, HANG.worsens)
    assert absorb.as_configured(HANG, config) == replace(
        HANG, severity=Severity.INFO, worsens=None, found_severity=found
    )
    capped = absorb.as_configured(GONE, replace(config, enforce=False))
    assert capped.severity is Severity.WARNING, "enforce = false wins"


def test_as_configured_without_settings_keeps_finding() -> None:
    assert absorb.as_configured(LINK, CheckConfig()) == LINK


# --- a sticky flag


def test_sticky_flag_stays_acknowledged_until_changed() -> None:
    node = Node().run(ROWS).repaired(ROWS.code)
    assert node.only.state is ACKNOWLEDGED
    for _ in range(3):
        assert node.run(ROWS).only.state is ACKNOWLEDGED
    assert node.judge().causes == ()
    worse = replace(ROWS, evidence="failure flag 2")
    assert node.run(worse).only.state is OPEN
    assert node.judge().causes == (node.only,)


def test_changed_evidence_after_ack_is_new_fault() -> None:
    node = Node().run(ROWS).operator_resumes().run(ROWS).run(replace(ROWS, evidence="failure flag 2"))
    assert node.only.critical_at == node.now == node.judge().fault_time


def test_resumed_fault_that_still_fails_keeps_fault_time() -> None:
    """A job that started after the operator resumed the node is not requeued for the old fault."""
    node = Node().run(GONE)
    fault_seen_at = node.now
    node.operator_resumes().run(GONE)
    assert node.judge().causes == (node.only,)
    assert node.judge().fault_time == fault_seen_at


def test_acknowledged_fault_clears_by_pass() -> None:
    assert Node().run(ROWS).repaired(ROWS.code).run().run().cleared_by == ["pass"]


# --- relapse


def test_reboot_fault_that_returns_within_week_requires_operator() -> None:
    node = Node().run(GONE).reboot().run(GONE, after=6 * DAY)
    assert node.only.clears is Clears.OPERATOR
    assert node.reboot().only.state is OPEN


def test_reboot_fault_that_returns_after_week_is_no_relapse() -> None:
    assert Node().run(GONE).reboot().run(GONE, after=8 * DAY).only.clears is Clears.REBOOT


def test_relapse_requires_same_fault_on_same_part() -> None:
    other = replace(GONE, subject="0000:2a:00.0")
    assert Node().run(GONE).reboot().run(other).only.clears is Clears.REBOOT


def test_repaired_fault_that_returns_within_week_requires_operator() -> None:
    assert Node().run(GONE).repaired(GONE.code).run(GONE).only.clears is Clears.OPERATOR
    assert Node().run(GONE).repaired(GONE.code).run(GONE, after=8 * DAY).only.clears is Clears.REBOOT


def test_relapse_seconds_makes_returning_fault_require_operator() -> None:
    slow = replace(RATE, relapse_seconds=DAY)
    node = Node().run(slow).run().quiet(3600.0)
    assert node.conditions == {}
    node.run(slow, after=0.9 * DAY).run().quiet(30 * DAY)
    assert (node.only.clears, node.only.state) == (Clears.OPERATOR, OPEN)
    assert node.repaired(slow.code).conditions == {}
    again = Node().run(slow).run().quiet(3600.0).run(slow, after=1.1 * DAY).run()
    assert again.only.clears is Clears.WINDOW


ENDING_TEXTS = ("", "reboot", "reboot: it was off", "repaired by root", "the log says: repaired by itself", "pass")


def relapsed(ending: Ending, finding: Finding, text: str) -> Condition:
    """Return the condition of a finding that returns one minute after its condition had this ending."""
    node = Node().run(finding)
    node.take({key: ended(c, ending, node.now, text) for key, c in node.conditions.items()})
    return node.run(finding, after=60.0).only


@pytest.mark.parametrize("text", ENDING_TEXTS)
@pytest.mark.parametrize(
    ("ending", "relapse"),
    [
        (Ending.PASS, False),
        (Ending.WINDOW, False),
        (Ending.RESET, False),
        (Ending.REBOOT, True),
        (Ending.REPAIRED, True),
        (Ending.RECOVERED, False),
        (Ending.RENAMED, False),
        (Ending.UNCHECKED, False),
    ],
)
def test_relapse_depends_on_ending_and_not_on_text(ending: Ending, relapse: bool, text: str) -> None:
    assert relapsed(ending, GONE, text).clears is (Clears.OPERATOR if relapse else Clears.REBOOT)
    assert relapsed(ending, RESET, text).clears is Clears.GPU_RESET, "a fault that requires a reset has no relapse"


@pytest.mark.parametrize("ending", Ending)
def test_relapse_seconds_applies_to_every_ending(ending: Ending) -> None:
    assert relapsed(ending, replace(RATE, relapse_seconds=DAY), "").clears is Clears.OPERATOR


def test_reset_fault_that_returns_after_reboot_is_no_relapse() -> None:
    assert Node().run(RESET).reboot().run(RESET).only.clears is Clears.GPU_RESET


def test_xid_that_returns_after_reboot_requires_operator() -> None:
    node = Node()
    node.event(XID)
    node.reboot().event(XID)
    assert node.only.clears is Clears.OPERATOR
    node.event(XID)
    assert node.only.clears is Clears.OPERATOR


# --- the kernel log


def test_event_opens_condition_at_own_time() -> None:
    node = Node()
    event = node.event(XID)
    assert (node.only.state, node.only.count, node.only.last_event) == (OPEN, 1, event.time)
    assert node.judge().fault_time == event.time


SHARED_LINK = replace(LINK, shared_cause=True)


def test_shared_cause_ends_after_confirm_time_of_own_reports() -> None:
    node = Node().run(SHARED_LINK).run(SHARED_LINK)
    assert node.run(LINK, after=300.0).only.shared_cause
    assert node.run(LINK, after=59.0).only.shared_cause
    assert not node.run(LINK, after=1.0).only.shared_cause
    assert node.run(SHARED_LINK, after=1.0).only.shared_cause


@pytest.mark.parametrize("between", [(SHARED_LINK,), ()])
def test_shared_report_or_clean_run_restarts_own_reports(between: tuple[Finding, ...]) -> None:
    node = Node().run(SHARED_LINK).run(SHARED_LINK).run(LINK).run(*between, check="ib_link")
    assert node.run(LINK).only.shared_cause
    assert not node.run(LINK).only.shared_cause


def test_shared_cause_of_pending_condition_remains_when_it_opens() -> None:
    node = Node().run(SHARED_LINK).run(LINK)
    assert (node.only.state, node.only.shared_cause) == (OPEN, True)


def test_own_fault_is_own_when_it_opens() -> None:
    node = Node().run(LINK).run(LINK)
    assert (node.only.state, node.only.shared_cause) == (OPEN, False)


def test_slowness_and_jobs_come_from_last_run() -> None:
    slow = Finding(Severity.WARNING, "failslow/job", "", "slow", slowness=Slowness(0.2, T0, ("4711",)))
    node = Node().run(slow)
    (first,) = node.conditions.values()
    assert (first.slowness, first.job) == (slow.slowness, "4711")
    node.run(replace(slow, slowness=Slowness(0.4, T0, ("4711", "4712"))))
    (second,) = node.conditions.values()
    assert (second.slowness, second.job) == (Slowness(0.4, T0, ("4711", "4712")), "4711,4712")


def test_finding_without_new_event_changes_nothing() -> None:
    node = Node()
    event = node.event(XID)
    before = node.conditions
    node.absorb_events(XID, event, touched=[])
    assert node.conditions == before
    node.repaired(XID.code).absorb_events(XID, event, touched=[])
    assert node.conditions == {}


def test_event_counts_once() -> None:
    node = Node()
    first = node.event(XID)
    second = replace(first, sequence=2, time=node.now + 5, last_time=node.now + 5)
    node.absorb_events(XID, first, second, touched=[2])
    node.absorb_events(XID, first, second, touched=[2])
    assert node.only.count == 2


def test_history_is_only_information() -> None:
    node = Node()
    node.event(XID, history=True)
    assert (node.only.severity, node.only.history) == (Severity.INFO, True)
    assert node.judge().health is Health.HEALTHY
    assert node.judge().causes == ()


def test_live_event_turns_history_into_fault() -> None:
    node = Node()
    node.event(XID, history=True)
    node.event(XID)
    assert (node.only.severity, node.only.history) == (Severity.CRITICAL, False)
    assert node.judge().fault_time == node.now


def test_late_history_does_not_soften_live_fault() -> None:
    node = Node()
    node.event(XID)
    node.event(XID, history=True)
    assert (node.only.severity, node.only.history) == (Severity.CRITICAL, False)


def test_clean_runs_do_not_clear_event_condition() -> None:
    node = Node()
    node.event(replace(XID, clears=Clears.PASS))
    assert node.run(check="gpu_xid").run(check="gpu_xid").only.state is OPEN


def test_milder_run_does_not_undo_latched_event() -> None:
    node = Node()
    node.event(XID)
    milder = replace(XID, severity=Severity.WARNING, clears=Clears.PASS, window_seconds=60.0)
    node.run(milder).run(check="gpu_xid").quiet(3600.0).run(check="gpu_xid")
    assert (node.only.severity, node.only.clears, node.only.state) == (Severity.CRITICAL, Clears.REBOOT, OPEN)
    assert node.reboot().conditions == {}


def test_event_latches_condition_from_earlier_run() -> None:
    node = Node().run(replace(XID, severity=Severity.WARNING, clears=Clears.PASS))
    node.event(XID)
    node.run(check="gpu_xid").run(check="gpu_xid")
    assert (node.only.severity, node.only.clears, node.only.state) == (Severity.CRITICAL, Clears.REBOOT, OPEN)
    assert node.reboot().conditions == {}


def test_new_event_restarts_clean_run_count() -> None:
    node = Node().run(FEWER).run()
    node.event(FEWER)
    assert node.run().only.state is OPEN
    assert node.run().conditions == {}


# --- kernel events that still count


SWITCH = "0000:85:00.0"
SXID = ("sxid/24007", SWITCH)


LISTENERS = [(Check(name, module), module.Config()) for name, module in (("gpu_xid", gpu_xid), ("sxid", sxid))]


class KernelLogNode(Node):
    """A node whose kernel lines are evaluated by gpu_xid or sxid."""

    events: tuple[KernelEvent, ...] = ()

    def add_line(
        self, kind: str, code: str, after: float = 3600.0, history: bool = False, **fields: str
    ) -> KernelLogNode:
        self.now += after
        line_fields = tuple(fields.items())
        return self.take_in(
            KernelEvent(kind, code, SWITCH, self.now, fields=line_fields, boot_id=self.boot, history=history)
        )

    def take_in(self, event: KernelEvent) -> KernelLogNode:
        ledger = Ledger(
            boot_id=self.boot,
            conditions=tuple(self.conditions.values()),
            cleared=tuple(self.cleared),
            events=self.events,
            next_sequence=len(self.events) + 1,
        )
        taken = intake.take_kernel_events(ledger, [replace(event, last_time=self.now)], LISTENERS, self.now)
        assert not taken.failures
        self.conditions, self.cleared = taken.ledger.by_key(), list(taken.ledger.cleared)
        self.events = taken.ledger.events
        return self

    def repaired(self, key: tuple[str, str]) -> KernelLogNode:
        self.now += 60
        self.take(endings.repaired(self.conditions, *key, "ann", self.now))
        return self


def test_harmless_line_after_repaired_fatal_line_is_harmless() -> None:
    node = KernelLogNode().add_line("sxid", "24007", fatal="true")
    assert node.conditions[SXID].severity is Severity.CRITICAL
    node.repaired(SXID).add_line("sxid", "24007", fatal="false")
    assert (node.conditions[SXID].severity, node.conditions[SXID].count) == (Severity.WARNING, 1)
    assert node.judge().causes == ()
    node.add_line("sxid", "24007", fatal="true")
    assert node.conditions[SXID].severity is Severity.CRITICAL


def test_harmless_line_does_not_hide_fatal_line() -> None:
    node = KernelLogNode().add_line("sxid", "24007", fatal="true").add_line("sxid", "24007", fatal="false")
    assert node.conditions[SXID].severity is Severity.CRITICAL


def test_harmless_line_after_resume_does_not_drain() -> None:
    node = KernelLogNode().add_line("sxid", "24007", fatal="true")
    node.operator_resumes()
    node.add_line("sxid", "24007", fatal="false")
    assert node.conditions[SXID].severity is Severity.WARNING
    assert node.judge().causes == ()


def test_fatal_history_makes_no_live_line_fatal() -> None:
    node = KernelLogNode().add_line("sxid", "24007", history=True, fatal="true")
    assert node.conditions[SXID].severity is Severity.INFO
    node.add_line("sxid", "24007", fatal="false")
    assert (node.conditions[SXID].severity, node.conditions[SXID].history) == (Severity.WARNING, False)


@pytest.mark.parametrize("history", [True, False])
def test_nvlink_error_after_history_or_repair_is_no_repetition(history: bool) -> None:
    node = KernelLogNode().add_line("xid", "74", history=history)
    if not history:
        node.repaired(("gpu_xid/74", SWITCH))
    node.add_line("xid", "74")
    assert node.conditions["gpu_xid/74", SWITCH].severity is Severity.WARNING
    assert node.add_line("xid", "74").conditions["gpu_xid/74", SWITCH].severity is Severity.CRITICAL


def test_storm_that_continues_after_repair_counts_again() -> None:
    node = KernelLogNode().add_line("xid", "95").repaired(("gpu_xid/95", SWITCH))
    assert node.conditions == {}
    node.now += 1
    (event,) = node.events = (replace(node.events[0], last_time=node.now, lines=900),)
    assert (
        node.take_in(replace(event, time=node.now, lines=1)).conditions["gpu_xid/95", SWITCH].severity
        is Severity.CRITICAL
    )


def test_condition_keeps_last_named_job() -> None:
    node = KernelLogNode().add_line("xid", "13", job="123").add_line("xid", "13")
    assert node.conditions["gpu_xid/13", SWITCH].job == "123"
    assert node.add_line("xid", "13", job="124").conditions["gpu_xid/13", SWITCH].job == "124"


def conditions_after(*findings: Finding) -> dict[tuple[str, str], Condition]:
    """Return the conditions after one kernel line for each finding, a day apart."""
    conditions: dict[tuple[str, str], Condition] = {}
    for sequence, finding in enumerate(findings, 1):
        event_time = 90_000.0 * sequence
        event = KernelEvent("sxid", "1", finding.subject, time=event_time, last_time=event_time, sequence=sequence)
        finding = replace(finding, events=(sequence,))
        conditions = absorb.absorb_events(
            conditions, "gpu_xid", [finding], {sequence: event}, frozenset({sequence}), "b1", ()
        )
    return conditions


FATAL_LINE = Finding(Severity.CRITICAL, "sxid/1", "0000:c3:00.0", "fatal", clears=Clears.REBOOT)
HARMLESS_LINE = Finding(
    Severity.WARNING, "sxid/1", "0000:c3:00.0", "not fatal", clears=Clears.GPU_RESET, window_seconds=86400.0
)


def test_harmless_line_does_not_undo_fault_that_requires_reboot() -> None:
    conditions = conditions_after(FATAL_LINE, HARMLESS_LINE)
    (fault,) = conditions.values()
    assert (fault.severity, fault.clears, fault.message, fault.count) == (Severity.CRITICAL, Clears.REBOOT, "fatal", 2)
    now = 400_000.0
    conditions = endings.after_quiet_time(conditions, 90_000.0, under_load=True, now=now)
    conditions = endings.after_repairs(conditions, [Repair(Clears.GPU_RESET, fault.subject, "reset", now)], now)
    assert [c.state for c in conditions.values()] == [ConditionState.OPEN]
    assert [c.state for c in endings.after_boot(conditions, "b2", now).values()] == [ConditionState.CLEARED]


def test_worse_line_raises_fault() -> None:
    (fault,) = conditions_after(HARMLESS_LINE, FATAL_LINE).values()
    assert (fault.severity, fault.clears, fault.window_seconds) == (Severity.CRITICAL, Clears.REBOOT, 0.0)


def test_reconfigured_applies_site_settings_to_open_fault() -> None:
    conditions = conditions_after(FATAL_LINE)
    config = CheckConfig(enforce=False)
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): config}).values()
    assert fault.severity is Severity.WARNING
    config = CheckConfig(severity={FATAL_LINE.code: Severity.DEGRADED})
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): config}).values()
    assert fault.severity is Severity.DEGRADED
    assert absorb.reconfigured(conditions, {}) == conditions


SITE_CONFIGS = (
    CheckConfig(enforce=False),
    CheckConfig(severity={"sxid/1": Severity.INFO}),
    CheckConfig(severity={"sxid/1": Severity.CRITICAL}, enforce=False),
    CheckConfig(),
)


@pytest.mark.parametrize("first_config", SITE_CONFIGS)
@pytest.mark.parametrize("second_config", SITE_CONFIGS)
def test_reconfigured_restores_found_severity(first_config: CheckConfig, second_config: CheckConfig) -> None:
    conditions = conditions_after(
        absorb.as_configured(FATAL_LINE, first_config), absorb.as_configured(FATAL_LINE, second_config)
    )
    for config in (second_config, first_config, CheckConfig()):
        conditions = absorb.reconfigured(conditions, {("gpu_xid", ""): config})
        (fault,) = conditions.values()
        assert fault.severity is absorb.as_configured(FATAL_LINE, config).severity
    assert (fault.severity, fault.clears) == (Severity.CRITICAL, Clears.REBOOT)


def test_harmless_line_under_override_keeps_found_severity() -> None:
    quiet = CheckConfig(severity={"sxid/1": Severity.WARNING})
    conditions = conditions_after(*(absorb.as_configured(line, quiet) for line in (FATAL_LINE, HARMLESS_LINE)))
    (fault,) = absorb.reconfigured(conditions, {("gpu_xid", ""): CheckConfig()}).values()
    assert (fault.severity, fault.clears, fault.message) == (Severity.CRITICAL, Clears.REBOOT, "fatal")


def test_reconfigured_keeps_severity_reached_with_time() -> None:
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


def test_reconfigured_keeps_history_as_info() -> None:
    node = Node()
    node.event(FATAL_LINE, history=True)
    config = CheckConfig(severity={FATAL_LINE.code: Severity.CRITICAL})
    (old,) = absorb.reconfigured(node.conditions, {("sxid", ""): config}).values()
    assert (old.severity, old.history) == (Severity.INFO, True)


SLOW = Finding(Severity.DEGRADED, "disk/slow", "sda", "slow", Clears.WINDOW, window_seconds=DAY)
SILENT = Finding(Severity.WARNING, "filesystem/no_answer", "nas1", "does not answer", Clears.WINDOW, window_seconds=DAY)
ANSWERS = replace(SILENT, severity=Severity.INFO, message="the log says: it answers again", recovered=True)


def test_recovery_line_clears_condition_at_once() -> None:
    node = Node()
    node.event(SILENT)
    node.event(ANSWERS)
    assert node.conditions == {}
    assert [(c.ending, c.cleared_by, c.cleared_at) for c in node.cleared] == [
        (Ending.RECOVERED, "the log says: it answers again", node.now)
    ]
    node.event(SILENT)
    assert [(c.state, c.count) for c in node.conditions.values()] == [(OPEN, 1)]


def test_recovery_line_without_condition_changes_nothing() -> None:
    node = Node()
    node.event(ANSWERS)
    assert (node.conditions, node.cleared) == ({}, [])


def test_recovery_line_older_than_fault_clears_nothing() -> None:
    node = Node()
    node.event(SILENT)
    late = KernelEvent("fs", "ok", time=node.now - 1, last_time=node.now - 1, sequence=99)
    node.absorb_events(ANSWERS, late)
    assert [c.state for c in node.conditions.values()] == [OPEN]


def test_recovery_during_daemon_downtime_clears_condition() -> None:
    node = Node()
    silent_event = node.event(SILENT)
    answer_event = KernelEvent("fs", "ok", time=node.now + 5, last_time=node.now + 5, sequence=2, boot_id=node.boot)
    node.absorb_events(ANSWERS, silent_event, answer_event, touched=[2])
    assert node.conditions == {}


def test_recovery_line_does_not_clear_reboot_fault() -> None:
    node = Node()
    node.event(GONE)
    node.event(replace(GONE, recovered=True))
    assert [c.state for c in node.conditions.values()] == [OPEN]


def test_with_jobs_changes_only_job() -> None:
    node = KernelLogNode().add_line("xid", "13").add_line("xid", "31")
    before = node.conditions
    found = [Finding(Severity.WARNING, f"gpu_xid/{code}", SWITCH, "", events=(1, 2)) for code in (13, 31, 79)]
    after = absorb.with_jobs(before, found[::2], {2: "9", 1: "8"})
    assert after == {**before, ("gpu_xid/13", SWITCH): replace(before["gpu_xid/13", SWITCH], job="9")}
