"""Tests of the evaluation of `make soak`: which mistakes it must detect and what is correct."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak.growth import Sample, slope, what_grew
from soak.model import Command, Wanted, what_is_wrong

PART = "0000:61:00.0"
REASON = f"healthd: gpu_xid/79 {PART}: Xid 79"


def of_fault(event: str, **also: Any) -> dict[str, Any]:
    return {"event": event, "condition": "9d1c-1", "code": "gpu_xid/79", "subject": PART, **also}


def story() -> list[dict[str, Any]]:
    """Return the events of a fault, its drain, a job's requeue, an ack, a repair and the resume."""
    return [
        of_fault("opened"),
        {"event": "drain", "stage": "sent", "reason": REASON},
        {"event": "drain", "stage": "confirmed", "reason": REASON},
        {"event": "requeue", "stage": "sent", "job": "7"},
        {"event": "requeue", "stage": "confirmed", "job": "7"},
        of_fault("acknowledged"),
        of_fault("opened", was="acknowledged"),
        {"event": "repaired", "code": "gpu_xid/79"},
        of_fault("cleared"),
        {"event": "resume", "stage": "sent"},
        {"event": "resume", "stage": "confirmed", "reason": REASON},
    ]


def commands() -> list[Command]:
    return [Command("drain", REASON), Command("requeue", "7"), Command("resume", "")]


def wanted(kills: int = 0) -> Wanted:
    told = {"acknowledged": (1, 1), "repaired": (1, 1)}
    made = Wanted(told=told, requeued={"7"}, kills=kills)
    made.opened["gpu_xid/79", PART] = 1
    return made


def test_what_was_told_and_done_once_is_right() -> None:
    assert what_is_wrong(story(), commands(), wanted()) == []
    assert what_is_wrong(story(), commands(), wanted(kills=3)) == []


@pytest.mark.parametrize("at", range(len(story())))
@pytest.mark.parametrize("kills", [0, 1])
def test_an_event_that_is_told_twice_is_seen(at: int, kills: int) -> None:
    events = story()
    events.insert(at, events[at])
    known = kills and (events[at]["event"], events[at].get("stage")) in {
        *(("drain", stage) for stage in ("sent", "confirmed")),
        *(("resume", stage) for stage in ("sent", "confirmed")),
        ("requeue", "sent"),  # a kill may come between the event and the command; the event is then sent again
    }
    again = events[at].get("was") == "acknowledged"  # the number of these events depends on the acks
    assert bool(what_is_wrong(events, commands(), wanted(kills))) is not bool(known or again)


@pytest.mark.parametrize("at", range(len(story())))
def test_an_event_that_is_missing_is_seen(at: int) -> None:
    events = story()
    gone = events.pop(at)
    is_wrong = bool(what_is_wrong(events, commands(), wanted()))
    assert is_wrong is (gone.get("was") != "acknowledged")


@pytest.mark.parametrize("at", range(3))
def test_a_command_that_was_run_twice_or_never_is_seen(at: int) -> None:
    twice, never = commands(), commands()
    twice.insert(at, twice[at])
    del never[at]
    assert what_is_wrong(story(), twice, wanted(kills=5)) != []
    assert what_is_wrong(story(), never, wanted()) != []


def test_a_fault_that_nobody_made_is_seen_and_one_that_was_made_and_not_told_too() -> None:
    made = wanted()
    made.opened["gpu_xid/79", "0000:62:00.0"] = 1
    assert what_is_wrong(story(), commands(), made) == ["gpu_xid/79 0000:62:00.0 opened 0 times, not 1"]
    made = wanted()
    del made.opened["gpu_xid/79", PART]
    made.opened["gpu_xid/31", PART] = 0
    assert what_is_wrong(story(), commands(), made) == [], "unexpected codes may open any number of times"
    made.opened["gpu_xid/79", PART] = 0
    assert what_is_wrong(story(), commands(), made) == [f"gpu_xid/79 {PART} opened 1 times, not 0"]


def test_a_command_without_an_answer_may_have_worked_and_is_told_once_all_the_same() -> None:
    refused = {"event": "drain", "stage": "refused", "reason": REASON, "error": "no answer"}
    events, twice = story(), [commands()[0], *commands()]
    late = [*events[:2], refused, *events[2:]]
    assert what_is_wrong(late, commands(), wanted()) == []
    assert what_is_wrong([*events[:2], refused, *events[1:]], twice, wanted()) == []
    assert what_is_wrong([*events[:2], refused, refused, *events[2:]], commands(), wanted()) != []
    assert what_is_wrong([*late[:4], refused, *late[4:]], commands(), wanted()) != []


def test_lines_for_which_the_stream_had_no_room_are_named() -> None:
    events = [*story(), {"event": "dropped", "count": 2, "from_seq": 7, "to_seq": 8}]
    (said,) = what_is_wrong(events, commands(), wanted())
    assert said.startswith("the stream had no room for lines: ")


def test_a_job_that_was_requeued_twice_is_seen_also_after_kills() -> None:
    twice = [*commands(), Command("requeue", "7")]
    events = [*story(), {"event": "requeue", "stage": "sent", "job": "7"}]
    assert any("requeued not once" in said for said in what_is_wrong(events, twice, wanted(kills=9)))


def samples(descriptors: list[float], kib: list[float]) -> list[Sample]:
    values = ({"descriptors": d, "own memory of the daemon, KiB": k} for d, k in zip(descriptors, kib, strict=True))
    return [Sample(60.0 * n, 100 * n, 1, value) for n, value in enumerate(values)]


def test_one_descriptor_more_has_grown_and_memory_after_the_warm_up_only() -> None:
    level = [20000.0, 21000, 22000, 22000, 22000, 22000]
    assert what_grew(samples([14.0] * 6, level), 1024, 0) == []
    assert what_grew(samples([14.0, 15, 15, 15, 14, 14], level), 1024, 0) == [], "it was closed again"
    (said,) = what_grew(samples([14.0, 14, 14, 14, 14, 15], level), 1024, 0)
    assert said == "descriptors: 14 in round 0, 15 in 500"
    (said,) = what_grew(samples([14.0] * 6, [*level[:-1], 24000.0]), 1024, 0)
    assert said == "own memory of the daemon, KiB: 22000 in round 200, 24000 in 500"


def test_the_slope_is_that_of_the_line_through_what_came_after_the_warm_up() -> None:
    grown = samples([14.0] * 6, [0.0, 0, 1000, 1010, 1020, 1030])
    assert slope(grown, "own memory of the daemon, KiB") == pytest.approx(100)
    assert slope(grown[:1], "descriptors") == 0.0
