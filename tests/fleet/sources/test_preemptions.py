"""Tests of slurmctld's log: messages of preempt.c, node_scheduler.c and gang.c with each LogTimeFormat."""

from __future__ import annotations

import gzip
import json
import os
from datetime import datetime, timezone

import pytest
from fleet_reading import RecordedReading, numbered_lines, store_rows
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.sources import preemptions

CHANGED = 1795392000.0  # 2026-11-23 00:00:00 UTC
AT = 1795349480  # 2026-11-22 12:11:20 UTC
STAMP = "[2026-11-22T12:11:20.123] "


def parse_log(text: str, changed: float = CHANGED) -> tuple[list[tuple], RecordedReading]:
    noted = RecordedReading()
    return list(preemptions.parse(numbered_lines(text), noted.reading, changed)), noted


# Jobs are as _jobid2fmt() of log.c writes them: a single job, a task of an array, a part of a het job.
@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("preempted JobId=7 has been requeued to reclaim resources for JobId=9", (7, 9, "requeued", None)),
        ("preempted JobId=7 has been killed to reclaim resources for JobId=9", (7, 9, "cancelled", None)),
        ("preempted JobId=5_2(7) has been killed to reclaim resources for JobId=9_4(9)", (7, 9, "cancelled", 4)),
        ("preempted JobId=5+1(6) has been requeued to reclaim resources for JobId=8+0(8)", (6, 8, "requeued", None)),
        ("preempted JobId=7 has been requeued to reclaim resources for JobId=9_*", (7, 9, "requeued", None)),
        ("slurm_job_preempt: preempted JobId=7 had to be killed", (7, None, "cancelled", None)),
        (
            "debug:  preempted JobId=7 suspended by gang scheduler to reclaim resources for JobId=9",
            (7, 9, "suspended", None),
        ),
        (
            "debug:  setting 60 sec preemption grace time for JobId=7 to reclaim resources for JobId=9",
            (7, 9, "signalled", None),
        ),
        ("preempted JobId=7 has been requeued", (7, None, "requeued", None)),
        ("preempted JobId=7 has been killed", (7, None, "cancelled", None)),
        ("sched: preempted JobId=7 has been killed to reclaim resources for JobId=9", (7, 9, "cancelled", None)),
        ("preempted JobId=7 has been checkpointed to reclaim resources for JobId=9", (7, 9, "checkpointed", None)),
    ],
)
def test_each_preemption_message_is_read(message, row):
    found, noted = parse_log(STAMP + message)
    assert found == [("c1", AT, *row)]
    assert (noted.unread, noted.read) == ([], [1])


@pytest.mark.parametrize(
    "message",
    [
        "error: preempted JobId=7 could not be requeued: Requested operation is presently disabled",
        "slurm_job_preempt: preempted JobId=7 kill failure Invalid job id specified",
        "gang waking preempted JobId=7",
        "_slurm_rpc_submit_batch_job: JobId=9 name preempted JobId=7 has been killed to reclaim resources for JobId=8",
        "sched: Allocate JobId=9 NodeList=n1 preempted JobId=7 has been requeued to reclaim resources for JobId=9",
        "preempted JobId=7 has been requeued to reclaim resources for JobId=9 and more",
        "Changing PreemptType from preempt/none to preempt/qos",
    ],
)
def test_other_messages_are_ignored(message):
    found, noted = parse_log(STAMP + message)
    assert (found, noted.unread) == ([], [])


MESSAGE = "preempted JobId=7 has been requeued to reclaim resources for JobId=9"


@pytest.mark.parametrize(
    "line",
    [
        f"[2026-11-22T12:11:20.123] {MESSAGE}",  # iso8601_ms, the default
        f"[2026-11-22T12:11:20] {MESSAGE}",  # iso8601
        f"[2026-11-22T13:11:20.123+01:00] {MESSAGE}",  # rfc5424_ms
        f"[2026-11-22T12:11:20+00:00] {MESSAGE}",  # rfc5424
        f"[2026-11-22T12:11:20Z] {MESSAGE}",  # rfc3339
        f"[Nov 22 12:11:20] {MESSAGE}",  # short
        f"[Nov 22 12:11:20.123456  4711 backfill     0x7f0012345678] {MESSAGE}",  # thread_id
        f"Nov 22 12:11:20 head slurmctld[4711]: {MESSAGE}",  # syslog
        f"2026-11-22T12:11:20.123456+00:00 head slurmctld[4711]: {MESSAGE}",  # rsyslog, journalctl -o short-iso
        f"2026-11-22T12:11:20+0000 head.example slurmctld[4711]: {MESSAGE}",
        json.dumps({"log": MESSAGE, "stream": "stdout", "time": "2026-11-22T12:11:20"}),
    ],
)
def test_time_is_read_in_each_format(line):
    assert parse_log(line)[0] == [("c1", AT, 7, 9, "requeued", None)]


@pytest.mark.parametrize("line", [f"[12345678] {MESSAGE}", MESSAGE, f"[Foo 22 12:11:20] {MESSAGE}"])
def test_preemption_without_time_is_counted(line):
    found, noted = parse_log(line)
    assert (found, noted.unread_lines) == ([], [1])


def test_time_without_year_is_latest_possible():
    short = f"[Dec 31 23:59:59] {MESSAGE}\n[Jan  1 00:00:01] {MESSAGE}\n[Feb 29 00:00:00] {MESSAGE}"
    found, _ = parse_log(short, datetime(2027, 1, 1, 1, tzinfo=timezone.utc).timestamp())
    years = [datetime.fromtimestamp(row[1], timezone.utc).isoformat() for row in found]
    assert years == ["2026-12-31T23:59:59+00:00", "2027-01-01T00:00:01+00:00", "2024-02-29T00:00:00+00:00"]


JOB = st.one_of(
    st.integers(1, 2**32 - 1).map(lambda n: (f"JobId={n}", n)),
    st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(1, 2**32 - 1)).map(
        lambda t: (f"JobId={t[0]}_{t[1]}({t[2]})", t[2])
    ),
    st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(1, 2**32 - 1)).map(
        lambda t: (f"JobId={t[0]}+{t[1]}({t[2]})", t[2])
    ),
)


@given(JOB, JOB, st.integers(1, 4_000_000_000))
def test_any_two_jobs_are_read_unchanged(taken, taker, at):
    stamp = datetime.fromtimestamp(at, timezone.utc).strftime("[%Y-%m-%dT%H:%M:%S.000] ")
    found, noted = parse_log(f"{stamp}preempted {taken[0]} has been killed to reclaim resources for {taker[0]}")
    assert [row[1:4] for row in found] == [(at, taken[1], taker[1])]
    assert noted.unread == []


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_is_read_or_ignored(before, behind):
    parse_log(f"{before}preempted JobId={behind}")


@pytest.mark.one_python
def test_growing_and_rotated_logs_are_read_once(tmp_path):
    import duckdb  # noqa: F401  # the extra

    from healthd.fleet.ingest import IngestOptions, ingest

    log, store = tmp_path / "slurmctld.log", tmp_path / "db"
    filler = "".join(f"[2026-11-22T12:00:{n:02}.000] filler {n}\n" for n in range(60))
    first, second = (
        f"[2026-11-22T12:11:2{n}.000] preempted JobId={n} has been killed to reclaim resources for JobId=9\n"
        for n in (1, 2)
    )

    def run(*paths) -> int:
        files = [str(path) for path in paths]
        result = ingest(str(store), [(preemptions.SOURCE, files)], IngestOptions(1795400000, "c1", timezone.utc))
        assert (result.failed, result.unread.unread) == ([], {})
        return result.unread.rows["preemptions"]

    log.write_text(filler + first + second[:30])  # slurmctld has written half of a line
    assert run(log) == 1
    log.write_text(filler + first + second)
    assert run(log) == 1
    assert run(log) == 0
    os.rename(log, tmp_path / "slurmctld.log.1")
    log.write_text(filler.replace("filler", "later") + first.replace("JobId=1 ", "JobId=3 "))
    assert run(log, tmp_path / "slurmctld.log.1") == 1
    packed = tmp_path / "slurmctld.log.1.gz"
    packed.write_bytes(gzip.compress((tmp_path / "slurmctld.log.1").read_bytes()))
    assert run(packed) == 0
    packed = tmp_path / "slurmctld.log.2.gz"
    packed.write_bytes(gzip.compress((filler.replace("filler", "older") + second.replace("=2 ", "=4 ")).encode()))
    assert run(packed) == 1
    damaged = tmp_path / "slurmctld.log.3.gz"
    damaged.write_bytes(gzip.compress(filler.encode())[:40])
    result = ingest(str(store), [(preemptions.SOURCE, [str(damaged)])], IngestOptions(1795400000, "c1"))
    assert [sentence.startswith(f"preemptions: {damaged}: ") for sentence in result.failed] == [True]
    log.write_text(filler.replace("filler", "later"))  # after the cut, the log is read from its start
    assert run(log) == 0
    assert [row["job_id"] for row in store_rows(store, "preemptions")] == [1, 3, 2, 4]
    coverage = {row["name"]: (row["from_time"], row["to_time"]) for row in store_rows(store, "ingests")}
    assert coverage[str(packed)] == (1795348800, 1795349482)


@pytest.mark.one_python
def test_missing_or_damaged_log_does_not_stop_next_log(tmp_path):
    import duckdb  # noqa: F401  # the extra

    from healthd.fleet.ingest import IngestOptions, ingest

    missing, damaged, log = paths = [tmp_path / name for name in ("gone.log", "slurmctld.log.1.gz", "slurmctld.log")]
    damaged.write_bytes(gzip.compress(b"filler\n" * 100)[:12])
    log.write_text(f"{STAMP}{MESSAGE}\n")
    sources = [(preemptions.SOURCE, [str(path) for path in paths])]
    result = ingest(str(tmp_path / "db"), sources, IngestOptions(1795400000, "c1", timezone.utc))
    assert result.failed[0] == f"preemptions: {missing}: cannot be read: No such file or directory"
    assert result.failed[1].startswith(f"preemptions: {damaged}: the compressed file is damaged: ")
    assert (len(result.failed), result.unread.rows["preemptions"]) == (2, 1)
    assert [row["job_id"] for row in store_rows(tmp_path / "db", "preemptions")] == [7]


@pytest.mark.one_python
def test_other_file_is_rejected_and_quiet_log_is_accepted(tmp_path):
    import duckdb  # noqa: F401  # the extra

    from healthd.fleet.ingest import IngestOptions, ingest

    tickets, quiet, empty = paths = [tmp_path / name for name in ("tickets.csv", "slurmctld.log", "slurmctld.log.1")]
    tickets.write_text("node,opened,closed,text\nn1,2026-11-22,,fans\n")
    quiet.write_text(f"the end of a line that was cut\n{STAMP}sched: Allocate JobId=7 NodeList=n1\n")
    empty.write_text("")
    sources = [(preemptions.SOURCE, [str(path) for path in paths])]
    result = ingest(str(tmp_path / "db"), sources, IngestOptions(1795400000, "c1", timezone.utc))
    assert result.failed == [
        f"preemptions: {tickets}: not a slurmctld log: neither its first nor its last line begins with a time"
    ]
