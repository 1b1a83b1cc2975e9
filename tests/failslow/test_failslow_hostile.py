"""Tests of faulty input files as they occur in practice: each is read correctly or ends with one sentence."""

from __future__ import annotations

import gzip
import json
import os
import random

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


def written(folder, text, name="job.csv"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def wrong(folder, text, asked=WORKER, name="job.csv"):
    with pytest.raises(Unreadable) as caught:
        read_table(written(folder, text, name), asked, name)
    return str(caught.value)


def ran(capsys, *words):
    status = main(["failslow", *words])
    told = capsys.readouterr()
    return status, told.out, told.err


def samples(seed, count=40):
    source = random.Random(seed)
    return [round(source.gauss(1.0, 0.02), 6) for _ in range(count)]


def column(seed, count=40):
    return "t\n" + "".join(f"{one}\n" for one in samples(seed, count))


@pytest.mark.parametrize("huge", ["1e308", "1.7976931348623157e308", "5e-324", "1e19"])
@pytest.mark.parametrize("whose", [range(6), range(1)])
def test_values_that_no_time_has_are_left_out_and_counted(tmp_path, capsys, huge, whose):
    rows = [
        f"{worker},{huge if step >= 150 and worker in whose else 1 + step % 7 / 100},{huge},1\n"
        for step in range(300)
        for worker in range(6)
    ]
    file = written(tmp_path, "worker,t,busy,wait\n" + "".join(rows))
    status, out, err = ran(capsys, file, "--series", "worker", "--value", "t", "--busy", "busy", "--json")
    assert (status, err) == (0, "")
    notes = json.loads(out)["notes"]
    assert f"{150 * len(whose):,} rows with a value that is not a time (below 1e-18, or above 1e+18): left out" in notes


def test_a_detector_takes_any_time_that_a_float_can_be():
    assert [point.onset_index for point in detect([5e-324] * 200 + [1.7976931348623157e308] * 100)] == [200]


def test_a_mistake_of_healthds_own_is_one_sentence_and_nobody_is_slow(tmp_path, capsys, monkeypatch):
    file = written(tmp_path, column(1))
    monkeypatch.setattr("healthd.failslow.analysis.diagnose", lambda *_: 1 // 0)
    status, out, err = ran(capsys, file)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert "internal error of healthd, no result: ZeroDivisionError" in err


def test_a_pipe_that_nobody_writes_to_is_told_and_ends_no_folder(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        status, _, err = ran(capsys, str(tmp_path / "pipe"))
        assert (status, err) == (3, f"healthd failslow: {tmp_path}/pipe: is not a regular file\n")
        written(tmp_path, column(1))
        assert read_all([str(tmp_path)], Columns()).unread == [{"file": "pipe", "why": "is not a regular file"}]
    finally:
        os.close(held)


def test_a_folder_a_host_names_each_rank_by_the_shortest_path_that_differs(tmp_path):
    for host in "abcde":
        for rank in range(2):
            written(tmp_path, column(f"{host}{rank}"), f"hosts/{host}/rank{rank}.csv")
    names = [one.name for one in read_all([str(tmp_path / "hosts")], Columns()).series]
    assert sorted(names) == [f"{host}/rank{rank}" for host in "abcde" for rank in range(2)]


def test_files_that_differ_by_their_ending_only_are_named_with_it(tmp_path):
    written(tmp_path, column(1), "job.csv")
    written(tmp_path, gzip.compress(column(2).encode()), "job.csv.gz")
    written(tmp_path, "".join(f'{{"t": {one}}}\n' for one in samples(3)), "job.jsonl")
    names = [one.name for one in read_all([str(tmp_path)], Columns()).series]
    assert sorted(names) == ["job.csv", "job.csv.gz", "job.jsonl"]


def test_a_copy_is_told_and_counted_once(tmp_path):
    file = written(tmp_path, column(1))
    written(tmp_path, column(1), "copy.csv")
    found = read_all([file, file, str(tmp_path / "copy.csv")], Columns())
    assert len(found.series) == 1
    assert sum("has the same samples as" in note for note in found.notes) == 2


def test_equal_samples_that_never_change_are_no_copies(tmp_path):
    for rank in range(4):
        written(tmp_path, "t\n" + "1.5\n" * 30, f"rank{rank}.csv")
    assert len(read_all([str(tmp_path)], Columns()).series) == 4


def test_series_whose_column_nobody_named_are_not_read_as_one(tmp_path):
    rows = "".join(f"{step},{who},{one}\n" for step, one in enumerate(samples(1)) for who in "abcd")
    sentence = "job.csv: has several rows per step; which column identifies the series? Use --series: machine"
    assert wrong(tmp_path, "step,machine,step_time\n" + rows, Columns()) == sentence
    assert wrong(tmp_path, "at,machine,t\n" + rows, Columns(index="at", value="t")) == sentence.replace("step;", "at;")


@pytest.mark.parametrize("rows_at_once", [7, 1 << 16])
def test_series_one_after_another_whose_column_nobody_named_are_not_read_as_one(tmp_path, monkeypatch, rows_at_once):
    monkeypatch.setattr(chunks, "BLOCK", 20 * rows_at_once)
    rows = "".join(f"{step},{who},{one}\n" for who in "abc" for step, one in enumerate(samples(1, 150)))
    sentence = "job.csv: has several rows per step; which column identifies the series? Use --series: machine"
    assert wrong(tmp_path, "step,machine,step_time\n" + rows, Columns()) == sentence


def test_a_job_that_starts_anew_on_other_machines_is_one_series(tmp_path):
    rows = "".join(f"{40 * nth + step},{who},1.5\n" for nth, who in enumerate("abcd") for step in range(60))
    assert len(read_table(written(tmp_path, "step,machine,step_time\n" + rows), Columns(index="step")).series) == 1


def test_columns_that_are_not_used_are_told_where_none_names_a_series(tmp_path):
    file = written(tmp_path, "machine,step_time\n" + "".join(f"a,{one}\n" for one in samples(1)))
    assert "no column identifies a series; unused columns: machine" in read_table(file, Columns()).notes


@pytest.mark.parametrize("name", ["proc", "process", "task", "worker_name", "procid"])
def test_series_are_found_by_names_that_such_columns_have(tmp_path, name):
    rows = "".join(f"{who},{one}\n" for one in samples(1) for who in "ab")
    found = read_table(written(tmp_path, f"{name},step_time\n{rows}"), Columns()).series
    assert [one.name for one in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker,step_time\n0,1\n0,fast\n0,2\n", 'line 3: column "step_time" has 4 characters, which is not a number'),
        ("worker;step_time\n0;1,5\n0;1,6\n", 'line 2: column "step_time" has \'1,5\', which is not a number'),
        ('worker,step_time\n0,"1,053"\n', 'line 2: column "step_time" has \'1,053\', which is not a number'),
        ("worker,step_time\n0,nan\n0,nan\n", "line 3: there is no sample with a value: several samples "
         "per series are required"),
        ("worker,step_time\n", "has no row"),
        ("worker,step_time\n0,1,2\n", "line 2: has 3 cells, the header has 2"),
    ],
)  # fmt: skip
def test_what_is_no_number_in_the_first_rows_has_its_line_too(tmp_path, text, sentence):
    assert wrong(tmp_path, text, Columns()) == f"job.csv: {sentence}"


def test_one_infinite_value_among_the_first_does_not_hide_its_column(tmp_path):
    found = read_table(written(tmp_path, "worker,step_time\n0,1\n0,inf\n0,2\n"), Columns())
    assert list(found.series[0].value) == [1.0, 2.0]


def test_a_true_is_no_number(tmp_path):
    text = '{"worker": 0, "t": 1.5}\n{"worker": 0, "t": true}\n'
    assert wrong(tmp_path, text) == 'job.csv: line 2: column "t" has a bool, which is not a number'
    text = '{"worker": 0, "t": true}\n{"worker": 0, "t": 2}\n'
    assert wrong(tmp_path, text) == 'job.csv: line 1: column "t" has a bool, which is not a number'


def test_damaged_lines_that_complete_each_other_are_damaged(tmp_path):
    text = '{"worker": 0, "t": 1\n"worker": 1}, {"worker": 0, "t": 2}\n{"worker": 0, "t": 2}\n'
    assert wrong(tmp_path, text).startswith("job.csv: line 1: is damaged JSON")


@pytest.mark.parametrize("rows", [15, 16, 17, 32])
def test_a_torn_last_line_is_left_out_wherever_it_stands(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 16)
    lines = "".join(f'{{"worker": 0, "t": {1 + row}}}\n' for row in range(rows - 1))
    found = read_table(written(tmp_path, lines + '{"worker": 0, "t'), WORKER)
    assert len(found.series[0].value) == rows - 1
    quoted = "".join(f'"0",{1 + row}\n' for row in range(rows - 2))
    found = read_table(written(tmp_path, f'worker,t\n"0\n",5\n{quoted}0'), WORKER)
    assert len(found.series[0].value) == rows - 1


def test_a_line_end_in_quotes_is_part_of_the_name_and_counts_as_a_line(tmp_path):
    text = 'worker,t\n"a\nb",1\n"a\nb",2\n'
    assert [one.name for one in read_table(written(tmp_path, text), WORKER).series] == ["a\nb"]
    assert "line 6:" in wrong(tmp_path, text + "a,x\n")


def test_a_table_with_columns_that_records_have_is_a_table(tmp_path):
    for name in ("entries", "coll_perf"):
        assert not is_record(written(tmp_path, f'{{"step_time": 1.5, "{name}": 3}}\n' * 30))


def test_an_old_pickle_that_wants_a_class_is_told_and_nothing_of_it_loaded(tmp_path, capsys):
    status, _, err = ran(capsys, written(tmp_path, b"cposix\nsystem\n(S'touch " + bytes(tmp_path) + b"/made'\ntR."))
    assert (status, "calls a class or function" in err, (tmp_path / "made").exists()) == (3, True, False)


def test_an_operation_column_without_a_name_is_wrong_use_and_two_of_one_name_cannot_be_read(tmp_path, capsys):
    file = written(tmp_path, "op,ts,ts\na,1,2\n")
    assert ran(capsys, "period", file, "--operation", "")[0] == 64
    status, _, err = ran(capsys, "period", file, "--time", "ts")
    assert (status, 'has 2 columns "ts"' in err) == (3, True)


def test_regimes_of_which_each_has_too_few_samples_are_told(tmp_path):
    rows = "".join(f"{step},{one}\n" for step, one in enumerate(samples(1)))
    found = read_table(written(tmp_path, "step,t\n" + rows), Columns(value="t", regime=("step",)))
    assert "40 of 40 samples have a regime with fewer than 20 samples per series: ignored" in found.notes


def test_a_decimal_column_of_parquet_is_found_by_its_name(tmp_path):
    import duckdb

    file = tmp_path / "job.parquet"
    duckdb.sql(
        f"COPY (SELECT 0 AS worker, CAST(1 + range / 10 AS DECIMAL(9, 3)) AS step_time FROM range(3)) TO '{file}'"
    )
    assert list(read_table(str(file), Columns()).series[0].value) == [1.0, 1.1, 1.2]


def test_parquet_with_text_among_numbers_is_told_with_its_row(tmp_path):
    import duckdb

    file = tmp_path / "job.parquet"
    duckdb.sql(f"COPY (SELECT unnest(['1.5', 'fast']) AS step_time) TO '{file}'")
    with pytest.raises(Unreadable) as caught:
        read_table(str(file), Columns(), "job.parquet")
    assert str(caught.value) == 'job.parquet: row 2: column "step_time" has 4 characters, which is not a number'
