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
    event = parse(line.encode())
    assert isinstance(event, StreamEvent)
    return event


def row_lines(event: StreamEvent) -> list[str]:
    return "".join(rows([event], Page(200, False, False))).splitlines()


def started_event(at: float) -> StreamEvent:
    return read(render(SOURCE, 1, at, 1.0, Event("started", {**STARTED, "last_alive": at})))


def test_rows_name_each_gpu_by_its_serial_number_or_uuid():
    gpus = [
        {"subject": "0000:1b:00.0", "serial": "1650522003820", "uuid": "GPU-a", "name": "H100"},
        {"subject": "0000:61:00.0", "serial": "", "uuid": "GPU-b", "name": "H100"},
    ]
    row = row_lines(read(render(SOURCE, 1, 1.0, 1.0, Event("gpus", {"gpus": gpus}))))[-1]
    assert row.endswith("2 GPUs: 0000:1b:00.0 serial 1650522003820, 0000:61:00.0 GPU-b")


def test_rows_show_latest_time_in_utc_if_local_year_overflows():
    with zone("Asia/Tokyo"):
        day, row = row_lines(started_event(LATEST))
        assert day == "9999-12-31 Friday, times are UTC"
        assert row.startswith("23:59:59  started")
        assert "last alive 9999-12-31 23:59:59 UTC" in row
        day, row = row_lines(started_event(LATEST - 9 * 3600))
        assert day == "9999-12-31 Friday, times are JST"
        assert "last alive 9999-12-31 23:59:59;" in f"{row};"


def test_rows_show_first_time_in_every_zone():
    with zone("America/Los_Angeles"):
        day, row = row_lines(started_event(0.0))
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
def test_rows_show_every_parsed_time_in_every_zone(second: int, fraction: str, where: str):
    text = f"{(datetime(1970, 1, 1) + timedelta(seconds=second)).isoformat()}{fraction}Z"
    fields = {**started_event(0.0).fields, "last_alive": text}
    parsed = parse(json.dumps({**fields, "time": text}).encode())
    assert isinstance(parsed, StreamEvent) == (second >= 0)
    late = read(json.dumps(fields))
    with zone(where):
        for event in (parsed, late) if isinstance(parsed, StreamEvent) else (late,):
            _day, row = row_lines(event)
            assert ("last alive unknown" in row) == (second < 0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"count": 2, "from_seq": 4, "to_seq": 5},
            "2 events (4 to 5) were dropped because the stream could not be written",
        ),
        (
            {"count": 1, "from_seq": 4, "to_seq": 4, "earlier": 7},
            "1 event (4 to 4) and 7 events from an earlier stream were dropped because the stream could not be written",
        ),
        (
            {"count": 0, "from_seq": 0, "to_seq": 0, "earlier": 1},
            "1 event from an earlier stream were dropped because the stream could not be written",
        ),
    ],
)
def test_rows_name_dropped_numbers_only_of_the_same_stream(fields: dict[str, int], text: str):
    _day, row = row_lines(read(render(SOURCE, 9, 0.0, 1.0, Event("dropped", fields))))
    assert row.split("  dropped ", 1)[1].strip() == text
