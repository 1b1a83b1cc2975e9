"""Tests of reading delimited files: lines, rows, and what is unread."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from fleet_reading import RecordedReading, numbered_lines
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.ingest import IngestError
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.lines import MAX_LINE_BYTES, Position, iterate_lines, read_lines

COLUMNS = Columns(("node", "words"), ("cluster",), {"nodename": "node"})


def read(content: bytes, **options) -> tuple[list[tuple[int, str]], RecordedReading]:
    noted = RecordedReading()
    return list(iterate_lines(io.BytesIO(content), noted.reading, **options)), noted


def read_table(
    text: str, columns: Columns = COLUMNS, **options
) -> tuple[list[tuple[int, dict[str, str]]], RecordedReading]:
    noted = RecordedReading()
    return list(rows(numbered_lines(text), columns, noted.reading, **options)), noted


def test_bom_and_carriage_returns_are_removed():
    assert read(b"\xef\xbb\xbfnode\r\nn1\r\n")[0] == [(1, "node"), (2, "n1")]


def test_line_over_limit_is_counted_once():
    longest = b"x" * MAX_LINE_BYTES + b"\n"
    found, noted = read(longest + b"x" + longest + b"end\n")
    assert [(number, len(text)) for number, text in found] == [(1, MAX_LINE_BYTES), (3, 3)]
    assert noted.unread == [(2, f"the line is longer than {MAX_LINE_BYTES} bytes")]


def test_line_longer_than_chunk_keeps_line_numbers():
    found, noted = read(b"y" * (3 * MAX_LINE_BYTES) + b"\nend\n")
    assert (found, noted.unread_lines) == ([(2, "end")], [1])


def test_last_line_without_end_is_unread():
    found, noted = read(b"n1\nn2")
    assert (found, noted.unread) == ([(1, "n1")], [(2, "the file ends within this line, which may be truncated")])
    assert read(b"z" * (MAX_LINE_BYTES + 5))[1].unread_lines == [1]


def test_growing_file_leaves_last_line_for_next_read():
    position = Position()
    found, noted = read(b"n1\nn2", position=position, is_growing=True)
    assert (found, noted.unread, position) == ([(1, "n1")], [], Position(3, 1))


def test_invalid_text_is_unread():
    found, noted = read(b"a\nb\xff\nc\0\nd\n")
    assert (found, noted.unread_lines) == ([(1, "a"), (4, "d")], [2, 3])


def test_compressed_file_is_read_and_cut_is_noted(tmp_path):
    path, noted = tmp_path / "log.gz", RecordedReading()
    whole = gzip.compress(b"".join(b"line %d\n" % n for n in range(5000)))
    path.write_bytes(whole)
    assert len(list(read_lines(str(path), noted.reading))) == 5000
    assert noted.cut == []
    path.write_bytes(whole[:-20])
    found = list(read_lines(str(path), noted.reading))
    assert [why.startswith("the compressed file is truncated: ") for why in noted.cut] == [True]
    assert noted.unread == []
    assert found == [(n + 1, f"line {n}") for n in range(len(found))]


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(IngestError, match="missing: cannot be read: No such file or directory"):
        list(read_lines(f"{tmp_path}/missing", RecordedReading().reading))


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
def test_separator_follows_from_header(separator):
    found, noted = read_table(separator.join(("words", "Node", "x")) + "\n" + separator.join(("fan", "n1", "9")))
    assert found == [(2, {"words": "fan", "node": "n1"})]
    assert noted.unread == []


def test_missing_and_repeated_columns_are_named():
    with pytest.raises(IngestError, match='file: has no column "words"'):
        read_table("node,cluster\nn1,c1")
    with pytest.raises(IngestError, match='file: names column "node" 2 times'):
        read_table("node,nodename,words\nn1,n1,x")


def test_quoted_field_may_contain_separators_quotes_and_line_ends():
    found, noted = read_table('node,words\nn1,"a, ""b""\nand c"\nn2,plain 6" disk\n')
    assert found == [(2, {"node": "n1", "words": 'a, "b"\nand c'}), (4, {"node": "n2", "words": 'plain 6" disk'})]
    assert noted.unread == []


def test_unclosed_quote_affects_only_its_row():
    text = 'node,words\nn1,"open\n' + "".join(f"n{n},x\n" for n in range(2, 200))
    found, noted = read_table(text)
    assert noted.unread_lines == [2]
    assert [number for number, _ in found] == list(range(3, 201))


def test_row_of_other_length_is_unread():
    found, noted = read_table("node,words\nn1\nn2,a,b\nn3,ok\n\n")
    assert [number for number, _ in found] == [4]
    assert noted.unread == [(2, "1 column instead of 2"), (3, "3 columns instead of 2")]


def test_free_column_may_contain_separator():
    columns = Columns(("node", "reason", "user"), free="reason")
    found, noted = read_table('node|reason|user\nn1|a|b "c|root\nn2||x\nn3|y', columns, separators="|")
    assert [row for _, row in found] == [
        {"node": "n1", "reason": 'a|b "c', "user": "root"},
        {"node": "n2", "reason": "", "user": "x"},
    ]
    assert noted.unread_lines == [4]


def test_empty_file_has_no_rows():
    assert read_table("")[0] == read_table("\n\n")[0] == []


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@given(st.lists(st.tuples(TEXT, st.text(alphabet='ab ,;"\n|', max_size=12)), max_size=8), st.sampled_from(",;|\t"))
def test_rows_of_csv_writer_are_read_unchanged(written, separator):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator, lineterminator="\n")
    writer.writerow(("node", "words"))
    writer.writerows(written)
    noted = RecordedReading()
    lines = list(iterate_lines(io.BytesIO(out.getvalue().encode()), noted.reading))
    found = [(row["node"], row["words"]) for _, row in rows(lines, COLUMNS, noted.reading)]
    # A row of blanks only is skipped.
    expected = [(node.strip(), text.strip()) for node, text in written]
    assert [row for row in found if any(row)] == [row for row in expected if any(row)]
    assert noted.unread == []


@given(st.binary(max_size=300))
def test_every_line_of_any_file_is_read_or_counted(content):
    found, noted = read(content)
    whole = content.count(b"\n") + (0 if content.endswith(b"\n") or not content else 1)
    assert sorted([number for number, _ in found] + noted.unread_lines) == list(range(1, whole + 1))


@given(st.text(max_size=200))
def test_any_text_gives_rows_or_one_sentence(text):
    noted = RecordedReading()
    try:
        found = list(rows(numbered_lines("node,words\n" + text), COLUMNS, noted.reading))
    except IngestError:
        return
    assert all(row.keys() == {"node", "words"} for _, row in found)
