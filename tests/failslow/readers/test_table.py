"""Tests of reading tables of times: the series of each format, and one sentence for invalid input."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.common.errors import HealthdError
from healthd.failslow.model import Series
from healthd.failslow.readers import chunks
from healthd.failslow.readers.chunks import Unreadable
from healthd.failslow.readers.columns import Columns, choose_columns
from healthd.failslow.readers.table import read_table

WORKER = Columns(series=("worker",), value="t")


def write_table(folder: Path, text: str | bytes, name: str = "job.csv") -> str:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def single_series(path: str, columns: Columns = Columns()) -> Series:  # noqa: B008
    found = read_table(path, columns).series
    assert len(found) == 1
    return found[0]


def error_of(path: str, columns: Columns = Columns()) -> str:  # noqa: B008
    """Return the error message without the folder."""
    with pytest.raises(Unreadable) as caught:
        read_table(path, columns)
    return str(caught.value).replace(f"{os.path.dirname(path)}/", "")


def values_of(folder: Path, text: str, columns: Columns = Columns()) -> list[float]:  # noqa: B008
    return list(single_series(write_table(folder, text), columns).value)


# --- written tables are read

CELLS = st.lists(
    st.tuples(st.sampled_from(("0", "1", "gpu-2", "10")), st.floats(1e-6, 1e6), st.integers(0, 10**18)),
    min_size=2,
    max_size=60,
)


def series_of_workers(path: str) -> dict[str, tuple[list[float], list[float]]]:
    series = read_table(path, Columns(series=("worker",), value="t", index="at")).series
    return {entry.name: (list(entry.value), list(entry.index)) for entry in series}


def expected_series(rows: list[tuple[str, float, int]]) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for place, (name, value, _) in enumerate(rows):
        series = found.setdefault(name, ([], []))
        series[0].append(value)
        series[1].append(10**17 + place)  # more digits than a float has
    return found


@settings(max_examples=40, deadline=None)
@given(CELLS, st.sampled_from(",;\t"), st.sampled_from(("\n", "\r\n")), st.booleans(), st.booleans(), st.booleans())
def test_written_csv_is_read(tmp_path_factory, rows, delimiter, end, quoted, packed, bom):
    def line(*cells: object) -> str:
        return delimiter.join(f'"{cell}"' if quoted else str(cell) for cell in cells) + end

    text = line("", "worker", "t", "at", "other")
    text += "".join(line(place, name, value, 10**17 + place, "x") for place, (name, value, _) in enumerate(rows))
    data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
    path = write_table(tmp_path_factory.mktemp("csv"), gzip.compress(data) if packed else data)
    if max(map(len, (series_values for series_values, _ in expected_series(rows).values()))) < 2:
        return
    assert series_of_workers(path) == expected_series(rows)


@settings(max_examples=25, deadline=None)
@given(CELLS)
def test_written_json_lines_are_read(tmp_path_factory, rows):
    text = "".join(
        json.dumps({"worker": name, "t": value, "at": 10**17 + place}) + "\n"
        for place, (name, value, _) in enumerate(rows)
    )
    path = write_table(tmp_path_factory.mktemp("json"), text, "job.jsonl")
    if max(map(len, (series_values for series_values, _ in expected_series(rows).values()))) < 2:
        return
    assert series_of_workers(path) == expected_series(rows)


@pytest.mark.parametrize("kind", ["VARCHAR", "INTEGER", "BIGINT"])
def test_written_parquet_is_read(tmp_path, kind):
    import duckdb

    path = str(tmp_path / "job[1].parquet")
    duckdb.execute(
        f"COPY (SELECT (i % 3)::{kind} AS worker, 1.5 + i AS t, {10**17} + i AS at FROM range(30) r(i)) TO '{path}' "
        "(FORMAT parquet)"
    )
    rows = [(str(place % 3), 1.5 + place, 0) for place in range(30)]
    assert series_of_workers(path) == expected_series(rows)


def test_parquet_timestamp_is_index(tmp_path):
    import duckdb

    path = str(tmp_path / "job.parquet")
    duckdb.execute(
        "COPY (SELECT 1.5::DECIMAL(9, 3) AS t, TIMESTAMP '2026-11-22 10:00:00' + i * INTERVAL 1 SECOND AS at "
        f"FROM range(30) r(i)) TO '{path}' (FORMAT parquet)"
    )
    assert [
        place - single_series(path, Columns(index="at")).index[0]
        for place in single_series(path, Columns(index="at")).index
    ] == [*range(30)]


def test_blocks_of_long_file_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", 64)
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 7)
    rows = [f"{place % 3},{place + 1.5}" for place in range(500)]
    plain = write_table(tmp_path, "\n".join(["worker,t", *rows]))
    quoted = write_table(tmp_path, "\n".join(["worker,t", *rows[:9], '"0\n",3', *rows[9:]]), "quoted.csv")
    objects = [json.dumps({"worker": row.split(",")[0], "t": float(row.split(",")[1])}) for row in rows]
    as_json = write_table(tmp_path, "\n\n".join(objects), "job.jsonl")
    found = {series.name: list(series.value) for series in read_table(plain, WORKER).series}
    assert found == {str(worker): [place + 1.5 for place in range(worker, 500, 3)] for worker in range(3)}
    assert {series.name: list(series.value) for series in read_table(as_json, WORKER).series} == found
    assert len(read_table(quoted, WORKER).series[0].value) == len(found["0"]) + 1


@settings(max_examples=40, deadline=None)
@given(CELLS, st.integers(0, 10**6))
def test_order_of_rows_of_different_series_is_ignored(tmp_path_factory, rows, seed):
    folder = tmp_path_factory.mktemp("order")
    lines = [(name, f"{name},{value},{10**17 + place}") for place, (name, value, _) in enumerate(rows)]
    queues = {name: [line for owner, line in lines if owner == name] for name, _ in lines}
    if max(map(len, queues.values())) < 2:
        return
    mixed, draw = [], random.Random(seed)
    while queues:
        name = draw.choice(sorted(queues))
        mixed.append(queues[name].pop(0))
        if not queues[name]:
            del queues[name]
    columns = Columns(series=("worker",), value="t")
    first = read_table(write_table(folder, "\n".join(["worker,t,at", *(line for _, line in lines)])), columns)
    second = read_table(write_table(folder, "\n".join(["worker,t,at", *mixed]), "mixed.csv"), columns)
    assert first == second


# --- any content

HOSTILE = st.one_of(
    st.binary(max_size=300),
    st.text(alphabet='0123456789.,;\t\n\r"-enaif{}[]:wt _', max_size=300).map(str.encode),
    st.text(max_size=200).map(lambda text: ("worker,t\n" + text).encode("utf-8", "replace")),
    st.lists(st.dictionaries(st.sampled_from("wtx"), st.none() | st.floats() | st.text(max_size=5), max_size=3)).map(
        lambda some: "\n".join(map(json.dumps, some)).encode()
    ),
)


@settings(max_examples=300, deadline=None)
@given(HOSTILE, st.booleans(), st.sampled_from((Columns(), Columns(value="t"), Columns(value="1", index="2"))))
def test_any_file_gives_series_or_one_sentence(tmp_path_factory, data, packed, columns):
    path = write_table(tmp_path_factory.getbasetemp(), gzip.compress(data) if packed else data, "any.csv")
    try:
        found = read_table(path, columns, "any.csv")
    except HealthdError as error:
        sentence = str(error)
    else:
        sentence = ""
    if sentence:
        assert sentence.startswith("any.csv: ")
        assert "\n" not in sentence
        return
    for series in found.series:
        assert all(0 < value < float("inf") for value in series.value)
        assert len(series.value) == len(series.index)


def error_or_none(path: str) -> str:
    """Return the error message of a file, or a text without an error."""
    try:
        read_table(path, Columns(value="t"), "damaged")
    except HealthdError as error:
        return str(error)
    return "damaged: but it can be read"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_gzip_or_parquet_is_one_sentence(tmp_path_factory, place, byte):
    import duckdb

    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.parquet"
    if not whole.exists():
        duckdb.execute(f"COPY (SELECT i + 1.5 AS t FROM range(50) r(i)) TO '{whole}' (FORMAT parquet)")
    text = "t\n" + "".join(f"{value}.5\n" for value in range(50))
    for data in (whole.read_bytes(), gzip.compress(text.encode(), mtime=0)):
        damaged = bytearray(data)
        damaged[place % len(data)] = byte
        for content in (bytes(damaged), data[: place % len(data)]):
            assert error_or_none(write_table(folder, content, "damaged")).startswith("damaged: ")


@pytest.mark.parametrize(
    ("text", "columns", "sentence"),
    [
        ("", Columns(), "job.csv: is empty"),
        ("worker,t\n0,1\n", Columns(value="time"), 'job.csv: has no column "time"; columns: worker and t'),
        ("t,t\n0,1\n", Columns(value="t"), 'job.csv: has 2 columns "t"'),
        ("worker,t\n0,1\n0,fast\n", WORKER, 'job.csv: line 3: column "t" has 4 characters, which is not a number'),
        ("worker,t\n0,1\n0,1;5\n", WORKER, 'job.csv: line 3: column "t" has 3 characters, which is not a number'),
        ('worker,t\n"0\n\n",1\n0,x\n', WORKER, 'job.csv: line 5: column "t" has 1 characters, which is not a number'),
        ("worker,t\n0,1\n0,1,2\n0,1\n", WORKER, "job.csv: line 3: has 3 cells, but the header has 2"),
        ("worker,t\n0,1\n0\n0,1\n", WORKER, "job.csv: line 3: has 1 cells, but the header has 2"),
        ('worker,t\n0,1\n0,"1"2\n', WORKER, "job.csv: line 3: is not CSV: ',' expected after '\"'"),
        ("a,b\nx,y\n", Columns(), "job.csv: no column is numeric; columns: a and b"),
        (
            "operation,timestamp\nall_reduce,1.5\nbroadcast,1.7\n",
            Columns(),
            "job.csv: no numeric column is known to contain iteration times; columns: operation and timestamp "
            "(use --value C; for times of operations use `healthd failslow period`)",
        ),
        ("a,b\n1,2\n1,3\n", Columns(), "job.csv: which of a and b contains the times? Use --value"),
        ("t\n5\n", Columns(value="t"), "job.csv: line 2: there is only one sample; several samples per "
         "series are required"),
        ("t\nnan\n\nnan\n", Columns(value="t"), "job.csv: line 4: there is no sample with a value; "
         "several samples per series are required"),
        ("t\n", Columns(value="t"), "job.csv: has no rows"),
        ("t,at\n1,2026-01-01\n1,noon\n", Columns(value="t", index="at"), 'job.csv: line 3: column "at" has 4 '
         "characters, which is not a time"),
        ("[1]\n", Columns(), "job.csv: line 1: is a JSON array, but one object per line is required "
         "(convert with jq -c '.[]')"),
        ('{"t": 1}\n{"t": 2\n{"t": 3}\n', Columns(), "job.csv: line 2: is damaged JSON: 7 characters"),
        ('{"t": 1}\n\n7\n', Columns(), "job.csv: line 3: is not a JSON object: '7'"),
        ('{"t": 1}\n{"t": [1]}\n', Columns(value="t"), 'job.csv: line 2: column "t" has a list, which is not a number'),
        ('{"t": 1, "r": {}}\n', Columns(value="t", series=("r",)), 'job.csv: line 1: column "r" has a dict, which is '
         "not a name"),
        ("step_time,busy_ms\n" + "1.5,1400\n" * 9, Columns(busy="busy_ms"), "job.csv: busy_ms together are far above "
         "step_time in most samples; check the units"),
        ("t,b,w\n" + "1500,1.4,0.1\n" * 9, Columns(value="t", busy="b", wait="w"), "job.csv: b and w together are far "
         "below t in most samples; check the units"),
    ],
)  # fmt: skip
def test_invalid_table_is_one_sentence_with_line(tmp_path, text, columns, sentence):
    assert error_of(write_table(tmp_path, text), columns) == sentence


def test_pipe_missing_file_and_binary_file_are_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert error_of(str(tmp_path / "pipe")).startswith("pipe: ")
    assert error_of(str(tmp_path / "none")).startswith("none: ")
    assert re.match("job.csv: .*UTF-8.*Parquet", error_of(write_table(tmp_path, b"\x00\x01binary")))
    long_line = write_table(tmp_path, b"t\n" + b"1" * (3 << 20))
    assert re.match("job.csv: line 2: .* 1 MiB", error_of(long_line, Columns(value="t")))


# --- columns and cells without numbers


def test_columns_are_found_by_name_and_noted(tmp_path):
    found = read_table(write_table(tmp_path, "step,Rank,hostname,Step Time (ms)\n0,3,n1,5\n1,3,n1,6\n"), Columns())
    assert [(series.name, series.label, series.node, list(series.value)) for series in found.series] == [
        ("3", "Rank", "n1", [5.0, 6.0])
    ]
    assert found.notes[0] == "columns found by name: value Step Time (ms); series Rank; node hostname"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("step,rank,stage,seconds", "seconds"),
        ("step,rank,loss,seconds", "seconds"),
        ("iteration,rank,loss,secs", "secs"),
        ("step,rank,loss,Milliseconds", "Milliseconds"),
        ("rank,seconds,loss,step_time", "step_time"),
        ("iteration,rank,stage,iteration_ms", "iteration_ms"),
        ("rank,stage,step,step_seconds", "step_seconds"),
    ],
)
def test_known_name_of_times_is_used_beside_other_numbers(tmp_path, header, value):
    text = header + "\n" + "".join(f"{at % 7 + 1},{at % 3},{at / 8 + 1},{at % 5 + 1}\n" for at in range(30))
    found = read_table(write_table(tmp_path, text), Columns())
    assert any(f"value {value};" in f"{note};" for note in found.notes)


@given(st.permutations(["rank", "step", "stage", "loss", "tokens", "seconds"]))
def test_choose_columns_ignores_order(names):
    found, _, problem = choose_columns(Columns(), names, lambda name: True)
    assert (found.value, found.series, problem) == ("seconds", ("rank",), "")


def test_series_may_be_named_by_several_columns(tmp_path):
    text = "node,gpu,stage,t\n" + "n1,3,a,1\nn1,10,a,2\nn2,3,b,3\n" * 2
    found = read_table(write_table(tmp_path, text), Columns(series=("node", "gpu"), value="t", group=("stage",))).series
    assert [(series.name, series.label, series.group) for series in found] == [
        ("n1/3", "node/gpu", "a"),
        ("n1/10", "node/gpu", "a"),
        ("n2/3", "node/gpu", "b"),
    ]


def test_file_without_series_column_is_one_series(tmp_path):
    series = single_series(write_table(tmp_path, "1.5\n1.6\n1.7\n", "rank3.csv"))
    assert (series.name, list(series.value), list(series.index)) == ("rank3", [1.5, 1.6, 1.7], [0, 1, 2])


def test_rows_without_value_keep_positions(tmp_path):
    found = read_table(write_table(tmp_path, "t\n1\nnan\n\n-2\ninf\n0\nNA\n3\n"), Columns(value="t"))
    series = found.series[0]
    assert (list(series.value), list(series.index), list(series.rows or ())) == ([1.0, 3.0], [0, 6], [0, 6])
    assert [re.findall(r"\d+|infinite|zero|without", note) for note in found.notes] == [
        ["2", "without"],
        ["1", "infinite"],
        ["2", "zero"],
        ["1", "20"],
    ]


def test_incomplete_last_line_is_left_out_and_noted(tmp_path):
    rows = read_table(write_table(tmp_path, "worker,t\n0,1\n0,2\n0"), WORKER)
    objects = read_table(
        write_table(tmp_path, '{"worker": 0, "t": 1}\n{"worker": 0, "t": 2}\n{"work', "job.jsonl"), WORKER
    )
    assert [list(series.value) for series in (*rows.series, *objects.series)] == [[1.0, 2.0], [1.0, 2.0]]
    assert rows.notes[0].startswith("line 4 is incomplete")
    assert objects.notes[0].startswith("line 3 is incomplete")


def test_index_may_change_from_integers_to_fractions(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", 8)
    assert list(
        single_series(write_table(tmp_path, "t,at\n1,1\n1,2\n1,2.5\n1,3\n"), Columns(value="t", index="at")).index
    ) == [
        1.0,
        2.0,
        2.5,
        3.0,
    ]


def test_other_digits_and_underscores_are_no_numbers(tmp_path):
    assert "is not a number" in error_of(write_table(tmp_path, "t\n1\n1_0\n"), Columns(value="t"))
    assert "is not a number" in error_of(write_table(tmp_path, "t\n1\n１２\n"), Columns(value="t"))


def test_parts_and_regimes_stay_with_their_samples(tmp_path):
    text = "t,b,size\n" + "1.5,1.2,8\nnan,1.3,8\n1.6,-1,16\n" * 2
    series = single_series(write_table(tmp_path, text), Columns(value="t", busy="b", regime=("size",)))
    assert [round(part, 1) if part == part else None for part in series.busy or ()] == [1.2, None, 1.2, None]
    assert list(series.regimes or ()) == ["8", "16", "8", "16"]


def test_standard_input_is_read():
    data = io.BufferedReader(io.BytesIO(b"t\n1\n2\n"))  # type: ignore[arg-type]
    assert list(read_table("-", Columns(value="t"), "standard input", data).series[0].value) == [1.0, 2.0]


@pytest.mark.parametrize("last", ["11", "11.5"])
def test_many_series_keep_all_rows_in_order(tmp_path, last):
    """A chunk of the file has only a few rows of each series."""
    steps = [*map(str, range(11)), last]
    lines = [
        f"{worker},{step},{worker + nth + 1},b{nth // 6}" for nth, step in enumerate(steps) for worker in range(9000)
    ]
    path = tmp_path / "many.csv"
    path.write_text("\n".join(["worker,step,seconds,batch", *lines]))
    found = read_table(str(path), Columns(series=("worker",), value="seconds", index="step", regime=("batch",))).series
    assert [series.name for series in found] == [*map(str, range(9000))]
    for worker, series in enumerate(found):
        assert list(series.value) == [worker + nth + 1 for nth in range(12)]
        assert list(series.index) == [*range(11), float(last)]
        assert series.regimes == ["b0"] * 6 + ["b1"] * 6
