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
from tests.agent.conditions.test_store import NOW, OPEN_XID


@pytest.fixture
def condition_store(tmp_path: Path) -> ConditionStore:
    """Return a store with the same fault on two GPUs."""
    other_gpu = replace(OPEN_XID, subject="0000:1b:00.0")
    new_store = ConditionStore(str(tmp_path), lambda: NOW)
    new_store.load(dict, "b1", Mode.ACT)
    set_conditions(new_store, OPEN_XID, other_gpu)
    return new_store


def set_conditions(condition_store: ConditionStore, *conditions: Condition) -> None:
    condition_store.set_conditions({(c.code, c.subject): c for c in conditions})


def run_command(condition_store: ConditionStore, command: str, **request: Any) -> str:
    return COMMANDS[command](condition_store, {"command": command, **request}, "ann (uid 1000)", NOW + 10)


def refusal(condition_store: ConditionStore, command: str, **request: Any) -> str:
    ledger_before = condition_store.ledger
    with pytest.raises(CommandRefused) as raised:
        run_command(condition_store, command, **request)
    assert condition_store.ledger == ledger_before
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_repaired_clears_only_named_part(condition_store: ConditionStore) -> None:
    reply = run_command(condition_store, "repaired", code="gpu_xid/79", part="0000:61:00.0")
    assert reply.startswith("repaired: gpu_xid/79 0000:61:00.0; ")
    assert [c.subject for c in condition_store.ledger.conditions] == ["0000:1b:00.0"]
    (cleared_condition,) = condition_store.ledger.cleared
    assert cleared_condition.cleared_by == "repaired by ann (uid 1000)"


def test_repaired_records_user_and_why(condition_store: ConditionStore) -> None:
    reply = run_command(condition_store, "repaired", code="gpu_xid/79", part="0000:61:00.0", why="reseated, ticket 12")
    assert reply == "repaired: gpu_xid/79 0000:61:00.0: reseated, ticket 12; all checks run now"
    assert condition_store.ledger.cleared[0].cleared_by == "repaired by ann (uid 1000): reseated, ticket 12"


def test_repaired_forgets_past_for_part(condition_store: ConditionStore) -> None:
    series = history.Series(3.0, NOW, "b1", ((NOW, 3.0),))
    keys = ("lost_total{pci=0000:61:00.0}", "lost_total{pci=0000:1b:00.0}")
    condition_store.set_past("gpu_xid", history.encode(dict.fromkeys(keys, series)))
    condition_store.set_past("ib_flap", history.encode(dict.fromkeys(keys, series)))
    run_command(condition_store, "repaired", code="gpu_xid/79", part="0000:61:00.0")
    assert [
        len(series_after.increments) for series_after in history.decode(condition_store.past["gpu_xid"]).values()
    ] == [0, 1]
    assert [
        len(series_after.increments) for series_after in history.decode(condition_store.past["ib_flap"]).values()
    ] == [1, 1]


def test_repaired_without_part_clears_all_parts(condition_store: ConditionStore) -> None:
    assert run_command(condition_store, "repaired", code="gpu_xid/79").count("gpu_xid/79") == 2
    assert condition_store.ledger.conditions == ()


def test_repaired_acknowledges_flag_until_changed(condition_store: ConditionStore) -> None:
    set_conditions(condition_store, replace(OPEN_XID, evidence="failure flag 1", last_level_seen=NOW))
    run_command(condition_store, "repaired", code="gpu_xid/79")
    (condition,) = condition_store.ledger.conditions
    assert (condition.state, condition.acknowledged_at) == (ConditionState.ACKNOWLEDGED, NOW + 10)
    assert not may_drain(condition, 0.0)


@pytest.mark.parametrize(
    "request_", [{"code": "gpu_xid/48"}, {"code": "gpu_xid/79", "part": "0000:99:00.0"}, {}, {"code": 7}, {"code": []}]
)
@pytest.mark.parametrize("command", ["repaired", "ack"])
def test_unknown_condition_is_refused_with_list(
    condition_store: ConditionStore, command: str, request_: dict[str, Any]
) -> None:
    message = refusal(condition_store, command, **{"seconds": 60, "why": "because", **request_})
    assert message.startswith("no condition ")
    assert "gpu_xid/79 0000:61:00.0" in message


def test_refusal_without_conditions_says_none(condition_store: ConditionStore) -> None:
    run_command(condition_store, "repaired", code="gpu_xid/79")
    assert refusal(condition_store, "repaired", code="gpu_xid/79").endswith(": none")


ONCE = ResumedDrain(NOW - 60, NOW - 50, True)
TWICE = DrainRecord(reason="healthd: gpu_xid/79 0000:61:00.0: it fell off", drained_at=NOW, resumed_drains=(ONCE, ONCE))


def clear_fault(condition_store: ConditionStore, cleared_at: float, **changes: Any) -> None:
    """Clear all conditions while healthd's drain stays, because it was not the first one."""
    cleared_condition = replace(
        OPEN_XID, state=ConditionState.CLEARED, cleared_at=cleared_at, cleared_by="pass", **changes
    )
    condition_store.change(conditions=(), cleared=(cleared_condition,), slurm=TWICE)


@pytest.mark.parametrize("severity", [Severity.CRITICAL, Severity.WARNING])
def test_repaired_accepts_cleared_fault_that_keeps_node_drained(
    condition_store: ConditionStore, severity: Severity
) -> None:
    """The Reason names the fault, also if it was only a warning in the end."""
    clear_fault(condition_store, NOW + 5, severity=severity)
    wait_text = flapping.wait_reason(
        replace(TWICE, own_hardware=True), flapping.Flapping(own_faults_per_hour=3), NOW + 9
    )
    assert '"healthd repaired gpu_xid/79"' in wait_text
    assert "gpu_xid/79 0000:61:00.0" in run_command(condition_store, "repaired", code="gpu_xid/79")
    assert condition_store.ledger.slurm == replace(TWICE, resumed_drains=())
    assert refusal(condition_store, "repaired", code="gpu_xid/79").endswith(": none")


def test_repaired_refuses_fault_cleared_before_drain(condition_store: ConditionStore) -> None:
    clear_fault(condition_store, NOW - 1)
    assert refusal(condition_store, "repaired", code="gpu_xid/79").endswith(": none")
    clear_fault(condition_store, NOW + 5, code="gpu_xid/13", severity=Severity.WARNING)
    assert refusal(condition_store, "repaired", code="gpu_xid/13").endswith(": none")
    clear_fault(condition_store, NOW + 5)
    message = refusal(condition_store, "ack", code="gpu_xid/79", seconds=60, why="because")
    assert message.endswith(": none")


def test_repaired_warning_keeps_resumed_drains(condition_store: ConditionStore) -> None:
    warning = replace(OPEN_XID, code="gpu_xid/13", severity=Severity.WARNING)
    set_conditions(condition_store, warning, OPEN_XID)
    condition_store.change(slurm=TWICE)
    run_command(condition_store, "repaired", code="gpu_xid/13")
    assert condition_store.ledger.slurm.resumed_drains == (ONCE, ONCE)
    run_command(condition_store, "repaired", code="gpu_xid/79")
    assert condition_store.ledger.slurm.resumed_drains == ()


def test_pause_is_stored_with_reason_and_user(condition_store: ConditionStore) -> None:
    assert run_command(condition_store, "pause", seconds=1800, why=" driver upgrade ") == (
        "paused for 30 min by ann (uid 1000): driver upgrade"
    )
    assert condition_store.ledger.pause == Pause(NOW + 1810, "driver upgrade", "ann (uid 1000)", NOW + 10)


def test_pause_replaces_earlier_pause(condition_store: ConditionStore) -> None:
    run_command(condition_store, "pause", seconds=1800, why="driver upgrade")
    run_command(condition_store, "pause", seconds=60, why="almost done")
    assert condition_store.ledger.pause == Pause(NOW + 70, "almost done", "ann (uid 1000)", NOW + 10)


PAUSE_AND_ACK = pytest.mark.parametrize("command", ["pause", "ack"])


@PAUSE_AND_ACK
@pytest.mark.parametrize(
    "seconds", [0, -1, None, True, "1800", MAX_SUPPRESSION_SECONDS + 1, float("nan"), float("inf")]
)
def test_pause_and_ack_refuse_invalid_duration(condition_store: ConditionStore, command: str, seconds: Any) -> None:
    assert " at most 7d" in refusal(condition_store, command, code="gpu_xid/79", seconds=seconds, why="because")


@PAUSE_AND_ACK
@pytest.mark.parametrize("reason", [None, "", "  "])
def test_pause_and_ack_require_reason(condition_store: ConditionStore, command: str, reason: Any) -> None:
    assert "needs a reason" in refusal(condition_store, command, code="gpu_xid/79", seconds=60, why=reason)


@pytest.mark.parametrize("command", ["pause", "ack", "repaired"])
def test_reason_is_single_bounded_printable_line(condition_store: ConditionStore, command: str) -> None:
    request: dict[str, Any] = {"code": "gpu_xid/79", "part": "0000:61:00.0", "seconds": 60}
    assert "at most 500 characters" in refusal(condition_store, command, **request, why="x" * (MAX_REASON_LENGTH + 1))
    reply = run_command(condition_store, command, **request, why=f"ticket\n12 \x1b[2J{'x' * (MAX_REASON_LENGTH - 14)}")
    assert "ticket 12 ?[2J" in reply
    assert reply.isprintable()


def test_unpause_drains_only_for_new_observations(condition_store: ConditionStore) -> None:
    run_command(condition_store, "pause", seconds=1800, why="driver upgrade")
    assert may_drain(condition_store.ledger.conditions[0], condition_store.ledger.trusted_since - NOW)
    run_command(condition_store, "unpause")
    assert condition_store.ledger.pause is None
    assert not may_drain(condition_store.ledger.conditions[0], condition_store.ledger.trusted_since)


def test_unpause_without_pause_is_refused(condition_store: ConditionStore) -> None:
    assert "not paused" in refusal(condition_store, "unpause")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


@given(st.sampled_from(sorted(COMMANDS)), st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("code", "part", "seconds", "why"), JSON)))  # fmt: skip
@settings(suppress_health_check=also(HealthCheck.function_scoped_fixture), deadline=None)
def test_commands_accept_or_refuse_any_request(
    condition_store: ConditionStore, command: str, request_: dict[str, Any]
) -> None:
    with suppress(CommandRefused):
        assert run_command(condition_store, command, **request_)
    condition_store.save()


@given(st.sampled_from(sorted(FAILSLOW_COMMANDS)), st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("seconds", "why"), JSON)))  # fmt: skip
@settings(suppress_health_check=also(HealthCheck.function_scoped_fixture), deadline=None)
def test_failslow_commands_accept_or_refuse_any_request(tmp_path: Path, command: str, request_: dict[str, Any]) -> None:
    with suppress(CommandRefused):
        assert FAILSLOW_COMMANDS[command](str(tmp_path), request_, "ann (uid 1000)", NOW)


def test_failslow_pause_without_runtime_dir_is_refused(tmp_path: Path) -> None:
    request = {"seconds": 60, "why": "x"}
    for command in FAILSLOW_COMMANDS:
        with pytest.raises(CommandRefused, match="No such file or directory"):
            FAILSLOW_COMMANDS[command](str(tmp_path / "none"), request, "ann (uid 1000)", NOW)
