"""Tests of the evaluation of `make soak`: which mistakes it must detect and what is correct."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak.growth import Sample, growth_problems, slope
from soak.model import Command, Expected, find_problems

PART = "0000:61:00.0"
REASON = f"healthd: gpu_xid/79 {PART}: Xid 79"


def fault_event(event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "condition": "9d1c-1", "code": "gpu_xid/79", "subject": PART, **fields}


def events_of_fault() -> list[dict[str, Any]]:
    """Return the events of a fault, its drain, a job's requeue, an ack, a repair and the resume."""
    return [
        fault_event("opened"),
        {"event": "drain", "stage": "sent", "reason": REASON},
        {"event": "drain", "stage": "confirmed", "reason": REASON},
        {"event": "requeue", "stage": "sent", "job": "7"},
        {"event": "requeue", "stage": "confirmed", "job": "7"},
        fault_event("acknowledged"),
        fault_event("opened", was="acknowledged"),
        {"event": "repaired", "code": "gpu_xid/79"},
        fault_event("cleared"),
        {"event": "resume", "stage": "sent"},
        {"event": "resume", "stage": "confirmed", "reason": REASON},
    ]


def commands_of_fault() -> list[Command]:
    return [Command("drain", REASON), Command("requeue", "7"), Command("resume", "")]


def expectation(kills: int = 0) -> Expected:
    user_commands = {"acknowledged": (1, 1), "repaired": (1, 1)}
    expected = Expected(reports=user_commands, requeued={"7"}, kills=kills)
    expected.opened["gpu_xid/79", PART] = 1
    return expected


def test_correct_events_and_commands_are_accepted() -> None:
    assert find_problems(events_of_fault(), commands_of_fault(), expectation()) == []
    assert find_problems(events_of_fault(), commands_of_fault(), expectation(kills=3)) == []


@pytest.mark.parametrize("index", range(len(events_of_fault())))
@pytest.mark.parametrize("kills", [0, 1])
def test_duplicate_event_is_detected(index: int, kills: int) -> None:
    events = events_of_fault()
    events.insert(index, events[index])
    is_allowed = kills and (events[index]["event"], events[index].get("stage")) in {
        *(("drain", stage) for stage in ("sent", "confirmed")),
        *(("resume", stage) for stage in ("sent", "confirmed")),
        ("requeue", "sent"),  # a kill may come between the event and the command; the event is then sent again
    }
    ends_acknowledgement = events[index].get("was") == "acknowledged"  # the number of these events depends on the acks
    assert bool(find_problems(events, commands_of_fault(), expectation(kills))) is not bool(
        is_allowed or ends_acknowledgement
    )


@pytest.mark.parametrize("index", range(len(events_of_fault())))
def test_missing_event_is_detected(index: int) -> None:
    events = events_of_fault()
    removed = events.pop(index)
    is_wrong = bool(find_problems(events, commands_of_fault(), expectation()))
    assert is_wrong is (removed.get("was") != "acknowledged")


@pytest.mark.parametrize("index", range(3))
def test_repeated_or_missing_command_is_detected(index: int) -> None:
    twice, missing = commands_of_fault(), commands_of_fault()
    twice.insert(index, twice[index])
    del missing[index]
    assert find_problems(events_of_fault(), twice, expectation(kills=5)) != []
    assert find_problems(events_of_fault(), missing, expectation()) != []


def test_unexpected_and_missing_faults_are_detected() -> None:
    expected = expectation()
    expected.opened["gpu_xid/79", "0000:62:00.0"] = 1
    assert find_problems(events_of_fault(), commands_of_fault(), expected) == [
        "gpu_xid/79 0000:62:00.0 opened 0 times, not 1"
    ]
    expected = expectation()
    del expected.opened["gpu_xid/79", PART]
    expected.opened["gpu_xid/31", PART] = 0
    assert find_problems(events_of_fault(), commands_of_fault(), expected) == [], (
        "unexpected codes may open any number of times"
    )
    expected.opened["gpu_xid/79", PART] = 0
    assert find_problems(events_of_fault(), commands_of_fault(), expected) == [
        f"gpu_xid/79 {PART} opened 1 times, not 0"
    ]


def test_unanswered_command_may_have_worked_but_is_reported_once() -> None:
    refused = {"event": "drain", "stage": "refused", "reason": REASON, "error": "no answer"}
    events, twice = events_of_fault(), [commands_of_fault()[0], *commands_of_fault()]
    late = [*events[:2], refused, *events[2:]]
    assert find_problems(late, commands_of_fault(), expectation()) == []
    assert find_problems([*events[:2], refused, *events[1:]], twice, expectation()) == []
    assert find_problems([*events[:2], refused, refused, *events[2:]], commands_of_fault(), expectation()) != []
    assert find_problems([*late[:4], refused, *late[4:]], commands_of_fault(), expectation()) != []


def test_dropped_lines_are_reported() -> None:
    events = [*events_of_fault(), {"event": "dropped", "count": 2, "from_seq": 7, "to_seq": 8}]
    (mistake,) = find_problems(events, commands_of_fault(), expectation())
    assert mistake.startswith("the stream dropped lines: ")


def test_repeated_requeue_is_detected_after_kills() -> None:
    twice = [*commands_of_fault(), Command("requeue", "7")]
    events = [*events_of_fault(), {"event": "requeue", "stage": "sent", "job": "7"}]
    assert any("requeued not once" in mistake for mistake in find_problems(events, twice, expectation(kills=9)))


def samples(descriptors: list[float], kib: list[float]) -> list[Sample]:
    values = (
        {"descriptors": count, "own memory of the daemon, KiB": kib_value}
        for count, kib_value in zip(descriptors, kib, strict=True)
    )
    return [Sample(60.0 * number, 100 * number, 1, value) for number, value in enumerate(values)]


def test_growth_counts_each_descriptor_but_memory_only_after_warm_up() -> None:
    level = [20000.0, 21000, 22000, 22000, 22000, 22000]
    assert growth_problems(samples([14.0] * 6, level), 1024, 0) == []
    assert growth_problems(samples([14.0, 15, 15, 15, 14, 14], level), 1024, 0) == [], "it was closed again"
    (mistake,) = growth_problems(samples([14.0, 14, 14, 14, 14, 15], level), 1024, 0)
    assert mistake == "descriptors: 14 in round 0, 15 in 500"
    (mistake,) = growth_problems(samples([14.0] * 6, [*level[:-1], 24000.0]), 1024, 0)
    assert mistake == "own memory of the daemon, KiB: 22000 in round 200, 24000 in 500"


def test_slope_ignores_warm_up() -> None:
    grown = samples([14.0] * 6, [0.0, 0, 1000, 1010, 1020, 1030])
    assert slope(grown, "own memory of the daemon, KiB") == pytest.approx(100)
    assert slope(grown[:1], "descriptors") == 0.0
