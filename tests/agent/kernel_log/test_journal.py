"""Tests of kernel lines in the systemd journal, with a fake of python-systemd's reader.

tests/e2e/test_real_kernel_log.py reads a real journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from healthd.agent.kernel_log.journal import JournalSource, read_journal

NOW_BOOT = "0f0c1f0e-5b86-4d0b-9d3c-7a9f6f0b1a11"
OLD_BOOT = "d2b8a8a0-30a7-4f0e-9a55-0b5f9d0c2b22"


def entry(text: str, boot: str, second: int, transport: str = "kernel") -> dict[str, Any]:
    """Return a journal entry with the fields and types of python-systemd."""
    return {
        "_TRANSPORT": transport,
        "_BOOT_ID": UUID(boot),
        "MESSAGE": text,
        "SYSLOG_IDENTIFIER": "kernel",
        "SYSLOG_FACILITY": 0,
        "_SOURCE_MONOTONIC_TIMESTAMP": timedelta(seconds=second),
        "__MONOTONIC_TIMESTAMP": SimpleNamespace(timestamp=timedelta(seconds=second), bootid=UUID(boot)),
        "__REALTIME_TIMESTAMP": datetime.fromtimestamp(1_000_000 + second, timezone.utc),
        "__CURSOR": f"s=1;i={second}",
    }


ENTRIES = (
    entry("of the earlier boot", OLD_BOOT, 3),
    entry("first", NOW_BOOT, 5),
    entry("of a service", NOW_BOOT, 6, transport="syslog"),
    entry("second", NOW_BOOT, 7),
)


class Reader:
    """A fake reader of ENTRIES. An entry must match one value of each field (sd_journal_add_match(3))."""

    def __init__(self, converters: object = None) -> None:
        self.matches: dict[str, set[str]] = {}
        self.remaining: Iterator[Mapping[str, Any]] = iter(())
        self.position = ""

    def add_match(self, **fields: str) -> None:
        for name, value in fields.items():
            self.matches.setdefault(name, set()).add(value)

    def matches_filter(self, entry: Mapping[str, Any]) -> bool:
        texts = {"_TRANSPORT": entry["_TRANSPORT"], "_BOOT_ID": entry["_BOOT_ID"].hex}
        return all(texts[name] in values for name, values in self.matches.items())

    def seek_head(self) -> None:
        self.remaining = filter(self.matches_filter, ENTRIES)

    def seek_cursor(self, cursor: str) -> None:
        """Make the entry of the cursor the next one (sd_journal_seek_cursor(3))."""
        if cursor not in {entry["__CURSOR"] for entry in ENTRIES}:
            raise ValueError("Invalid argument")
        self.remaining = filter(
            self.matches_filter, itertools.dropwhile(lambda entry: entry["__CURSOR"] != cursor, ENTRIES)
        )

    def test_cursor(self, cursor: str) -> bool:
        return cursor == self.position

    def seek_monotonic(self, seconds: float, boot_id: str) -> None:
        self.remaining = filter(self.matches_filter, ENTRIES)

    def get_next(self) -> Mapping[str, Any]:
        entry = next(self.remaining, {})
        self.position = entry.get("__CURSOR", self.position)
        return entry

    def process(self) -> int:
        return 0

    def close(self) -> None:
        self.remaining = iter(())


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systemd.journal.Reader", Reader)


def test_read_journal_returns_kernel_lines_from_requested_boot() -> None:
    assert [line.text for line in read_journal(NOW_BOOT, 0, 10_000_000, 10)] == ["first", "second"]
    assert [line.text for line in read_journal(OLD_BOOT, 0, 10_000_000, 10)] == ["of the earlier boot"]


def test_read_journal_returns_lines_strictly_between_two_times() -> None:
    assert [line.text for line in read_journal(NOW_BOOT, 5_000_000, 10_000_000, 10)] == ["second"]
    assert [line.text for line in read_journal(NOW_BOOT, 0, 7_000_000, 10)] == ["first"]
    assert [line.text for line in read_journal(NOW_BOOT, 0, 10_000_000, 1)] == ["first"]


def test_journal_source_reads_every_boot_without_boot_id() -> None:
    lines = JournalSource("", None).read()
    assert [line.text for line in lines] == ["of the earlier boot", "first", "second"]


def test_journal_source_reads_only_current_boot() -> None:
    assert [line.text for line in JournalSource(NOW_BOOT, None).read()] == ["first", "second"]


def test_journal_source_continues_after_last_line() -> None:
    first_source = JournalSource(NOW_BOOT, None)
    assert [line.text for line in first_source.read(1)] == ["first"]
    second_source = JournalSource(NOW_BOOT, first_source.cursor)
    assert [line.text for line in second_source.read()] == ["second"]
    assert second_source.read() == []
