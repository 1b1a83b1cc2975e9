"""parse: from a line of an event stream to an event, or to the reason why it is invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from event_lines import line
from hypothesis import given
from hypothesis import strategies as st

from healthd.events.parse import InvalidLine, Key, StreamEvent, dropped_range, parse, seconds
from healthd.events.schema import EVENTS, LATEST


def parsed_event(**fields: Any) -> StreamEvent:
    found = parse(line(**fields))
    assert isinstance(found, StreamEvent), found
    return found


def invalid_reason(content: bytes) -> str:
    found = parse(content)
    assert isinstance(found, InvalidLine), found
    return found.why


def test_parse_reads_stream_and_number():
    event = parsed_event(seq=12, event="opened", code="gpu_xid/79", time="2026-11-22T12:11:20.123Z")
    assert (event.key, event.seq, event.at, event.unknown) == (Key("c1", "n1", "a" * 16), 12, 1795349480.123, "")
    assert event.fields["code"] == "gpu_xid/79"
    assert event.line == line(seq=12, event="opened", code="gpu_xid/79", time="2026-11-22T12:11:20.123Z")


@pytest.mark.parametrize("event", sorted(EVENTS))
def test_parse_recognises_each_event_of_schema(event):
    assert parsed_event(event=event).unknown == ""


def test_parse_keeps_and_names_events_of_newer_healthd():
    assert parsed_event(event="melted").unknown == "event melted"
    newer = parsed_event(schema=2, event="melted")
    assert (newer.unknown, newer.key, newer.seq) == ("schema 2", Key("c1", "n1", "a" * 16), 1)


def test_parse_of_newer_schema_may_have_no_key():
    newer = parse(b'{"schema":2,"who":"n1","no":"12"}')
    assert isinstance(newer, StreamEvent)
    assert (newer.key, newer.seq, newer.at, newer.unknown) == (None, None, None, "schema 2")
    half = parse(b'{"schema":2,"cluster":"c","node":"n","stream_id":"s"}')
    assert isinstance(half, StreamEvent)
    assert (half.key, half.seq) == (None, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is truncated or damaged: it is not JSON"),
        (line()[:-1], "is truncated or damaged: it is not JSON"),
        (line()[20:], "is truncated or damaged: it is not JSON"),
        (line() + line(), "is truncated or damaged: it is not JSON"),
        (line(mono=float("nan")), "is truncated or damaged: it is not JSON"),
        (b"[" * 100_000, "is truncated or damaged: it is not JSON"),
        (b"1" * 100_000, "is truncated or damaged: it is not JSON"),
        (line(code="\xe4").decode().encode("latin-1"), "is not UTF-8"),
        (b"[]", 'is not an event: "schema" is not a number'),
        (b"{}", 'is not an event: "schema" is not a number'),
        (line(schema=True), 'is not an event: "schema" is not a number'),
        (line(schema="1"), 'is not an event: "schema" is not a number'),
        (line(node=None), "is damaged: cluster, node or stream_id is missing"),
        (line(stream_id=""), "is damaged: cluster, node or stream_id is missing"),
        (line(seq="1"), "is damaged: seq is missing"),
        (line(seq=-1), "is damaged: seq is missing"),
        (line(seq=1.0), "is damaged: seq is missing"),
        (line(seq=2**63), "is damaged: seq is missing"),
        (line(time=1795349480), "is damaged: time must be UTC, such as 2026-11-22T12:11:20.123Z"),
        (line(time="2026-11-31T12:11:20.123Z"), "is damaged: time must be UTC, such as 2026-11-22T12:11:20.123Z"),
        (line(event=None), "is damaged: event is missing"),
        (line(event=""), "is damaged: event is missing"),
    ],
)
def test_parse_returns_reason_of_invalid_line(content, reason):
    assert invalid_reason(content) == reason


def test_parse_accepts_largest_64_bit_number():
    assert parsed_event(seq=2**63 - 1).seq == 2**63 - 1


def test_parse_accepts_empty_cluster_name():
    assert parsed_event(cluster="").key == Key("", "n1", "a" * 16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("1969-12-31T23:59:59.999Z", None),
        ("0001-01-01T00:00:00Z", None),
        ("9999-12-31T23:59:59Z", LATEST),
        ("9999-12-31T23:59:59.999999999Z", LATEST),
        ("2026-11-22T12:11:20.5Z", 1795349480.5),
        ("2026-11-22T12:11:20.123456789Z", 1795349480.123456789),
        ("2026-11-22T12:11:20.123", None),
        ("2026-11-22T12:11:20.123+01:00", None),
        ("2026-11-22 12:11:20Z", None),
        ("2026-11-22T12:11:20.Z", None),
        ("٢٠٢٦-11-22T12:11:20Z", None),
        ("0000-01-01T00:00:00Z", None),
        (None, None),
    ],
)
def test_seconds_parses_utc_times_only(text, expected):
    assert seconds(text) == expected


def test_dropped_range_returns_numbers_of_dropped_event():
    assert dropped_range(parsed_event(event="dropped", from_seq=5, to_seq=9, count=5)) == (5, 9)
    assert dropped_range(parsed_event(event="dropped", from_seq=9, to_seq=5)) is None
    assert dropped_range(parsed_event(event="dropped")) is None
    assert dropped_range(parsed_event(event="dropped", from_seq=0, to_seq=0, count=0, earlier=7)) is None
    assert dropped_range(parsed_event(event="opened", from_seq=5, to_seq=9)) is None
    assert dropped_range(parsed_event(schema=2, event="dropped", from_seq=5, to_seq=9)) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["schema", "cluster", "node", "stream_id", "seq", "time", "event", "from_seq", "to_seq"])


@given(st.dictionaries(FIELDS, PLAIN))
def test_parse_of_any_field_value_gives_event_or_reason(fields):
    whole = json.loads(line(event="dropped", from_seq=1, to_seq=2))
    found = parse(json.dumps({**whole, **fields}).encode())
    assert isinstance(found, InvalidLine) or found.fields["schema"] >= 0
    if isinstance(found, StreamEvent):
        dropped_range(found)


@given(st.binary(max_size=200))
def test_parse_of_any_bytes_gives_event_or_reason(content):
    assert isinstance(parse(content), InvalidLine) or json.loads(content)["schema"] is not None


@given(st.integers(0, 2**32), st.integers(0, 400))
def test_parse_rejects_truncated_line(seq, cut):
    whole = line(seq=seq, event="opened", code="gpu_xid/79", jobs=["1", "2"])
    assert isinstance(parse(whole[: min(cut, len(whole) - 1)]), InvalidLine)
