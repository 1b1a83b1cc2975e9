"""Tests with jobs of a real slurmdbd, in each available version: our own query, sacct's text and its JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from slurm_cluster import SlurmCluster

from healthd.fleet.sources.sacct import COLUMNS, NEWER_COLUMNS

ROOT = Path(__file__).parents[2]
VERSIONS = ("22.05", "24.11", "26.05")
TOKEN = "hf_SECRETTOKEN0123456789"
ODD_NAME = "a|b\nc"
CONF = (
    "AccountingStorageTRES=gres/gpu",
    "AccountingStoreFlags=job_script",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10",
)
SCRIPT = "#!/bin/bash\n#SBATCH --exclude=n[2-3]\nexit 3\n"
# 26 October 2025 in Berlin: at 01:00 UTC, clocks go from 03:00 back to 02:00.
SUBMIT, START, END = 1_761_435_000, 1_761_436_800, 1_761_442_200
DAY = 86_400


class ClusterHistory:
    """A cluster with a history, and the ids of its jobs by their fate."""

    def __init__(self, cluster: SlurmCluster, version: str, scratch: Path) -> None:
        self.cluster = cluster
        self.version = version
        self.scratch = scratch
        self.key = scratch / "key"
        self.key.write_text("0" * 64)
        self.key.chmod(0o600)
        self.jobs: dict[str, str] = {}

    def sql(self, statement: str) -> None:
        socket = f"--socket={self.cluster.directory}/database/s"
        self.cluster.run("mariadb", "--no-defaults", "-uroot", socket, "slurm_acct", "-e", statement)

    def ingest(self, db: Path, *arguments: str, status: int = 0, **environment: str) -> str:
        """Run `healthd fleet ingest` and return its output."""
        command = (sys.executable, "-m", "healthd", "fleet", "ingest", "--out", str(db), "--key", str(self.key))
        env = {**self.cluster.env, "PYTHONPATH": str(ROOT), **environment}
        result = subprocess.run([*command, *arguments], env=env, cwd="/", capture_output=True, text=True, timeout=400)
        assert result.returncode == status, result.stderr + result.stdout
        return result.stderr + result.stdout

    def sacct(self, name: str, *arguments: str, **environment: str) -> Path:
        """Write sacct's output for all jobs of this test to a file."""
        window = (f"--starttime=uts{int(time.time()) - DAY}", f"--endtime=uts{int(time.time()) + 9 * DAY}")
        command = ("sacct", "--allusers", "--duplicates", "--allocations", *window, *arguments)
        result = subprocess.run(command, env={**self.cluster.env, **environment}, capture_output=True, timeout=240)
        assert result.returncode == 0, result.stderr
        path = self.scratch / name
        path.write_bytes(result.stdout)
        return path


def rows(db: Path, table: str, order: str = "job_id, submit_time") -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT * FROM read_parquet('{db}/{table}/*/*.parquet') ORDER BY {order}")
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def row_of_job(db: Path, job: str) -> dict[str, Any]:
    (row,) = (row for row in rows(db, "jobs") if row["job_id"] == int(job))
    return row


def from_days_ago(days: int) -> tuple[str, str]:
    """Return the --from flag. Use at least one day: midnight may pass between a job and its ingest."""
    return "--from", time.strftime("%Y-%m-%d", time.gmtime(time.time() - days * DAY))


@pytest.fixture(scope="module", params=VERSIONS)
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHistory]:
    version = "" if request.param == "22.05" else request.param
    with SlurmCluster(nodes=4, accounting=True, version=version, extra_conf=CONF) as cluster:
        cluster.run("sacctmgr", "-i", "-Q", "add", "account", "gpu")
        cluster.run("sacctmgr", "-i", "-Q", "add", "user", "root", "Account=gpu")
        cluster_history = ClusterHistory(cluster, request.param, tmp_path_factory.mktemp("history"))
        _create_history(cluster_history)
        yield cluster_history


def _create_history(cluster_history: ClusterHistory) -> None:
    """Create jobs: one is requeued, one preempted, one loses its node; also an array, a reservation, and texts of
    users."""
    cluster, jobs = cluster_history.cluster, cluster_history.jobs
    script = cluster_history.scratch / "run.sh"
    script.write_text(SCRIPT)
    cluster.run("scontrol", "create", "reservation", "ReservationName=maint", *RESERVATION)
    jobs["requeued"] = cluster.sbatch("sleep 3000", "-w", "n1", "--gpus=8")
    jobs["preempted"] = cluster.sbatch("sleep 3000", "-w", "n2", "--exclusive")
    jobs["node_fail"] = cluster.sbatch("sleep 3000", "-w", "n4", "--no-requeue", "--gpus=2")
    jobs["scripted"] = cluster.run("sbatch", "--parsable", "-o", "/dev/null", str(script)).strip()
    jobs["array"] = cluster.sbatch("exit 0", "--array=1-2", "-x", "n4", f"--comment={TOKEN}", f"-J{ODD_NAME}")
    jobs["killed"] = cluster.sbatch("kill -9 $$", "--gpus=1")
    jobs["waits"] = cluster.sbatch("exit 0", "--begin=now+2days")  # sacct lists it by the day on which it may start
    jobs["cancelled"] = cluster.sbatch("exit 0", "--begin=now+2days")
    cluster.run("scancel", jobs["cancelled"])
    for name in ("requeued", "preempted", "node_fail"):
        cluster.wait_job(jobs[name], "RUNNING")
    time.sleep(1.2)  # a row is identified by job and second of submission; a reservation must start before its jobs
    jobs["reserved"] = cluster.sbatch("exit 0", "--reservation=maint", "-w", "n3")
    for name in ("reserved", "array", "killed", "scripted"):
        cluster.wait_job(jobs[name], "COMPLETED", "FAILED")
    cluster.run("scontrol", "requeue", jobs["requeued"])
    jobs["urgent"] = cluster.sbatch("sleep 3000", "-w", "n2", "--exclusive", "--partition=urgent")
    cluster.wait_job(jobs["urgent"], "RUNNING")
    cluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=burnt")
    jobs["open"] = cluster.sbatch("sleep 3000", "--gpus=1")
    cluster.wait_job(jobs["open"], "RUNNING")
    _wait_for_sacct(cluster_history, jobs["open"], "RUNNING")
    _wait_for_sacct(cluster_history, jobs["node_fail"], "NODE_FAIL")
    _wait_for_sacct(cluster_history, jobs["preempted"], "PREEMPTED", runs=2)
    _wait_for_sacct(cluster_history, jobs["requeued"], "REQUEUED", runs=2)


RESERVATION = ("StartTime=now", "Duration=60", "Nodes=n3", "Users=root")


def _wait_for_sacct(cluster_history: ClusterHistory, job: str, state: str, runs: int = 1) -> None:
    """Wait for a state in sacct. slurmdbd lags behind slurmctld, which starts the next run of a job after the end of
    the last."""
    end, command = time.monotonic() + 240, ("sacct", "-X", "-n", "-P", "-D", "-j", job, "-o", "State")
    while state not in (text := cluster_history.cluster.run(*command)) or text.count("\n") < runs:
        assert time.monotonic() < end, text
        time.sleep(0.2)


@pytest.fixture(scope="module")
def store_from_sacct(history: ClusterHistory) -> Path:
    """Create a store that queried sacct."""
    db = history.scratch / "asked"
    history.ingest(db, "--sacct", *from_days_ago(1), "--users", "keep")
    return db


def test_each_run_of_job_is_row_with_its_state(history: ClusterHistory, store_from_sacct: Path) -> None:
    jobs = history.jobs
    rows_by_job: dict[int, list[dict[str, Any]]] = {}
    for row in rows(store_from_sacct, "jobs"):
        rows_by_job.setdefault(row["job_id"], []).append(row)

    def states(name: str) -> list[str]:
        return [row["state"] for row in rows_by_job[int(jobs[name])]]

    assert states("requeued")[0] == "REQUEUED"
    assert len(states("requeued")) == 2
    assert states("preempted")[0] == "PREEMPTED"
    assert len(states("preempted")) == 2
    assert states("node_fail") == ["NODE_FAIL"]
    assert states("urgent") == states("open") == ["RUNNING"]
    assert states("waits") == ["PENDING"]
    assert states("cancelled") == ["CANCELLED"]
    first = rows_by_job[int(jobs["requeued"])][0]
    assert (first["nodes"], first["gpus"], first["node_list"], first["partition"]) == (1, 8, "n1", "gpu")
    assert first["submit_time"] <= first["start_time"] <= first["end_time"]
    (cancelled,) = rows_by_job[int(jobs["cancelled"])]
    assert (cancelled["start_time"], cancelled["nodes"]) == (None, None)
    (killed,) = rows_by_job[int(jobs["killed"])]
    assert (killed["state"], killed["exit_code"], killed["exit_signal"]) == ("FAILED", 0, 9)
    (reserved,) = rows_by_job[int(jobs["reserved"])]
    assert (reserved["reservation"], reserved["user_name"]) == ("maint", "root")
    tasks = sorted(row["array_task_id"] for job_rows in rows_by_job.values() for row in job_rows if row["array_job_id"])
    assert tasks == [1, 2]
    restarts = [row["restarts"] for row in rows_by_job[int(jobs["requeued"])]]
    assert restarts == ([None, None] if history.version == "22.05" else [0, 1])
    assert len({row["db_index"] for job_rows in rows_by_job.values() for row in job_rows}) == sum(
        map(len, rows_by_job.values())
    )


def test_nodes_and_exclusions_are_stored_without_tokens(history: ClusterHistory, store_from_sacct: Path) -> None:
    jobs = history.jobs
    job_nodes = {(row["db_index"], row["node"]) for row in rows(store_from_sacct, "job_nodes", "db_index, node")}
    assert (row_of_job(store_from_sacct, jobs["node_fail"])["db_index"], "n4") in job_nodes
    excluded = {(row["job_id"], row["node"], row["source"]) for row in rows(store_from_sacct, "exclusions")}
    array = {(row["job_id"], "n4", "submit_line") for row in rows(store_from_sacct, "jobs") if row["array_job_id"]}
    scripted = {(int(jobs["scripted"]), node, "script") for node in ("n2", "n3")}
    assert excluded == (array if history.version == "22.05" else array | scripted)
    assert row_of_job(store_from_sacct, jobs["scripted"])["exclusions_known"] is (history.version != "22.05")
    assert row_of_job(store_from_sacct, jobs["killed"])["exclusions_known"] is True
    for path in store_from_sacct.rglob("*"):
        assert not path.is_file() or (
            TOKEN.encode() not in path.read_bytes() and ODD_NAME.encode() not in path.read_bytes()
        )


def test_sacct_text_and_json_give_same_rows(history: ClusterHistory, store_from_sacct: Path) -> None:
    newer = NEWER_COLUMNS if history.version == "22.05" else frozenset()
    columns = ",".join(name for name in COLUMNS if name not in newer)
    format_flags = ("--parsable2", "--noconvert", f"--format={columns}")
    text = history.sacct("jobs.txt", *format_flags, "--delimiter=|#|", SLURM_TIME_FORMAT="%s")
    as_json = history.sacct("jobs.json", "--json")
    history.ingest(history.scratch / "text", "--sacct", str(text), "--users", "keep")
    history.ingest(history.scratch / "json", "--sacct", str(as_json), "--users", "keep")
    if history.version == "22.05":  # columns that its JSON lacks or has wrong
        different = {
            "db_index",
            "exit_code",
            "exit_signal",
            "reservation",
            "exclusions_known",
            "source",
            "cpus",
            "priority",
        }
    else:
        different = {"source"} if history.version == "26.05" else {"source", "db_index"}

    def rows_without(db: str, drop: set[str]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k not in drop} for row in rows(history.scratch / db, "jobs")]

    assert rows_without("json", different) == rows_without("text", different)
    # The own query runs per day and includes the scripts: their --exclude is in no text.
    script_columns = {"exclusions_known", "source"}
    queried_rows = [{k: v for k, v in row.items() if k not in script_columns} for row in rows(store_from_sacct, "jobs")]
    assert {row["db_index"] for row in rows_without("text", script_columns)} <= {
        row["db_index"] for row in queried_rows
    }


def test_ambiguous_name_in_foreign_text_is_rejected(history: ClusterHistory) -> None:
    text = history.sacct(
        "bars.txt", "--parsable2", "--format=JobIDRaw,JobID,Cluster,State,Submit,JobName,SubmitLine,DBIndex"
    )
    output = history.ingest(history.scratch / "bars", "--sacct", str(text), "--timezone", "UTC", status=1)
    assert f"{text}:" in output
    job_ids = {row["job_id"] for row in rows(history.scratch / "bars", "jobs")}
    assert int(history.jobs["killed"]) in job_ids
    assert int(history.jobs["array"]) not in job_ids


def test_rerun_changes_only_ended_jobs(history: ClusterHistory, store_from_sacct: Path) -> None:
    history.ingest(store_from_sacct, "--sacct")
    before = rows(store_from_sacct, "jobs")
    history.ingest(store_from_sacct, "--sacct")
    assert rows(store_from_sacct, "jobs") == before
    history.cluster.run("scancel", history.jobs["open"])
    _wait_for_sacct(history, history.jobs["open"], "CANCELLED")
    history.ingest(store_from_sacct, "--sacct")
    after = rows(store_from_sacct, "jobs")
    assert {row["db_index"] for row in after} == {row["db_index"] for row in before}
    assert [row for row in after if row["end_time"] is None or row in before] != after
    assert all(row in after for row in before if row["end_time"] is not None)
    ended = row_of_job(store_from_sacct, history.jobs["open"])
    assert (ended["state"], ended["end_time"] is None) == ("CANCELLED", False)


def test_job_ended_by_operator_long_ago_is_updated(history: ClusterHistory) -> None:
    """As by `sacctmgr show runawayjobs`: its end is before the days that a rerun reads."""
    db, job = history.scratch / "runaway", history.jobs["urgent"]
    begin = int(time.time()) // DAY * DAY - 4 * DAY
    times = f"time_submit={begin}, time_eligible={begin}, time_start={begin}"
    history.sql(f"UPDATE test_job_table SET {times} WHERE id_job={job}")
    history.ingest(db, "--sacct", *from_days_ago(5), "--users", "keep")
    assert (row_of_job(db, job)["state"], row_of_job(db, job)["end_time"]) == ("RUNNING", None)
    history.sql(f"UPDATE test_job_table SET time_end={begin + 60}, state=3 WHERE id_job={job}")
    history.ingest(db, "--sacct")
    assert (row_of_job(db, job)["state"], row_of_job(db, job)["end_time"]) == ("COMPLETED", begin + 60)


def test_times_ignore_summer_time_and_ambiguous_local_time_is_reported(history: ClusterHistory) -> None:
    job = history.jobs["killed"]
    times = f"time_submit={SUBMIT}, time_eligible={SUBMIT}, time_start={START}, time_end={END}"
    history.sql(f"UPDATE test_job_table SET {times} WHERE id_job={job}")
    db = history.scratch / "summer"
    history.ingest(db, "--sacct", "--from", "2025-10-26", "--to", "2025-10-27", "--users", "keep", TZ="Europe/Berlin")
    row = row_of_job(db, job)
    assert (row["submit_time"], row["start_time"], row["end_time"]) == (SUBMIT, START, END)
    window = ("--starttime=uts1761400000", "--endtime=uts1761500000", "--parsable2")
    columns = "--format=JobIDRaw,JobID,DBIndex,Cluster,State,Submit,Start,End"
    text = history.sacct("summer.txt", *window, columns, TZ="Europe/Berlin")
    assert "2025-10-26T02:00:00|2025-10-26T02:30:00" in text.read_text()
    output = history.ingest(history.scratch / "local", "--sacct", str(text), "--timezone", "Europe/Berlin", status=1)
    assert f"{text}:2: 2025-10-26T02:00:00 occurs twice in Europe/Berlin, when clocks are set back" in output


def test_slurmdbd_down_is_reported_in_one_sentence(history: ClusterHistory) -> None:
    conf = history.scratch / "slurm.conf"
    lines = (history.cluster.directory / "slurm.conf").read_text().splitlines()
    other_lines = [line for line in lines if not line.startswith("AccountingStoragePort")]
    conf.write_text("\n".join([*other_lines, "AccountingStoragePort=9", ""]))
    db = history.scratch / "away"
    output = history.ingest(db, "--sacct", *from_days_ago(1), status=3, SLURM_CONF=str(conf))
    assert "sacct: sacct failed: " in output
    assert "Traceback" not in output
    assert os.listdir(db) != []
