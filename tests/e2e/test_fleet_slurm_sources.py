"""Tests of the fleet sources with a real Slurm and slurmdbd: sacctmgr, squeue, scontrol and slurmctld's log."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_reading import live
from slurm_cluster import SlurmCluster
from waiting import until

CONF = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "TopologyPlugin=topology/tree",
    "PartitionName=low Nodes=ALL PriorityTier=1",
    "PartitionName=brief Nodes=ALL PriorityTier=1 PreemptMode=CANCEL",
    "PartitionName=high Nodes=ALL PriorityTier=10",
)
TOPOLOGY = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\nSwitchName=spine Switches=leaf[1-2]\n"


@pytest.fixture(scope="module", params=["", "24.11", "26.05"], ids=["own", "24.11", "26.05"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    directory = Path(tempfile.mkdtemp(prefix="slurm."))
    (directory / "topology.conf").write_text(TOPOLOGY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")  # for Slurm's daemons and commands; the ingest uses another one
        with SlurmCluster(directory, nodes=4, extra_conf=CONF, accounting=True, version=request.param) as running:
            yield running


def ingest(cluster: SlurmCluster, store: Path, *flags: str | Path) -> None:
    command = [sys.executable, "-m", "healthd", "fleet", "ingest", "--out", store, "--users", "keep", *flags]
    repository = str(Path(__file__).resolve().parents[2])
    env = {**cluster.env, "PYTHONPATH": repository, "SQUEUE_FORMAT": "%i", "TZ": "Asia/Tokyo"}
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def rows(store: Path, table: str, **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in live(store, table) if all(row[name] == value for name, value in wanted.items())]


def test_a_drain_has_its_beginning_then_its_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    reason = "a fan | broken"
    began = time.time()
    cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", f"Reason={reason}")
    shown = ("sacctmgr", "-nP", "show", "event", "nodes=n4", "format=Reason")
    until(lambda: reason in cluster.run(*shown), "slurmdbd has the drain")
    ingest(cluster, tmp_path / "db", "--node-states")
    (drain,) = rows(tmp_path / "db", "node_states", node="n4", reason=reason)
    assert began - 2 <= drain["start_time"] <= time.time()
    assert (drain["cluster"], drain["end_time"], drain["user_name"]) == ("test", None, "root")
    assert drain["state"].startswith("DRAIN")
    time.sleep(1.1)  # times are whole seconds: the end must be later than the start
    cluster.run("scontrol", "update", "NodeName=n4", "State=UNDRAIN")
    ended = ("sacctmgr", "-nP", "show", "event", "nodes=n4", "format=End")
    until(lambda: "Unknown" not in cluster.run(*ended), "slurmdbd has the end")
    ingest(cluster, tmp_path / "db", "--node-states")
    (drain,) = rows(tmp_path / "db", "node_states", node="n4", reason=reason)
    assert drain["start_time"] < drain["end_time"] <= time.time() + 1
    # the same from a file with local times
    text = cluster.run(
        "sacctmgr", "-P", "show", "event", "nodes=n4", "all_time", "format=Cluster,NodeName,Start,End,State,Reason,User"
    )
    (tmp_path / "events.txt").write_text(text)
    ingest(cluster, tmp_path / "db2", "--node-states", tmp_path / "events.txt", "--timezone", "UTC")
    assert rows(tmp_path / "db2", "node_states", reason=reason) == [drain]


def test_a_maintenance_reservation_has_its_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    what = (
        "ReservationName=rack7",
        "Nodes=n[3-4]",
        "Users=root",
        "StartTime=now",
        "Duration=10",
        "Flags=MAINT,IGNORE_JOBS",
    )
    cluster.run("scontrol", "create", "reservation", *what)
    until(lambda: "rack7" in cluster.run("sacctmgr", "-nP", "show", "reservation"), "slurmdbd has the reservation")
    ingest(cluster, tmp_path / "db", "--reservations")
    found = rows(tmp_path / "db", "reservations", name="rack7")
    assert [row["node"] for row in found] == ["n3", "n4"]
    assert all(row["maintenance"] and row["end_time"] - row["start_time"] == 600 for row in found)
    cluster.run("scontrol", "delete", "ReservationName=rack7")


def test_what_users_excluded_is_read_from_squeue(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.sbatch("true", "--exclude=n[1-2]", "--hold", "--partition=low")
    array = cluster.sbatch("true", "--exclude=n3", "--hold", "--partition=low", "--array=1-3")
    plain = cluster.sbatch("true", "--hold", "--partition=low")
    ingest(cluster, tmp_path / "db", "--exclusions")
    found = {(row["job_id"], row["node"]) for row in live(tmp_path / "db", "exclusions")}
    assert found == {(int(job), "n1"), (int(job), "n2"), (int(array), "n3")}
    assert {row["source"] for row in live(tmp_path / "db", "exclusions")} == {"squeue"}
    wide = cluster.run("squeue", "--all", "-o", "%10A %20V %30x %5j")
    (tmp_path / "squeue.txt").write_text(wide)
    ingest(cluster, tmp_path / "db2", "--exclusions", tmp_path / "squeue.txt", "--cluster", "test", "--timezone", "UTC")
    assert live(tmp_path / "db2", "exclusions") == live(tmp_path / "db", "exclusions")
    cluster.run("scancel", job, array, plain)


def test_nodes_have_their_gpus_and_their_leaves(cluster: SlurmCluster, tmp_path: Path) -> None:
    ingest(cluster, tmp_path / "db", "--nodes", "--topology")
    found = live(tmp_path / "db", "nodes")
    assert [(row["node"], row["gpu_model"], row["gpus"], row["switch"]) for row in found] == [
        ("n1", "h100", 8, "leaf1"),
        ("n2", "h100", 8, "leaf1"),
        ("n3", "h100", 8, "leaf2"),
        ("n4", "h100", 8, "leaf2"),
    ]
    assert found[0]["partitions"].split(",") == ["gpu", "low", "brief", "high"]
    sinfo = cluster.run("sinfo", "-a", "-o", "%N|%G|%R")
    (tmp_path / "sinfo.txt").write_text(sinfo)
    flags = ("--nodes", tmp_path / "sinfo.txt", "--topology", cluster.directory / "topology.conf", "--cluster", "test")
    ingest(cluster, tmp_path / "db2", *flags)
    assert [{**row, "partitions": ""} for row in live(tmp_path / "db2", "nodes")] == [
        {**row, "partitions": ""} for row in found
    ]


def test_the_log_says_who_preempted_whom(cluster: SlurmCluster, tmp_path: Path) -> None:
    whole = ("--exclusive", "--gres=gpu:8")
    began = int(time.time())
    victims = [cluster.sbatch("sleep 3000", "-w", "n1", "-p", "low", *whole)]
    victims.append(cluster.sbatch("sleep 3000", "-w", "n2", "-p", "brief", *whole))
    victims.append(cluster.sbatch("sleep 3000", "-w", "n3", "-p", "low", "--array=7", *whole))
    for job in victims:
        cluster.wait_job(job, "RUNNING")
    takers = [cluster.sbatch("sleep 3000", "-w", f"n{number}", "-p", "high", *whole) for number in (1, 2)]
    array = cluster.sbatch("sleep 3000", "-w", "n3", "-p", "high", "--array=4-5%1", *whole)
    for job in (*takers, f"{array}_4"):
        cluster.wait_job(job, "RUNNING")
    log = cluster.directory / "log" / "slurmctld.log"
    ingest(cluster, tmp_path / "db", "--slurmctld-log", log, "--cluster", "test", "--timezone", "UTC")
    found = live(tmp_path / "db", "preemptions")
    assert all(began <= row["time"] <= time.time() for row in found)
    told = {(row["job_id"], row["preemptor_job_id"], row["mode"], row["preemptor_array_task_id"]) for row in found}
    assert told == {
        (int(victims[0]), int(takers[0]), "requeued", None),
        (int(victims[1]), int(takers[1]), "cancelled", None),
        (int(victims[2]), int(array), "requeued", 4),
    }
    # The log has the array's id, although the task runs under another one, so the task is stored too.
    assert cluster.job(f"{array}_4")["JobId"] != array
    cluster.run("scancel", *victims, *takers, array)
