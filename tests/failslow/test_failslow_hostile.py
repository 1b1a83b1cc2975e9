"""Tests of faulty input files as they occur in practice: each is read correctly or ends with one sentence."""

from __future__ import annotations

import gzip
import json
import os
import random
import re

import pytest

from healthd.cli.main import main
from healthd.failslow.detect import detect
from healthd.failslow.readers import chunks
from healthd.failslow.readers.chunks import Unreadable
from healthd.failslow.readers.columns import Columns
from healthd.failslow.readers.folder import read_files as read_all
from healthd.failslow.readers.streams import is_record
from healthd.failslow.readers.table import read_table

WORKER = Columns(series=("worker",), value="t")


def write_file(folder, text, name="job.csv"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def error_of(folder, text, columns=WORKER, name="job.csv"):
    with pytest.raises(Unreadable) as caught:
        read_table(write_file(folder, text, name), columns, name)
    return str(caught.value)


def run_failslow(capsys, *arguments):
    status = main(["failslow", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def samples(seed, count=40):
    source = random.Random(seed)
    return [round(source.gauss(1.0, 0.02), 6) for _ in range(count)]


def column(seed, count=40):
    return "t\n" + "".join(f"{entry}\n" for entry in samples(seed, count))


@pytest.mark.parametrize("huge", ["1e308", "1.7976931348623157e308", "5e-324", "1e19"])
@pytest.mark.parametrize("affected", [range(6), range(1)])
def test_impossible_times_are_left_out_and_counted(tmp_path, capsys, huge, affected):
    rows = [
        f"{worker},{huge if step >= 150 and worker in affected else 1 + step % 7 / 100},{huge},1\n"
        for step in range(300)
        for worker in range(6)
    ]
    file = write_file(tmp_path, "worker,t,busy,wait\n" + "".join(rows))
    status, out, err = run_failslow(capsys, file, "--series", "worker", "--value", "t", "--busy", "busy", "--json")
    assert (status, err) == (0, "")
    notes = json.loads(out)["notes"]
    assert any(re.match(rf"{150 * len(affected):,} rows .*1e-18.*1e\+18", note) for note in notes)


def test_detect_accepts_any_float_time():
    assert [point.onset_index for point in detect([5e-324] * 200 + [1.7976931348623157e308] * 100)] == [200]


def test_internal_error_is_one_sentence_without_result(tmp_path, capsys, monkeypatch):
    file = write_file(tmp_path, column(1))
    monkeypatch.setattr("healthd.failslow.analysis.diagnose", lambda *_: 1 // 0)
    status, out, err = run_failslow(capsys, file)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert "internal error" in err
    assert "ZeroDivisionError" in err


def test_pipe_without_writer_is_rejected_and_skipped_in_folder(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        status, _, err = run_failslow(capsys, str(tmp_path / "pipe"))
        assert (status, err.startswith(f"healthd failslow: {tmp_path}/pipe: "), err.count("\n")) == (3, True, 1)
        write_file(tmp_path, column(1))
        assert [entry["file"] for entry in read_all([str(tmp_path)], Columns()).unread] == ["pipe"]
    finally:
        os.close(pipe)


def test_ranks_in_host_folders_are_named_by_shortest_path(tmp_path):
    for host in "abcde":
        for rank in range(2):
            write_file(tmp_path, column(f"{host}{rank}"), f"hosts/{host}/rank{rank}.csv")
    names = [entry.name for entry in read_all([str(tmp_path / "hosts")], Columns()).series]
    assert sorted(names) == [f"{host}/rank{rank}" for host in "abcde" for rank in range(2)]


def test_files_differing_only_in_extension_are_named_with_it(tmp_path):
    write_file(tmp_path, column(1), "job.csv")
    write_file(tmp_path, gzip.compress(column(2).encode()), "job.csv.gz")
    write_file(tmp_path, "".join(f'{{"t": {entry}}}\n' for entry in samples(3)), "job.jsonl")
    names = [entry.name for entry in read_all([str(tmp_path)], Columns()).series]
    assert sorted(names) == ["job.csv", "job.csv.gz", "job.jsonl"]


def test_copied_file_is_noted_and_counted_once(tmp_path):
    file = write_file(tmp_path, column(1))
    write_file(tmp_path, column(1), "copy.csv")
    found = read_all([file, file, str(tmp_path / "copy.csv")], Columns())
    assert len(found.series) == 1
    assert sum(" same samples " in note for note in found.notes) == 2


def test_equal_constant_samples_are_no_copies(tmp_path):
    for rank in range(4):
        write_file(tmp_path, "t\n" + "1.5\n" * 30, f"rank{rank}.csv")
    assert len(read_all([str(tmp_path)], Columns()).series) == 4


def test_unnamed_series_column_is_error(tmp_path):
    rows = "".join(f"{step},{machine},{entry}\n" for step, entry in enumerate(samples(1)) for machine in "abcd")
    sentence = "job.csv: has several rows per step; which column identifies the series? Use --series: machine"
    assert error_of(tmp_path, "step,machine,step_time\n" + rows, Columns()) == sentence
    assert error_of(tmp_path, "at,machine,t\n" + rows, Columns(index="at", value="t")) == sentence.replace(
        "step;", "at;"
    )


@pytest.mark.parametrize("rows_at_once", [7, 1 << 16])
def test_unnamed_series_column_is_error_for_consecutive_series(tmp_path, monkeypatch, rows_at_once):
    monkeypatch.setattr(chunks, "BLOCK", 20 * rows_at_once)
    rows = "".join(f"{step},{machine},{entry}\n" for machine in "abc" for step, entry in enumerate(samples(1, 150)))
    sentence = "job.csv: has several rows per step; which column identifies the series? Use --series: machine"
    assert error_of(tmp_path, "step,machine,step_time\n" + rows, Columns()) == sentence


def test_restart_on_other_machines_is_one_series(tmp_path):
    rows = "".join(f"{40 * nth + step},{machine},1.5\n" for nth, machine in enumerate("abcd") for step in range(60))
    assert len(read_table(write_file(tmp_path, "step,machine,step_time\n" + rows), Columns(index="step")).series) == 1


def test_unused_columns_are_noted_without_series_column(tmp_path):
    file = write_file(tmp_path, "machine,step_time\n" + "".join(f"a,{entry}\n" for entry in samples(1)))
    assert any(note.endswith("unused columns: machine") for note in read_table(file, Columns()).notes)


@pytest.mark.parametrize("name", ["proc", "process", "task", "worker_name", "procid"])
def test_series_column_is_found_by_common_names(tmp_path, name):
    rows = "".join(f"{worker},{entry}\n" for entry in samples(1) for worker in "ab")
    found = read_table(write_file(tmp_path, f"{name},step_time\n{rows}"), Columns()).series
    assert [entry.name for entry in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker,step_time\n0,1\n0,fast\n0,2\n", 'line 3: column "step_time" has 4 characters, which is not a number'),
        ("worker;step_time\n0;1,5\n0;1,6\n", 'line 2: column "step_time" has \'1,5\', which is not a number'),
        ('worker,step_time\n0,"1,053"\n', 'line 2: column "step_time" has \'1,053\', which is not a number'),
        ("worker,step_time\n0,nan\n0,nan\n", "line 3: there is no sample with a value; several samples "
         "per series are required"),
        ("worker,step_time\n", "has no rows"),
        ("worker,step_time\n0,1,2\n", "line 2: has 3 cells, but the header has 2"),
    ],
)  # fmt: skip
def test_invalid_number_in_first_rows_is_reported_with_line(tmp_path, text, sentence):
    assert error_of(tmp_path, text, Columns()) == f"job.csv: {sentence}"


def test_infinite_value_does_not_hide_its_column(tmp_path):
    found = read_table(write_file(tmp_path, "worker,step_time\n0,1\n0,inf\n0,2\n"), Columns())
    assert list(found.series[0].value) == [1.0, 2.0]


def test_boolean_is_no_number(tmp_path):
    text = '{"worker": 0, "t": 1.5}\n{"worker": 0, "t": true}\n'
    assert error_of(tmp_path, text).startswith('job.csv: line 2: column "t" ')
    text = '{"worker": 0, "t": true}\n{"worker": 0, "t": 2}\n'
    assert error_of(tmp_path, text).startswith('job.csv: line 1: column "t" ')


def test_damaged_lines_are_not_joined(tmp_path):
    text = '{"worker": 0, "t": 1\n"worker": 1}, {"worker": 0, "t": 2}\n{"worker": 0, "t": 2}\n'
    assert error_of(tmp_path, text).startswith("job.csv: line 1: ")


@pytest.mark.parametrize("rows", [15, 16, 17, 32])
def test_incomplete_last_line_is_left_out_at_any_position(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 16)
    lines = "".join(f'{{"worker": 0, "t": {1 + row}}}\n' for row in range(rows - 1))
    found = read_table(write_file(tmp_path, lines + '{"worker": 0, "t'), WORKER)
    assert len(found.series[0].value) == rows - 1
    quoted = "".join(f'"0",{1 + row}\n' for row in range(rows - 2))
    found = read_table(write_file(tmp_path, f'worker,t\n"0\n",5\n{quoted}0'), WORKER)
    assert len(found.series[0].value) == rows - 1


def test_line_end_in_quotes_is_part_of_name_and_counts_as_line(tmp_path):
    text = 'worker,t\n"a\nb",1\n"a\nb",2\n'
    assert [entry.name for entry in read_table(write_file(tmp_path, text), WORKER).series] == ["a\nb"]
    assert "line 6:" in error_of(tmp_path, text + "a,x\n")


def test_table_with_column_names_of_records_is_table(tmp_path):
    for name in ("entries", "coll_perf"):
        assert not is_record(write_file(tmp_path, f'{{"step_time": 1.5, "{name}": 3}}\n' * 30))


def test_pickle_with_class_is_rejected_without_loading(tmp_path, capsys):
    status, _, err = run_failslow(
        capsys, write_file(tmp_path, b"cposix\nsystem\n(S'touch " + bytes(tmp_path) + b"/made'\ntR.")
    )
    assert (status, "class or function" in err, (tmp_path / "made").exists()) == (3, True, False)


def test_empty_or_ambiguous_operation_column_is_rejected(tmp_path, capsys):
    file = write_file(tmp_path, "op,ts,ts\na,1,2\n")
    assert run_failslow(capsys, "period", file, "--operation", "")[0] == 64
    status, _, err = run_failslow(capsys, "period", file, "--time", "ts")
    assert (status, 'has 2 columns "ts"' in err) == (3, True)


def test_rare_regimes_are_ignored_and_noted(tmp_path):
    rows = "".join(f"{step},{entry}\n" for step, entry in enumerate(samples(1)))
    found = read_table(write_file(tmp_path, "step,t\n" + rows), Columns(value="t", regime=("step",)))
    assert any(re.match(r"40 of 40 samples .* regime", note) for note in found.notes)


def test_decimal_column_of_parquet_is_found(tmp_path):
    import duckdb

    file = tmp_path / "job.parquet"
    duckdb.sql(
        f"COPY (SELECT 0 AS worker, CAST(1 + range / 10 AS DECIMAL(9, 3)) AS step_time FROM range(3)) TO '{file}'"
    )
    assert list(read_table(str(file), Columns()).series[0].value) == [1.0, 1.1, 1.2]


def test_text_among_numbers_of_parquet_is_reported_with_row(tmp_path):
    import duckdb

    file = tmp_path / "job.parquet"
    duckdb.sql(f"COPY (SELECT unnest(['1.5', 'fast']) AS step_time) TO '{file}'")
    with pytest.raises(Unreadable) as caught:
        read_table(str(file), Columns(), "job.parquet")
    assert str(caught.value).startswith('job.parquet: row 2: column "step_time" ')
