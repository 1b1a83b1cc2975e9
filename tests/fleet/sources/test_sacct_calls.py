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
InstallSacct = Callable[..., Path]


@pytest.fixture
def install_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallSacct:
    """Return a function that puts a sacct first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(*jobs: dict[str, Any], first: str = "", ids: bool = False, scontrol: str = "exit 1") -> Path:
        job_fields = [{**FIELDS, "asked": False, **job} for job in jobs]
        (folder / "sacct").write_text(SACCT.format(first=first, jobs=job_fields, ids=True if ids else None))
        (folder / "sacct").chmod(0o755)
        (folder / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
        (folder / "scontrol").chmod(0o755)
        return folder

    return put


def run(tmp_path: Path, now: int = NOON, **values: Any) -> IngestResult:
    options = IngestOptions(now, **{"users": "keep", "from_time": NOON - 60, **values})
    return ingest(str(tmp_path / "db"), [(sacct.SOURCE, [])], options)


def stored_jobs(tmp_path: Path) -> list[dict[str, Any]]:
    return [dict(zip(TABLES["jobs"].columns, row, strict=True)) for row in content(tmp_path / "db").get("jobs", [])]


def recorded_calls(folder: Path) -> list[tuple[list[str], str | None, str | None]]:
    return [eval(line) for line in (folder / "calls").read_text().splitlines()]


# --- days


def test_missing_days_of_first_run_begin_at_from_or_one_year_ago() -> None:
    nothing = Runs()
    assert missing_days(NOON, nothing, None, None)[0] == NOON - DAY // 2 - FIRST_DAYS * DAY
    assert missing_days(NOON, nothing, NOON - 2 * DAY, None) == [NOON - DAY // 2 - n * DAY for n in (2, 1, 0)]
    assert missing_days(NOON, nothing, NOON - 2 * DAY, NOON - DAY) == [NOON - DAY // 2 - n * DAY for n in (2, 1)]


def test_missing_days_of_rerun_overlap_end_of_last_run() -> None:
    runs = Runs([(NOON - DAY // 2 - 9 * DAY, NOON - 1)])
    late = [NOON + DAY // 2 - n * DAY for n in range(OVERLAP_DAYS + 1, -1, -1)]
    assert missing_days(NOON + DAY, runs, None, None) == late
    assert missing_days(NOON + DAY, runs, NOON - 9 * DAY, None) == late, (
        "a cron job may keep the arguments of the first run"
    )
    assert missing_days(NOON + DAY, runs, NOON - 11 * DAY, None) == [
        *(NOON - DAY // 2 - n * DAY for n in (11, 10)),
        *late,
    ], "an earlier --from adds what was never read"


def test_missing_days_are_whole_days_until_today() -> None:
    days = missing_days(NOON, Runs(), NOON - 3 * DAY, None)
    assert all(day % DAY == 0 for day in days)
    assert days == sorted(set(days))
    assert days[-1] <= NOON < days[-1] + DAY
    midnight = NOON - DAY // 2
    assert missing_days(midnight, Runs(), midnight, None) == [midnight]


def queried_days(folder: Path) -> list[int]:
    """Return how many days before today each call began, for the calls since the last use of this function."""
    found = [
        (NOON - DAY // 2 - int(word.partition("=uts")[2])) // DAY
        for argv, _, _ in recorded_calls(folder)
        for word in argv
        if word.startswith("--starttime=")
    ]
    (folder / "calls").unlink()
    return found


def test_each_cluster_has_its_own_read_days(install_sacct: InstallSacct, tmp_path: Path) -> None:
    folder = install_sacct(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, from_time=NOON - 5 * DAY)
    assert queried_days(folder) == [5, 4, 3, 2, 1, 0]
    run(tmp_path, cluster="c2", from_time=NOON - 5 * DAY)
    assert queried_days(folder) == [5, 4, 3, 2, 1, 0]
    for cluster in ("", "c1", "c2"):
        run(tmp_path, cluster=cluster, from_time=None)
        assert queried_days(folder) == [2, 1, 0], cluster


def test_rerun_with_from_reads_new_and_earlier_days(install_sacct: InstallSacct, tmp_path: Path) -> None:
    folder = install_sacct(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, from_time=NOON - 5 * DAY)
    queried_days(folder)
    run(tmp_path, from_time=NOON - 5 * DAY)
    assert queried_days(folder) == [2, 1, 0]
    run(tmp_path, from_time=NOON - 7 * DAY)
    assert queried_days(folder) == [7, 6, 2, 1, 0]
    run(tmp_path, from_time=NOON - 7 * DAY, to_time=NOON - 6 * DAY)
    assert not (folder / "calls").exists()


def test_days_read_with_clock_ahead_are_read_again(
    install_sacct: InstallSacct, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = install_sacct(scontrol="echo 'ClusterName = c1'")
    run(tmp_path, now=NOON + 90 * DAY, from_time=NOON + 88 * DAY)
    run(tmp_path, from_time=NOON - 3 * DAY)
    run(tmp_path, now=NOON + 5 * DAY, from_time=NOON - 3 * DAY)
    queried_days(folder)
    capsys.readouterr()
    run(tmp_path, from_time=None)
    assert queried_days(folder) == [5, 4, 3, 2, 1, 0], (
        "all days are read again: those read with the wrong clock are not known"
    )
    assert "which is in the future: a clock was ahead" in capsys.readouterr().err
    run(tmp_path, from_time=None)
    assert queried_days(folder) == [2, 1, 0]
    assert capsys.readouterr().err == ""


# --- arguments


def test_sacct_gets_needed_fields_epoch_times_and_random_delimiter(
    install_sacct: InstallSacct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCT_FORMAT", "User")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    folder = install_sacct({})
    assert run(tmp_path, from_time=NOON - DAY).failed == []
    (first, second) = recorded_calls(folder)
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


def test_user_text_is_no_delimiter_and_no_line(install_sacct: InstallSacct, tmp_path: Path) -> None:
    install_sacct({}, {"DBIndex": "8", "JobName": "\n\n||\x1f", "WorkDir": "/a\nb|c"})
    result = run(tmp_path)
    assert result.unread.examples == []
    assert [row["db_index"] for row in stored_jobs(tmp_path)] == [7, 8]


def test_coverage_is_recorded_for_each_day(install_sacct: InstallSacct, tmp_path: Path) -> None:
    install_sacct(scontrol="echo 'ClusterName             = c1'")
    run(tmp_path, from_time=NOON - DAY)
    columns = TABLES["ingests"].columns
    records = [dict(zip(columns, row, strict=True)) for row in content(tmp_path / "db")["ingests"]]
    days = {row["name"]: (row["from_time"], row["to_time"]) for row in records if row["name"].startswith("day ")}
    midnight = NOON - DAY // 2
    assert list(days.values()) == [(midnight - DAY, midnight), (midnight, NOON)]
    assert {row["cluster"] for row in records} == {"c1"}
    assert {row["rows_read"] for row in records} == {0}


def test_column_unknown_to_old_sacct_is_left_out(install_sacct: InstallSacct, tmp_path: Path) -> None:
    message = 'sacct: error: Invalid field requested: \\"Restarts\\"'
    folder = install_sacct({}, first=f'if "Restarts" in options["format"]:\n    sys.exit("{message}")')
    assert run(tmp_path, from_time=NOON - DAY).failed == []
    assert len(stored_jobs(tmp_path)) == 1
    assert len(recorded_calls(folder)) == 3  # one call with the column, then two without


def test_required_column_is_not_left_out(install_sacct: InstallSacct, tmp_path: Path) -> None:
    install_sacct({}, first="sys.exit('sacct: error: Invalid field requested: \"DBIndex\"')")
    assert run(tmp_path).failed == ['sacct: sacct failed: sacct: error: Invalid field requested: "DBIndex"']


# --- faults


def test_missing_sacct_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(tmp_path).failed == ["sacct: sacct: cannot be run: No such file or directory"]


def test_failing_sacct_is_one_sentence_and_keeps_nothing(install_sacct: InstallSacct, tmp_path: Path) -> None:
    folder = install_sacct({})
    script = (folder / "sacct").read_text()
    (folder / "sacct").write_text(script + 'sys.exit("sacct: error: Problem talking\\nto the database\\x1b[2J")\n')
    assert run(tmp_path).failed == ["sacct: sacct failed: sacct: error: Problem talking to the database?[2J"]
    assert content(tmp_path / "db") == {}


def test_silent_sacct_is_killed(install_sacct: InstallSacct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "OUTPUT_TIMEOUT_SECONDS", 0.3)
    install_sacct({}, first="import time\ntime.sleep(100)")
    start = time.monotonic()
    assert run(tmp_path).failed == ["sacct: sacct: printed nothing for 0.3 s and was killed"]
    assert time.monotonic() - start < 60


def test_sacct_without_exit_is_killed(
    install_sacct: InstallSacct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "EXIT_TIMEOUT_SECONDS", 0.3)
    install_sacct({}, first="import time\nos.close(1)\ntime.sleep(100)")
    assert run(tmp_path).failed == ["sacct: sacct: did not end and was killed"]


def test_days_before_failed_day_are_kept(install_sacct: InstallSacct, tmp_path: Path) -> None:
    midnight = NOON - DAY // 2
    install_sacct({}, first=f'if options["starttime"] == "uts{midnight}":\n    sys.exit("no")')
    assert run(tmp_path, from_time=NOON - DAY).failed == ["sacct: sacct failed: no"]
    assert len(stored_jobs(tmp_path)) == 1
    folder = install_sacct({"DBIndex": "8"})
    (folder / "calls").unlink()
    assert run(tmp_path, from_time=None).failed == []
    assert recorded_calls(folder)[0][0][-2] == f"--starttime=uts{midnight - OVERLAP_DAYS * DAY}"
    assert [row["db_index"] for row in stored_jobs(tmp_path)] == [7, 8]


# --- open jobs


def test_job_no_longer_reported_as_open_is_queried_by_id(install_sacct: InstallSacct, tmp_path: Path) -> None:
    runs = {"State": "RUNNING", "End": "Unknown"}
    install_sacct(runs, {**runs, "DBIndex": "8", "JobIDRaw": "101", "JobID": "101"})
    run(tmp_path)
    assert [row["end_time"] for row in stored_jobs(tmp_path)] == [None, None]
    folder = install_sacct({**runs, "DBIndex": "8", "JobIDRaw": "101", "JobID": "101"}, {"asked": True}, ids=True)
    (folder / "calls").unlink()
    run(tmp_path)
    assert [argv[-1] for argv, _, _ in recorded_calls(folder)][-1] == "--jobs=100"
    assert [row["end_time"] for row in stored_jobs(tmp_path)] == [NOON - 400, None]


def test_read_of_past_days_does_not_query_open_jobs(install_sacct: InstallSacct, tmp_path: Path) -> None:
    folder = install_sacct({"State": "RUNNING", "End": "Unknown"})
    run(tmp_path, from_time=NOON - 3 * DAY, to_time=NOON - 2 * DAY)
    assert all("--jobs" not in word for argv, _, _ in recorded_calls(folder) for word in argv)


# --- scripts


def test_scripts_are_read_if_site_stores_them(install_sacct: InstallSacct, tmp_path: Path) -> None:
    job = {"job_id": 100, "time": {"submission": NOON - 600}, "script": "#!/bin/sh\n#SBATCH -x n[3-4]\ntrue\n"}
    first = f"import json\nif 'json' in options:\n    print(json.dumps({{'jobs': [{job!r}]}}))\n    sys.exit()"
    folder = install_sacct({}, first=first, scontrol="echo 'AccountingStoreFlags    = job_comment,job_script'")
    assert run(tmp_path).failed == []
    (row,) = stored_jobs(tmp_path)
    assert row["exclusions_known"] is True
    found = [
        dict(zip(TABLES["exclusions"].columns, values, strict=True))
        for values in content(tmp_path / "db")["exclusions"]
    ]
    assert [(values["node"], values["source"], values["db_index"]) for values in found] == [
        ("n3", "script", 7),
        ("n4", "script", 7),
    ]
    (argv,) = [argv for argv, _, _ in recorded_calls(folder) if "--json" in argv]
    assert argv[-3:] == ["--batch-script", "--json", "--jobs=100"]


def test_unavailable_scripts_do_not_lose_jobs(install_sacct: InstallSacct, tmp_path: Path) -> None:
    first = "if 'json' in options:\n    sys.exit('no json')"
    install_sacct({}, first=first, scontrol="echo 'AccountingStoreFlags = job_script'")
    assert run(tmp_path).failed == []
    (row,) = stored_jobs(tmp_path)
    assert row["exclusions_known"] is False


def test_scripts_are_not_queried_if_site_does_not_store_them(install_sacct: InstallSacct, tmp_path: Path) -> None:
    folder = install_sacct({}, scontrol="echo 'AccountingStoreFlags = job_comment'")
    run(tmp_path)
    assert all("--json" not in argv for argv, _, _ in recorded_calls(folder))
