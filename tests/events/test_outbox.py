"""outbox: events wait until they are on disk. They are numbered, limited, and dropped events are reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.events import outbox
from healthd.events.outbox import MAX_BYTES, MAX_LINES, Outbox, acknowledge, new_stream, put, truncate
from healthd.events.schema import MAX_TEXT, Event, Source

STREAM, OTHER = "0f3c6f1e2a9b4d57", "ffff000011112222"
SOURCE = Source("c1", "n1", "boot", STREAM)
NOW = 1795349480.0


def said(text: str = "") -> Event:
    return Event("stopped", {"why": text})


def told(box: Outbox, *events: Event, time: float = NOW) -> Outbox:
    return put(box, events, Source("c1", "n1", "boot", box.stream_id), time, 5.0)


def numbers(box: Outbox) -> list[int]:
    return [json.loads(line)["seq"] for line in box.lines]


def dropped(box: Outbox) -> list[tuple[int, int, int]]:
    lines = map(json.loads, box.lines)
    return [(e["count"], e["from_seq"], e["to_seq"]) for e in lines if e["event"] == "dropped"]


FULL = told(Outbox(STREAM), *[said()] * MAX_LINES)


def test_lines_are_numbered_from_one_and_stay_until_they_are_written():
    box = told(told(Outbox(STREAM), said(), said()), said())
    assert (numbers(box), box.next_seq) == ([1, 2, 3], 4)
    box = acknowledge(box, box.lines[:2])
    assert numbers(box) == [3]
    assert acknowledge(box, box.lines).lines == ()
    assert acknowledge(box, ["something else"]) == box


def test_a_clock_that_is_set_changes_no_line_that_waits():
    box = told(Outbox(STREAM), said())
    assert told(box, said(), time=NOW - 86400).lines[0] == box.lines[0]


def test_so_many_lines_fit_and_one_more_is_counted():
    assert (len(FULL.lines), FULL.dropped) == (MAX_LINES, 0)
    beyond = told(FULL, said(), said())
    assert beyond.lines == FULL.lines
    assert (beyond.dropped, beyond.dropped_from, beyond.dropped_to) == (2, MAX_LINES + 1, MAX_LINES + 2)


def test_so_many_bytes_fit_and_one_more_is_counted():
    box = Outbox(STREAM)
    while not box.dropped:
        before, box = box, told(box, said("x" * MAX_TEXT))
    room = MAX_BYTES - sum(len(line) + 1 for line in before.lines)
    empty = len(told(before, said()).lines[-1]) + 1
    assert 0 <= room - empty < MAX_TEXT
    assert not told(before, said("x" * (room - empty))).dropped
    assert told(before, said("x" * (room - empty + 1))).dropped == 1


def test_what_did_not_fit_is_told_once_there_is_room_before_anything_else_is():
    box = told(FULL, *[said()] * 5)
    box = told(acknowledge(box, box.lines[:2]), said("later"))
    assert dropped(box) == [(5, MAX_LINES + 1, MAX_LINES + 5)]
    assert [json.loads(line)["event"] for line in box.lines[-2:]] == ["dropped", "stopped"]
    assert numbers(box)[-2:] == [MAX_LINES + 6, MAX_LINES + 7]
    assert (box.dropped, box.dropped_from, box.dropped_to) == (0, 0, 0)


def test_where_only_that_word_fits_the_next_event_is_counted_again():
    box = told(acknowledge(told(FULL, said()), FULL.lines[:1]), said())
    assert dropped(box) == [(1, MAX_LINES + 1, MAX_LINES + 1)]
    assert (box.dropped, box.dropped_from) == (1, MAX_LINES + 3)


def test_it_is_told_also_where_nothing_else_happens():
    box = told(FULL, said())
    assert dropped(told(acknowledge(box, box.lines))) == [(1, MAX_LINES + 1, MAX_LINES + 1)]


def test_a_new_stream_numbers_anew_and_the_lines_of_the_one_before_are_still_written():
    box = told(new_stream(told(Outbox(STREAM), said()), OTHER), said())
    assert [(e["stream_id"], e["seq"]) for e in map(json.loads, box.lines)] == [(STREAM, 1), (OTHER, 1)]


def test_a_new_stream_tells_how_many_of_the_one_before_did_not_fit():
    box = new_stream(told(FULL, said(), said()), OTHER)
    box = told(acknowledge(box, box.lines))
    assert dropped(box) == [(0, 0, 0)]
    assert json.loads(box.lines[0])["earlier"] == 2


def test_numbers_are_named_only_of_lines_of_the_stream_they_are_in():
    waiting = new_stream(told(Outbox(STREAM, next_seq=50_000), said(), said()), OTHER)
    box = truncate(told(waiting, said(), said()), [])
    assert (box.dropped, box.dropped_from, box.dropped_to) == (4, 1, 2)
    box = told(box)
    assert dropped(box) == [(2, 1, 2)]
    assert json.loads(box.lines[0])["earlier"] == 2
    again = truncate(told(box, said()), [])
    assert (again.dropped, again.dropped_from, again.dropped_to) == (6, 1, 4)


def test_where_lines_of_the_stream_before_are_shed_no_number_is_named():
    box = truncate(new_stream(told(Outbox(STREAM), said(), said()), OTHER), [])
    assert (box.dropped, box.dropped_from, box.dropped_to) == (2, 0, 0)
    told_once = told(box)
    assert (told_once.dropped, truncate(told_once, []).dropped) == (0, 3)
    assert (truncate(told_once, []).dropped_from, truncate(told_once, []).dropped_to) == (1, 1)


def test_lines_that_are_shed_are_dropped_and_so_is_what_they_told_of_others():
    box = told(acknowledge(told(FULL, said(), said()), FULL.lines[: MAX_LINES - 1]))
    assert [json.loads(line)["seq"] for line in box.lines] == [MAX_LINES, MAX_LINES + 3]
    left = truncate(told(box, said()), box.lines[:1])
    assert numbers(left) == [MAX_LINES]
    assert (left.dropped, left.dropped_from, left.dropped_to) == (4, MAX_LINES + 1, MAX_LINES + 4)
    assert dropped(told(left)) == [(4, MAX_LINES + 1, MAX_LINES + 4)]
    assert truncate(box, box.lines) is box


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_every_number_is_a_line_or_is_named_by_a_dropped_event(steps):
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(outbox, "MAX_LINES", 25)
        box, on_disk = Outbox(STREAM), []
        for events, acknowledged in steps:
            box = told(box, *[said()] * events)
            assert len(box.lines) <= 25
            on_disk += box.lines[:acknowledged]
            box = acknowledge(box, box.lines[:acknowledged])
        on_disk += box.lines
        box = told(acknowledge(box, box.lines))
        on_disk += box.lines
    lines = list(map(json.loads, on_disk))
    named = [range(e["from_seq"], e["to_seq"] + 1) for e in lines if e["event"] == "dropped"]
    assert [len(some) for some in named] == [e["count"] for e in lines if e["event"] == "dropped"]
    seen = sorted([e["seq"] for e in lines] + [number for some in named for number in some])
    assert seen == list(range(1, box.next_seq))


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "acknowledge", "save", "full", "full unsaved", "boot"]), st.integers(0, 12)),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_was_shed_no_number_that_was_written_is_named_as_dropped_and_each_line_is_counted_once(steps):
    """Follow the daemon: a line is on disk only after a ledger with it was saved. A full /run drops the lines that are
    not in the last saved ledger, or all lines if none was saved."""
    with pytest.MonkeyPatch.context() as bound:
        bound.setattr(outbox, "MAX_LINES", 8)
        streams, given_before, on_disk = 0, 0, []
        box = saved = Outbox(f"{streams:016x}")
        for step, number in steps:
            if step == "put":
                box = told(box, *[said()] * number)
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
                streams, given_before = streams + 1, given_before + box.next_seq - 1
                box = saved = new_stream(box, f"{streams:016x}")
            assert_all_is_known(box, on_disk, given_before)


def assert_all_is_known(box: Outbox, on_disk: list[str], given_before: int) -> None:
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
    there = {(line["stream_id"], line["seq"]) for line in lines}
    assert not there & named
    here = {seq for stream, seq in there | named if stream == box.stream_id}
    assert here == set(range(1, box.next_seq)), "an unreported gap"
    told_of = sum(e["count"] + e.get("earlier", 0) for e in drops)
    assert len(there) + told_of + box.dropped == given_before + box.next_seq - 1
