"""Tests of `healthd ack`: an acknowledged condition does not drain until the ack expires or the condition worsens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import absorb, endings, verdict
from healthd.agent.conditions.store import ConditionStore, decode
from healthd.agent.control.commands import COMMANDS, CommandRefused
from healthd.common.model import (
    Ack,
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Finding,
    Health,
    KernelEvent,
    Mode,
    Outcome,
    Severity,
    Verdict,
)
from healthd.common.values import encode
from tests.agent.conditions.test_store import NOW, OPEN_XID

HOUR = 3600.0
MOUNT = ("mount/missing", "/data")
XID = (OPEN_XID.code, OPEN_XID.subject)


class Clock:
    now = NOW


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def condition_store(tmp_path: Path, clock: Clock) -> ConditionStore:
    new_store = ConditionStore(str(tmp_path), lambda: clock.now)
    new_store.load(dict, "b1", Mode.ACT)
    new_store.change(trusted_since=1.0)
    return new_store


def ack(condition_store: ConditionStore, key: tuple[str, str], seconds: float = 2 * HOUR, now: float = NOW) -> str:
    request = {"command": "ack", "code": key[0], "part": key[1], "seconds": seconds, "why": "cable is on its way"}
    return COMMANDS["ack"](condition_store, request, "ann (uid 1000)", now)


def run_mount(
    condition_store: ConditionStore,
    now: float,
    severity: Severity | None = Severity.DEGRADED,
    confirm: float = 0.0,
    evidence: str = "",
) -> Verdict:
    """Run mount once, with this finding for /data or none, and return the verdict."""
    finding = Finding(severity, *MOUNT, "not mounted", confirm_seconds=confirm, evidence=evidence) if severity else None
    result = CheckResult("mount", "/data", Outcome.COMPLETED, now, 0.0, (finding,) if finding else ())
    condition_store.set_conditions(absorb.absorb_result(condition_store.conditions, result, 2, "b1", ()))
    condition_store.end_expired_acks()
    return verdict.judge(condition_store.conditions, {("mount", "/data"): result}, [("mount", "/data")], 1.0)


def judge_now(condition_store: ConditionStore) -> Verdict:
    return verdict.judge(condition_store.conditions, {}, [], 1.0)


def set_condition(condition_store: ConditionStore, condition: Condition) -> None:
    condition_store.set_conditions({(condition.code, condition.subject): condition})


def test_ack_prevents_drain_and_allows_resume(
    condition_store: ConditionStore,
) -> None:
    assert run_mount(condition_store, NOW).causes
    reply = ack(condition_store, MOUNT)
    assert reply == "acknowledged for 2 h by ann (uid 1000): mount/missing /data: cable is on its way"
    for minutes in range(5, 115, 5):
        node_verdict = run_mount(condition_store, NOW + minutes * 60)
        assert (node_verdict.causes, node_verdict.may_resume, node_verdict.health) == ((), True, Health.WARNING)
        assert node_verdict.conditions[0].ack is not None


def test_expired_ack_drains_again(
    condition_store: ConditionStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    run_mount(condition_store, NOW + 300)
    clock.now = NOW + 2 * HOUR
    with caplog.at_level(logging.INFO, "healthd"):
        condition_store.end_expired_acks()
    assert re.search(r"ann \(uid 1000\) .*expired: cable ", caplog.text)
    (cause,) = judge_now(condition_store).causes
    assert (cause.state, cause.ack, cause.opened_at) == (ConditionState.OPEN, None, NOW)


def test_expired_ack_on_event_condition_drains_with_old_fault_time(
    condition_store: ConditionStore, clock: Clock
) -> None:
    set_condition(condition_store, OPEN_XID)
    ack(condition_store, XID)
    assert judge_now(condition_store).causes == ()
    clock.now = NOW + 2 * HOUR
    condition_store.end_expired_acks()
    node_verdict = judge_now(condition_store)
    assert [c.code for c in node_verdict.causes] == ["gpu_xid/79"]
    assert node_verdict.fault_time == OPEN_XID.last_event, "jobs that started during the ack are not affected jobs"


def repeat_xid(condition_store: ConditionStore, severity: Severity, now: float) -> None:
    event = KernelEvent("xid", "79", time=now, last_time=now, sequence=7)
    finding = Finding(severity, *XID, "again", clears=Clears.REBOOT, events=(7,))
    events = frozenset({7})
    condition_store.set_conditions(
        absorb.absorb_events(condition_store.conditions, "gpu_xid", [finding], {7: event}, events, "b1", ())
    )
    condition_store.end_expired_acks()


def test_ack_covers_repeated_event(condition_store: ConditionStore) -> None:
    set_condition(condition_store, OPEN_XID)
    ack(condition_store, XID)
    for severity in (Severity.CRITICAL, Severity.INFO):
        repeat_xid(condition_store, severity, NOW + 60)
        (condition,) = condition_store.ledger.conditions
        assert (condition.state, condition.severity) == (ConditionState.ACKNOWLEDGED, Severity.CRITICAL)
        assert condition.clears is Clears.REBOOT


def test_ack_ends_when_condition_worsens(condition_store: ConditionStore, caplog: pytest.LogCaptureFixture) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    with caplog.at_level(logging.INFO, "healthd"):
        (cause,) = run_mount(condition_store, NOW + 300, Severity.CRITICAL).causes
    assert "became worse" in caplog.text
    assert (cause.ack, cause.severity) == (None, Severity.CRITICAL)
    set_condition(condition_store, replace(OPEN_XID, severity=Severity.WARNING))
    ack(condition_store, XID)
    repeat_xid(condition_store, Severity.CRITICAL, NOW + 60)
    assert [c.code for c in judge_now(condition_store).causes] == ["gpu_xid/79"]


def test_ack_covers_milder_condition(condition_store: ConditionStore) -> None:
    run_mount(condition_store, NOW, Severity.CRITICAL)
    ack(condition_store, MOUNT)
    assert run_mount(condition_store, NOW + 300, Severity.WARNING).conditions[0].ack
    assert run_mount(condition_store, NOW + 600, Severity.CRITICAL).causes == ()


def test_ack_ends_with_condition(condition_store: ConditionStore) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    run_mount(condition_store, NOW + 300, None)
    assert run_mount(condition_store, NOW + 600, None).conditions == ()
    assert run_mount(condition_store, NOW + 900).causes


def test_ack_does_not_unlatch_condition(condition_store: ConditionStore) -> None:
    set_condition(condition_store, replace(OPEN_XID, check="mount", instance="/data", last_level_seen=NOW))
    ack(condition_store, XID)
    for minutes in (5, 10, 15):
        run_mount(condition_store, NOW + minutes * 60, None)
    assert [c.code for c in condition_store.ledger.conditions] == ["gpu_xid/79"]


def test_ack_on_pending_condition_keeps_confirm_time(condition_store: ConditionStore, clock: Clock) -> None:
    run_mount(condition_store, NOW, confirm=240.0)
    ack(condition_store, MOUNT, 60)
    states = [condition_store.ledger.conditions[0].state]
    clock.now = NOW + 60
    condition_store.end_expired_acks()
    states += [condition_store.ledger.conditions[0].state]
    assert states == [ConditionState.ACKNOWLEDGED, ConditionState.PENDING]
    assert run_mount(condition_store, NOW + 300, confirm=240.0).causes


def test_expired_ack_keeps_earlier_resume(condition_store: ConditionStore, clock: Clock) -> None:
    set_condition(condition_store, OPEN_XID)
    condition_store.set_conditions(endings.acknowledge_resumed(condition_store.conditions, NOW, NOW))
    ack(condition_store, XID, 60)
    clock.now = NOW + 60
    condition_store.end_expired_acks()
    (condition,) = condition_store.ledger.conditions
    assert (condition.state, condition.ack) == (ConditionState.ACKNOWLEDGED, None)


def test_repaired_ends_ack(condition_store: ConditionStore) -> None:
    run_mount(condition_store, NOW, evidence="flag 1")
    ack(condition_store, MOUNT)
    COMMANDS["repaired"](condition_store, {"code": "mount/missing", "part": None}, "ann", NOW + 10)
    (condition,) = condition_store.ledger.conditions
    assert (condition.state, condition.ack) == (ConditionState.ACKNOWLEDGED, None)


def test_ack_survives_encoding(condition_store: ConditionStore) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    assert decode(encode(condition_store.ledger), "there") == condition_store.ledger


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_clock_step_keeps_ack_duration(condition_store: ConditionStore, step: float) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    condition_store.apply_clock_step(step, since=NOW - 60, until=NOW + 60)
    (condition,) = condition_store.ledger.conditions
    assert condition.ack
    assert condition.ack.until == NOW + 2 * HOUR + step


def test_clock_step_keeps_ack_given_with_correct_clock(condition_store: ConditionStore) -> None:
    run_mount(condition_store, NOW)
    ack(condition_store, MOUNT)
    COMMANDS["pause"](condition_store, {"seconds": 60, "why": "reboot"}, "ann", NOW)
    year_2000 = 946_684_800.0
    condition_store.apply_clock_step(NOW - year_2000, since=year_2000, until=year_2000 + 60)
    (condition,) = condition_store.ledger.conditions
    assert condition.ack
    assert condition_store.ledger.pause
    assert (condition.ack.until, condition_store.ledger.pause.until) == (NOW + 2 * HOUR, NOW + 60)


class CountedConditions(tuple[Condition, ...]):
    """Conditions that count how often they are iterated."""

    iterations = 0

    def __iter__(self) -> Iterator[Condition]:
        type(self).iterations += 1
        return super().__iter__()


def test_next_ack_expiry_is_cached(condition_store: ConditionStore) -> None:
    acked = replace(OPEN_XID, ack=Ack(NOW + 60, "known", "ann", OPEN_XID.severity, NOW))
    condition_store.ledger = replace(condition_store.ledger, conditions=CountedConditions((OPEN_XID, acked)))
    assert [condition_store.next_ack_expiry for _ in range(100)] == [NOW + 60] * 100
    condition_store.end_expired_acks()
    assert CountedConditions.iterations == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(Severity), st.none() | st.tuples(st.integers(-5, 5), st.sampled_from(Severity))),
        max_size=5,
    )
)
def test_next_ack_expiry_is_first_end_time(drawn: list[tuple[Severity, tuple[int, Severity] | None]]) -> None:
    conditions = {
        ConditionKey("mount/missing", str(number)): replace(
            OPEN_XID,
            code="mount/missing",
            subject=str(number),
            severity=severity,
            ack=ack and Ack(NOW + ack[0], "known", "ann", ack[1], NOW - 60),
        )
        for number, (severity, ack) in enumerate(drawn)
    }
    assert (endings.next_ack_expiry(conditions.values()) <= NOW) == (
        endings.end_expired_acks(conditions, NOW) != conditions
    )


def unack(condition_store: ConditionStore, key: tuple[str, str], now: float = NOW) -> str:
    return COMMANDS["unack"](
        condition_store, {"command": "unack", "code": key[0], "part": key[1]}, "ann (uid 1000)", now
    )


def test_unack_reopens_condition(condition_store):
    condition_store.set_conditions({OPEN_XID.key: OPEN_XID})
    ack(condition_store, XID)
    assert condition_store.conditions[OPEN_XID.key].state is ConditionState.ACKNOWLEDGED
    assert "gpu_xid" in unack(condition_store, XID, NOW + 60)
    reopened = condition_store.conditions[OPEN_XID.key]
    assert (reopened.state, reopened.ack) == (ConditionState.OPEN, None)
    node_verdict = verdict.judge(condition_store.conditions, {}, (), 1.0)
    assert [c.key for c in node_verdict.causes] == [OPEN_XID.key]


def test_unack_refuses_condition_without_ack(condition_store):
    condition_store.set_conditions({OPEN_XID.key: OPEN_XID})
    for key in (XID, ("mount/missing", "/nowhere")):
        with pytest.raises(CommandRefused):
            unack(condition_store, key)


@pytest.mark.parametrize("seconds", [0, -5, True, "1", None, 8 * 86400.0, float("nan"), float("inf"), int("9" * 400)])
def test_ack_refuses_invalid_duration(condition_store, seconds):
    condition_store.set_conditions({OPEN_XID.key: OPEN_XID})
    with pytest.raises(CommandRefused, match="must last at most 7d"):
        ack(condition_store, XID, seconds)
