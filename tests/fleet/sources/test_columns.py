"""Tests of reading delimited files: lines, rows, and what is unread."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from fleet_reading import Noted, numbered
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.ingest import IngestError
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.lines import MAX_LINE_BYTES, Position, iterate_lines, read_lines

COLUMNS = Columns(("node", "words"), ("cluster",), {"nodename": "node"})


def read(content: bytes, **how) -> tuple[list[tuple[int, str]], Noted]:
    noted = Noted()
    return list(iterate_lines(io.BytesIO(content), noted.reading, **how)), noted


def table(text: str, columns: Columns = COLUMNS, **how) -> tuple[list[tuple[int, dict[str, str]]], Noted]:
    noted = Noted()
    return list(rows(numbered(text), columns, noted.reading, **how)), noted


def test_a_mark_of_byte_order_and_carriage_returns_are_no_text():
    assert read(b"\xef\xbb\xbfnode\r\nn1\r\n")[0] == [(1, "node"), (2, "n1")]


def test_the_longest_line_is_read_and_a_longer_one_is_not_kept_and_counted_once():
    longest = b"x" * MAX_LINE_BYTES + b"\n"
    found, noted = read(longest + b"x" + longest + b"end\n")
    assert [(number, len(text)) for number, text in found] == [(1, MAX_LINE_BYTES), (3, 3)]
    assert noted.unread == [(2, f"the line is longer than {MAX_LINE_BYTES} bytes")]


def test_a_line_that_is_longer_than_a_piece_of_the_file_does_not_shift_the_numbers():
    found, noted = read(b"y" * (3 * MAX_LINE_BYTES) + b"\nend\n")
    assert (found, noted.lines) == ([(2, "end")], [1])


def test_a_file_that_ends_in_a_line_leaves_that_line_unread():
    found, noted = read(b"n1\nn2")
    assert (found, noted.unread) == ([(1, "n1")], [(2, "the file ends within this line, which may be cut")])
    assert read(b"z" * (MAX_LINE_BYTES + 5))[1].lines == [1]


def test_a_line_that_is_still_written_is_left_for_the_next_time():
    position = Position()
    found, noted = read(b"n1\nn2", position=position, is_growing=True)
    assert (found, noted.unread, position) == ([(1, "n1")], [], Position(3, 1))


def test_what_is_no_text_is_unread():
    found, noted = read(b"a\nb\xff\nc\0\nd\n")
    assert (found, noted.lines) == ([(1, "a"), (4, "d")], [2, 3])


def test_a_compressed_file_is_read_and_one_that_is_cut_says_so(tmp_path):
    path, noted = tmp_path / "log.gz", Noted()
    whole = gzip.compress(b"".join(b"line %d\n" % n for n in range(5000)))
    path.write_bytes(whole)
    assert len(list(read_lines(str(path), noted.reading))) == 5000
    assert noted.cut == []
    path.write_bytes(whole[:-20])
    found = list(read_lines(str(path), noted.reading))
    assert [why.startswith("the compressed file is cut: ") for why in noted.cut] == [True]
    assert noted.unread == []
    assert found == [(n + 1, f"line {n}") for n in range(len(found))]


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(IngestError, match="missing: cannot be read: No such file or directory"):
        list(read_lines(f"{tmp_path}/missing", Noted().reading))


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
def test_the_separator_is_the_one_that_gives_the_columns_their_names(separator):
    found, noted = table(separator.join(("words", "Node", "x")) + "\n" + separator.join(("fan", "n1", "9")))
    assert found == [(2, {"words": "fan", "node": "n1"})]
    assert noted.unread == []


def test_a_missing_and_a_doubled_column_are_named():
    with pytest.raises(IngestError, match='file: no column "words"'):
        table("node,cluster\nn1,c1")
    with pytest.raises(IngestError, match='file: names the column "node" 2 times'):
        table("node,nodename,words\nn1,n1,x")


def test_a_quoted_field_holds_separators_quotes_and_line_ends():
    found, noted = table('node,words\nn1,"a, ""b""\nand c"\nn2,plain 6" disk\n')
    assert found == [(2, {"node": "n1", "words": 'a, "b"\nand c'}), (4, {"node": "n2", "words": 'plain 6" disk'})]
    assert noted.unread == []


def test_a_quote_that_never_closes_takes_no_other_row_with_it():
    text = 'node,words\nn1,"open\n' + "".join(f"n{n},x\n" for n in range(2, 200))
    found, noted = table(text)
    assert noted.lines == [2]
    assert [number for number, _ in found] == list(range(3, 201))


def test_a_row_of_another_length_is_unread():
    found, noted = table("node,words\nn1\nn2,a,b\nn3,ok\n\n")
    assert [number for number, _ in found] == [4]
    assert noted.unread == [(2, "1 column instead of 2"), (3, "3 columns instead of 2")]


def test_the_one_free_column_may_hold_the_separator():
    columns = Columns(("node", "reason", "user"), free="reason")
    found, noted = table('node|reason|user\nn1|a|b "c|root\nn2||x\nn3|y', columns, separators="|")
    assert [row for _, row in found] == [
        {"node": "n1", "reason": 'a|b "c', "user": "root"},
        {"node": "n2", "reason": "", "user": "x"},
    ]
    assert noted.lines == [4]


def test_an_empty_file_has_no_rows():
    assert table("")[0] == table("\n\n")[0] == []


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@given(st.lists(st.tuples(TEXT, st.text(alphabet='ab ,;"\n|', max_size=12)), max_size=8), st.sampled_from(",;|\t"))
def test_what_a_csv_writer_wrote_is_read_as_it_was(written, separator):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator, lineterminator="\n")
    writer.writerow(("node", "words"))
    writer.writerows(written)
    noted = Noted()
    lines = list(iterate_lines(io.BytesIO(out.getvalue().encode()), noted.reading))
    found = [(row["node"], row["words"]) for _, row in rows(lines, COLUMNS, noted.reading)]
    # A row of blanks only is skipped.
    wanted = [(node.strip(), words.strip()) for node, words in written]
    assert [row for row in found if any(row)] == [row for row in wanted if any(row)]
    assert noted.unread == []


@given(st.binary(max_size=300))
def test_whatever_a_file_holds_each_line_is_read_or_counted(content):
    found, noted = read(content)
    whole = content.count(b"\n") + (0 if content.endswith(b"\n") or not content else 1)
    assert sorted([number for number, _ in found] + noted.lines) == list(range(1, whole + 1))


@given(st.text(max_size=200))
def test_any_text_gives_rows_of_the_columns_or_a_sentence(text):
    noted = Noted()
    try:
        found = list(rows(numbered("node,words\n" + text), COLUMNS, noted.reading))
    except IngestError:
        return
    assert all(row.keys() == {"node", "words"} for _, row in found)
