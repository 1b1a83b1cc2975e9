"""Tests of records of delimited text: joined if unambiguous, else counted with their line."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from healthd.common.text import regex
from healthd.fleet.sources import records as records_module
from healthd.fleet.sources.records import MAX_RECORD_BYTES, read_records


class Form:
    """A format where columns "N..." have digits and all others any text; only N, A and N2 are used."""

    def is_header(self, names: Sequence[str], is_first: bool) -> bool:
        return "N" in names and (is_first or "A" in names)

    def is_free_text(self, name: str) -> bool:
        return not name.startswith("N")

    def is_used(self, name: str) -> bool:
        return name in ("N", "A", "N2")

    def fits(self, name: str, text: str) -> bool:
        return bool(regex(r"\d+").fullmatch(text))


def read(text: bytes | str, delimiter: str = "") -> tuple[list[tuple[int, list[str]]], list[tuple[int, str]]]:
    """Return the read rows as (line, fields), and the unread ones as (line, reason)."""
    unread: list[tuple[int, str]] = []
    raw = text if isinstance(text, bytes) else text.encode()
    batches = read_records(io.BytesIO(raw), Form(), lambda line, why: unread.append((line, why)), delimiter)
    return [row for batch in batches for row in batch.rows], unread


@pytest.mark.parametrize("delimiter", ["|", "|#", "\x1f", ";;", "\t"])
def test_header_defines_delimiter(delimiter: str) -> None:
    text = "N|A|N2\n1|x|2\n3|y z|4\n".replace("|", delimiter)
    assert read(text) == ([(2, ["1", "x", "2"]), (3, ["3", "y z", "4"])], [])


def test_lines_above_header_are_comments_or_reported_once() -> None:
    assert read("# from somewhere\n\nN|A|N2\n1|x|2\n") == ([(4, ["1", "x", "2"])], [])
    rows, unread = read("1|x|2\n3|y|4\nN|A|N2\n5|z|6\n")
    assert (rows, unread) == ([(4, ["5", "z", "6"])], [(1, "no header line precedes it")])


def test_joined_files_may_have_different_headers() -> None:
    unread: list[int] = []
    text = b"N|A|N2\n1|x|2\nN|A|N2\n3|y|4\nA|N\nz|5\n"
    batches = list(read_records(io.BytesIO(text), Form(), lambda line, why: unread.append(line)))
    assert [(batch.header, row) for batch in batches for row in batch.rows] == [
        (("N", "A", "N2"), (2, ["1", "x", "2"])),
        (("N", "A", "N2"), (4, ["3", "y", "4"])),
        (("A", "N"), (6, ["z", "5"])),
    ]
    assert unread == []


def test_text_like_header_changes_no_columns() -> None:
    assert read("N|A|N2\n1|x\nN|y|2\n3|y|4\n")[0] == [(2, ["1", "x N|y", "2"]), (4, ["3", "y", "4"])]
    with_delimiter = "N;;A;;N2\n1;;x\nN\ny;;2\nN;;A;;N2\n3;;y;;4\n"
    assert [fields for _, fields in read(with_delimiter, ";;")[0]][::2] == [["1", "x N y", "2"], ["3", "y", "4"]]


def test_line_end_within_field_is_kept_as_blank() -> None:
    assert read("N|A|N2\n1|two\nlines|2\n3|y|4\n") == ([(2, ["1", "two lines", "2"]), (4, ["3", "y", "4"])], [])
    assert read("N|A|N2\n1|\n\n\n|2\n") == ([(2, ["1", "   ", "2"])], [])


def test_windows_line_ends_are_accepted() -> None:
    text = "N|A|N2\n1|x|2\n3|two\nlines|4\n\n5|a|b|6\nA|N\ny|7\nN|A|N2\n8|z\n"
    rows, unread = read(text)
    assert (len(rows), len(unread)) == (4, 1)
    assert read(text.replace("\n", "\r\n")) == (rows, unread)
    assert read("A|N\r\n1|a\rb\r\n".replace("A|N", "N|A"))[0] == [(2, ["1", "a\rb"])]


def test_windows_line_end_may_be_split_between_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in range(1, 9):
        monkeypatch.setattr(records_module, "CHUNK", size)
        assert read("N|A|N2\r\n1|x|2\r\n3|y|4\r\n") == ([(2, ["1", "x", "2"]), (3, ["3", "y", "4"])], []), size


def test_cut_record_affects_no_other() -> None:
    assert read("N|A|N2\n1|x\n3|y|4\n") == ([(3, ["3", "y", "4"])], [(2, "2 fields, but the header has 3")])
    assert read("N|A|N2\nrest|2\n3|y|4\n")[1] == [(2, "2 fields, but the header has 3")]


def test_delimiter_in_text_is_kept_if_unambiguous() -> None:
    assert read("N|A|N2\n1|a|b|2\n") == ([(2, ["1", "a|b", "2"])], [])
    assert read("N|A|N2\n1|a\nb|c|2\n") == ([(2, ["1", "a b|c", "2"])], [])


def test_ambiguous_delimiter_is_not_guessed() -> None:
    assert read("N|A|B|N2\n1|a|b|c|2\n") == ([], [(2, "5 fields, but the header has 4")])
    # both splits give the same values for the used columns
    assert read("N|B|C|N2\n1|a|b|c|2\n")[0][0][1][0] == "1"
    # only a digit fits into N2
    assert read("N|A|N2|B\n1|a|b|2|c\n") == ([(2, ["1", "a|b", "2", "c"])], [])


def test_last_line_without_end_is_unread() -> None:
    assert read("N|A|N2\n1|x|2\n3|y|4") == (
        [(2, ["1", "x", "2"])],
        [(3, "the file ends within this line, which may be truncated")],
    )


def test_too_few_fields_are_unread() -> None:
    assert read("N|A|N2\n1|x\n") == ([], [(2, "2 fields, but the header has 3")])


def test_invalid_utf8_is_escaped() -> None:
    assert read(b"N|A|N2\n1|\xff\xfe|2\n") == ([(2, ["1", "\\xff\\xfe", "2"])], [])


def test_long_line_needs_bounded_memory() -> None:
    class Endless(io.RawIOBase):
        """A header, a line of 64 MiB, a row."""

        def __init__(self) -> None:
            self.parts = [b"N|A|N2\n", *[b"x" * (1 << 20)] * 64, b"\n", b"1|x|2\n"]

        def read(self, size: int = -1) -> bytes:
            return self.parts.pop(0) if self.parts else b""

        def readline(self, size: int | None = -1) -> bytes:
            return self.read()

    unread: list[tuple[int, str]] = []
    tracemalloc.start()
    try:
        found = list(read_records(Endless(), Form(), lambda line, why: unread.append((line, why))))  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert unread == [(2, f"the line is longer than {MAX_RECORD_BYTES} bytes")]
    assert [batch.rows for batch in found] == [[(3, ["1", "x", "2"])]]


TEXT = st.text(st.characters(exclude_characters="\n|", codec="utf-8"), max_size=12).filter(lambda t: t.strip() == t)


@given(st.lists(st.tuples(st.integers(0, 999), TEXT, st.integers(0, 999)), max_size=30))
def test_written_rows_are_read_unchanged(rows: list[tuple[int, str, int]]) -> None:
    text = "N|A|N2\n" + "".join(f"{first}|{text_field}|{second}\n" for first, text_field, second in rows)
    found, unread = read(text)
    assert [fields for _, fields in found] == [
        [str(first), text_field, str(second)] for first, text_field, second in rows
    ]
    assert unread == []


@settings(max_examples=200)
@given(
    st.binary(max_size=300) | st.lists(st.sampled_from([b"1", b"|", b"\n", b"x", b"N|A|N2\n", b"\xff"])).map(b"".join)
)
@example(b"N\x00\x00\n\x00\x00\n")  # another header, with two columns
def test_any_bytes_are_read_or_reported_once(raw: bytes) -> None:
    unread: list[int] = []
    batches = list(read_records(io.BytesIO(b"N|A|N2\n" + raw), Form(), lambda line, why: unread.append(line)))
    found = [(line, fields, batch.header) for batch in batches for line, fields in batch.rows]
    lines = [line for line, _, _ in found] + unread
    assert len(set(lines)) == len(lines)
    assert all(2 <= line <= raw.count(b"\n") + 2 for line in lines)
    assert all(len(fields) == len(header) for _, fields, header in found)
