"""Tests of the bound on conditions: the worst keep their names, and no drain or latch is lost."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from fakes import NOW
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import bounds, endings, intake
from healthd.agent.conditions.bounds import MAX_CONDITIONS, OVERFLOW, limit_conditions, limit_findings, overflow_key
from healthd.agent.conditions.condition import fault_time, may_drain
from healthd.agent.conditions.ledger import Ledger, with_conditions
from healthd.agent.conditions.verdict import early_run_times, judge
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig
from healthd.agent.slurm.fleet_limit import is_own_hardware
from healthd.common.model import (
    Ack,
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Finding,
    KernelEvent,
    Outcome,
    RunName,
    Severity,
    Worsens,
)

BUILT_IN = registry.built_in_checks()
XIDS = [(BUILT_IN["gpu_xid"], BUILT_IN["gpu_xid"].config())]
EMPTY = Ledger(boot_id="b")
XID_OVERFLOW = overflow_key(RunName("gpu_xid"))


def xid(code: int, number: int, at: float = NOW) -> KernelEvent:
    line = f"NVRM: Xid (PCI:{number:04x}:01:00): {code}, pid=1, name=x, GPU has fallen off the bus."
    event = make_event(RawLine(at, line), "b")
    assert event is not None
    return event


def take_events(ledger: Ledger, *events: KernelEvent, at: float = NOW) -> Ledger:
    return intake.take_kernel_events(ledger, events, XIDS, at).ledger


def condition(number: int = 0, code: str = "gpu_xid/31", **changes: object) -> Condition:
    default = Condition(
        check=code.partition("/")[0],
        instance="",
        code=code,
        subject=f"part{number:05}",
        severity=Severity.WARNING,
        message=f"fault {number}",
        clears=Clears.WINDOW,
        state=ConditionState.OPEN,
        first_seen=NOW + number,
        last_seen=NOW + number,
        last_event=NOW + number,
        count=1,
        boot_id="b",
        window_seconds=60.0,
    )
    return replace(default, **changes)  # type: ignore[arg-type]


def by_key(conditions: Sequence[Condition]) -> dict[ConditionKey, Condition]:
    return {c.key: c for c in conditions}


def make_finding(
    number: int, severity: Severity = Severity.WARNING, code: str = "processes/x", **more: object
) -> Finding:
    finding = Finding(severity, code, f"part{number:05}", f"fault {number}")
    return replace(finding, **more)  # type: ignore[arg-type]


def take_run(
    ledger: Ledger, findings: Sequence[Finding], at: float = NOW, clear_after: int = 1, check: str = "processes"
) -> Ledger:
    result = CheckResult(check, "", Outcome.COMPLETED, at, 0.0, tuple(findings))
    return intake.take_result(ledger, result, CheckConfig(clear_after=clear_after), at).ledger


# --- the bound


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_intake_limits_conditions_per_code(excess: int) -> None:
    ledger = take_events(EMPTY, *(xid(31, number) for number in range(MAX_CONDITIONS + excess)))
    assert len(ledger.conditions) == MAX_CONDITIONS
    others = ledger.by_key().get(XID_OVERFLOW)
    assert (others.count if others else 0) == (excess + 1 if excess else 0)


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_intake_limits_conditions_per_check(excess: int) -> None:
    first = 1000  # unassigned Xid numbers
    ledger = take_events(EMPTY, *(xid(number, 7) for number in range(first, first + MAX_CONDITIONS + excess)))
    assert len(ledger.conditions) == MAX_CONDITIONS
    others = ledger.by_key().get(XID_OVERFLOW)
    assert (others.count if others else 0) == (excess + 1 if excess else 0)


def test_overflow_counts_parts_from_successive_bursts_once() -> None:
    ledger, burst = EMPTY, 200
    for start in range(0, 5 * burst, burst):
        ledger = take_events(ledger, *(xid(31, number) for number in range(start, start + burst)))
    assert ledger.by_key()[XID_OVERFLOW].count == 5 * burst - MAX_CONDITIONS + 1
    again = take_events(ledger, xid(31, 5 * burst - 1, NOW + 60), at=NOW + 60)
    assert again.by_key()[XID_OVERFLOW].count == 5 * burst - MAX_CONDITIONS + 2


def test_lost_gpu_keeps_name_in_any_burst() -> None:
    burst = [xid(31, number) for number in range(1280)]
    for position in (0, 640, 1280):
        ledger = take_events(EMPTY, *burst[:position], xid(79, 9999), *burst[position:])
        assert ledger.by_key()["gpu_xid/79", "270f:01:00.0"].severity is Severity.CRITICAL
        assert any(event.code == "79" for event in ledger.events), "its event is kept, too"
    many_codes_ledger = take_events(EMPTY, *(xid(number, 7) for number in range(1000, 2280)), xid(79, 9999))
    assert ("gpu_xid/79", "270f:01:00.0") in many_codes_ledger.by_key()
    later = take_events(take_events(EMPTY, *burst), xid(79, 9999, NOW + 9), at=NOW + 9)
    assert ("gpu_xid/79", "270f:01:00.0") in later.by_key()


def test_limit_conditions_keeps_draining_and_worst_by_name() -> None:
    mild = [condition(number) for number in range(1000)]
    special = [
        condition(5000, severity=Severity.DEGRADED),
        condition(5001, severity=Severity.CRITICAL, state=ConditionState.ACKNOWLEDGED),
        condition(5002, "other/x", severity=Severity.INFO),
    ]
    limited = limit_conditions(by_key([*mild, *special]))
    assert {c.key for c in special} <= limited.keys()
    assert len(limited) == MAX_CONDITIONS


def test_limit_conditions_names_later_worse_condition() -> None:
    full = limit_conditions(by_key([condition(number) for number in range(200)]))
    worse = condition(500, severity=Severity.CRITICAL)
    limited = limit_conditions({**full, worse.key: worse})
    assert worse.key in limited
    assert len(limited) == MAX_CONDITIONS
    assert limited[XID_OVERFLOW].count == 201 - MAX_CONDITIONS + 1
    assert limited[XID_OVERFLOW].severity is Severity.WARNING


def test_limit_conditions_counts_instances_separately() -> None:
    """Only the run of a mount itself can report that the mount is back."""
    mounts = [condition(number, "mount/missing", instance=f"/m{number}") for number in range(500)]
    assert limit_conditions(by_key(mounts)) == by_key(mounts), "folding one condition would only change its name"
    site_conditions = [condition(number, "exec/x", instance="site") for number in range(500)]
    assert ConditionKey("exec/others", "others of site") in limit_conditions(by_key(site_conditions))


@pytest.mark.parametrize("excess", [0, 1, 1000])
def test_limit_conditions_bounds_all_checks_together(excess: int) -> None:
    mild = [condition(n, f"check{n % 50:02}/x") for n in range(MAX_CONDITIONS + excess - 2)]
    worse = [condition(10_000 + n, "check07/y", severity=Severity.DEGRADED) for n in range(2)]
    limited = limit_conditions(by_key([*mild, *worse]))
    assert len(limited) == MAX_CONDITIONS
    assert {c.key for c in worse} <= limited.keys()
    others = [c for c in limited.values() if c.subject == OVERFLOW]
    assert sum(c.count for c in others) == (excess + len(others) if excess else 0)
    assert all(c.code == f"{c.check}/others" for c in others)


def test_limit_conditions_folds_mildest_first() -> None:
    """A storm of warnings of one check must not fold a draining fault of another check."""
    draining = [condition(n, "ib_link/down", severity=Severity.DEGRADED) for n in range(60)]
    storm = [condition(n, f"gpu_xid/{n}", last_event=NOW + 9) for n in range(1000, 2000)]
    others = [condition(n, f"check{n}/x", severity=Severity.INFO) for n in range(40)]
    limited = limit_conditions(by_key([*draining, *storm, *others]))
    assert {c.key for c in draining} <= limited.keys()
    assert {c.key for c in others} <= limited.keys(), "each is the only condition of its check"
    assert len(limited) == MAX_CONDITIONS
    assert limited[XID_OVERFLOW].count == 1000 - (MAX_CONDITIONS - 60 - 40 - 1)


def test_take_jobs_changes_no_count_and_no_quiet_time() -> None:
    """Each GPU has two exceptions of different jobs. Only the jobs show that a processor may be broken."""
    listeners = [(BUILT_IN[name], BUILT_IN[name].config()) for name in ("gpu_xid", "gpu_sm")]
    text = "NVRM: Xid (PCI:{:04x}:01:00): 13, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Out Of Range Address"
    lines = [RawLine(at, text.format(n)) for n in range(240) for at in (NOW - 3600, NOW)]
    ledger = intake.take_kernel_events(
        EMPTY, [event for line in lines if (event := make_event(line, "b"))], listeners, NOW
    ).ledger
    assert len(ledger.conditions) == MAX_CONDITIONS
    quiet_conditions = endings.after_quiet_time(ledger.by_key(), 30.0, True, NOW + 30)
    before = with_conditions(ledger, quiet_conditions)
    with_jobs = intake.take_jobs(before, {e.sequence: str(e.sequence) for e in ledger.events}, listeners)
    xid_conditions = [c for c in with_jobs.conditions if c.check == "gpu_xid"]
    assert {c.quiet_seconds for c in xid_conditions} == {30.0}, "the quiet time continues"
    assert any(c.job for c in xid_conditions)
    sm_conditions = [c for c in with_jobs.conditions if c.check == "gpu_sm"]
    assert [sum(c.count for c in group) for group in (xid_conditions, sm_conditions)] == [480, 480]
    assert len(with_jobs.conditions) == MAX_CONDITIONS
    assert intake.take_jobs(with_jobs, {}, listeners) == with_jobs


def test_storm_does_not_fold_equally_severe_faults_from_other_check() -> None:
    storm = [condition(n) for n in range(1000)]
    disk_conditions = [condition(5000 + n, "disk/x") for n in range(5)]
    limited = limit_conditions(by_key([*storm, *disk_conditions]))
    assert {c.key for c in disk_conditions} <= limited.keys()
    assert len(limited) == MAX_CONDITIONS


# --- the overflow condition

SEVERITIES, STATES = st.sampled_from(Severity), st.sampled_from([ConditionState.OPEN, ConditionState.ACKNOWLEDGED])
CONDITION_LISTS = st.lists(
    st.builds(
        condition,
        st.integers(0, 99_999),
        st.sampled_from(["gpu_xid/31", "gpu_xid/79"]),
        severity=SEVERITIES,
        state=STATES,
        clears=st.sampled_from(Clears),
        window_seconds=st.sampled_from([0.0, 60.0]),
        acknowledged_at=st.sampled_from([0.0, NOW]),
        job=st.sampled_from(["", "1"]),
        shared_cause=st.booleans(),
        observed=st.booleans(),
    ),
    min_size=1,
    max_size=300,
    unique_by=lambda c: c.key,
)


@given(CONDITION_LISTS)
def test_limit_conditions_loses_no_drain_latch_or_count(conditions: list[Condition]) -> None:
    before, after = by_key(conditions), limit_conditions(by_key(conditions))
    assert len(after) <= MAX_CONDITIONS
    assert sum(c.count for c in after.values()) == len(before)
    assert any(may_drain(c, 0.0) for c in after.values()) == any(may_drain(c, 0.0) for c in before.values())
    worst = max((c.severity for c in before.values() if may_drain(c, 0.0)), default=None)
    assert max((c.severity for c in after.values() if may_drain(c, 0.0)), default=None) == worst
    last_before = max((bounds._ENDING_ORDER.index(c.clears) for c in before.values() if not c.observed), default=None)
    assert (
        max((bounds._ENDING_ORDER.index(c.clears) for c in after.values() if not c.observed), default=None)
        == last_before
    )
    assert limit_conditions(after) == after, "a second call changes nothing"


# Conditions of many checks, in groups of equal conditions: (check, size, severity, state, clears, job).
GROUPS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(1, 64),
        SEVERITIES,
        STATES,
        st.sampled_from(Clears),
        st.sampled_from(["", "1"]),
    ),
    min_size=1,
    max_size=20,
)


def group_conditions(groups: Sequence[tuple[int, int, Severity, ConditionState, Clears, str]]) -> list[Condition]:
    return [
        condition(
            1000 * number + n,
            f"check{check}/{number}",
            severity=severity,
            state=state,
            clears=clears,
            window_seconds=60.0 if clears is Clears.WINDOW else 0.0,
            job=job,
        )
        for number, (check, group_size, severity, state, clears, job) in enumerate(groups)
        for n in range(group_size)
    ]


@given(GROUPS, st.randoms(use_true_random=False))
def test_limit_conditions_keeps_bound_and_verdict(
    groups: list[tuple[int, int, Severity, ConditionState, Clears, str]], random: Random
) -> None:
    conditions = group_conditions(groups)
    before, after = by_key(conditions), limit_conditions(by_key(conditions))
    assert len(after) <= MAX_CONDITIONS
    assert len(after) == len(before) or len(before) > MAX_CONDITIONS
    assert sum(c.count for c in after.values()) == len(before)
    assert limit_conditions(after) == after, "a second call changes nothing"
    random.shuffle(conditions)
    assert limit_conditions(by_key(conditions)) == after, "the order does not matter"
    with_all, with_fewer = (judge(c, {}, [], 0.0) for c in (before, after))
    assert (with_fewer.health, with_fewer.may_resume) == (with_all.health, with_all.may_resume)
    worst = [max((c.severity for c in verdict.causes), default=None) for verdict in (with_all, with_fewer)]
    assert worst[0] == worst[1]


@given(GROUPS)
def test_folded_conditions_are_no_worse_than_named_ones(
    groups: list[tuple[int, int, Severity, ConditionState, Clears, str]],
) -> None:
    before = by_key(group_conditions(groups))
    after = limit_conditions(before)
    by_run: dict[RunName, list[Condition]] = {}
    for c in before.values():
        by_run.setdefault(c.run, []).append(c)
    worst_lost = max(
        ((may_drain(c, 0.0), c.severity) for c in before.values() if c.key not in after), default=(False, -1)
    )
    for run_conditions in by_run.values():
        named = sorted((may_drain(c, 0.0), c.severity) for c in run_conditions if c.key in after)
        assert all(severity_rank >= worst_lost for severity_rank in named[1:]), (
            "folding a single condition of a check saves nothing"
        )


def fill(others: Sequence[Condition]) -> dict[ConditionKey, Condition]:
    """Return conditions that drain in all places but one, followed by `others`."""
    named = [condition(n, severity=Severity.CRITICAL, clears=Clears.OPERATOR) for n in range(MAX_CONDITIONS - 1)]
    return limit_conditions(by_key([*named, *others]))


def get_overflow(conditions: dict[ConditionKey, Condition]) -> Condition:
    return conditions[XID_OVERFLOW]


def test_overflow_ends_with_last_condition() -> None:
    quick, late = condition(900), condition(901, clears=Clears.REBOOT, window_seconds=0.0)
    overflow = get_overflow(fill([quick, late]))
    assert (overflow.clears, overflow.window_seconds, overflow.count) == (Clears.REBOOT, 0.0, 2)
    longest_window = get_overflow(fill([quick, condition(901, window_seconds=600.0)]))
    assert (longest_window.clears, longest_window.window_seconds) == (Clears.WINDOW, 600.0)
    reset_with_window = get_overflow(fill([quick, condition(901, clears=Clears.GPU_RESET, window_seconds=600.0)]))
    assert (reset_with_window.clears, reset_with_window.window_seconds) == (Clears.GPU_RESET, 600.0)
    assert not any(
        c.subject == OVERFLOW for c in endings.after_boot(fill([late]), "c", NOW).values() if not c.cleared_at
    )


def test_overflow_can_be_repaired_resumed_and_acknowledged() -> None:
    filled = fill([condition(900, severity=Severity.DEGRADED), condition(901, severity=Severity.DEGRADED)])
    repaired = endings.repaired(filled, "gpu_xid/others", OVERFLOW, "root", NOW)
    assert get_overflow(repaired).state is ConditionState.CLEARED
    resumed = endings.acknowledge_resumed(filled, NOW, NOW)
    assert not may_drain(get_overflow(resumed), 0.0)
    acked: dict[ConditionKey, Condition] = filled
    for code in ("gpu_xid/31", "gpu_xid/others"):
        acked = endings.acknowledge(acked, code, None, Ack(NOW + 60, "why", "root", Severity.INFO, NOW))
    assert not may_drain(get_overflow(acked), 0.0)
    late = limit_conditions({**acked, (new := condition(950, severity=Severity.DEGRADED)).key: new})
    assert may_drain(late[new.key], 0.0), "this one is not acknowledged"
    assert not judge(late, {}, [], 0.0).may_resume


def test_harmless_line_after_repaired_overflow_is_harmless() -> None:
    burst = [xid(79, number) for number in range(200)]
    ledger = take_events(EMPTY, *burst)
    cleared = endings.repaired(ledger.by_key(), "gpu_xid/79", None, "root", NOW + 100)
    cleared = endings.repaired(cleared, "gpu_xid/others", None, "root", NOW + 100)
    ledger = with_conditions(ledger, cleared)
    assert not ledger.conditions
    events = [event for event in ledger.events if event.code == "79"]
    findings = intake.evaluate_events(events, XIDS, ledger.inventory, (*ledger.conditions, *ledger.cleared))
    assert findings == {}, "faults that were repaired with the overflow condition are over"


def test_repairing_every_overflow_code_settles_all_events() -> None:
    ledger = take_events(EMPTY, *(xid(number, 7) for number in range(1000, 1400)))
    cleared = ledger.by_key()
    for key in ledger.by_key():
        cleared = endings.repaired(cleared, key.code, None, "root", NOW + 100)
    ledger = with_conditions(ledger, cleared)
    settled = (*ledger.conditions, *ledger.cleared)
    assert (len(ledger.conditions), len(ledger.events)) == (0, 400)
    assert intake.evaluate_events(ledger.events, XIDS, ledger.inventory, settled) == {}


def test_forged_lines_change_only_overflow_count() -> None:
    proven = condition(900, severity=Severity.DEGRADED, acknowledged_at=NOW, state=ConditionState.ACKNOWLEDGED)
    forged = [condition(901 + n, severity=Severity.CRITICAL, clears=Clears.REBOOT, observed=True) for n in range(500)]
    overflow = get_overflow(fill([proven, *forged]))
    assert (overflow.state, overflow.severity, overflow.clears) == (
        ConditionState.ACKNOWLEDGED,
        Severity.DEGRADED,
        Clears.WINDOW,
    )
    assert (overflow.last_event, overflow.observed, overflow.count) == (proven.last_event, False, 501)
    assert get_overflow(fill(forged)).observed


def test_overflow_message_has_count_and_worst() -> None:
    overflow = get_overflow(fill([condition(900), condition(901, severity=Severity.DEGRADED)]))
    assert overflow.message == "seen 2 times, on unlisted parts; the worst: part00901: fault 901"
    further = limit_conditions({**fill([condition(900)]), **by_key([condition(902)])})
    assert get_overflow(further).message == "seen 2 times, on unlisted parts; the worst: part00900: fault 900"


def test_overflow_message_counts_repeats_and_not_parts() -> None:
    overflow = get_overflow(fill([condition(900, count=500), condition(901)]))
    assert overflow.message == "seen 501 times, on unlisted parts; the worst: part00900: fault 900"
    once = get_overflow(fill([condition(900, count=0), condition(901)]))
    assert once.message.startswith("seen once, on unlisted parts; the worst: ")


def test_overflow_is_own_hardware_if_acting_member_is() -> None:
    shared = condition(900, severity=Severity.DEGRADED, shared_cause=True)
    own = condition(901, severity=Severity.DEGRADED)
    assert is_own_hardware([get_overflow(fill([shared, own]))])
    assert not is_own_hardware([get_overflow(fill([shared, replace(own, shared_cause=True)]))])
    acknowledged = replace(own, state=ConditionState.ACKNOWLEDGED, acknowledged_at=NOW)
    for harmless in (acknowledged, replace(own, severity=Severity.WARNING)):
        assert not is_own_hardware([get_overflow(fill([shared, harmless]))]), "only the shared fault drains"
    critical = replace(shared, severity=Severity.CRITICAL)
    assert is_own_hardware([get_overflow(fill([critical, own]))]), "a milder draining fault is own hardware, too"


def test_overflow_fault_time_is_latest_critical_time() -> None:
    early = condition(900, severity=Severity.CRITICAL, last_event=0.0, critical_at=NOW + 100)
    late = condition(901, severity=Severity.CRITICAL, last_event=0.0, critical_at=NOW + 200)
    for pair in ([early, late], [late, early]):
        assert fault_time(get_overflow(fill(pair))) == NOW + 200


def test_line_after_first_overflow_ack_is_new() -> None:
    """One part was acknowledged at NOW + 10, another at NOW + 100. The overflow condition cannot distinguish them."""
    acknowledged = condition(900, state=ConditionState.ACKNOWLEDGED, acknowledged_at=NOW + 10, last_sequence=9)
    overflow = get_overflow(
        fill([acknowledged, condition(901, state=acknowledged.state, acknowledged_at=NOW + 100, last_sequence=8)])
    )

    def findings_at(event_time: float) -> list[ConditionKey]:
        event = replace(xid(31, 900, event_time), sequence=7)
        return [f.key for fs in intake.evaluate_events([event], XIDS, EMPTY.inventory, [overflow]).values() for f in fs]

    assert findings_at(NOW + 5) == []
    assert findings_at(NOW + 50) == [("gpu_xid/31", "0384:01:00.0")]


def test_resume_acknowledges_overflow_only_if_all_were_open() -> None:
    first = condition(900, severity=Severity.DEGRADED, opened_at=NOW + 100)
    conditions = fill([first, condition(901, severity=Severity.DEGRADED, opened_at=NOW + 200)])
    assert may_drain(get_overflow(endings.acknowledge_resumed(conditions, NOW + 150, NOW + 300)), 0.0)
    assert not may_drain(get_overflow(endings.acknowledge_resumed(conditions, NOW + 200, NOW + 300)), 0.0)


def test_overflow_quiet_time_is_shortest_quiet_time() -> None:
    quiet = condition(900, quiet_seconds=50.0, clean_runs=5, repaired=True, first_seen=NOW)
    conditions = fill([quiet, condition(901, quiet_seconds=20.0, clean_runs=1, first_seen=NOW + 901)])
    overflow = get_overflow(endings.after_quiet_time(conditions, 30.0, True, NOW + 2000))
    assert (overflow.state, overflow.quiet_seconds, overflow.clean_runs) == (ConditionState.OPEN, 50.0, 1)
    overflow = get_overflow(endings.after_quiet_time(conditions, 30.0, False, NOW + 2000))
    assert overflow.quiet_seconds == 20.0, "only time under load counts unless all were repaired"
    assert overflow.first_seen == NOW


@pytest.mark.parametrize("time_field", ["last_event", "last_level_seen"])
def test_overflow_acts_by_latest_observation(time_field: str) -> None:
    unseen = condition(900, severity=Severity.DEGRADED, last_event=0.0)
    later = replace(unseen, subject="later", **{time_field: NOW + 5000})  # type: ignore[arg-type]
    overflow = get_overflow(fill([replace(unseen, **{time_field: NOW}), later]))  # type: ignore[arg-type]
    assert may_drain(overflow, NOW + 4999)
    assert not may_drain(overflow, NOW + 5000)


def test_overflow_reopens_when_first_ack_expires() -> None:
    acks = [Ack(NOW + seconds, "why", "root", Severity.WARNING, NOW) for seconds in (60, 600)]
    conditions = fill([condition(900 + n, state=ConditionState.ACKNOWLEDGED, ack=ack) for n, ack in enumerate(acks)])
    assert get_overflow(endings.end_expired_acks(conditions, NOW + 59)).state is ConditionState.ACKNOWLEDGED
    assert get_overflow(endings.end_expired_acks(conditions, NOW + 60)).state is ConditionState.OPEN


def test_overflow_worsens_with_first_condition() -> None:
    worsens = Worsens(600.0, Severity.CRITICAL)
    first = condition(900, worsens=worsens, persists_since=NOW, last_level_seen=NOW + 300)
    second = replace(condition(901), worsens=worsens, persists_since=NOW + 200, last_level_seen=NOW + 300)
    for pair in ([first, second], [second, first]):
        overflow = get_overflow(fill(pair))
        assert early_run_times({overflow.key: overflow}) == {overflow.run: NOW + 600}


@pytest.mark.parametrize("expects", ["expected", "other"])
def test_guessed_finding_stays_warning_in_overflow(expects: str) -> None:
    guess = condition(900, expects="expected", found_severity=Severity.CRITICAL)
    overflow = get_overflow(fill([guess, condition(901, expects=expects, found_severity=Severity.WARNING)]))
    assert (overflow.severity, overflow.found_severity, overflow.expects) == (Severity.WARNING, Severity.WARNING, "")


# --- checks with many findings


def test_overflow_lasts_until_last_finding_is_gone() -> None:
    findings = [make_finding(number) for number in range(1000)]
    ledger = EMPTY
    for at in range(3):
        ledger = take_run(ledger, findings, NOW + at)
        assert len(ledger.conditions) == MAX_CONDITIONS
        assert not ledger.cleared
    others = ledger.by_key()["processes/others", OVERFLOW]
    assert (others.count, others.clean_runs) == (3, 0)
    assert others.message.startswith(f"{1000 - MAX_CONDITIONS + 1} more, on unlisted parts; the worst: part")
    named_only = take_run(ledger, findings[: MAX_CONDITIONS - 1], NOW + 4)
    assert ("processes/others", OVERFLOW) not in named_only.by_key()
    assert [c.subject for c in take_run(named_only, [], NOW + 5).conditions] == []


def test_draining_finding_is_named_among_thousands() -> None:
    findings = [make_finding(number) for number in range(1000)]
    ledger = take_run(
        take_run(EMPTY, findings), [*findings, make_finding(5000, Severity.CRITICAL)], NOW + 1, clear_after=2
    )
    assert ledger.by_key()["processes/x", "part05000"].severity is Severity.CRITICAL
    assert len(ledger.conditions) <= MAX_CONDITIONS


def test_overflow_is_confirmed_as_single_condition() -> None:
    findings = [make_finding(number, Severity.DEGRADED, confirm_seconds=60.0) for number in range(1000)]
    ledger = take_run(EMPTY, findings)
    assert {c.state for c in ledger.conditions} == {ConditionState.PENDING}
    ledger = take_run(ledger, findings, NOW + 61)
    assert {c.state for c in ledger.conditions} == {ConditionState.OPEN}


def test_overflow_stays_latched_after_milder_run() -> None:
    latched = [make_finding(n, Severity.CRITICAL, clears=Clears.REBOOT) for n in range(200)]
    ledger = take_run(take_run(EMPTY, latched), [*latched, make_finding(500)], NOW + 1)
    ledger = take_run(take_run(ledger, [make_finding(500)], NOW + 2), [], NOW + 3)
    others = ledger.by_key()["processes/others", OVERFLOW]
    assert (others.severity, others.clears, others.state) == (Severity.CRITICAL, Clears.REBOOT, ConditionState.OPEN)
    mild_first = take_run(
        take_run(EMPTY, [make_finding(n) for n in range(200)]),
        [*(make_finding(n) for n in range(200)), *latched],
        NOW + 1,
    )
    assert mild_first.by_key()["processes/others", OVERFLOW].clears is Clears.REBOOT


def test_changed_evidence_reopens_acknowledged_overflow() -> None:
    findings = [make_finding(number, Severity.DEGRADED, evidence="1") for number in range(200)]
    ledger = take_run(EMPTY, findings)
    resumed = endings.acknowledge_resumed(ledger.by_key(), NOW, NOW + 1)
    ledger = take_run(with_conditions(ledger, resumed), findings, NOW + 2)
    assert not any(may_drain(c, 0.0) for c in ledger.conditions)
    ledger = take_run(ledger, [*findings[:-1], replace(findings[-1], evidence="2")], NOW + 3)
    assert [c.subject for c in ledger.conditions if may_drain(c, 0.0)] == [OVERFLOW]


def test_repeated_round_with_all_checks_changes_only_counts() -> None:
    """No condition opens again in each round, and none that is still found ends."""
    checks = [f"check{number:02}" for number in range(30)]

    def run_round(ledger: Ledger, at: float) -> Ledger:
        for number, check in enumerate(checks):
            findings = [
                make_finding(n, (Severity.INFO, Severity.WARNING)[n % 2], f"{check}/x") for n in range(5 * number + 1)
            ]
            ledger = take_run(ledger, findings, at + number, clear_after=2, check=check)
            assert len(ledger.conditions) <= MAX_CONDITIONS
        return ledger

    first = run_round(run_round(EMPTY, NOW), NOW + 300)
    for number in range(2, 6):
        ledger = run_round(first, NOW + 300 * number)
        before, after = (
            [(c.key, c.first_seen, c.state, c.count + increment) for c in ledger_seen.conditions]
            for ledger_seen, increment in ((first, 1), (ledger, 0))
        )
        assert after == before, "each count rose by one"
        assert ledger.cleared == first.cleared
        first = ledger


def test_folded_condition_regains_name_when_there_is_room() -> None:
    storm = [make_finding(n, Severity.DEGRADED, "storm/x") for n in range(MAX_CONDITIONS // 4)]
    mild = [make_finding(n, code=f"mild/{n % 4}") for n in range(200)]

    def run_round(ledger: Ledger, at: float, storm_checks: int) -> Ledger:
        for number in range(4):
            findings = [replace(f, code=f"storm{number}/x") for f in storm] if number < storm_checks else []
            ledger = take_run(ledger, findings, at, check=f"storm{number}")
        return take_run(ledger, mild, at + 1, check="mild")

    ledger = run_round(EMPTY, NOW, 0)
    named = {c.key for c in ledger.conditions}
    assert len(named) == MAX_CONDITIONS
    ledger = run_round(ledger, NOW + 300, 3)
    assert len(ledger.conditions) == MAX_CONDITIONS
    assert sum(c.check == "mild" for c in ledger.conditions) == MAX_CONDITIONS // 4
    assert ledger.by_key()["mild/others", OVERFLOW].state is ConditionState.OPEN
    ledger = run_round(run_round(ledger, NOW + 600, 0), NOW + 900, 0)
    assert {c.key for c in ledger.conditions} == named
    assert take_run(ledger, [], NOW + 1200, check="mild").conditions == ()


def test_pending_finding_does_not_fold_open_worse_condition() -> None:
    ledger = EMPTY
    for number in range(4):
        code = f"check{number}/x"
        ledger = take_run(
            ledger,
            [make_finding(n, Severity.DEGRADED, code) for n in range(MAX_CONDITIONS // 4)],
            check=f"check{number}",
        )
    open_keys = {c.key for c in ledger.conditions}
    pending = [make_finding(n, code="late/x", confirm_seconds=60.0) for n in range(100)]
    for at in (10, 40, 80):
        ledger = take_run(ledger, pending, NOW + at, check="late")
        late = [c for c in ledger.conditions if c.check == "late"]
        assert [c.subject for c in late] == [OVERFLOW]
        assert late[0].state is (ConditionState.OPEN if at == 80 else ConditionState.PENDING)
    assert len(ledger.conditions) == MAX_CONDITIONS
    assert len(open_keys - ledger.by_key().keys()) == 2, "the last two of one check are folded into one"


def test_limit_findings_bounds_result() -> None:
    result = CheckResult("processes", "", Outcome.COMPLETED, NOW, 0.0, tuple(make_finding(n) for n in range(5000)))
    limited_result = limit_findings(result, {})
    assert len(limited_result.findings) == MAX_CONDITIONS
    assert limit_findings(limited_result, {}) == limited_result
    short = replace(result, findings=result.findings[:MAX_CONDITIONS])
    assert limit_findings(short, {}) is short


def test_explain_describes_overflow_code() -> None:
    assert ("gpu_xid/others", OVERFLOW) == XID_OVERFLOW
    text = registry.explain(BUILT_IN, "gpu_xid/others")
    assert text is not None
    assert f"more than {MAX_CONDITIONS} problems" in text.meaning
