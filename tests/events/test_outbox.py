"""outbox: events wait until they are on disk. They are numbered, limited, and dropped events are reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.events import outbox
from healthd.events.outbox import MAX_BYTES, MAX_LINES, Outbox, acknowledge, new_stream, put, truncate
from healthd.events.schema import MAX_TEXT, Event, Source

STREAM, OTHER_STREAM = "0f3c6f1e2a9b4d57", "ffff000011112222"
SOURCE = Source("c1", "n1", "boot", STREAM)
NOW = 1795349480.0


def stopped_event(text: str = "") -> Event:
    return Event("stopped", {"why": text})


def put_events(box: Outbox, *events: Event, time: float = NOW) -> Outbox:
    return put(box, events, Source("c1", "n1", "boot", box.stream_id), time, 5.0)


def numbers(box: Outbox) -> list[int]:
    return [json.loads(line)["seq"] for line in box.lines]


def dropped_ranges(box: Outbox) -> list[tuple[int, int, int]]:
    lines = map(json.loads, box.lines)
    return [(e["count"], e["from_seq"], e["to_seq"]) for e in lines if e["event"] == "dropped"]


FULL = put_events(Outbox(STREAM), *[stopped_event()] * MAX_LINES)


def test_put_numbers_lines_and_acknowledge_removes_them():
    box = put_events(put_events(Outbox(STREAM), stopped_event(), stopped_event()), stopped_event())
    assert (numbers(box), box.next_seq) == ([1, 2, 3], 4)
    box = acknowledge(box, box.lines[:2])
    assert numbers(box) == [3]
    assert acknowledge(box, box.lines).lines == ()
    assert acknowledge(box, ["something else"]) == box


def test_clock_change_does_not_alter_waiting_lines():
    box = put_events(Outbox(STREAM), stopped_event())
    assert put_events(box, stopped_event(), time=NOW - 86400).lines[0] == box.lines[0]


def test_put_accepts_max_lines_and_counts_further_ones():
    assert (len(FULL.lines), FULL.dropped) == (MAX_LINES, 0)
    beyond = put_events(FULL, stopped_event(), stopped_event())
    assert beyond.lines == FULL.lines
    assert (beyond.dropped, beyond.dropped_from, beyond.dropped_to) == (2, MAX_LINES + 1, MAX_LINES + 2)


def test_put_accepts_max_bytes_and_counts_further_lines():
    box = Outbox(STREAM)
    while not box.dropped:
        before, box = box, put_events(box, stopped_event("x" * MAX_TEXT))
    room = MAX_BYTES - sum(len(line) + 1 for line in before.lines)
    empty = len(put_events(before, stopped_event()).lines[-1]) + 1
    assert 0 <= room - empty < MAX_TEXT
    assert not put_events(before, stopped_event("x" * (room - empty))).dropped
    assert put_events(before, stopped_event("x" * (room - empty + 1))).dropped == 1


def test_put_reports_dropped_lines_first_when_there_is_room():
    box = put_events(FULL, *[stopped_event()] * 5)
    box = put_events(acknowledge(box, box.lines[:2]), stopped_event("later"))
    assert dropped_ranges(box) == [(5, MAX_LINES + 1, MAX_LINES + 5)]
    assert [json.loads(line)["event"] for line in box.lines[-2:]] == ["dropped", "stopped"]
    assert numbers(box)[-2:] == [MAX_LINES + 6, MAX_LINES + 7]
    assert (box.dropped, box.dropped_from, box.dropped_to) == (0, 0, 0)


def test_put_counts_next_event_if_only_dropped_event_fits():
    box = put_events(acknowledge(put_events(FULL, stopped_event()), FULL.lines[:1]), stopped_event())
    assert dropped_ranges(box) == [(1, MAX_LINES + 1, MAX_LINES + 1)]
    assert (box.dropped, box.dropped_from) == (1, MAX_LINES + 3)


def test_put_without_events_reports_dropped_lines():
    box = put_events(FULL, stopped_event())
    assert dropped_ranges(put_events(acknowledge(box, box.lines))) == [(1, MAX_LINES + 1, MAX_LINES + 1)]


def test_new_stream_restarts_numbers_and_keeps_earlier_lines():
    box = put_events(new_stream(put_events(Outbox(STREAM), stopped_event()), OTHER_STREAM), stopped_event())
    assert [(e["stream_id"], e["seq"]) for e in map(json.loads, box.lines)] == [(STREAM, 1), (OTHER_STREAM, 1)]


def test_new_stream_reports_dropped_lines_of_previous_stream():
    box = new_stream(put_events(FULL, stopped_event(), stopped_event()), OTHER_STREAM)
    box = put_events(acknowledge(box, box.lines))
    assert dropped_ranges(box) == [(0, 0, 0)]
    assert json.loads(box.lines[0])["earlier"] == 2


def test_dropped_event_has_numbers_only_of_its_stream():
    waiting = new_stream(put_events(Outbox(STREAM, next_seq=50_000), stopped_event(), stopped_event()), OTHER_STREAM)
    box = truncate(put_events(waiting, stopped_event(), stopped_event()), [])
    assert (box.dropped, box.dropped_from, box.dropped_to) == (4, 1, 2)
    box = put_events(box)
    assert dropped_ranges(box) == [(2, 1, 2)]
    assert json.loads(box.lines[0])["earlier"] == 2
    again = truncate(put_events(box, stopped_event()), [])
    assert (again.dropped, again.dropped_from, again.dropped_to) == (6, 1, 4)


def test_truncate_of_previous_stream_lines_reports_no_numbers():
    box = truncate(new_stream(put_events(Outbox(STREAM), stopped_event(), stopped_event()), OTHER_STREAM), [])
    assert (box.dropped, box.dropped_from, box.dropped_to) == (2, 0, 0)
    reported = put_events(box)
    assert (reported.dropped, truncate(reported, []).dropped) == (0, 3)
    assert (truncate(reported, []).dropped_from, truncate(reported, []).dropped_to) == (1, 1)


def test_truncate_counts_lines_of_a_removed_dropped_event():
    box = put_events(acknowledge(put_events(FULL, stopped_event(), stopped_event()), FULL.lines[: MAX_LINES - 1]))
    assert [json.loads(line)["seq"] for line in box.lines] == [MAX_LINES, MAX_LINES + 3]
    truncated = truncate(put_events(box, stopped_event()), box.lines[:1])
    assert numbers(truncated) == [MAX_LINES]
    assert (truncated.dropped, truncated.dropped_from, truncated.dropped_to) == (4, MAX_LINES + 1, MAX_LINES + 4)
    assert dropped_ranges(put_events(truncated)) == [(4, MAX_LINES + 1, MAX_LINES + 4)]
    assert truncate(box, box.lines) is box


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_every_number_is_a_line_or_in_a_dropped_event(steps):
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(outbox, "MAX_LINES", 25)
        box, on_disk = Outbox(STREAM), []
        for events, acknowledged in steps:
            box = put_events(box, *[stopped_event()] * events)
            assert len(box.lines) <= 25
            on_disk += box.lines[:acknowledged]
            box = acknowledge(box, box.lines[:acknowledged])
        on_disk += box.lines
        box = put_events(acknowledge(box, box.lines))
        on_disk += box.lines
    lines = list(map(json.loads, on_disk))
    named = [range(e["from_seq"], e["to_seq"] + 1) for e in lines if e["event"] == "dropped"]
    assert [len(dropped_range) for dropped_range in named] == [e["count"] for e in lines if e["event"] == "dropped"]
    all_numbers = sorted([e["seq"] for e in lines] + [number for dropped_range in named for number in dropped_range])
    assert all_numbers == list(range(1, box.next_seq))


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "acknowledge", "save", "full", "full unsaved", "boot"]), st.integers(0, 12)),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_number_is_counted_exactly_once_after_truncation(steps):
    """Follow the daemon: a line is on disk only after a ledger with it was saved. A full /run drops the lines that are
    not in the last saved ledger, or all lines if none was saved."""
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(outbox, "MAX_LINES", 8)
        streams, numbers_before, on_disk = 0, 0, []
        box = saved = Outbox(f"{streams:016x}")
        for step, number in steps:
            if step == "put":
                box = put_events(box, *[stopped_event()] * number)
            elif step == "acknowledge":
                lines = [line for line in saved.lines if line in box.lines][:number]
                on_disk += lines
                box = acknowledge(box, lines)
            elif step == "save":
                saved = box
            elif step == "full":
                box = saved = truncate(box, saved.lines)
            elif step == "full unsaved":
                box = saved = truncate(box, [])
            else:
                streams, numbers_before = streams + 1, numbers_before + box.next_seq - 1
                box = saved = new_stream(box, f"{streams:016x}")
            assert_all_numbers_counted(box, on_disk, numbers_before)


def assert_all_numbers_counted(box: Outbox, on_disk: list[str], numbers_before: int) -> None:
    lines = [json.loads(line) for line in (*on_disk, *box.lines)]
    drops = [line for line in lines if line["event"] == "dropped"]
    ranges = [(e["stream_id"], e["from_seq"], e["to_seq"], e["count"]) for e in drops]
    mine = box.dropped_to - box.dropped_from + 1 if box.dropped_from else 0
    named = set()
    for stream, first, last, count in (*ranges, (box.stream_id, box.dropped_from, box.dropped_to, mine)):
        numbers = {(stream, seq) for seq in range(first, last + 1) if first}
        assert len(numbers) == count
        assert not numbers & named
        named |= numbers
    line_numbers = {(line["stream_id"], line["seq"]) for line in lines}
    assert not line_numbers & named
    numbers_of_stream = {seq for stream, seq in line_numbers | named if stream == box.stream_id}
    assert numbers_of_stream == set(range(1, box.next_seq)), "an unreported gap"
    dropped_count = sum(e["count"] + e.get("earlier", 0) for e in drops)
    assert len(line_numbers) + dropped_count + box.dropped == numbers_before + box.next_seq - 1
