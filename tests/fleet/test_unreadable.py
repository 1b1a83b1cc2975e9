"""Rows that cannot be read are counted and shown, and more than 1 % of a source's are too many."""

from __future__ import annotations

from healthd.fleet.unreadable import SHOWN, Unread


def test_a_row_is_shown_with_file_and_line():
    rows = Unread()
    rows.read("tickets", 1999)
    rows.add("tickets", "t.csv", 17, "closed before it was opened")
    assert list(rows.told()) == [
        "tickets: t.csv:17: closed before it was opened",
        "tickets: 1 of 2,000 rows could not be read (less than 0.1 %)",
    ]


def test_what_has_no_lines_is_shown_without():
    rows = Unread()
    rows.add("prometheus", "http://vm:8428", 0, "no number: x")
    assert next(rows.told()) == "prometheus: http://vm:8428: no number: x"


def test_the_first_rows_are_shown_and_the_others_counted():
    rows = Unread()
    for line in range(1, SHOWN + 3):
        rows.add("sacct", "a.txt", line, "cut")
    told = list(rows.told())
    assert told[SHOWN - 1 :] == [
        f"sacct: a.txt:{SHOWN}: cut",
        "... and 2 more",
        f"sacct: {SHOWN + 2} of {SHOWN + 2} rows could not be read (100.0 %)",
    ]


def test_one_in_a_hundred_is_not_too_many_and_more_is():
    rows = Unread()
    rows.read("sacct", 99)
    rows.add("sacct", "a.txt", 1, "cut")
    assert not rows.too_many()
    rows.add("sacct", "a.txt", 2, "cut")
    assert rows.too_many()


def test_a_small_source_is_not_hidden_behind_a_large_one():
    rows = Unread()
    rows.read("sacct", 1_000_000)
    rows.read("tickets", 10)
    rows.add("tickets", "t.csv", 3, "no node is named")
    assert rows.too_many()


def test_nothing_read_is_not_too_many():
    assert not Unread().too_many()
    assert list(Unread().told()) == []


def test_what_others_wrote_is_shown_printable_and_short():
    rows = Unread()
    rows.add("tickets", "a\x1b]0;x", 1, "no time: \x1b[2J" + "x" * 10_000)
    shown = next(rows.told())
    assert shown.isprintable()
    assert len(shown) < 300
