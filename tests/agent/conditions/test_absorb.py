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
    assert node.run(LINK, after=40).only.state is PENDING, "the confirm time starts again"


@pytest.mark.parametrize(
    ("kernel", "state"),
    [({}, OPEN), ({"observed": True}, PENDING), ({"history": True}, PENDING)],
    ids=["proven", "observed", "history"],
)
def test_confirm_time_is_waived_only_by_what_the_kernel_proves_now(
    kernel: dict[str, bool], state: ConditionState
) -> None:
    dead = replace(LINK, code="gpu_count/dead", subject=XID.subject, confirmed_by=(XID.code,))
    node = Node()
    node.event(XID, **kernel)
    node.run(dead, after=10.0)
    assert node.conditions[dead.key].state is state


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


# --- settings of the site


def test_enforce_false_caps_everything_at_warning() -> None:
    mild = absorb.as_configured(replace(GONE, worsens=Worsens(1.0, Severity.CRITICAL)), CheckConfig(enforce=False))
    assert mild.severity is Severity.WARNING
    assert mild.worsens == Worsens(1.0, Severity.WARNING)


def test_a_severity_that_the_site_sets_is_final() -> None:
    config = CheckConfig(severity={"gpu_access/hang": Severity.INFO, "gpu_count/missing": Severity.CRITICAL})
    found = FoundSeverity(HANG.severity, HANG.worsens)
    assert absorb.as_configured(HANG, config) == replace(
        HANG, severity=Severity.INFO, worsens=None, found_severity=found
    )
    capped = absorb.as_configured(GONE, replace(config, enforce=False))
    assert capped.severity is Severity.WARNING, "enforce = false wins"


def test_without_settings_a_finding_is_as_the_check_gave_it() -> None:
    assert absorb.as_configured(LINK, CheckConfig()) == LINK


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


ENDED_TEXTS = ("", "reboot", "reboot: it was off", "repaired by root", "the log says: repaired by itself", "pass")


def after(ending: Ending, finding: Finding, text: str) -> Condition:
    """Return the condition of a finding that returns one minute after its condition had this ending."""
    node = Node().run(finding)
    node.take({key: ended(c, ending, node.now, text) for key, c in node.conditions.items()})
    return node.run(finding, after=60.0).only


@pytest.mark.parametrize("text", ENDED_TEXTS)
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
def test_relapse_depends_on_ending_not_on_its_text(ending: Ending, relapse: bool, text: str) -> None:
    assert after(ending, GONE, text).clears is (Clears.OPERATOR if relapse else Clears.REBOOT)
    assert after(ending, RESET, text).clears is Clears.GPU_RESET, "a fault that requires a reset has no relapse"


@pytest.mark.parametrize("ending", Ending)
def test_relapse_with_relapse_seconds_follows_every_ending(ending: Ending) -> None:
    assert after(ending, replace(RATE, relapse_seconds=DAY), "").clears is Clears.OPERATOR


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


# --- kernel events that still count


SWITCH = "0000:85:00.0"
SXID = ("sxid/24007", SWITCH)


LISTENERS = [(Check(name, module), module.Config()) for name, module in (("gpu_xid", gpu_xid), ("sxid", sxid))]


class Listening(Node):
    """A node whose kernel lines are evaluated by gpu_xid or sxid."""

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
        heard = intake.take_kernel_events(known, [replace(event, last_time=self.now)], LISTENERS, self.now)
        assert not heard.failures
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
    """Return the conditions after one kernel line for each finding, a day apart."""
    conditions: dict[tuple[str, str], Condition] = {}
    for sequence, finding in enumerate(findings, 1):
        when = 90_000.0 * sequence
        event = KernelEvent("sxid", "1", finding.subject, time=when, last_time=when, sequence=sequence)
        finding = replace(finding, events=(sequence,))
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
    conditions = endings.after_quiet_time(conditions, 90_000.0, under_load=True, now=now)
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
ANSWERS = replace(SILENT, severity=Severity.INFO, message="the log says: it answers again", recovered=True)


def test_what_the_log_itself_takes_back_is_over_at_once_and_comes_back_with_the_next_line() -> None:
    node = Node()
    node.event(SILENT)
    node.event(ANSWERS)
    assert node.conditions == {}
    assert [(c.ending, c.cleared_by, c.cleared_at) for c in node.cleared] == [
        (Ending.RECOVERED, "the log says: it answers again", node.now)
    ]
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
    node.event(replace(GONE, recovered=True))
    assert [c.state for c in node.conditions.values()] == [OPEN]


def test_a_job_that_becomes_known_later_is_no_new_fault_and_opens_nothing_again() -> None:
    node = Listening().line("xid", "13").line("xid", "31")
    before = node.conditions
    found = [Finding(Severity.WARNING, f"gpu_xid/{code}", SWITCH, "", events=(1, 2)) for code in (13, 31, 79)]
    after = absorb.with_jobs(before, found[::2], {2: "9", 1: "8"})
    assert after == {**before, ("gpu_xid/13", SWITCH): replace(before["gpu_xid/13", SWITCH], job="9")}
