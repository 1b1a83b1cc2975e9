"""Tests of `healthd ack`: an acknowledged condition does not drain until the ack expires or the condition worsens."""

from __future__ import annotations

import logging
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
from tests.agent.conditions.test_store import NOW, STANDING

HOUR = 3600.0
MOUNT = ("mount/missing", "/data")
XID = (STANDING.code, STANDING.subject)


class Clock:
    now = NOW


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(tmp_path: Path, clock: Clock) -> ConditionStore:
    made = ConditionStore(str(tmp_path), lambda: clock.now)
    made.load(dict, "b1", Mode.ACT)
    made.change(trusted_since=1.0)
    return made


def ack(memory: ConditionStore, key: tuple[str, str], seconds: float = 2 * HOUR, now: float = NOW) -> str:
    request = {"command": "ack", "code": key[0], "part": key[1], "seconds": seconds, "why": "cable is on its way"}
    return COMMANDS["ack"](memory, request, "ann (uid 1000)", now)


def look(
    memory: ConditionStore,
    now: float,
    severity: Severity | None = Severity.DEGRADED,
    confirm: float = 0.0,
    evidence: str = "",
) -> Verdict:
    """Run mount once, with this finding for /data or none, and return the verdict."""
    found = Finding(severity, *MOUNT, "not mounted", confirm_seconds=confirm, evidence=evidence) if severity else None
    result = CheckResult("mount", "/data", Outcome.COMPLETED, now, 0.0, (found,) if found else ())
    memory.set_conditions(absorb.absorb_result(memory.conditions, result, 2, "b1", ()))
    memory.end_expired_acks()
    return verdict.judge(memory.conditions, {("mount", "/data"): result}, [("mount", "/data")], 1.0)


def judged(memory: ConditionStore) -> Verdict:
    return verdict.judge(memory.conditions, {}, [], 1.0)


def hold(memory: ConditionStore, condition: Condition) -> None:
    memory.set_conditions({(condition.code, condition.subject): condition})


def test_what_is_known_does_not_act_and_holds_no_resume_although_it_is_seen_again_and_again(
    memory: ConditionStore,
) -> None:
    assert look(memory, NOW).causes
    said = ack(memory, MOUNT)
    assert said == "acknowledged for 2 h by ann (uid 1000): mount/missing /data: cable is on its way"
    for minutes in range(5, 115, 5):
        found = look(memory, NOW + minutes * 60)
        assert (found.causes, found.may_resume, found.health) == ((), True, Health.WARNING)
        assert found.conditions[0].ack is not None


def test_when_the_time_is_over_it_acts_again_if_it_still_stands(
    memory: ConditionStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    look(memory, NOW + 300)
    clock.now = NOW + 2 * HOUR
    with caplog.at_level(logging.INFO, "healthd"):
        memory.end_expired_acks()
    assert "the ack by ann (uid 1000) ended, it expired: cable is on its way" in caplog.text
    (cause,) = judged(memory).causes
    assert (cause.state, cause.ack, cause.opened_at) == (ConditionState.OPEN, None, NOW)


def test_a_fault_that_only_the_log_told_acts_again_too_for_it_stands_until_its_repair(
    memory: ConditionStore, clock: Clock
) -> None:
    hold(memory, STANDING)
    ack(memory, XID)
    assert judged(memory).causes == ()
    clock.now = NOW + 2 * HOUR
    memory.end_expired_acks()
    found = judged(memory)
    assert [c.code for c in found.causes] == ["gpu_xid/79"]
    assert found.fault_time == STANDING.last_event, "jobs that started during the ack are not affected jobs"


def xid_again(memory: ConditionStore, severity: Severity, now: float) -> None:
    event = KernelEvent("xid", "79", time=now, last_time=now, sequence=7)
    finding = Finding(severity, *XID, "again", clears=Clears.REBOOT, events=(7,))
    events = frozenset({7})
    memory.set_conditions(absorb.absorb_events(memory.conditions, "gpu_xid", [finding], {7: event}, events, "b1", ()))
    memory.end_expired_acks()


def test_the_same_line_again_is_known_and_a_harmless_one_undoes_nothing(memory: ConditionStore) -> None:
    hold(memory, STANDING)
    ack(memory, XID)
    for severity in (Severity.CRITICAL, Severity.INFO):
        xid_again(memory, severity, NOW + 60)
        (condition,) = memory.ledger.conditions
        assert (condition.state, condition.severity) == (ConditionState.ACKNOWLEDGED, Severity.CRITICAL)
        assert condition.clears is Clears.REBOOT


def test_what_becomes_worse_is_not_what_was_known(memory: ConditionStore, caplog: pytest.LogCaptureFixture) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    with caplog.at_level(logging.INFO, "healthd"):
        (cause,) = look(memory, NOW + 300, Severity.CRITICAL).causes
    assert "the condition became worse" in caplog.text
    assert (cause.ack, cause.severity) == (None, Severity.CRITICAL)
    hold(memory, replace(STANDING, severity=Severity.WARNING))
    ack(memory, XID)
    xid_again(memory, Severity.CRITICAL, NOW + 60)
    assert [c.code for c in judged(memory).causes] == ["gpu_xid/79"]


def test_what_is_milder_stays_known(memory: ConditionStore) -> None:
    look(memory, NOW, Severity.CRITICAL)
    ack(memory, MOUNT)
    assert look(memory, NOW + 300, Severity.WARNING).conditions[0].ack
    assert look(memory, NOW + 600, Severity.CRITICAL).causes == ()


def test_it_ends_with_the_condition_and_a_later_one_is_not_known(memory: ConditionStore) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    look(memory, NOW + 300, None)
    assert look(memory, NOW + 600, None).conditions == ()
    assert look(memory, NOW + 900).causes


def test_a_latched_fault_is_not_cleared_by_clean_runs_because_somebody_knows(memory: ConditionStore) -> None:
    hold(memory, replace(STANDING, check="mount", instance="/data", last_level_seen=NOW))
    ack(memory, XID)
    for minutes in (5, 10, 15):
        look(memory, NOW + minutes * 60, None)
    assert [c.code for c in memory.ledger.conditions] == ["gpu_xid/79"]


def test_what_was_not_confirmed_when_it_was_acknowledged_still_has_to_be(memory: ConditionStore, clock: Clock) -> None:
    look(memory, NOW, confirm=240.0)
    ack(memory, MOUNT, 60)
    states = [memory.ledger.conditions[0].state]
    clock.now = NOW + 60
    memory.end_expired_acks()
    states += [memory.ledger.conditions[0].state]
    assert states == [ConditionState.ACKNOWLEDGED, ConditionState.PENDING]
    assert look(memory, NOW + 300, confirm=240.0).causes


def test_what_an_operators_resume_forgave_before_stays_forgiven_afterwards(
    memory: ConditionStore, clock: Clock
) -> None:
    hold(memory, STANDING)
    memory.set_conditions(endings.acknowledge_resumed(memory.conditions, NOW, NOW))
    ack(memory, XID, 60)
    clock.now = NOW + 60
    memory.end_expired_acks()
    (condition,) = memory.ledger.conditions
    assert (condition.state, condition.ack) == (ConditionState.ACKNOWLEDGED, None)


def test_a_repair_ends_it(memory: ConditionStore) -> None:
    look(memory, NOW, evidence="flag 1")
    ack(memory, MOUNT)
    COMMANDS["repaired"](memory, {"code": "mount/missing", "part": None}, "ann", NOW + 10)
    (condition,) = memory.ledger.conditions
    assert (condition.state, condition.ack) == (ConditionState.ACKNOWLEDGED, None)


def test_it_survives_a_restart(memory: ConditionStore) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    assert decode(encode(memory.ledger), "there") == memory.ledger


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_it_lasts_as_long_as_was_said_also_when_the_clock_is_set(memory: ConditionStore, step: float) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    memory.apply_clock_step(step, since=NOW - 60, until=NOW + 60)
    (condition,) = memory.ledger.conditions
    assert condition.ack
    assert condition.ack.until == NOW + 2 * HOUR + step


def test_one_that_was_given_while_the_clock_was_right_is_not_moved_by_26_years(memory: ConditionStore) -> None:
    look(memory, NOW)
    ack(memory, MOUNT)
    COMMANDS["pause"](memory, {"seconds": 60, "why": "reboot"}, "ann", NOW)
    year_2000 = 946_684_800.0
    memory.apply_clock_step(NOW - year_2000, since=year_2000, until=year_2000 + 60)
    (condition,) = memory.ledger.conditions
    assert condition.ack
    assert memory.ledger.pause
    assert (condition.ack.until, memory.ledger.pause.until) == (NOW + 2 * HOUR, NOW + 60)


class Walked(tuple[Condition, ...]):
    """Conditions that count how often they are iterated."""

    walks = 0

    def __iter__(self) -> Iterator[Condition]:
        type(self).walks += 1
        return super().__iter__()


def test_the_next_end_of_an_ack_is_known_without_a_walk_through_all_conditions(memory: ConditionStore) -> None:
    known = replace(STANDING, ack=Ack(NOW + 60, "known", "ann", STANDING.severity, NOW))
    memory.ledger = replace(memory.ledger, conditions=Walked((STANDING, known)))
    assert [memory.next_ack_expiry for _ in range(100)] == [NOW + 60] * 100
    memory.end_expired_acks()
    assert Walked.walks == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(Severity), st.none() | st.tuples(st.integers(-5, 5), st.sampled_from(Severity))),
        max_size=5,
    )
)
def test_the_next_end_of_an_ack_is_when_one_ends(drawn: list[tuple[Severity, tuple[int, Severity] | None]]) -> None:
    conditions = {
        ConditionKey("mount/missing", str(number)): replace(
            STANDING,
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


def unack(memory: ConditionStore, key: tuple[str, str], now: float = NOW) -> str:
    return COMMANDS["unack"](memory, {"command": "unack", "code": key[0], "part": key[1]}, "ann (uid 1000)", now)


def test_unack_ends_an_ack_before_its_time_and_the_condition_acts_again(memory):
    memory.set_conditions({STANDING.key: STANDING})
    ack(memory, XID)
    assert memory.conditions[STANDING.key].state is ConditionState.ACKNOWLEDGED
    assert "gpu_xid" in unack(memory, XID, NOW + 60)
    after = memory.conditions[STANDING.key]
    assert (after.state, after.ack) == (ConditionState.OPEN, None)
    judged = verdict.judge(memory.conditions, {}, (), 1.0)
    assert [c.key for c in judged.causes] == [STANDING.key]


def test_unack_of_a_condition_without_an_ack_is_refused(memory):
    memory.set_conditions({STANDING.key: STANDING})
    for key in (XID, ("mount/missing", "/nowhere")):
        with pytest.raises(CommandRefused):
            unack(memory, key)


@pytest.mark.parametrize("seconds", [0, -5, True, "1", None, 8 * 86400.0, float("nan"), float("inf"), int("9" * 400)])
def test_a_time_that_is_none_is_refused_whatever_a_client_sends(memory, seconds):
    memory.set_conditions({STANDING.key: STANDING})
    with pytest.raises(CommandRefused, match="must last at most 7d"):
        ack(memory, XID, seconds)
