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

CHECKS = registry.built_in_checks()
XIDS = [(CHECKS["gpu_xid"], CHECKS["gpu_xid"].config())]
EMPTY = Ledger(boot_id="b")
XID_OTHERS = overflow_key(RunName("gpu_xid"))


def xid(code: int, number: int, at: float = NOW) -> KernelEvent:
    line = f"NVRM: Xid (PCI:{number:04x}:01:00): {code}, pid=1, name=x, GPU has fallen off the bus."
    event = make_event(RawLine(at, line), "b")
    assert event is not None
    return event


def hear(ledger: Ledger, *events: KernelEvent, at: float = NOW) -> Ledger:
    return intake.take_kernel_events(ledger, events, XIDS, at).ledger


def condition(number: int = 0, code: str = "gpu_xid/31", **changes: object) -> Condition:
    plain = Condition(
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
    return replace(plain, **changes)  # type: ignore[arg-type]


def by_key(conditions: Sequence[Condition]) -> dict[ConditionKey, Condition]:
    return {c.key: c for c in conditions}


def found(number: int, severity: Severity = Severity.WARNING, code: str = "processes/x", **more: object) -> Finding:
    finding = Finding(severity, code, f"part{number:05}", f"fault {number}")
    return replace(finding, **more)  # type: ignore[arg-type]


def run(
    ledger: Ledger, findings: Sequence[Finding], at: float = NOW, clear_after: int = 1, check: str = "processes"
) -> Ledger:
    result = CheckResult(check, "", Outcome.COMPLETED, at, 0.0, tuple(findings))
    return intake.take_result(ledger, result, CheckConfig(clear_after=clear_after), at).ledger


# --- the bound


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_a_code_has_so_many_conditions_and_no_more(more: int) -> None:
    ledger = hear(EMPTY, *(xid(31, number) for number in range(MAX_CONDITIONS + more)))
    assert len(ledger.conditions) == MAX_CONDITIONS
    others = ledger.by_key().get(XID_OTHERS)
    assert (others.count if others else 0) == (more + 1 if more else 0)


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_a_check_has_so_many_conditions_whatever_their_codes_and_one_for_the_rest(more: int) -> None:
    first = 1000  # unassigned Xid numbers
    ledger = hear(EMPTY, *(xid(number, 7) for number in range(first, first + MAX_CONDITIONS + more)))
    assert len(ledger.conditions) == MAX_CONDITIONS
    others = ledger.by_key().get(XID_OTHERS)
    assert (others.count if others else 0) == (more + 1 if more else 0)


def test_what_comes_burst_by_burst_is_counted_once() -> None:
    ledger, burst = EMPTY, 200
    for start in range(0, 5 * burst, burst):
        ledger = hear(ledger, *(xid(31, number) for number in range(start, start + burst)))
    assert ledger.by_key()[XID_OTHERS].count == 5 * burst - MAX_CONDITIONS + 1
    again = hear(ledger, xid(31, 5 * burst - 1, NOW + 60), at=NOW + 60)
    assert again.by_key()[XID_OTHERS].count == 5 * burst - MAX_CONDITIONS + 2


def test_one_lost_gpu_has_its_name_in_any_burst() -> None:
    burst = [xid(31, number) for number in range(1280)]
    for place in (0, 640, 1280):
        ledger = hear(EMPTY, *burst[:place], xid(79, 9999), *burst[place:])
        assert ledger.by_key()["gpu_xid/79", "270f:01:00.0"].severity is Severity.CRITICAL
        assert any(event.code == "79" for event in ledger.events), "its event is kept, too"
    many = hear(EMPTY, *(xid(number, 7) for number in range(1000, 2280)), xid(79, 9999))
    assert ("gpu_xid/79", "270f:01:00.0") in many.by_key()
    later = hear(hear(EMPTY, *burst), xid(79, 9999, NOW + 9), at=NOW + 9)
    assert ("gpu_xid/79", "270f:01:00.0") in later.by_key()


def test_what_drains_then_what_is_worst_keeps_its_name() -> None:
    mild = [condition(number) for number in range(1000)]
    special = [
        condition(5000, severity=Severity.DEGRADED),
        condition(5001, severity=Severity.CRITICAL, state=ConditionState.ACKNOWLEDGED),
        condition(5002, "other/x", severity=Severity.INFO),
    ]
    kept = limit_conditions(by_key([*mild, *special]))
    assert {c.key for c in special} <= kept.keys()
    assert len(kept) == MAX_CONDITIONS


def test_a_worse_one_that_comes_later_takes_the_place_of_the_mildest() -> None:
    full = limit_conditions(by_key([condition(number) for number in range(200)]))
    worse = condition(500, severity=Severity.CRITICAL)
    kept = limit_conditions({**full, worse.key: worse})
    assert worse.key in kept
    assert len(kept) == MAX_CONDITIONS
    assert kept[XID_OTHERS].count == 201 - MAX_CONDITIONS + 1
    assert kept[XID_OTHERS].severity is Severity.WARNING


def test_runs_of_one_check_do_not_count_for_one_another() -> None:
    """Only the run of a mount itself can report that the mount is back."""
    several = [condition(number, "mount/missing", instance=f"/m{number}") for number in range(500)]
    assert limit_conditions(by_key(several)) == by_key(several), "folding one condition would only change its name"
    one = [condition(number, "exec/x", instance="site") for number in range(500)]
    assert ConditionKey("exec/others", "others of site") in limit_conditions(by_key(one))


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_all_checks_together_have_so_many_conditions_and_each_counts_its_rest(more: int) -> None:
    mild = [condition(n, f"check{n % 50:02}/x") for n in range(MAX_CONDITIONS + more - 2)]
    worse = [condition(10_000 + n, "check07/y", severity=Severity.DEGRADED) for n in range(2)]
    kept = limit_conditions(by_key([*mild, *worse]))
    assert len(kept) == MAX_CONDITIONS
    assert {c.key for c in worse} <= kept.keys()
    others = [c for c in kept.values() if c.subject == OVERFLOW]
    assert sum(c.count for c in others) == (more + len(others) if more else 0)
    assert all(c.code == f"{c.check}/others" for c in others)


def test_the_mildest_of_all_checks_lose_their_names_first() -> None:
    """A storm of warnings of one check must not fold a draining fault of another check."""
    of_the_drain = [condition(n, "ib_link/down", severity=Severity.DEGRADED) for n in range(60)]
    storm = [condition(n, f"gpu_xid/{n}", last_event=NOW + 9) for n in range(1000, 2000)]
    others = [condition(n, f"check{n}/x", severity=Severity.INFO) for n in range(40)]
    kept = limit_conditions(by_key([*of_the_drain, *storm, *others]))
    assert {c.key for c in of_the_drain} <= kept.keys()
    assert {c.key for c in others} <= kept.keys(), "each is the only condition of its check"
    assert len(kept) == MAX_CONDITIONS
    assert kept[XID_OTHERS].count == 1000 - (MAX_CONDITIONS - 60 - 40 - 1)


def test_jobs_that_become_known_later_name_no_part_that_is_counted_and_are_no_news_of_a_fault() -> None:
    """Each GPU has two exceptions of different jobs. Only the jobs show that a processor may be broken."""
    listeners = [(CHECKS[name], CHECKS[name].config()) for name in ("gpu_xid", "gpu_sm")]
    text = "NVRM: Xid (PCI:{:04x}:01:00): 13, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Out Of Range Address"
    lines = [RawLine(at, text.format(n)) for n in range(240) for at in (NOW - 3600, NOW)]
    heard = intake.take_kernel_events(
        EMPTY, [event for line in lines if (event := make_event(line, "b"))], listeners, NOW
    ).ledger
    assert len(heard.conditions) == MAX_CONDITIONS
    quieter = endings.after_quiet_time(heard.by_key(), 30.0, True, NOW + 30)
    before = with_conditions(heard, quieter)
    told = intake.take_jobs(before, {e.sequence: str(e.sequence) for e in heard.events}, listeners)
    of_xids = [c for c in told.conditions if c.check == "gpu_xid"]
    assert {c.quiet_seconds for c in of_xids} == {30.0}, "the quiet time continues"
    assert any(c.job for c in of_xids)
    of_sms = [c for c in told.conditions if c.check == "gpu_sm"]
    assert [sum(c.count for c in several) for several in (of_xids, of_sms)] == [480, 480]
    assert len(told.conditions) == MAX_CONDITIONS
    assert intake.take_jobs(told, {}, listeners) == told


def test_a_storm_of_one_check_takes_no_name_from_an_equally_bad_fault_of_another() -> None:
    storm = [condition(n) for n in range(1000)]
    few = [condition(5000 + n, "disk/x") for n in range(5)]
    kept = limit_conditions(by_key([*storm, *few]))
    assert {c.key for c in few} <= kept.keys()
    assert len(kept) == MAX_CONDITIONS


# --- the overflow condition

SEVERITIES, STATES = st.sampled_from(Severity), st.sampled_from([ConditionState.OPEN, ConditionState.ACKNOWLEDGED])
MANY = st.lists(
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


@given(MANY)
def test_no_drain_no_latch_and_no_count_is_lost_however_many_there_are(conditions: list[Condition]) -> None:
    before, after = by_key(conditions), limit_conditions(by_key(conditions))
    assert len(after) <= MAX_CONDITIONS
    assert sum(c.count for c in after.values()) == len(before)
    assert any(may_drain(c, 0.0) for c in after.values()) == any(may_drain(c, 0.0) for c in before.values())
    worst = max((c.severity for c in before.values() if may_drain(c, 0.0)), default=None)
    assert max((c.severity for c in after.values() if may_drain(c, 0.0)), default=None) == worst
    last = max((bounds._ENDING_ORDER.index(c.clears) for c in before.values() if not c.observed), default=None)
    assert max((bounds._ENDING_ORDER.index(c.clears) for c in after.values() if not c.observed), default=None) == last
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


def of_groups(groups: Sequence[tuple[int, int, Severity, ConditionState, Clears, str]]) -> list[Condition]:
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
        for number, (check, many, severity, state, clears, job) in enumerate(groups)
        for n in range(many)
    ]


@given(GROUPS, st.randoms(use_true_random=False))
def test_there_are_never_more_than_the_bound_and_the_verdict_is_the_one_without_it(
    groups: list[tuple[int, int, Severity, ConditionState, Clears, str]], random: Random
) -> None:
    conditions = of_groups(groups)
    before, after = by_key(conditions), limit_conditions(by_key(conditions))
    assert len(after) <= MAX_CONDITIONS
    assert len(after) == len(before) or len(before) > MAX_CONDITIONS
    assert sum(c.count for c in after.values()) == len(before)
    assert limit_conditions(after) == after, "a second call changes nothing"
    random.shuffle(conditions)
    assert limit_conditions(by_key(conditions)) == after, "the order does not matter"
    with_all, with_fewer = (judge(c, {}, [], 0.0) for c in (before, after))
    assert (with_fewer.health, with_fewer.may_resume) == (with_all.health, with_all.may_resume)
    worst_of = [max((c.severity for c in seen.causes), default=None) for seen in (with_all, with_fewer)]
    assert worst_of[0] == worst_of[1]


@given(GROUPS)
def test_who_lost_its_name_is_no_worse_than_who_kept_it(
    groups: list[tuple[int, int, Severity, ConditionState, Clears, str]],
) -> None:
    before = by_key(of_groups(groups))
    after = limit_conditions(before)
    of_check: dict[RunName, list[Condition]] = {}
    for c in before.values():
        of_check.setdefault(c.run, []).append(c)
    worst_lost = max(
        ((may_drain(c, 0.0), c.severity) for c in before.values() if c.key not in after), default=(False, -1)
    )
    for several in of_check.values():
        named = sorted((may_drain(c, 0.0), c.severity) for c in several if c.key in after)
        assert all(bad >= worst_lost for bad in named[1:]), "folding a single condition of a check saves nothing"


def full(others: Sequence[Condition]) -> dict[ConditionKey, Condition]:
    """Return conditions that drain in all places but one, followed by `others`."""
    named = [condition(n, severity=Severity.CRITICAL, clears=Clears.OPERATOR) for n in range(MAX_CONDITIONS - 1)]
    return limit_conditions(by_key([*named, *others]))


def of_others(conditions: dict[ConditionKey, Condition]) -> Condition:
    return conditions[XID_OTHERS]


def test_the_others_end_when_the_last_of_them_does() -> None:
    quick, late = condition(900), condition(901, clears=Clears.REBOOT, window_seconds=0.0)
    rest = of_others(full([quick, late]))
    assert (rest.clears, rest.window_seconds, rest.count) == (Clears.REBOOT, 0.0, 2)
    windows = of_others(full([quick, condition(901, window_seconds=600.0)]))
    assert (windows.clears, windows.window_seconds) == (Clears.WINDOW, 600.0)
    by_both = of_others(full([quick, condition(901, clears=Clears.GPU_RESET, window_seconds=600.0)]))
    assert (by_both.clears, by_both.window_seconds) == (Clears.GPU_RESET, 600.0)
    assert not any(
        c.subject == OVERFLOW for c in endings.after_boot(full([late]), "c", NOW).values() if not c.cleared_at
    )


def test_the_others_are_repaired_acknowledged_and_known_like_any_part() -> None:
    known = full([condition(900, severity=Severity.DEGRADED), condition(901, severity=Severity.DEGRADED)])
    repaired = endings.repaired(known, "gpu_xid/others", OVERFLOW, "root", NOW)
    assert of_others(repaired).state is ConditionState.CLEARED
    resumed = endings.acknowledge_resumed(known, NOW, NOW)
    assert not may_drain(of_others(resumed), 0.0)
    acked: dict[ConditionKey, Condition] = known
    for code in ("gpu_xid/31", "gpu_xid/others"):
        acked = endings.acknowledge(acked, code, None, Ack(NOW + 60, "why", "root", Severity.INFO, NOW))
    assert not may_drain(of_others(acked), 0.0)
    late = limit_conditions({**acked, (new := condition(950, severity=Severity.DEGRADED)).key: new})
    assert may_drain(late[new.key], 0.0), "this one is not acknowledged"
    assert not judge(late, {}, [], 0.0).may_resume


def test_after_a_repair_of_the_others_a_harmless_line_of_one_of_them_is_harmless() -> None:
    burst = [xid(79, number) for number in range(200)]
    ledger = hear(EMPTY, *burst)
    cleared = endings.repaired(ledger.by_key(), "gpu_xid/79", None, "root", NOW + 100)
    cleared = endings.repaired(cleared, "gpu_xid/others", None, "root", NOW + 100)
    ledger = with_conditions(ledger, cleared)
    assert not ledger.conditions
    events = [event for event in ledger.events if event.code == "79"]
    settled = intake.evaluate_events(events, XIDS, ledger.inventory, (*ledger.conditions, *ledger.cleared))
    assert settled == {}, "faults that were repaired with the overflow condition are over"


def test_so_is_it_after_a_repair_of_what_counts_the_rest_of_a_check() -> None:
    ledger = hear(EMPTY, *(xid(number, 7) for number in range(1000, 1400)))
    cleared = ledger.by_key()
    for key in ledger.by_key():
        cleared = endings.repaired(cleared, key.code, None, "root", NOW + 100)
    ledger = with_conditions(ledger, cleared)
    known = (*ledger.conditions, *ledger.cleared)
    assert (len(ledger.conditions), len(ledger.events)) == (0, 400)
    assert intake.evaluate_events(ledger.events, XIDS, ledger.inventory, known) == {}


def test_lines_that_can_be_forged_change_nothing_of_the_others_but_their_count() -> None:
    proven = condition(900, severity=Severity.DEGRADED, acknowledged_at=NOW, state=ConditionState.ACKNOWLEDGED)
    forged = [condition(901 + n, severity=Severity.CRITICAL, clears=Clears.REBOOT, observed=True) for n in range(500)]
    rest = of_others(full([proven, *forged]))
    assert (rest.state, rest.severity, rest.clears) == (ConditionState.ACKNOWLEDGED, Severity.DEGRADED, Clears.WINDOW)
    assert (rest.last_event, rest.observed, rest.count) == (proven.last_event, False, 501)
    assert of_others(full(forged)).observed


def test_the_count_and_the_worst_stand_in_the_words() -> None:
    rest = of_others(full([condition(900), condition(901, severity=Severity.DEGRADED)]))
    assert rest.message == "seen 2 times, on unlisted parts; the worst: part00901: fault 901"
    further = limit_conditions({**full([condition(900)]), **by_key([condition(902)])})
    assert of_others(further).message == "seen 2 times, on unlisted parts; the worst: part00900: fault 900"


def test_one_part_that_repeats_does_not_look_like_hundreds_of_broken_ones() -> None:
    rest = of_others(full([condition(900, count=500), condition(901)]))
    assert rest.message == "seen 501 times, on unlisted parts; the worst: part00900: fault 900"
    once = of_others(full([condition(900, count=0), condition(901)]))
    assert once.message.startswith("seen once, on unlisted parts; the worst: ")


def test_the_others_are_a_nodes_own_fault_where_one_of_those_that_act_is() -> None:
    shared = condition(900, severity=Severity.DEGRADED, shared_cause=True)
    own = condition(901, severity=Severity.DEGRADED)
    assert is_own_hardware([of_others(full([shared, own]))])
    assert not is_own_hardware([of_others(full([shared, replace(own, shared_cause=True)]))])
    known = replace(own, state=ConditionState.ACKNOWLEDGED, acknowledged_at=NOW)
    for harmless in (known, replace(own, severity=Severity.WARNING)):
        assert not is_own_hardware([of_others(full([shared, harmless]))]), "only the shared fault drains"
    worse = replace(shared, severity=Severity.CRITICAL)
    assert is_own_hardware([of_others(full([worse, own]))]), "a milder draining fault is own hardware, too"


def test_jobs_that_ran_when_the_last_of_the_others_became_critical_are_its_victims() -> None:
    early = condition(900, severity=Severity.CRITICAL, last_event=0.0, critical_at=NOW + 100)
    late = condition(901, severity=Severity.CRITICAL, last_event=0.0, critical_at=NOW + 200)
    for both in ([early, late], [late, early]):
        assert fault_time(of_others(full(both))) == NOW + 200


def test_a_line_after_the_first_acknowledgement_of_the_others_is_news() -> None:
    """One part was acknowledged at NOW + 10, another at NOW + 100. The overflow condition cannot distinguish them."""
    one = condition(900, state=ConditionState.ACKNOWLEDGED, acknowledged_at=NOW + 10, last_sequence=9)
    rest = of_others(full([one, condition(901, state=one.state, acknowledged_at=NOW + 100, last_sequence=8)]))

    def found_at(when: float) -> list[ConditionKey]:
        event = replace(xid(31, 900, when), sequence=7)
        return [f.key for fs in intake.evaluate_events([event], XIDS, EMPTY.inventory, [rest]).values() for f in fs]

    assert found_at(NOW + 5) == []
    assert found_at(NOW + 50) == [("gpu_xid/31", "0384:01:00.0")]


def test_a_resume_forgives_the_others_only_if_the_last_of_them_was_open_before() -> None:
    one = condition(900, severity=Severity.DEGRADED, opened_at=NOW + 100)
    conditions = full([one, condition(901, severity=Severity.DEGRADED, opened_at=NOW + 200)])
    assert may_drain(of_others(endings.acknowledge_resumed(conditions, NOW + 150, NOW + 300)), 0.0)
    assert not may_drain(of_others(endings.acknowledge_resumed(conditions, NOW + 200, NOW + 300)), 0.0)


def test_the_quiet_time_of_the_others_is_that_of_the_least_quiet() -> None:
    quiet = condition(900, quiet_seconds=50.0, clean_runs=5, repaired=True, first_seen=NOW)
    conditions = full([quiet, condition(901, quiet_seconds=20.0, clean_runs=1, first_seen=NOW + 901)])
    rest = of_others(endings.after_quiet_time(conditions, 30.0, True, NOW + 2000))
    assert (rest.state, rest.quiet_seconds, rest.clean_runs) == (ConditionState.OPEN, 50.0, 1)
    rest = of_others(endings.after_quiet_time(conditions, 30.0, False, NOW + 2000))
    assert rest.quiet_seconds == 20.0, "only time under load counts unless all were repaired"
    assert rest.first_seen == NOW


@pytest.mark.parametrize("seen", ["last_event", "last_level_seen"])
def test_the_others_act_by_the_last_sight_of_any_of_them(seen: str) -> None:
    never = condition(900, severity=Severity.DEGRADED, last_event=0.0)
    later = replace(never, subject="later", **{seen: NOW + 5000})  # type: ignore[arg-type]
    rest = of_others(full([replace(never, **{seen: NOW}), later]))  # type: ignore[arg-type]
    assert may_drain(rest, NOW + 4999)
    assert not may_drain(rest, NOW + 5000)


def test_the_others_are_known_until_the_first_acknowledgement_of_them_is_over() -> None:
    acks = [Ack(NOW + seconds, "why", "root", Severity.WARNING, NOW) for seconds in (60, 600)]
    conditions = full([condition(900 + n, state=ConditionState.ACKNOWLEDGED, ack=ack) for n, ack in enumerate(acks)])
    assert of_others(endings.end_expired_acks(conditions, NOW + 59)).state is ConditionState.ACKNOWLEDGED
    assert of_others(endings.end_expired_acks(conditions, NOW + 60)).state is ConditionState.OPEN


def test_the_others_get_worse_when_the_first_of_them_does() -> None:
    worsens = Worsens(600.0, Severity.CRITICAL)
    first = condition(900, worsens=worsens, persists_since=NOW, last_level_seen=NOW + 300)
    second = replace(condition(901), worsens=worsens, persists_since=NOW + 200, last_level_seen=NOW + 300)
    for both in ([first, second], [second, first]):
        rest = of_others(full(both))
        assert early_run_times({rest.key: rest}) == {rest.run: NOW + 600}


@pytest.mark.parametrize("other", ["expected", "other"])
def test_what_a_profile_guessed_stays_a_warning_among_the_others(other: str) -> None:
    guess = condition(900, expects="expected", found_severity=Severity.CRITICAL)
    rest = of_others(full([guess, condition(901, expects=other, found_severity=Severity.WARNING)]))
    assert (rest.severity, rest.found_severity, rest.expects) == (Severity.WARNING, Severity.WARNING, "")


# --- checks with many findings


def test_what_a_check_finds_beyond_the_bound_is_seen_until_the_last_of_it_is_gone() -> None:
    many = [found(number) for number in range(1000)]
    ledger = EMPTY
    for at in range(3):
        ledger = run(ledger, many, NOW + at)
        assert len(ledger.conditions) == MAX_CONDITIONS
        assert not ledger.cleared
    others = ledger.by_key()["processes/others", OVERFLOW]
    assert (others.count, others.clean_runs) == (3, 0)
    assert others.message.startswith(f"{1000 - MAX_CONDITIONS + 1} more, on unlisted parts; the worst: part")
    fewer = run(ledger, many[: MAX_CONDITIONS - 1], NOW + 4)
    assert ("processes/others", OVERFLOW) not in fewer.by_key()
    assert [c.subject for c in run(fewer, [], NOW + 5).conditions] == []


def test_a_run_that_drains_for_one_of_thousands_names_it() -> None:
    many = [found(number) for number in range(1000)]
    ledger = run(run(EMPTY, many), [*many, found(5000, Severity.CRITICAL)], NOW + 1, clear_after=2)
    assert ledger.by_key()["processes/x", "part05000"].severity is Severity.CRITICAL
    assert len(ledger.conditions) <= MAX_CONDITIONS


def test_the_others_are_confirmed_as_one() -> None:
    many = [found(number, Severity.DEGRADED, confirm_seconds=60.0) for number in range(1000)]
    ledger = run(EMPTY, many)
    assert {c.state for c in ledger.conditions} == {ConditionState.PENDING}
    ledger = run(ledger, many, NOW + 61)
    assert {c.state for c in ledger.conditions} == {ConditionState.OPEN}


def test_the_others_stay_latched_where_a_later_run_finds_only_mild_ones() -> None:
    latched = [found(n, Severity.CRITICAL, clears=Clears.REBOOT) for n in range(200)]
    ledger = run(run(EMPTY, latched), [*latched, found(500)], NOW + 1)
    ledger = run(run(ledger, [found(500)], NOW + 2), [], NOW + 3)
    others = ledger.by_key()["processes/others", OVERFLOW]
    assert (others.severity, others.clears, others.state) == (Severity.CRITICAL, Clears.REBOOT, ConditionState.OPEN)
    mild_first = run(run(EMPTY, [found(n) for n in range(200)]), [*(found(n) for n in range(200)), *latched], NOW + 1)
    assert mild_first.by_key()["processes/others", OVERFLOW].clears is Clears.REBOOT


def test_other_evidence_among_the_others_is_news_to_the_operator_who_knew() -> None:
    many = [found(number, Severity.DEGRADED, evidence="1") for number in range(200)]
    ledger = run(EMPTY, many)
    known = endings.acknowledge_resumed(ledger.by_key(), NOW, NOW + 1)
    ledger = run(with_conditions(ledger, known), many, NOW + 2)
    assert not any(may_drain(c, 0.0) for c in ledger.conditions)
    ledger = run(ledger, [*many[:-1], replace(many[-1], evidence="2")], NOW + 3)
    assert [c.subject for c in ledger.conditions if may_drain(c, 0.0)] == [OVERFLOW]


def test_a_round_in_which_all_checks_find_the_same_changes_nothing_however_many_there_are() -> None:
    """No condition opens again in each round, and none that is still found ends."""
    checks = [f"check{number:02}" for number in range(30)]

    def round_of(ledger: Ledger, at: float) -> Ledger:
        for number, check in enumerate(checks):
            of_check = [found(n, (Severity.INFO, Severity.WARNING)[n % 2], f"{check}/x") for n in range(5 * number + 1)]
            ledger = run(ledger, of_check, at + number, clear_after=2, check=check)
            assert len(ledger.conditions) <= MAX_CONDITIONS
        return ledger

    first = round_of(round_of(EMPTY, NOW), NOW + 300)
    for number in range(2, 6):
        ledger = round_of(first, NOW + 300 * number)
        before, after = (
            [(c.key, c.first_seen, c.state, c.count + more) for c in seen.conditions]
            for seen, more in ((first, 1), (ledger, 0))
        )
        assert after == before, "each count rose by one"
        assert ledger.cleared == first.cleared
        first = ledger


def test_what_has_lost_its_name_to_other_checks_has_it_again_when_there_is_room() -> None:
    storm = [found(n, Severity.DEGRADED, "storm/x") for n in range(MAX_CONDITIONS // 4)]
    mild = [found(n, code=f"mild/{n % 4}") for n in range(200)]

    def round_of(ledger: Ledger, at: float, storms: int) -> Ledger:
        for number in range(4):
            of_check = [replace(f, code=f"storm{number}/x") for f in storm] if number < storms else []
            ledger = run(ledger, of_check, at, check=f"storm{number}")
        return run(ledger, mild, at + 1, check="mild")

    ledger = round_of(EMPTY, NOW, 0)
    named = {c.key for c in ledger.conditions}
    assert len(named) == MAX_CONDITIONS
    ledger = round_of(ledger, NOW + 300, 3)
    assert len(ledger.conditions) == MAX_CONDITIONS
    assert sum(c.check == "mild" for c in ledger.conditions) == MAX_CONDITIONS // 4
    assert ledger.by_key()["mild/others", OVERFLOW].state is ConditionState.OPEN
    ledger = round_of(round_of(ledger, NOW + 600, 0), NOW + 900, 0)
    assert {c.key for c in ledger.conditions} == named
    assert run(ledger, [], NOW + 1200, check="mild").conditions == ()


def test_what_waits_to_be_confirmed_takes_no_name_from_what_stands_and_is_worse() -> None:
    ledger = EMPTY
    for number in range(4):
        code = f"check{number}/x"
        ledger = run(
            ledger, [found(n, Severity.DEGRADED, code) for n in range(MAX_CONDITIONS // 4)], check=f"check{number}"
        )
    stands = {c.key for c in ledger.conditions}
    waits = [found(n, code="late/x", confirm_seconds=60.0) for n in range(100)]
    for at in (10, 40, 80):
        ledger = run(ledger, waits, NOW + at, check="late")
        late = [c for c in ledger.conditions if c.check == "late"]
        assert [c.subject for c in late] == [OVERFLOW]
        assert late[0].state is (ConditionState.OPEN if at == 80 else ConditionState.PENDING)
    assert len(ledger.conditions) == MAX_CONDITIONS
    assert len(stands - ledger.by_key().keys()) == 2, "the last two of one check are folded into one"


def test_a_result_shows_no_more_findings_than_there_are_conditions() -> None:
    result = CheckResult("processes", "", Outcome.COMPLETED, NOW, 0.0, tuple(found(n) for n in range(5000)))
    shown = limit_findings(result, {})
    assert len(shown.findings) == MAX_CONDITIONS
    assert limit_findings(shown, {}) == shown
    few = replace(result, findings=result.findings[:MAX_CONDITIONS])
    assert limit_findings(few, {}) is few


def test_the_words_for_a_code_of_others_can_be_asked_for() -> None:
    assert ("gpu_xid/others", OVERFLOW) == XID_OTHERS
    text = registry.explain(CHECKS, "gpu_xid/others")
    assert text is not None
    assert f"more than {MAX_CONDITIONS} problems" in text.meaning
