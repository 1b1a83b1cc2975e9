"""Tests of jobs from files of sacct: each becomes a row, or is counted with its line."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet_rows import content
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_text import TYPED

from healthd.fleet import times
from healthd.fleet.ingest import IngestOptions, Unread, ingest
from healthd.fleet.privacy import Privacy
from healthd.fleet.sources import common, sacct
from healthd.fleet.sources.job_row import FIELDS, JobRowReader, hashed_db_index
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

DATA = Path(__file__).parents[2] / "data" / "sacct"
KEY = b"0123456789abcdef0123456789abcdef"
NOW = 1_800_000_000
JOB = {
    "JobIDRaw": "100",
    "JobID": "100",
    "DBIndex": "5001",
    "Cluster": "c1",
    "State": "COMPLETED",
    "ExitCode": "0:0",
    "Submit": "1793500000",
    "Eligible": "1793500000",
    "Start": "1793500100",
    "End": "1793503700",
    "Suspended": "00:00:00",
    "NNodes": "2",
    "NodeList": "n[1-2]",
    "AllocCPUS": "192",
    "AllocTRES": "billing=192,cpu=192,gres/gpu=16,gres/gpu:h100=16,mem=2T,node=2",
    "Partition": "train",
    "Account": "physics",
    "QOS": "high",
    "Priority": "4294901759",
    "User": "ada",
    "Reservation": "",
    "TimelimitRaw": "60",
    "Restarts": "0",
    "JobName": "llm",
    "WorkDir": "/home/ada",
    "SubmitLine": "sbatch --exclude=n[7-8] run.sh",
}


def text(*jobs: dict[str, str], columns: Sequence[str] = tuple(JOB), delimiter: str = "|") -> str:
    lines = [columns, *([{**JOB, **job}[name] for name in columns] for job in jobs)]
    return "".join(delimiter.join(line) + "\n" for line in lines)


def ingest_options(**values: Any) -> IngestOptions:
    return IngestOptions(NOW, **{"cluster": "", "users": "keep", **values})


def read(tmp_path: Path, *texts: str | bytes, **values: Any) -> tuple[dict[str, list[dict[str, Any]]], Unread]:
    """Ingest files into a new store. Return its rows as dicts, and the unread rows."""
    paths = []
    for number, content_of_file in enumerate(texts):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(content_of_file if isinstance(content_of_file, bytes) else content_of_file.encode())
        paths.append(str(path))
    result = ingest(str(tmp_path / "db"), [(sacct.SOURCE, paths)], ingest_options(**values))
    return rows_of_store(tmp_path / "db"), result.unread


def rows_of_store(db: Path) -> dict[str, list[dict[str, Any]]]:
    found = content(db)
    return {
        table: [dict(zip(TABLES[table].columns, row, strict=True)) for row in table_rows]
        for table, table_rows in found.items()
    }


def job_row(tmp_path: Path, **job: str) -> dict[str, Any]:
    """Return the row in `jobs` of one job."""
    found, unread = read(tmp_path, text(job))
    assert not unread.examples
    (row,) = found["jobs"]
    return row


def unread_reason(tmp_path: Path, **job: str) -> str:
    """Return why a job was not read."""
    found, unread = read(tmp_path, text(job))
    assert "jobs" not in found
    (message,) = unread.examples
    return message.removeprefix(f"sacct: {tmp_path / '0.txt'}:2: ")


def test_job_has_rows_for_nodes_and_exclusions(tmp_path: Path) -> None:
    found, unread = read(tmp_path, text(JOB))
    assert found["jobs"] == [
        {
            "cluster": "c1",
            "db_index": 5001,
            "job_id": 100,
            "array_job_id": None,
            "array_task_id": None,
            "restarts": 0,
            "state": "COMPLETED",
            "exit_code": 0,
            "exit_signal": 0,
            "submit_time": 1793500000,
            "eligible_time": 1793500000,
            "start_time": 1793500100,
            "end_time": 1793503700,
            "nodes": 2,
            "gpus": 16,
            "cpus": 192,
            "node_list": "n[1-2]",
            "partition": "train",
            "account": "physics",
            "qos": "high",
            "priority": 4294901759,
            "user_name": "ada",
            "run_key": found["jobs"][0]["run_key"],
            "reservation": None,
            "time_limit_seconds": 3600,
            "suspended_seconds": 0,
            "exclusions_known": True,
            "source": "sacct",
        }
    ]
    key = {"cluster": "c1", "db_index": 5001, "submit_time": 1793500000}
    ran = {**key, "start_time": 1793500100, "end_time": 1793503700, "gpus": 8.0}
    assert found["job_nodes"] == [{**ran, "node": "n1"}, {**ran, "node": "n2"}]
    excluded = {**key, "source": "submit_line", "job_id": 100}
    assert found["exclusions"] == [{**excluded, "node": "n7"}, {**excluded, "node": "n8"}]
    (record,) = found["ingests"]
    assert (record["cluster"], record["from_time"], record["to_time"]) == ("c1", 1793500000, 1793503700)
    assert (record["rows_read"], record["rows_unread"], unread.examples) == (1, 0, [])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"State": "CANCELLED by 1000"}, {"state": "CANCELLED"}),
        ({"State": "OUT_OF_MEMORY", "ExitCode": "0:125"}, {"exit_code": 0, "exit_signal": 125}),
        ({"State": "FAILED", "ExitCode": "0:9"}, {"state": "FAILED", "exit_code": 0, "exit_signal": 9}),
        ({"State": "REQUEUED"}, {"state": "REQUEUED"}),
        ({"State": "RESIZING"}, {"state": "RESIZING"}),
        ({"JobID": "90_7"}, {"job_id": 100, "array_job_id": 90, "array_task_id": 7}),
        ({"JobID": "100_[3-9%2]"}, {"job_id": 100, "array_job_id": 100, "array_task_id": None}),
        ({"JobID": "99+1"}, {"job_id": 100, "array_job_id": None, "array_task_id": None}),
        ({"AllocTRES": "cpu=4,gres/gpu:h100=3,gres/gpu:a100=1"}, {"gpus": 4}),
        ({"AllocTRES": "cpu=4,mem=1G"}, {"gpus": 0}),
        ({"AllocTRES": ""}, {"gpus": None}),
        ({"TimelimitRaw": "UNLIMITED"}, {"time_limit_seconds": None}),
        ({"Suspended": "1-00:00:30"}, {"suspended_seconds": 86430}),
        ({"Eligible": "Unknown"}, {"eligible_time": None}),
        ({"Restarts": ""}, {"restarts": None}),
        ({"User": ""}, {"user_name": None}),
        ({"SubmitLine": ""}, {"exclusions_known": False}),
        ({"SubmitLine": "sbatch run.sh"}, {"exclusions_known": False}),
        ({"SubmitLine": "srun hostname"}, {"exclusions_known": True}),
        ({"DBIndex": str(2**64 - 1)}, {"db_index": -1}),
        ({"DBIndex": str(2**63)}, {"db_index": -(2**63)}),
        ({"DBIndex": "0"}, {"db_index": hashed_db_index("c1", "100", 1793500000)}),
        ({"State": "RUNNING", "End": "Unknown"}, {"end_time": None, "start_time": 1793500100, "gpus": 16}),
        ({"Partition": 'a "b"\tc'}, {"partition": 'a "b"?c'}),
    ],
)
def test_each_field_is_interpreted(tmp_path: Path, fields: dict[str, str], expected: dict[str, Any]) -> None:
    row = job_row(tmp_path, **fields)
    assert {name: row[name] for name in expected} == expected


def test_job_cancelled_while_pending_never_ran(tmp_path: Path) -> None:
    """sacct 22.05 reports the time of the cancellation as the start."""
    never = {"State": "CANCELLED by 0", "NodeList": "None assigned", "Start": JOB["End"], "AllocTRES": ""}
    found, _ = read(tmp_path, text(never))
    (row,) = found["jobs"]
    assert (row["start_time"], row["end_time"], row["nodes"], row["gpus"], row["cpus"]) == (
        *(None, 1793503700, None, None, None),
    )
    assert "job_nodes" not in found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"End": "1793500099"}, "End is 1 s before Start"),
        ({"End": "9999999999"}, "a time before 1970 or after 2100: '9999999999'"),
        ({"Submit": "4102444801"}, "a time before 1970 or after 2100: '4102444801'"),
        ({"State": "RUNNING"}, "RUNNING with an End: was sacct run with --truncate?"),
        ({"State": "completed"}, "State: not a job state: 9 characters"),
        ({"Submit": "Unknown"}, "Submit: missing"),
        ({"Submit": "soon"}, "not a time: 4 characters"),
        (
            {"Submit": "2026-11-01T00:00:00"},
            "a time without a zone: '2026-11-01T00:00:00'; add --timezone",
        ),
        ({"JobIDRaw": "x"}, "JobIDRaw: not a number: 1 characters"),
        ({"JobID": "100_x"}, "JobID: not a job id: 5 characters"),
        ({"DBIndex": str(2**64)}, f"DBIndex: not a 64-bit number: '{2**64}'"),
        ({"ExitCode": "9"}, "ExitCode: not of the form 0:0: '9'"),
        ({"AllocTRES": "gpus"}, "AllocTRES: not of the form cpu=1,gres/gpu=8: 4 characters"),
        ({"NodeList": "n[1-99999999]"}, "more than 65536 names in one list"),
        ({"Priority": "high"}, "not a number: 4 characters"),
        ({"Suspended": "long"}, "not a duration: 4 characters"),
        ({"ExitCode": "TOKEN=hf_secret123"}, "ExitCode: not of the form 0:0: 18 characters"),
        ({"AllocTRES": "cpu=8,gres/gpu=1.3K"}, "AllocTRES: not a number of GPUs: 4 characters"),
    ],
)
def test_unreadable_row_is_reported_with_line(tmp_path: Path, fields: dict[str, str], reason: str) -> None:
    assert unread_reason(tmp_path, **fields) == reason


@pytest.mark.parametrize(
    ("fields", "column", "value"),
    [
        ({"AllocTRES": "cpu=8,gres/gpu=1K"}, "gpus", 1024),
        ({"AllocTRES": "cpu=8,gres/gpu:h100=1.50K"}, "gpus", 1536),
        ({"Priority": "4294967294"}, "priority", None),
        ({"Priority": "4294967295"}, "priority", None),
        ({"Priority": "4294967293"}, "priority", 4294967293),
        ({"Suspended": "INVALID"}, "suspended_seconds", None),
    ],
)
def test_large_and_special_values_are_interpreted(
    tmp_path: Path, fields: dict[str, str], column: str, value: int | None
) -> None:
    found, _ = read(tmp_path, text({**JOB, **fields}))
    assert [row[column] for row in found["jobs"]] == [value]


def test_steps_are_skipped_without_counting(tmp_path: Path) -> None:
    steps = [{"JobIDRaw": f"100.{step}", "JobID": f"100.{step}"} for step in ("batch", "extern", "0", "interactive")]
    found, unread = read(tmp_path, text(JOB, *steps))
    assert len(found["jobs"]) == 1
    assert (unread.rows["sacct"], unread.unread["sacct"]) == (1, 0)


def test_columns_may_have_any_order_and_be_missing(tmp_path: Path) -> None:
    columns = list(JOB)
    random.Random(1).shuffle(columns)
    (tmp_path / "a").mkdir()
    whole, _ = read(tmp_path / "a", text(JOB, columns=columns, delimiter="|#"))
    assert whole["jobs"][0]["end_time"] == 1793503700
    (tmp_path / "b").mkdir()
    few, _ = read(tmp_path / "b", text(JOB, columns=("State", "JobID", "Submit")), cluster="c9")
    (row,) = few["jobs"]
    assert {name: value for name, value in row.items() if value is not None} == {
        "cluster": "c9",
        "db_index": hashed_db_index("c9", "100", 1793500000),
        "job_id": 100,
        "state": "COMPLETED",
        "submit_time": 1793500000,
        "exclusions_known": False,
        "source": "sacct",
    }


def read_cut_file(tmp_path: Path, content_of_file: str | bytes) -> tuple[list[dict[str, Any]], str]:
    """Ingest a file that is cut. Return the jobs before the cut, and the error."""
    path = tmp_path / "cut.txt"
    path.write_bytes(content_of_file if isinstance(content_of_file, bytes) else content_of_file.encode())
    result = ingest(str(tmp_path / "db"), [(sacct.SOURCE, [str(path)])], ingest_options())
    (message,) = result.failed
    before = rows_of_store(tmp_path / "db").get("jobs", [])
    assert result.unread.rows["sacct"] - result.unread.unread["sacct"] == len(before)
    return before, message.removeprefix(f"sacct: {path}: ")


def rejection(tmp_path: Path, content_of_file: str) -> str:
    """Return the error for a file from which nothing is kept."""
    path = tmp_path / "refused.txt"
    path.write_text(content_of_file)
    (message,) = ingest(str(tmp_path / "db"), [(sacct.SOURCE, [str(path)])], ingest_options()).failed
    assert rows_of_store(tmp_path / "db") == {}
    return message.removeprefix(f"sacct: {path}: ")


def test_file_without_jobs_is_one_sentence(tmp_path: Path) -> None:
    assert rejection(tmp_path, text(JOB, columns=("State", "JobID"))) == (
        "has no column Submit; run sacct with --format=JobIDRaw,JobID,DBIndex,Cluster,State,ExitCode,Submit,Eligible,"
        "Start,End,..."
    )
    without = text(JOB, columns=("State", "JobID", "Submit"))
    assert rejection(tmp_path, without) == "a job does not name its cluster: add --cluster NAME"
    result = ingest(str(tmp_path / "db"), [(sacct.SOURCE, [str(tmp_path / "nowhere")])], ingest_options())
    assert result.failed == [f"sacct: {tmp_path / 'nowhere'}: cannot be read: No such file or directory"]


def test_job_id_of_task_without_raw_id_is_not_guessed(tmp_path: Path) -> None:
    found, unread = read(tmp_path, text({"JobID": "90_7"}, columns=("State", "JobID", "Submit", "Cluster")))
    assert "jobs" not in found
    assert unread.examples[0].endswith(":2: JobIDRaw: missing, and JobID '90_7' does not contain it")


def test_times_need_zone_and_ambiguous_hour_is_reported(tmp_path: Path) -> None:
    berlin = {"Submit": "2026-10-25T01:30:00", "Eligible": "2026-10-25T01:30:00", "Start": "2026-10-25T01:59:59"}
    good = {**berlin, "End": "2026-10-25T03:00:00"}
    twice = {**berlin, "End": "2026-10-25T02:30:00", "DBIndex": "5002"}
    found, unread = read(tmp_path, text(good, twice), zone=times.load_zone("Europe/Berlin"))
    (row,) = found["jobs"]
    assert (row["submit_time"], row["start_time"], row["end_time"]) == (1792884600, 1792886399, 1792893600)
    assert row["end_time"] - row["start_time"] == 7201
    assert unread.examples[0].endswith(
        ":3: 2026-10-25T02:30:00 occurs twice in Europe/Berlin, when clocks are set back"
    )


def test_unread_limit_is_one_percent(tmp_path: Path) -> None:
    good = [{"DBIndex": str(number), "JobIDRaw": str(number), "JobID": str(number)} for number in range(1, 100)]
    _, unread = read(tmp_path, text(*good, {"State": "?"}))
    assert (unread.rows["sacct"], unread.unread["sacct"], unread.is_over_limit()) == (100, 1, False)
    (tmp_path / "more").mkdir()
    assert read(tmp_path / "more", text(*good[1:], {"State": "?"}))[1].is_over_limit() is True


def test_ended_job_replaces_running_job_in_any_order(tmp_path: Path) -> None:
    runs = text({"State": "RUNNING", "End": "Unknown"})
    for name, texts in (("before", (runs, text(JOB))), ("after", (text(JOB), runs)), ("together", (runs + text(JOB),))):
        (tmp_path / name).mkdir()
        found, _ = read(tmp_path / name, *texts)
        assert [row["end_time"] for row in found["jobs"]] == [1793503700], name
        assert [row["end_time"] for row in found["job_nodes"]] == [1793503700] * 2, name


@pytest.mark.parametrize("last", ["DBIndex", "User", "State", "Start", "AllocTRES"])
def test_windows_line_ends_give_same_jobs(tmp_path: Path, last: str) -> None:
    columns = [*(name for name in JOB if name != last), last]
    for name, end in (("unix", "\n"), ("windows", "\r\n")):
        (tmp_path / name).mkdir()
        found, unread = read(tmp_path / name, text(JOB, columns=columns).replace("\n", end), users="keep")
        assert unread.examples == []
        (row,) = found["jobs"]
        assert (row["user_name"], row["db_index"], row["state"], row["gpus"]) == ("ada", 5001, "COMPLETED", 16), name


def test_run_key_needs_work_directory(tmp_path: Path) -> None:
    columns = [name for name in JOB if name != "WorkDir"]
    bob = {"User": "bob", "DBIndex": "5002", "JobIDRaw": "101", "JobID": "101"}
    found, _ = read(tmp_path, text(JOB, bob, columns=columns))
    assert [(row["user_name"], row["run_key"]) for row in found["jobs"]] == [("ada", None), ("bob", None)]


def test_requeued_job_has_row_for_each_run(tmp_path: Path) -> None:
    again = {"DBIndex": "5002", "Submit": "1793503800", "Start": "1793503900", "End": "1793504000", "Restarts": "1"}
    found, _ = read(tmp_path, text({"State": "REQUEUED"}, again))
    assert [(row["job_id"], row["restarts"], row["state"]) for row in found["jobs"]] == [
        (100, 0, "REQUEUED"),
        (100, 1, "COMPLETED"),
    ]
    keys = {row["run_key"] for row in found["jobs"]}
    assert len(keys) == 1
    assert None not in keys


def test_only_changed_file_is_read_again(tmp_path: Path) -> None:
    _, unread = read(tmp_path, text(JOB))
    assert unread.rows["sacct"] == 1
    again = ingest(str(tmp_path / "db"), [(sacct.SOURCE, [str(tmp_path / "0.txt")])], ingest_options())
    assert again.unread.rows["sacct"] == 0
    found, unread = read(tmp_path, text(JOB, {"DBIndex": "5002", "JobIDRaw": "101", "JobID": "101"}))
    assert (unread.rows["sacct"], len(found["jobs"])) == (2, 2)


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_broken_file_does_not_stop_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(common, "BATCH_BYTES", together)
    paths = [str(tmp_path / f"{number}.txt") for number in range(4)]
    missing = str(tmp_path / "gone.txt")
    for number, path in enumerate(paths):
        content_of_file = text({"DBIndex": str(6000 + number), "JobIDRaw": str(number + 1), "JobID": str(number + 1)})
        Path(path).write_text(content_of_file if number != 2 else "State|JobID\nCOMPLETED|1\n")
    result = ingest(str(tmp_path / "db"), [(sacct.SOURCE, [paths[0], missing, *paths[1:]])], ingest_options())
    assert result.failed[0] == f"sacct: {missing}: cannot be read: No such file or directory"
    assert result.failed[1].startswith(f"sacct: {paths[2]}: has no column Submit")
    assert (len(result.failed), result.sources, result.unread.rows["sacct"]) == (2, ["sacct"], 3)
    found = rows_of_store(tmp_path / "db")
    assert [row["job_id"] for row in found["jobs"]] == [1, 2, 4]
    assert {row["name"]: row["rows_read"] for row in found["ingests"]} == dict.fromkeys((*paths[:2], paths[3]), 1)
    Path(paths[2]).write_text(text({"DBIndex": "6002", "JobIDRaw": "3", "JobID": "3"}))
    assert ingest(str(tmp_path / "db"), [(sacct.SOURCE, paths)], ingest_options()).unread.rows["sacct"] == 1
    assert [row["job_id"] for row in rows_of_store(tmp_path / "db")["jobs"]] == [1, 2, 3, 4]


def test_only_jobs_in_period_are_kept(tmp_path: Path) -> None:
    early = {"DBIndex": "1", "Submit": "1793400000", "Start": "1793400000", "End": "1793400100"}
    late = {"DBIndex": "2", "Submit": "1793600000", "Start": "1793600000", "End": "1793600100"}
    found, unread = read(tmp_path, text(early, JOB, late), from_time=1793500000, to_time=1793600000)
    assert [row["db_index"] for row in found["jobs"]] == [5001]
    assert unread.rows["sacct"] == 3


def test_compressed_file_is_read_and_cut_is_reported(tmp_path: Path) -> None:
    jobs = [{"DBIndex": str(n), "JobIDRaw": str(n), "JobID": str(n)} for n in range(1, 4000)]
    packed = gzip.compress(text(*jobs).encode())
    found, unread = read(tmp_path, packed)
    assert (len(found["jobs"]), unread.examples) == (3999, [])
    (tmp_path / "cut").mkdir()
    before, message = read_cut_file(tmp_path / "cut", packed[: len(packed) // 2])
    assert len(before) < 3999
    assert message.startswith("the compressed file is truncated: ")


def test_store_keeps_no_text_of_submission_except_nodes(tmp_path: Path) -> None:
    secret = "hf_SECRETTOKEN0123456789"
    line = f"sbatch --exclude=n7 --export=TOKEN={secret} --comment={secret} run.sh --token {secret}"
    hidden = {"SubmitLine": line, "JobName": f"train-{secret}", "WorkDir": f"/home/ada/{secret}", "User": secret}
    broken = {"SubmitLine": line, "State": "?", "DBIndex": "5002"}
    job = json_job(submit_line=line, name=secret, working_directory=secret, user={"name": secret}["name"])
    found, _ = read(tmp_path, text(hidden, broken), json.dumps({"jobs": [job]}), users="hash")
    assert [row["node"] for row in found["exclusions"]] == ["n7"]
    for path in (tmp_path / "db").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert all(
        secret not in str(value) for table_rows in found.values() for row in table_rows for value in row.values()
    )


@pytest.mark.parametrize("users", ["keep", "drop", "hash"])
def test_users_are_kept_dropped_or_hashed_with_same_runs(tmp_path: Path, users: str) -> None:
    other = {"DBIndex": "5002", "JobIDRaw": "101", "JobID": "101", "WorkDir": "/home/bob"}
    found, _ = read(tmp_path, text(JOB, {**other}), users=users)
    names = {row["user_name"] for row in found["jobs"]}
    assert len(names) == 1
    assert (names == {"ada"}) == (users == "keep")
    assert (names == {None}) == (users == "drop")
    assert len({row["run_key"] for row in found["jobs"]}) == 2


def test_long_node_lists_are_not_cached() -> None:
    reader = JobRowReader(Privacy("hash", KEY), None, "c1", "sacct")
    job = {**dict.fromkeys(FIELDS, ""), **JOB}
    tracemalloc.start()
    try:
        for number in range(12):  # 10,000 names take 700 kB
            row = reader.read(tuple({**job, "NodeList": f"n[{number}-{number + 9999}]"}[name] for name in FIELDS))
            assert row is not None
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


# --- captured files


def test_captured_file_with_line_ends_in_fields_has_two_jobs(tmp_path: Path) -> None:
    found, unread = read(tmp_path, (DATA / "multiline.txt").read_bytes(), zone=times.load_zone("UTC"))
    assert [(row["job_id"], row["state"], row["nodes"], row["gpus"]) for row in found["jobs"]] == [
        (201729, "FAILED", 128, 1024),
        (201844, "REQUEUED", 32, 256),
    ]
    assert len(found["job_nodes"]) == 160
    assert unread.examples == []


def test_captured_file_with_invalid_utf8_keeps_all_jobs(tmp_path: Path) -> None:
    found, unread = read(tmp_path, (DATA / "invalid_utf8.txt").read_bytes(), zone=times.load_zone("UTC"))
    assert [(row["job_id"], row["exit_signal"]) for row in found["jobs"]] == [(3557891, 9), (3557892, 0)]
    assert unread.examples == []


def test_captured_file_with_rest_of_line_reports_it(tmp_path: Path) -> None:
    found, unread = read(tmp_path, (DATA / "invalid_lines.txt").read_bytes(), zone=times.load_zone("UTC"))
    assert "jobs" not in found
    assert unread.examples == [f"sacct: {tmp_path / '0.txt'}:3: 93 fields, but the header has 109"]
    assert unread.is_over_limit()


def test_captured_file_of_steps_has_no_jobs(tmp_path: Path) -> None:
    found, unread = read(tmp_path, (DATA / "steps.txt").read_bytes(), zone=times.load_zone("UTC"))
    assert "jobs" not in found
    assert unread.examples == []


# --- JSON


def json_job(**values: Any) -> dict[str, Any]:
    """Return JOB as data_parser/v0.0.45 writes it, in part."""

    def number(value: int) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": value}

    return {
        "job_id": 100,
        "sluid": "s00000000004W9",
        "array": {"job_id": 0, "task_id": {"set": False, "infinite": False, "number": 0}},
        "het": {"job_id": 0, "job_offset": {"set": False, "infinite": False, "number": 0}},
        "cluster": "c1",
        "state": {"current": ["COMPLETED"], "reason": "None"},
        "exit_code": {"status": ["SUCCESS"], "return_code": number(0), "signal": {"id": number(0), "name": ""}},
        "time": {
            "submission": 1793500000,
            "eligible": 1793500000,
            "start": 1793500100,
            "end": 1793503700,
            "suspended": 0,
            "limit": number(60),
        },
        "allocation_nodes": 2,
        "nodes": "n[1-2]",
        "tres": {
            "allocated": [
                {"type": "cpu", "name": "", "id": 1, "count": 192},
                {"type": "energy", "name": "", "id": 3, "count": -2},
                {"type": "gres", "name": "gpu", "id": 1001, "count": 16},
                {"type": "gres", "name": "gpu:h100", "id": 1002, "count": 16},
            ]
        },
        "partition": "train",
        "account": "physics",
        "qos": "high",
        "priority": number(4294901759),
        "user": "ada",
        "reservation": {"id": 0, "name": ""},
        "restart_cnt": 0,
        "name": "llm",
        "working_directory": "/home/ada",
        "submit_line": "sbatch --exclude=n[7-8] run.sh",
        "steps": [],
        **values,
    }


def test_json_gives_same_rows_as_text(tmp_path: Path) -> None:
    for name, content_of_file in (
        ("text", text(JOB)),
        ("json", json.dumps({"meta": {}, "jobs": [json_job()], "errors": []}, indent=1)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "db").mkdir()
        (tmp_path / name / "db" / "key").write_text("0" * 64)
        (tmp_path / name / "db" / "key").chmod(0o600)
        read(tmp_path / name, content_of_file)
    as_text, as_json = (rows_of_store(tmp_path / name / "db") for name in ("text", "json"))
    assert as_json["jobs"] == [{**as_text["jobs"][0], "source": "sacct_json"}]
    assert as_json["job_nodes"] == as_text["job_nodes"]
    assert as_json["exclusions"] == as_text["exclusions"]


OLD_EXIT = {"status": "SUCCESS", "return_code": 0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sluid": None}, {"db_index": hashed_db_index("c1", "100", 1793500000)}),
        ({"state": {"current": "FAILED"}, "exit_code": OLD_EXIT}, {"state": "FAILED", "exit_code": None}),
        ({"state": {"current": "COMPLETED"}, "exit_code": OLD_EXIT}, {"exit_code": 0, "exit_signal": 0}),
        (
            {"exit_code": {"status": "SIGNALED", "return_code": -127, "signal": {"signal_id": 9, "name": "Killed"}}},
            {"exit_code": 0, "exit_signal": 9},
        ),
        ({"state": {"current": ["PENDING", "REQUEUED"]}}, {"state": "REQUEUED"}),
        ({"array": {"job_id": 90, "task_id": 7}}, {"job_id": 100, "array_job_id": 90, "array_task_id": 7}),
        ({"array": {"job_id": 90, "task_id": 4294967294}}, {"array_job_id": 90, "array_task_id": None}),
        ({"reservation": {"id": 0, "name": 0}}, {"reservation": None}),
        (
            {"time": {**json_job()["time"], "limit": {"set": True, "infinite": True, "number": 0}}},
            {"time_limit_seconds": None},
        ),
        ({"nodes": "None assigned", "tres": {"allocated": []}}, {"start_time": None, "nodes": None, "gpus": None}),
        ({"submit_line": "sbatch run.sh", "script": "#SBATCH -x n3\nhostname\n"}, {"exclusions_known": True}),
    ],
)
def test_json_of_each_version_is_interpreted(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found, unread = read(tmp_path, json.dumps({"jobs": [json_job(**fields)]}))
    (row,) = found["jobs"]
    assert {name: row[name] for name in expected} == expected
    assert unread.examples == []


def test_cut_json_keeps_jobs_before_cut(tmp_path: Path) -> None:
    whole = json.dumps({"jobs": [json_job(), json_job(job_id=101, sluid=None)]}, indent=1)
    for end, message in (
        (len(whole) - 400, "is truncated at line "),
        (whole.rindex("]"), "ends within the list of jobs"),
    ):
        (tmp_path / str(end)).mkdir()
        before, reason = read_cut_file(tmp_path / str(end), whole[:end])
        assert [row["job_id"] for row in before] in ([100], [100, 101])
        assert f"the document {message}" in reason


def test_json_of_other_shape_is_rejected_or_reported(tmp_path: Path) -> None:
    assert rejection(tmp_path, "{}") == 'has no list "jobs" from sacct --json'
    assert rejection(tmp_path, '{"jobs": 5}') == 'has no list "jobs" from sacct --json'
    assert rejection(tmp_path, '{"meta": [1').startswith("line 1: not JSON: ")
    found, unread = read(tmp_path, json.dumps({"jobs": [7, json_job(tres=[]), json_job(time=5), json_job()]}))
    assert len(found["jobs"]) == 1
    assert len(unread.examples) == 2


# --- any content


LINES = st.lists(
    st.sampled_from([*text(JOB).splitlines(), "", "x", "||", JOB["SubmitLine"]]) | st.text(max_size=40), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400) | LINES.map(lambda lines: "\n".join(lines).encode("utf-8", "replace")))
def test_any_bytes_are_read_or_reported(raw: bytes) -> None:
    unread: list[int] = []
    reader = JobRowReader(Privacy("hash", KEY), None, "c1", "sacct")
    found = list(sacct.text_rows(io.BytesIO(raw), reader, lambda line, why: unread.append(line)))
    assert len(unread) + len(found) <= raw.count(b"\n") + 1
    for row in found:
        if row is not None:
            line = f"{row.head}\t{row.exclusions_known}\t{row.tail}"
            assert line.count("\t") == len(TABLES["jobs"].columns)
            assert "\n" not in line


# Fields that a user types. A hostile user would try JobID=... and header lines.
TYPED_FIELDS = ("JobName", "Comment", "AdminComment", "Extra", "Constraints", "SubmitLine", "WorkDir", "Partition")
COLUMNS = (*(name for name in JOB if name not in (*TYPED_FIELDS, "DBIndex")), *TYPED_FIELDS, "DBIndex")
IMITATION = st.sampled_from([b"\nJobID\n", b"\njobid|x\n", b"|", b"||||", b"\n", b"\n\n", b"\x85", b"101|", b"\r\n"])
WRITTEN = st.lists(TYPED | IMITATION, max_size=4).map(b"".join)


@pytest.mark.parametrize("delimiter", [b"|", b"\x1f0123456789ab\x1f"], ids=["file", "call"])
@settings(max_examples=200, deadline=None)
@given(typed=st.tuples(*[WRITTEN] * len(TYPED_FIELDS)))
def test_typed_text_does_not_change_other_jobs(delimiter: bytes, typed: tuple[bytes, ...]) -> None:
    """The typed job is between two others. It is correct, or it is counted as unread.

    In a file, text with line ends and delimiters may look like columns, so only one of the two is typed.
    """
    if delimiter == b"|" and b"\n" in b"".join(typed):
        typed = tuple(value.replace(b"|", b"") for value in typed)

    def line(**values: bytes) -> bytes:
        job = {name: value.encode() for name, value in JOB.items()}
        return delimiter.join({**job, **values}.get(name, b"") for name in COLUMNS) + b"\n"

    header = delimiter.join(name.encode() for name in COLUMNS) + b"\n"
    typed_job = line(JobIDRaw=b"101", JobID=b"101", DBIndex=b"5002", **dict(zip(TYPED_FIELDS, typed, strict=True)))
    unread: list[int] = []

    def rows_of(*lines: bytes) -> list[Any]:
        reader = JobRowReader(Privacy("keep", KEY), None, "c1", "sacct")
        file = io.BytesIO(b"".join((header, *lines)))
        own = "" if delimiter == b"|" else delimiter.decode()
        return list(sacct.text_rows(file, reader, lambda line, why: unread.append(line), own))

    last = line(JobIDRaw=b"102", JobID=b"102", DBIndex=b"5003")
    other_rows = rows_of(line(), last)
    assert unread == []
    found = rows_of(line(), typed_job, last)
    assert [row for row in found if row.job_id in ("100", "102")] == other_rows
    typed_rows = [row for row in found if row.job_id == "101"]
    assert len(found) == 2 + len(typed_rows)
    assert all((row.submit_time, row.end_time, row.db_index) == (1793500000, 1793503700, 5002) for row in typed_rows)
    assert typed_rows or unread


def test_fields_are_unique() -> None:
    assert len(set(FIELDS)) == len(FIELDS) == 28


# --- data that was lost without a message


def test_node_fail_without_nodes_keeps_times_and_gpus(tmp_path: Path) -> None:
    for number, nodes in enumerate(("None assigned", "")):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = job_row(folder, **{**JOB, "State": "NODE_FAIL", "NodeList": nodes})
        times = (row["start_time"], row["end_time"])
        assert (times, row["nodes"], row["gpus"], row["node_list"]) == ((1793500100, 1793503700), 2, 16, None)


def test_json_with_errors_of_sacct_is_incomplete(tmp_path: Path) -> None:
    errors = [{"description": "slurmdbd down", "error_number": 7000}]
    for number, document in enumerate(({"errors": errors, "jobs": []}, {"jobs": [], "errors": errors})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert "slurmdbd down" in rejection(folder, json.dumps(document))
    before, message = read_cut_file(tmp_path, json.dumps({"jobs": [json_job()], "errors": errors}))
    assert [row["job_id"] for row in before] == [100]
    assert "slurmdbd down" in message
    (tmp_path / "empty").mkdir()
    found, unread = read(tmp_path / "empty", json.dumps({"jobs": [], "errors": []}))
    assert "jobs" not in found
    assert unread.examples == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_job_without_cluster_is_unread_and_others_are_kept(tmp_path: Path, form: str) -> None:
    if form == "text":
        jobs = [{**JOB, "JobIDRaw": str(n), "JobID": str(n), "DBIndex": str(n)} for n in range(1, 13)]
        jobs[0] = {**jobs[0], "Cluster": ""}
        jobs[11] = {**jobs[11], "Cluster": ""}
        content_of_file = text(*jobs)
    else:
        records = [json_job(job_id=n, sluid=None) for n in range(1, 13)]
        records[0]["cluster"] = records[11]["cluster"] = ""
        content_of_file = json.dumps({"jobs": records})
    found, unread = read(tmp_path, content_of_file)
    assert sorted(row["job_id"] for row in found["jobs"]) == list(range(2, 12))
    assert sum(unread.unread.values()) == 2
    assert all("--cluster" in message for message in unread.examples)


@pytest.mark.parametrize("tres", ["gres/gpumem=0", "gres/gpuutil=97", "gres/gpumem=40G,gres/gpu:h100=8"])
def test_gpu_memory_and_utilisation_are_no_gpu_count(tmp_path: Path, tres: str) -> None:
    row = job_row(tmp_path, **{**JOB, "AllocTRES": f"cpu=192,{tres},gres/gpu=16"})
    assert row["gpus"] == 16


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("is_reversed", [True, False])
def test_later_end_or_read_wins_without_db_index(tmp_path: Path, together: bool, is_reversed: bool) -> None:
    early = {**JOB, "DBIndex": "", "State": "TIMEOUT", "NodeList": "n[1-2]"}
    late = {**JOB, "DBIndex": "", "State": "FAILED", "End": "1793507300", "NodeList": "n[3-4]"}
    jobs = [late, early] if is_reversed else [early, late]
    if together:
        found, _ = read(tmp_path, text(*jobs))
        expected = "FAILED"
    else:
        for number, job in enumerate(jobs):
            path = tmp_path / f"{number}.txt"
            path.write_text(text(job))
            ingest(str(tmp_path / "db"), [(sacct.SOURCE, [str(path)])], ingest_options())
        found, expected = rows_of_store(tmp_path / "db"), jobs[-1]["State"]
    (row,) = found["jobs"]
    assert row["state"] == expected
    nodes = {"FAILED": {"n3", "n4"}, "TIMEOUT": {"n1", "n2"}}
    assert {values["node"] for values in found["job_nodes"]} == nodes[expected]


def test_revoked_jobs_are_skipped(tmp_path: Path) -> None:
    found, unread = read(tmp_path, text(JOB, {**JOB, "DBIndex": "5002", "State": "REVOKED", "Start": "Unknown"}))
    assert [row["state"] for row in found["jobs"]] == ["COMPLETED"]
    assert not unread.unread
