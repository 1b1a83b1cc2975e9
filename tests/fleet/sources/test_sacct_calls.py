"""Tests of calls to sacct: the days, the arguments, and faults of sacct. A script replaces sacct."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_rows import content

from healthd.events.sequence import Runs
from healthd.fleet.ingest import IngestOptions, IngestResult, ingest
from healthd.fleet.sources import sacct
from healthd.fleet.sources import slurm_commands as programs
from healthd.fleet.sources.sacct import COLUMNS, DAY, FIRST_DAYS, OVERLAP_DAYS, missing_days
from healthd.fleet.tables import TABLES

pytestmark = pytest.mark.one_python

NOON = 1_793_534_400 // DAY * DAY + DAY // 2
FIELDS = {
    **dict.fromkeys(COLUMNS, ""),
    "JobIDRaw": "100",
    "JobID": "100",
    "DBIndex": "7",
    "Cluster": "c1",
    "State": "COMPLETED",
    "ExitCode": "0:0",
    "Submit": str(NOON - 600),
    "Start": str(NOON - 500),
    "End": str(NOON - 400),
    "NodeList": "n1",
    "JobName": "a|b\x1f\nc",
    "SubmitLine": "sbatch run.sh",
}
# Prints the records below with the given delimiter; each call adds a line to the file "calls".
SACCT = """\
#!/usr/bin/env python3
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
with open(here + "/calls", "a") as calls:
    calls.write(repr((sys.argv[1:], os.environ.get("SLURM_TIME_FORMAT"), os.environ.get("SACCT_FORMAT"))) + "\\n")
{first}
columns = options["format"].split(",")
print(options["delimiter"].join(columns))
for job in {jobs!r}:
    if {ids!r} is None or ("jobs" in options) == job["asked"]:
        print(options["delimiter"].join(job[column] for column in columns))
"""
Stand = Callable[..., Path]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Return a function that puts a sacct first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(*jobs: dict[str, Any], first: str = "", ids: bool = False, scontrol: str = "exit 1") -> Path:
        told = [{**FIELDS, "asked": False, **job} for job in jobs]
        (folder / "sacct").write_text(SACCT.format(first=first, jobs=told, ids=True if ids else None))
        (folder / "sacct").chmod(0o755)
        (folder / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
        (folder / "scontrol").chmod(0o755)
        return folder

    return put


def run(tmp_path: Path, now: int = NOON, **values: Any) -> IngestResult:
    asked = IngestOptions(now, **{"users": "keep", "from_time": NOON - 60, **values})
    return ingest(str(tmp_path / "db"), [(sacct.SOURCE, [])], asked)


def jobs(tmp_path: Path) -> list[dict[str, Any]]:
    return [dict(zip(TABLES["jobs"].columns, row, strict=True)) for row in content(tmp_path / "db").get("jobs", [])]


def calls(folder: Path) -> list[tuple[list[str], str | None, str | None]]:
    return [eval(line) for line in (folder / "calls").read_text().splitlines()]


# --- days


def test_a_first_run_begins_a_year_ago_or_where_it_is_told() -> None:
    nothing = Runs()
    assert missing_days(NOON, nothing, None, None)[0] == NOON - DAY // 2 - FIRST_DAYS * DAY
    assert missing_days(NOON, nothing, NOON - 2 * DAY, None) == [NOON - DAY // 2 - n * DAY for n in (2, 1, 0)]
    assert missing_days(NOON, nothing, NOON - 2 * DAY, NOON - DAY) == [NOON - DAY // 2 - n * DAY for n in (2, 1)]


def test_a_rerun_begins_some_days_before_the_end_of_what_was_read() -> None:
    read = Runs([(NOON - DAY // 2 - 9 * DAY, NOON - 1)])
    late = [NOON + DAY // 2 - n * DAY for n in range(OVERLAP_DAYS + 1, -1, -1)]
    assert missing_days(NOON + DAY, read, None, None) == late
    assert missing_days(NOON + DAY, read, NOON - 9 * DAY, None) == late, (
        "a cron job may keep the arguments of the first run"
    )
    assert missing_days(NOON + DAY, read, NOON - 11 * DAY, None) == [
        *(NOON - DAY // 2 - n * DAY for n in (11, 10)),
        *late,
    ], "an earlier --from adds what was never read"


def test_each_day_is_one_call_from_midnight_to_midnight_and_the_last_has_begun() -> None:
    days = missing_days(NOON, Runs(), NOON - 3 * DAY, None)
    assert all(day % DAY == 0 for day in days)
    assert days == sorted(set(days))
    assert days[-1] <= NOON < days[-1] + DAY
    midnight = NOON - DAY // 2
    assert missing_days(midnight, Runs(), midnight, None) == [midnight]


def asked_days(folder: Path) -> list[int]:
    """Return how many days before today each call began, for the calls since the last use of this function."""
    found = [
        (NOON - DAY // 2 - int(word.partition("=uts")[2])) // DAY
        for argv, _, _ in calls(folder)
        for word in argv
        if word.startswith("--starttime=")
    ]
    (folder / "calls").unlink()
    return found


def test_what_was_read_of_one_cluster_was_not_read_of_another(stand: Stand, tmp_path: Path) -> None:
    folder = stand(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, from_time=NOON - 5 * DAY)
    assert asked_days(folder) == [5, 4, 3, 2, 1, 0]
    run(tmp_path, cluster="c2", from_time=NOON - 5 * DAY)
    assert asked_days(folder) == [5, 4, 3, 2, 1, 0]
    for cluster in ("", "c1", "c2"):
        run(tmp_path, cluster=cluster, from_time=None)
        assert asked_days(folder) == [2, 1, 0], cluster


def test_a_rerun_with_from_reads_what_is_new_and_an_earlier_from_what_was_before(stand: Stand, tmp_path: Path) -> None:
    folder = stand(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, from_time=NOON - 5 * DAY)
    asked_days(folder)
    run(tmp_path, from_time=NOON - 5 * DAY)
    assert asked_days(folder) == [2, 1, 0]
    run(tmp_path, from_time=NOON - 7 * DAY)
    assert asked_days(folder) == [7, 6, 2, 1, 0]
    run(tmp_path, from_time=NOON - 7 * DAY, to_time=NOON - 6 * DAY)
    assert not (folder / "calls").exists()


def test_a_clock_that_was_ahead_once_stops_nothing(
    stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stand(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, now=NOON + 90 * DAY, from_time=NOON + 88 * DAY)
    run(tmp_path, from_time=NOON - 3 * DAY)
    run(tmp_path, now=NOON + 5 * DAY, from_time=NOON - 3 * DAY)
    asked_days(folder)
    capsys.readouterr()
    run(tmp_path, from_time=None)
    assert asked_days(folder) == [5, 4, 3, 2, 1, 0], (
        "all days are read again: those read with the wrong clock are not known"
    )
    assert "which is in the future: a clock was ahead" in capsys.readouterr().err
    run(tmp_path, from_time=None)
    assert asked_days(folder) == [2, 1, 0]
    assert capsys.readouterr().err == ""


# --- arguments


def test_sacct_is_asked_for_what_is_kept_in_epoch_seconds_and_with_a_delimiter_that_nobody_knows(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCT_FORMAT", "User")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    folder = stand({})
    assert run(tmp_path, from_time=NOON - DAY).failed == []
    (first, second) = calls(folder)
    midnight = NOON - DAY // 2
    ahead = 366 * DAY  # also jobs with a begin time in the future
    for (argv, form, columns), begin, span in ((first, midnight - DAY, DAY), (second, midnight, ahead)):
        assert argv[:5] == ["--allusers", "--duplicates", "--allocations", "--noconvert", "--parsable2"]
        assert (f"--starttime=uts{begin}", f"--endtime=uts{begin + span}") == (argv[-2], argv[-1])
        assert (form, columns) == ("%s", None)
        asked_for = next(word for word in argv if word.startswith("--format=")).partition("=")[2].split(",")
        assert asked_for == list(COLUMNS)
        assert not {"Comment", "AdminComment", "SystemComment", "Extra", "Container"} & set(asked_for)
    delimiters = {next(word for word in argv if word.startswith("--delimiter=")) for argv, _, _ in (first, second)}
    assert len(delimiters) == 2
    assert all(len(word) > 20 for word in delimiters)


def test_what_users_write_is_no_delimiter_and_no_line(stand: Stand, tmp_path: Path) -> None:
    stand({}, {"DBIndex": "8", "JobName": "\n\n||\x1f", "WorkDir": "/a\nb|c"})
    came = run(tmp_path)
    assert came.unread.examples == []
    assert [row["db_index"] for row in jobs(tmp_path)] == [7, 8]


def test_what_was_covered_is_told_day_by_day_also_where_nothing_ran(stand: Stand, tmp_path: Path) -> None:
    stand(scontrol="echo 'ClusterName             = c1'")
    run(tmp_path, from_time=NOON - DAY)
    columns = TABLES["ingests"].columns
    told = [dict(zip(columns, row, strict=True)) for row in content(tmp_path / "db")["ingests"]]
    days = {row["name"]: (row["from_time"], row["to_time"]) for row in told if row["name"].startswith("day ")}
    midnight = NOON - DAY // 2
    assert list(days.values()) == [(midnight - DAY, midnight), (midnight, NOON)]
    assert {row["cluster"] for row in told} == {"c1"}
    assert {row["rows_read"] for row in told} == {0}


def test_a_column_of_newer_versions_is_left_out_where_sacct_does_not_know_it(stand: Stand, tmp_path: Path) -> None:
    words = 'sacct: error: Invalid field requested: \\"Restarts\\"'
    folder = stand({}, first=f'if "Restarts" in options["format"]:\n    sys.exit("{words}")')
    assert run(tmp_path, from_time=NOON - DAY).failed == []
    assert len(jobs(tmp_path)) == 1
    assert len(calls(folder)) == 3  # one call with the column, then two without


def test_a_column_that_every_version_has_is_not_left_out(stand: Stand, tmp_path: Path) -> None:
    stand({}, first="sys.exit('sacct: error: Invalid field requested: \"DBIndex\"')")
    assert run(tmp_path).failed == ['sacct: sacct failed: sacct: error: Invalid field requested: "DBIndex"']


# --- faults


def test_without_sacct_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(tmp_path).failed == ["sacct: sacct: cannot be run: No such file or directory"]


def test_a_sacct_that_refuses_is_one_sentence_and_what_it_printed_is_not_kept(stand: Stand, tmp_path: Path) -> None:
    folder = stand({})
    script = (folder / "sacct").read_text()
    (folder / "sacct").write_text(script + 'sys.exit("sacct: error: Problem talking\\nto the database\\x1b[2J")\n')
    assert run(tmp_path).failed == ["sacct: sacct failed: sacct: error: Problem talking to the database?[2J"]
    assert content(tmp_path / "db") == {}


def test_a_sacct_that_says_nothing_is_killed(stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "OUTPUT_TIMEOUT_SECONDS", 0.3)
    stand({}, first="import time\ntime.sleep(100)")
    began = time.monotonic()
    assert run(tmp_path).failed == ["sacct: sacct: printed nothing for 0.3 s and was killed"]
    assert time.monotonic() - began < 60


def test_a_sacct_that_closes_its_output_and_stays_is_killed(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "EXIT_TIMEOUT_SECONDS", 0.3)
    stand({}, first="import time\nos.close(1)\ntime.sleep(100)")
    assert run(tmp_path).failed == ["sacct: sacct: did not end and was killed"]


def test_days_before_one_that_fails_stay_and_a_rerun_goes_on(stand: Stand, tmp_path: Path) -> None:
    midnight = NOON - DAY // 2
    stand({}, first=f'if options["starttime"] == "uts{midnight}":\n    sys.exit("no")')
    assert run(tmp_path, from_time=NOON - DAY).failed == ["sacct: sacct failed: no"]
    assert len(jobs(tmp_path)) == 1
    folder = stand({"DBIndex": "8"})
    (folder / "calls").unlink()
    assert run(tmp_path, from_time=None).failed == []
    assert calls(folder)[0][0][-2] == f"--starttime=uts{midnight - OVERLAP_DAYS * DAY}"
    assert [row["db_index"] for row in jobs(tmp_path)] == [7, 8]


# --- open jobs


def test_a_job_that_slurm_does_not_tell_as_open_any_more_is_asked_for_by_its_id(stand: Stand, tmp_path: Path) -> None:
    runs = {"State": "RUNNING", "End": "Unknown"}
    stand(runs, {**runs, "DBIndex": "8", "JobIDRaw": "101", "JobID": "101"})
    run(tmp_path)
    assert [row["end_time"] for row in jobs(tmp_path)] == [None, None]
    folder = stand({**runs, "DBIndex": "8", "JobIDRaw": "101", "JobID": "101"}, {"asked": True}, ids=True)
    (folder / "calls").unlink()
    run(tmp_path)
    assert [argv[-1] for argv, _, _ in calls(folder)][-1] == "--jobs=100"
    assert [row["end_time"] for row in jobs(tmp_path)] == [NOON - 400, None]


def test_past_days_alone_do_not_tell_what_is_open(stand: Stand, tmp_path: Path) -> None:
    folder = stand({"State": "RUNNING", "End": "Unknown"})
    run(tmp_path, from_time=NOON - 3 * DAY, to_time=NOON - 2 * DAY)
    assert all("--jobs" not in word for argv, _, _ in calls(folder) for word in argv)


# --- scripts


def test_scripts_are_asked_for_where_the_site_keeps_them(stand: Stand, tmp_path: Path) -> None:
    job = {"job_id": 100, "time": {"submission": NOON - 600}, "script": "#!/bin/sh\n#SBATCH -x n[3-4]\ntrue\n"}
    first = f"import json\nif 'json' in options:\n    print(json.dumps({{'jobs': [{job!r}]}}))\n    sys.exit()"
    folder = stand({}, first=first, scontrol="echo 'AccountingStoreFlags    = job_comment,job_script'")
    assert run(tmp_path).failed == []
    (row,) = jobs(tmp_path)
    assert row["exclusions_known"] is True
    found = [
        dict(zip(TABLES["exclusions"].columns, its, strict=True)) for its in content(tmp_path / "db")["exclusions"]
    ]
    assert [(its["node"], its["source"], its["db_index"]) for its in found] == [
        ("n3", "script", 7),
        ("n4", "script", 7),
    ]
    (argv,) = [argv for argv, _, _ in calls(folder) if "--json" in argv]
    assert argv[-3:] == ["--batch-script", "--json", "--jobs=100"]


def test_where_scripts_cannot_be_had_the_jobs_are_kept_all_the_same(stand: Stand, tmp_path: Path) -> None:
    first = "if 'json' in options:\n    sys.exit('no json')"
    stand({}, first=first, scontrol="echo 'AccountingStoreFlags = job_script'")
    assert run(tmp_path).failed == []
    (row,) = jobs(tmp_path)
    assert row["exclusions_known"] is False


def test_scripts_are_not_asked_for_where_nobody_keeps_them(stand: Stand, tmp_path: Path) -> None:
    folder = stand({}, scontrol="echo 'AccountingStoreFlags = job_comment'")
    run(tmp_path)
    assert all("--json" not in argv for argv, _, _ in calls(folder))
