"""Tests of the operator commands: each changes the ledger according to its reply, or is refused in one sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions.condition import MAX_SUPPRESSION_SECONDS, may_drain
from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control.commands import COMMANDS, FAILSLOW_COMMANDS, MAX_REASON_LENGTH, CommandRefused
from healthd.agent.slurm import flapping
from healthd.common import history
from healthd.common.model import Condition, ConditionState, DrainRecord, Mode, ResumedDrain, Severity
from tests.agent.conditions.test_store import NOW, STANDING


@pytest.fixture
def memory(tmp_path: Path) -> ConditionStore:
    """Return a store with the same fault on two GPUs."""
    other = replace(STANDING, subject="0000:1b:00.0")
    made = ConditionStore(str(tmp_path), lambda: NOW)
    made.load(dict, "b1", Mode.ACT)
    hold(made, STANDING, other)
    return made


def hold(memory: ConditionStore, *conditions: Condition) -> None:
    memory.set_conditions({(c.code, c.subject): c for c in conditions})


def told(memory: ConditionStore, command: str, **request: Any) -> str:
    return COMMANDS[command](memory, {"command": command, **request}, "ann (uid 1000)", NOW + 10)


def refused(memory: ConditionStore, command: str, **request: Any) -> str:
    before = memory.ledger
    with pytest.raises(CommandRefused) as why:
        told(memory, command, **request)
    assert memory.ledger == before
    assert "\n" not in str(why.value)
    return str(why.value)


def test_a_repaired_part_ends_its_condition_and_no_other(memory: ConditionStore) -> None:
    said = told(memory, "repaired", code="gpu_xid/79", part="0000:61:00.0")
    assert said == "repaired: gpu_xid/79 0000:61:00.0; all checks run now"
    assert [c.subject for c in memory.ledger.conditions] == ["0000:1b:00.0"]
    (ended,) = memory.ledger.cleared
    assert ended.cleared_by == "repaired by ann (uid 1000)"


def test_who_repaired_it_and_how_stays_known(memory: ConditionStore) -> None:
    said = told(memory, "repaired", code="gpu_xid/79", part="0000:61:00.0", why="reseated, ticket 12")
    assert said == "repaired: gpu_xid/79 0000:61:00.0: reseated, ticket 12; all checks run now"
    assert memory.ledger.cleared[0].cleared_by == "repaired by ann (uid 1000): reseated, ticket 12"


def test_what_the_counters_of_a_repaired_part_did_before_is_forgotten(memory: ConditionStore) -> None:
    series = history.Series(3.0, NOW, "b1", ((NOW, 3.0),))
    keys = ("lost_total{pci=0000:61:00.0}", "lost_total{pci=0000:1b:00.0}")
    memory.set_past("gpu_xid", history.encode(dict.fromkeys(keys, series)))
    memory.set_past("ib_flap", history.encode(dict.fromkeys(keys, series)))
    told(memory, "repaired", code="gpu_xid/79", part="0000:61:00.0")
    assert [len(each.increments) for each in history.decode(memory.past["gpu_xid"]).values()] == [0, 1]
    assert [len(each.increments) for each in history.decode(memory.past["ib_flap"]).values()] == [1, 1]


def test_without_a_part_every_condition_with_that_code_ends(memory: ConditionStore) -> None:
    assert told(memory, "repaired", code="gpu_xid/79").count("gpu_xid/79") == 2
    assert memory.ledger.conditions == ()


def test_a_flag_that_a_check_still_reads_is_acknowledged_until_it_changes(memory: ConditionStore) -> None:
    hold(memory, replace(STANDING, evidence="failure flag 1", last_level_seen=NOW))
    told(memory, "repaired", code="gpu_xid/79")
    (condition,) = memory.ledger.conditions
    assert (condition.state, condition.acknowledged_at) == (ConditionState.ACKNOWLEDGED, NOW + 10)
    assert not may_drain(condition, 0.0)


@pytest.mark.parametrize(
    "request_", [{"code": "gpu_xid/48"}, {"code": "gpu_xid/79", "part": "0000:99:00.0"}, {}, {"code": 7}, {"code": []}]
)
@pytest.mark.parametrize("command", ["repaired", "ack"])
def test_what_does_not_stand_cannot_be_meant_and_the_refusal_says_what_does(
    memory: ConditionStore, command: str, request_: dict[str, Any]
) -> None:
    why = refused(memory, command, **{"seconds": 60, "why": "because", **request_})
    assert why.startswith("no condition ")
    assert "gpu_xid/79 0000:61:00.0" in why


def test_where_nothing_stands_the_refusal_says_so(memory: ConditionStore) -> None:
    told(memory, "repaired", code="gpu_xid/79")
    assert refused(memory, "repaired", code="gpu_xid/79").endswith("conditions on this node: none")


ONCE = ResumedDrain(NOW - 60, NOW - 50, True)
TWICE = DrainRecord(reason="healthd: gpu_xid/79 0000:61:00.0: it fell off", drained_at=NOW, resumed_drains=(ONCE, ONCE))


def over(memory: ConditionStore, when: float, **changes: Any) -> None:
    """Clear all conditions while healthd's drain stays, because it was not the first one."""
    gone = replace(STANDING, state=ConditionState.CLEARED, cleared_at=when, cleared_by="pass", **changes)
    memory.change(conditions=(), cleared=(gone,), slurm=TWICE)


@pytest.mark.parametrize("severity", [Severity.CRITICAL, Severity.WARNING])
def test_a_fault_that_is_over_is_answered_for_where_it_came_and_went_and_holds_the_node(
    memory: ConditionStore, severity: Severity
) -> None:
    """The Reason names the fault, also if it was only a warning in the end."""
    over(memory, NOW + 5, severity=severity)
    said = flapping.wait_reason(replace(TWICE, own_hardware=True), flapping.Flapping(own_faults_per_hour=3), NOW + 9)
    assert 'an operator must resume it, or run "healthd repaired gpu_xid/79"' in said
    assert told(memory, "repaired", code="gpu_xid/79") == "repaired: gpu_xid/79 0000:61:00.0; all checks run now"
    assert memory.ledger.slurm == replace(TWICE, resumed_drains=())
    assert refused(memory, "repaired", code="gpu_xid/79").endswith("conditions on this node: none")


def test_what_was_over_before_the_drain_or_never_drained_is_not_meant(memory: ConditionStore) -> None:
    over(memory, NOW - 1)
    assert refused(memory, "repaired", code="gpu_xid/79").endswith("conditions on this node: none")
    over(memory, NOW + 5, code="gpu_xid/13", severity=Severity.WARNING)
    assert refused(memory, "repaired", code="gpu_xid/13").endswith("conditions on this node: none")
    over(memory, NOW + 5)
    why = refused(memory, "ack", code="gpu_xid/79", seconds=60, why="because")
    assert why.endswith("conditions on this node: none")


def test_who_repairs_what_only_warned_does_not_answer_for_what_drained(memory: ConditionStore) -> None:
    warns = replace(STANDING, code="gpu_xid/13", severity=Severity.WARNING)
    hold(memory, warns, STANDING)
    memory.change(slurm=TWICE)
    told(memory, "repaired", code="gpu_xid/13")
    assert memory.ledger.slurm.resumed_drains == (ONCE, ONCE)
    told(memory, "repaired", code="gpu_xid/79")
    assert memory.ledger.slurm.resumed_drains == ()


def test_a_pause_is_kept_with_its_reason_and_who_wanted_it(memory: ConditionStore) -> None:
    assert told(memory, "pause", seconds=1800, why=" driver upgrade ") == (
        "paused for 30 min by ann (uid 1000): driver upgrade"
    )
    assert memory.ledger.pause == Pause(NOW + 1810, "driver upgrade", "ann (uid 1000)", NOW + 10)


def test_a_second_pause_takes_the_place_of_the_first(memory: ConditionStore) -> None:
    told(memory, "pause", seconds=1800, why="driver upgrade")
    told(memory, "pause", seconds=60, why="almost done")
    assert memory.ledger.pause == Pause(NOW + 70, "almost done", "ann (uid 1000)", NOW + 10)


WISHES = pytest.mark.parametrize("command", ["pause", "ack"])


@WISHES
@pytest.mark.parametrize(
    "seconds", [0, -1, None, True, "1800", MAX_SUPPRESSION_SECONDS + 1, float("nan"), float("inf")]
)
def test_a_pause_or_an_ack_of_no_time_or_of_for_ever_is_refused(
    memory: ConditionStore, command: str, seconds: Any
) -> None:
    assert " must last at most 7d" in refused(memory, command, code="gpu_xid/79", seconds=seconds, why="because")


@WISHES
@pytest.mark.parametrize("why", [None, "", "  "])
def test_a_pause_or_an_ack_without_a_reason_is_refused(memory: ConditionStore, command: str, why: Any) -> None:
    assert "needs a reason" in refused(memory, command, code="gpu_xid/79", seconds=60, why=why)


@pytest.mark.parametrize("command", ["pause", "ack", "repaired"])
def test_a_reason_is_one_printable_line_of_bounded_length(memory: ConditionStore, command: str) -> None:
    request: dict[str, Any] = {"code": "gpu_xid/79", "part": "0000:61:00.0", "seconds": 60}
    assert "at most 500 characters" in refused(memory, command, **request, why="x" * (MAX_REASON_LENGTH + 1))
    said = told(memory, command, **request, why=f"ticket\n12 \x1b[2J{'x' * (MAX_REASON_LENGTH - 14)}")
    assert "ticket 12 ?[2J" in said
    assert said.isprintable()


def test_after_a_pause_only_what_is_seen_again_acts(memory: ConditionStore) -> None:
    told(memory, "pause", seconds=1800, why="driver upgrade")
    assert may_drain(memory.ledger.conditions[0], memory.ledger.trusted_since - NOW)
    told(memory, "unpause")
    assert memory.ledger.pause is None
    assert not may_drain(memory.ledger.conditions[0], memory.ledger.trusted_since)


def test_without_a_pause_there_is_none_to_end(memory: ConditionStore) -> None:
    assert refused(memory, "unpause") == "healthd is not paused"


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


@given(st.sampled_from(sorted(COMMANDS)), st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("code", "part", "seconds", "why"), JSON)))  # fmt: skip
@settings(suppress_health_check=also(HealthCheck.function_scoped_fixture), deadline=None)
def test_whatever_a_request_says_it_is_done_or_refused(
    memory: ConditionStore, command: str, request_: dict[str, Any]
) -> None:
    with suppress(CommandRefused):
        assert told(memory, command, **request_)
    memory.save()


@given(st.sampled_from(sorted(FAILSLOW_COMMANDS)), st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("seconds", "why"), JSON)))  # fmt: skip
@settings(suppress_health_check=also(HealthCheck.function_scoped_fixture), deadline=None)
def test_whatever_a_request_on_detection_says_it_is_done_or_refused(
    tmp_path: Path, command: str, request_: dict[str, Any]
) -> None:
    with suppress(CommandRefused):
        assert FAILSLOW_COMMANDS[command](str(tmp_path), request_, "ann (uid 1000)", NOW)


def test_without_a_runtime_directory_nothing_is_paused_and_that_is_told(tmp_path: Path) -> None:
    wish = {"seconds": 60, "why": "x"}
    for command in FAILSLOW_COMMANDS:
        with pytest.raises(CommandRefused, match="No such file or directory"):
            FAILSLOW_COMMANDS[command](str(tmp_path / "none"), wish, "ann (uid 1000)", NOW)
