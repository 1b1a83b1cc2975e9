"""rows: events as users read them, for any time in any time zone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.events.parse import StreamEvent, parse
from healthd.events.rows import rows
from healthd.events.schema import LATEST, Event, Source, render

SOURCE = Source("c1", "n1", "boot", "0f3c6f1e2a9b4d57")
STARTED = {"version": "1", "mode": "act", "clean": True}


@contextmanager
def zone(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TZ", name)
        time.tzset()
        try:
            yield
        finally:
            environment.undo()
            time.tzset()


def read(line: str) -> StreamEvent:
    told = parse(line.encode())
    assert isinstance(told, StreamEvent)
    return told


def shown(told: StreamEvent) -> list[str]:
    return "".join(rows([told], Page(200, False, False))).splitlines()


def started(at: float) -> StreamEvent:
    return read(render(SOURCE, 1, at, 1.0, Event("started", {**STARTED, "last_alive": at})))


def test_the_last_time_of_all_is_shown_in_utc_where_it_is_in_the_next_year():
    with zone("Asia/Tokyo"):
        day, row = shown(started(LATEST))
        assert day == "9999-12-31 Friday, times are UTC"
        assert row.startswith("23:59:59  started")
        assert "last alive 9999-12-31 23:59:59 UTC" in row
        day, row = shown(started(LATEST - 9 * 3600))
        assert day == "9999-12-31 Friday, times are JST"
        assert "last alive 9999-12-31 23:59:59;" in f"{row};"


def test_the_first_time_of_all_is_shown_in_every_zone():
    with zone("America/Los_Angeles"):
        day, row = shown(started(0.0))
        assert day == "1969-12-31 Wednesday, times are PST"
        assert "last alive 1969-12-31 16:00:00" in row


BEGIN = -62135596800  # start of the year 1
SECONDS = st.integers(BEGIN, int(LATEST)) | st.builds(
    lambda edge, off: min(max(edge + off, BEGIN), int(LATEST)),
    st.sampled_from([BEGIN, 0, int(LATEST)]),
    st.integers(-100_000, 100_000),
)
ZONES = st.builds("XXX{:+d}:{:02d}".format, st.integers(-24, 24), st.integers(0, 59)) | st.sampled_from(
    ["UTC", "Asia/Tokyo", "America/Los_Angeles", "Pacific/Kiritimati", "Europe/Berlin"]
)


@settings(max_examples=300, deadline=None)
@given(SECONDS, st.sampled_from(["", ".5", ".999999999"]), ZONES)
def test_every_time_that_is_read_is_shown_in_every_zone(second: int, fraction: str, where: str):
    text = f"{(datetime(1970, 1, 1) + timedelta(seconds=second)).isoformat()}{fraction}Z"
    fields = {**started(0.0).fields, "last_alive": text}
    told = parse(json.dumps({**fields, "time": text}).encode())
    assert isinstance(told, StreamEvent) == (second >= 0)
    late = read(json.dumps(fields))
    with zone(where):
        for one in (told, late) if isinstance(told, StreamEvent) else (late,):
            _day, row = shown(one)
            assert ("last alive unknown" in row) == (second < 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"count": 2, "from_seq": 4, "to_seq": 5},
            "2 events (4 to 5) were dropped because the stream could not be written",
        ),
        (
            {"count": 1, "from_seq": 4, "to_seq": 4, "earlier": 7},
            "1 event (4 to 4) and 7 events of an earlier stream were dropped because the stream could not be written",
        ),
        (
            {"count": 0, "from_seq": 0, "to_seq": 0, "earlier": 1},
            "1 event of an earlier stream were dropped because the stream could not be written",
        ),
    ],
)
def test_what_was_dropped_names_numbers_only_of_its_own_stream(fields: dict[str, int], words: str):
    _day, row = shown(read(render(SOURCE, 9, 0.0, 1.0, Event("dropped", fields))))
    assert row.split("  dropped ", 1)[1].strip() == words
