"""Tests of records of operations: iterations, waiting times, and stopped ranks."""

from __future__ import annotations

import json
import pickle
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import inspector_lines, simulate_calls, simulate_gang

from healthd.cli.main import main
from healthd.failslow.readers.streams import (
    is_record,
    rank_from_name,
    read_hook_log,
    read_inspector,
    read_recorder,
    read_streams,
    to_seconds,
)
from healthd.failslow.stream import StreamError, analyse_streams, find_stream_period

# An entry of PyTorch 2.x, from a test of NVIDIA/nvidia-resiliency-ext (Apache-2.0), without its stack.
ENTRY = {
    "record_id": 86709,
    "pg_id": 5,
    "process_group": ("35", "TENSOR_MODEL_PARALLEL_GROUP"),
    "collective_seq_id": 39416,
    "p2p_seq_id": 0,
    "op_id": 39416,
    "profiling_name": "nccl:_all_gather_base",
    "time_created_ns": 1758610505947721376,
    "input_sizes": [[4096, 1, 5120]],
    "input_dtypes": ["BFloat16"],
    "output_sizes": [[8192, 1, 5120]],
    "output_dtypes": ["BFloat16"],
    "state": "scheduled",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "retired": False,
    "timeout_ms": 180000,
    "is_p2p": False,
}
PATTERN = ["all_gather"] * 3 + ["reduce_scatter"] * 2


def dump_of_calls(made):
    entries = [
        ENTRY | {"profiling_name": f"nccl:{name}", "time_created_ns": int(time * 1e9), "collective_seq_id": at}
        for at, (name, time) in enumerate(made)
    ]
    return {"version": "2.9", "pg_config": {"35": {"name": "35", "ranks": "[0, 1]"}}, "entries": entries}


def log_of_calls(made):
    return "".join(f"{time:.6f} {name} 0x7f\n" for name, time in made)


def record_file(kind):
    made, _ = simulate_calls(PATTERN, 60)
    if kind == "pickle":
        return "dump_rank3", pickle.dumps(dump_of_calls(made), 2)
    if kind == "json":
        return "dump_rank3.json", json.dumps(dump_of_calls(made)).encode()
    if kind == "log":
        return "rank3.log", log_of_calls(made).encode()
    if kind == "json log":
        return "rank3.jsonl", "".join(json.dumps({"time": t, "operation": n}) + "\n" for n, t in made).encode()
    if kind == "csv":
        return "rank3.csv", ("ts,op\n" + "".join(f"{time},{name}\n" for name, time in made)).encode()
    return "gpu-0-pid103.log", inspector_lines(3, 8, [(name, time, 0.001) for name, time in made]).encode()


@pytest.mark.parametrize("kind", ["pickle", "json", "log", "json log", "csv", "inspector"])
def test_period_is_found_in_each_kind_of_record(tmp_path, capsys, kind):
    name, data = record_file(kind)
    (tmp_path / name).write_bytes(data)
    assert main(["failslow", "period", str(tmp_path / name), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["period"] == 5
    assert document["iteration_seconds"] == pytest.approx(1.0, rel=0.02)
    assert document["confidence"] == pytest.approx(1.0)
    assert main(["failslow", "period", str(tmp_path / name)]) == 0
    assert " 5 operations " in capsys.readouterr().out


def test_doubtful_period_is_reported_with_alternative(tmp_path, capsys):
    made, _ = simulate_calls(["all_gather", "all_gather", "reduce_scatter"] * 32 + ["all_reduce"], 12)
    (tmp_path / "rank3.log").write_text(log_of_calls(made))
    assert main(["failslow", "period", str(tmp_path / "rank3.log"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["period"], document["series"][0]["other"]["period"]) == (3, 97)
    assert document["confidence"] < 0.5
    assert main(["failslow", "period", str(tmp_path / "rank3.log")]) == 0
    assert re.search(r"(?m)^note: doubtful: .* 97 operations ", capsys.readouterr().out)


def test_imprecise_iteration_time_is_reported_as_doubtful(tmp_path, capsys):
    made, _ = simulate_calls(["all_gather", "reduce_scatter"] * 9 + ["all_reduce"], 25, cv=0.3)
    (tmp_path / "rank3.log").write_text(log_of_calls(made))
    assert main(["failslow", "period", str(tmp_path / "rank3.log"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["series"][0]["within"] > 0.012
    assert document["confidence"] < 0.5
    assert main(["failslow", "period", str(tmp_path / "rank3.log")]) == 0
    assert re.search(r"doubtful: .* 24 iterations", capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["pickle", "json", "log", "json log", "inspector"])
def test_record_is_evaluated_like_table(tmp_path, capsys, kind):
    name, data = record_file(kind)
    (tmp_path / name).write_bytes(data)
    assert main(["failslow", str(tmp_path / name), "--json"]) == 0
    [series] = json.loads(capsys.readouterr().out)["series"]
    assert (series["series"], series["kind"], series["samples"]) == ("3", "rank", 59)


class NotPlainData:
    pass


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.pkl", pickle.dumps({"entries": [NotPlainData()]}, 2), "class or function"),
        ("a.pkl", b"\x80\x02]", "truncated pickle"),
        ("a.pkl", pickle.dumps({"entries": [{"process_group": 1}]}, 2), "entry 1 is not"),
        ("a.json", b'{"entries": [\n{"process_group": ', "line 2: is damaged JSON"),
        ("a.log", b"1.0 all_reduce\nnonsense\n2.0 all_reduce\n", "line 2"),
        ("a.log", inspector_lines(0, 8, [("A", 1.0, 1.0)] * 3).replace("}\n", "\n", 1).encode(), "line 1"),
        ("a.log", inspector_lines(0, 8, [("A", 1.0, 1.0)]).replace("1048576", '"many"').encode(), "line 1"),
        ("a.log", inspector_lines(0, 8, [("A", 1.0, 1.0)] * 50, verbose=False).encode(), "no event_trace_ts"),
        ("a.log", b"", "is empty"),
        ("a.csv", b"ts,op\n1,a\nnow,b\n", "line 3"),
        ("a.csv", b"x,y\n1,a\n", "which column contains the operations"),
        ("missing", None, "cannot be read"),
    ],
)
def test_invalid_record_is_one_sentence(tmp_path, capsys, name, data, message):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert main(["failslow", "period", str(path)]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["log", "json log", "inspector"])
def test_incomplete_last_line_is_left_out_and_noted(tmp_path, capsys, kind):
    name, data = record_file(kind)
    (tmp_path / name).write_bytes(data[:-20])
    assert main(["failslow", "period", str(tmp_path / name)]) == 0
    assert "line 300 is incomplete" in capsys.readouterr().out


def test_header_before_records_is_read_as_in_v4_3():
    first, *rest = (json.loads(line) for line in inspector_lines(2, 4, [("A", 9.0, 1.0)] * 3).splitlines())
    marker = {"header": first["header"], "metadata": first["metadata"], "dump_stats": {"coll_records": 3}}
    lines = [json.dumps(marker), *(json.dumps({"coll_perf": record["coll_perf"]}) for record in (first, *rest))]
    [stream] = read_inspector(lines, "a.log", [])
    assert (stream.rank, stream.node, len(stream.operations)) == ("2", "gpu-0", 3)
    with pytest.raises(StreamError, match="line 1: has no preceding communicator header"):
        read_inspector(lines[1:], "a.log", [])


def test_rank_with_longer_compute_time_is_suspected(tmp_path, capsys):
    for rank, made in enumerate(simulate_gang(8, 300, slow=3, slow_from=150)):
        (tmp_path / f"gpu-{rank // 4}-pid{100 + rank}.log").write_text(inspector_lines(rank, 8, made))
    assert main(["failslow", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [entry["subject"] for entry in document["suspects"]] == ["3"]
    assert document["suspects"][0]["cause"].startswith("compute")
    assert document["fail_stop"] == []


def test_transfer_is_time_of_last_rank_and_wait_is_difference():
    streams = []
    for rank, made in enumerate(simulate_gang(4, 60)):
        streams += read_inspector(inspector_lines(rank, 4, made).splitlines(), f"{rank}.log", [])
    for series in analyse_streams(streams).series:
        assert series.transfer
        assert series.wait
        assert series.busy
        assert sum(series.transfer) / len(series.transfer) == pytest.approx(5 * 0.003, rel=0.05)
        whole = [sum(parts) for parts in zip(series.busy, series.wait, series.transfer, strict=True)]
        assert whole == pytest.approx(list(series.value), rel=1e-6)
    [alone] = analyse_streams(streams[:1]).series
    assert alone.transfer is None
    assert alone.wait is None
    assert alone.busy is None


def test_plain_records_give_series_of_communicator():
    streams = []
    for rank, made in enumerate(simulate_gang(4, 60)):
        streams += read_inspector(inspector_lines(rank, 4, made, verbose=False).splitlines(), f"{rank}.log", [])
    assert {entry.label for entry in analyse_streams(streams).series} == {"communicator"}
    with pytest.raises(StreamError, match="event_trace_ts"):
        analyse_streams(streams[:3])


def test_rank_with_same_last_operation_in_two_dumps_is_stopped(tmp_path, capsys):
    made, _ = simulate_calls(PATTERN, 60)
    for poll, rank, count in ((1, 0, 250), (2, 0, 300), (1, 1, 280), (2, 1, 280)):
        (tmp_path / f"{poll}").mkdir(exist_ok=True)
        (tmp_path / f"{poll}/dump_rank{rank}").write_bytes(pickle.dumps(dump_of_calls(made[:count]), 2))
    assert main(["failslow", str(tmp_path), "--json"]) == 1
    [stop] = json.loads(capsys.readouterr().out)["fail_stop"]
    assert (stop["series"], stop["since"]) == ("1", pytest.approx(made[279][1]))
    assert main(["failslow", str(tmp_path)]) == 1
    assert "rank 1" in (output := capsys.readouterr().out)
    assert "stopped at" in output


def test_rank_with_early_last_operation_is_stopped():
    made, _ = simulate_calls(PATTERN, 100)
    streams = [read_hook_log(log_of_calls(made).splitlines(), f"{rank}.log", str(rank), [])[0] for rank in range(3)]
    streams += read_hook_log(log_of_calls(made[:300]).splitlines(), "3.log", "3", [])
    assert [stop.series for stop in analyse_streams(streams).fail_stops] == ["3"]
    assert analyse_streams(streams[:3]).fail_stops == ()


def test_operations_are_distinguished_by_size():
    made = [(f"nccl:all_reduce {at % 4}", float(at)) for at in range(200)]
    entries = [
        ENTRY | {"profiling_name": "nccl:all_reduce", "time_created_ns": int(time * 1e9), "input_sizes": [[at % 4]]}
        for at, (_, time) in enumerate(made, 1)
    ]
    assert find_stream_period(read_recorder(json.dumps(entries).encode(), "a", "0")).operations == 4


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_3.pkl", "3"), ("x/_dump_12", "12"), ("gpu-7_rank5.log.gz", "5"), ("calls.log", "calls")],
)
def test_rank_from_name_reads_number(name, rank):
    assert rank_from_name(name) == rank


@given(st.sampled_from([1.7e9, 1.7e12, 1.7e15, 1.7e18]))
def test_to_seconds_accepts_each_unit(time):
    assert to_seconds(time) == pytest.approx(1.7e9)


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(0, 2), st.text(max_size=20), st.integers(0, 400))
def test_any_lines_are_read_or_rejected(lines, is_inspector, inserted, at):
    good = inspector_lines(1, 2, [("A", 1.0, 1.0)]) if is_inspector else "1.5 all_reduce 0x1\n"
    damaged = (good[: at % len(good)] + inserted + good[at % len(good) :]).splitlines()
    for reader in (
        lambda input_lines_of_reader: read_inspector(input_lines_of_reader, "a", []),
        lambda input_lines_of_reader: read_hook_log(input_lines_of_reader, "a", "0", []),
    ):
        for input_lines in ([*lines, *damaged], [*damaged, *lines], lines):
            with suppress(StreamError):
                assert reader(input_lines)


JSONS = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ENTRY)), inner, max_size=4),
)


@given(st.sampled_from(sorted(ENTRY)), JSONS)
def test_any_entry_is_read_or_rejected(field, value):
    with suppress(StreamError):
        stream = read_recorder(json.dumps({"entries": [ENTRY, ENTRY | {field: value}]}).encode(), "a", "0")
        with suppress(StreamError):
            analyse_streams([stream])


@given(st.sampled_from(["header", "metadata", "coll_perf"]), JSONS)
def test_any_part_of_record_is_read_or_rejected(part, value):
    record = json.loads(inspector_lines(1, 2, [("A", 1.0, 1.0)]))
    for changed in (value, {**record[part], **value} if isinstance(value, dict) else value):
        with suppress(StreamError):
            read_inspector([json.dumps(record | {part: changed})], "a", [])


def test_table_is_no_record(tmp_path):
    (tmp_path / "a.csv").write_text("worker,step_time\n1,2.5\n")
    (tmp_path / "a.jsonl").write_text('{"event": "step", "time": 1, "step_time": 2.5}\n')
    assert not is_record(str(tmp_path / "a.csv"))
    assert not is_record(str(tmp_path / "a.jsonl"))
    with pytest.raises(StreamError, match="not a record"):
        read_streams(str(tmp_path / "a.csv"), [])
