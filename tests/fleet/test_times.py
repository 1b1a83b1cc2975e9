"""Tests of times as Slurm and people write them: one meaning, or an error that names the text."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.times import TimeError, load_zone, parse_duration, parse_limit, parse_seconds

BERLIN = load_zone("Europe/Berlin")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/Sao_Paulo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1700000000", 1_700_000_000),
        ("1700000000.75", 1_700_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000),
        ("2023-11-14 22:13:20 UTC", 1_700_000_000),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000),
        ("2023-11-14T17:13:20-0500", 1_700_000_000),
        ("2023-11-14T23:13:20", 1_700_000_000),
        ("2023-11-14T23:13:20.123456", 1_700_000_000),
        ("2023-11-14", 1_699_916_400),
        ("2023-11-14T23:13", 1_699_999_980),
        *(("Unknown", None), ("None", None), ("N/A", None), ("", None), ("0", None)),
    ],
)
def test_parse_seconds_reads_each_format(text: str, expected: int | None) -> None:
    assert parse_seconds(text, BERLIN) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("yesterday", "2023-13-01T00:00:00", "2023-02-30T00:00:00", "2023-11-14T25:00:00", "14.11.2023", "-5", "1e9"),
        *(
            "99999999999",
            "1969-12-31T00:00:00Z",
            "2101-01-01",
            "١٧٠٠٠٠٠٠٠٠",
            "2023-11-14T23:13:20 CET",
            "###",
            "9" * 4000,
        ),
    ],
)
def test_parse_seconds_rejects_invalid_time(text: str) -> None:
    with pytest.raises(TimeError):
        parse_seconds(text, BERLIN)


def test_parse_seconds_requires_zone() -> None:
    with pytest.raises(TimeError, match="add --timezone"):
        parse_seconds("2023-11-14T23:13:20")
    assert parse_seconds("1700000000") == 1_700_000_000


def test_parse_seconds_rejects_ambiguous_hour() -> None:
    assert parse_seconds("2026-10-25T01:59:59", BERLIN) == 1_792_886_399
    for text in ("2026-10-25T02:00:00", "2026-10-25T02:30:00", "2026-10-25T02:59:59"):
        with pytest.raises(TimeError, match=rf"^{text} occurs twice in Europe/Berlin, when clocks are set back$"):
            parse_seconds(text, BERLIN)
    assert parse_seconds("2026-10-25T03:00:00", BERLIN) == 1_792_893_600


def test_parse_seconds_rejects_missing_hour() -> None:
    assert parse_seconds("2026-03-29T01:59:59", BERLIN) == 1_774_745_999
    with pytest.raises(TimeError, match="does not exist in Europe/Berlin, when clocks are set forward"):
        parse_seconds("2026-03-29T02:30:00", BERLIN)
    assert parse_seconds("2026-03-29T03:00:00", BERLIN) == 1_774_746_000


def test_load_zone_rejects_unknown_zone() -> None:
    for name in ("Mars/Olympus", "../../etc/passwd", "", "CEST\0"):
        with pytest.raises(TimeError, match="unknown time zone"):
            load_zone(name)


@given(st.integers(1, 4_102_000_000), st.sampled_from(ZONES))
def test_parse_seconds_round_trips_or_names_ambiguous_hour(moment: int, name: str) -> None:
    where = load_zone(name)
    written = datetime.datetime.fromtimestamp(moment, where)
    assert parse_seconds(written.isoformat()) == moment
    local = written.replace(tzinfo=None).isoformat()
    if written.utcoffset() == written.replace(fold=1 - written.fold).utcoffset():
        assert parse_seconds(local, where) == moment
    else:
        with pytest.raises(TimeError, match="occurs twice in"):
            parse_seconds(local, where)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    for read in (lambda t: parse_seconds(t, BERLIN), parse_duration, parse_limit):
        try:
            value = read(text)
        except TimeError:
            continue
        assert value is None or value >= 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00:00:00", 0),
        ("01:02:03", 3723),
        ("1-01:02:03", 90123),
        ("02:03.456", 123),
        ("2-12", 216000),
        ("120:00:01", 432001),
    ],
)
def test_parse_duration_reads_each_format(text: str, expected: int) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "5", "INVALID", "-1:00:00", "00:00:00:00"])
def test_parse_duration_rejects_invalid_text(text: str) -> None:
    with pytest.raises(TimeError):
        parse_duration(text)


def test_parse_limit_reads_minutes_or_none() -> None:
    assert (parse_limit("90"), parse_limit("UNLIMITED"), parse_limit("Partition_Limit"), parse_limit("")) == (
        5400,
        None,
        None,
        None,
    )
    with pytest.raises(TimeError):
        parse_limit("1:30")
