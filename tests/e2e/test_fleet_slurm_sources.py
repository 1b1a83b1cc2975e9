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
from fleet_reading import store_rows
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


def run_ingest(cluster: SlurmCluster, store: Path, *flags: str | Path) -> None:
    command = [sys.executable, "-m", "healthd", "fleet", "ingest", "--out", store, "--users", "keep", *flags]
    repository = str(Path(__file__).resolve().parents[2])
    env = {**cluster.env, "PYTHONPATH": repository, "SQUEUE_FORMAT": "%i", "TZ": "Asia/Tokyo"}
    result = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, timeout=400)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr


def rows(store: Path, table: str, **values: Any) -> list[dict[str, Any]]:
    return [row for row in store_rows(store, table) if all(row[name] == value for name, value in values.items())]


def test_drain_is_stored_with_start_and_then_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    reason = "a fan | broken"
    start = time.time()
    cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", f"Reason={reason}")
    query = ("sacctmgr", "-nP", "show", "event", "nodes=n4", "format=Reason")
    until(lambda: reason in cluster.run(*query), "slurmdbd has the drain")
    run_ingest(cluster, tmp_path / "db", "--node-states")
    (drain,) = rows(tmp_path / "db", "node_states", node="n4", reason=reason)
    assert start - 2 <= drain["start_time"] <= time.time()
    assert (drain["cluster"], drain["end_time"], drain["user_name"]) == ("test", None, "root")
    assert drain["state"].startswith("DRAIN")
    time.sleep(1.1)  # times are whole seconds: the end must be later than the start
    cluster.run("scontrol", "update", "NodeName=n4", "State=UNDRAIN")
    end_query = ("sacctmgr", "-nP", "show", "event", "nodes=n4", "format=End")
    until(lambda: "Unknown" not in cluster.run(*end_query), "slurmdbd has the end")
    run_ingest(cluster, tmp_path / "db", "--node-states")
    (drain,) = rows(tmp_path / "db", "node_states", node="n4", reason=reason)
    assert drain["start_time"] < drain["end_time"] <= time.time() + 1
    # the same from a file with local times
    text = cluster.run(
        "sacctmgr", "-P", "show", "event", "nodes=n4", "all_time", "format=Cluster,NodeName,Start,End,State,Reason,User"
    )
    (tmp_path / "events.txt").write_text(text)
    run_ingest(cluster, tmp_path / "db2", "--node-states", tmp_path / "events.txt", "--timezone", "UTC")
    assert rows(tmp_path / "db2", "node_states", reason=reason) == [drain]


def test_maintenance_reservation_is_stored_per_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    arguments = (
        "ReservationName=rack7",
        "Nodes=n[3-4]",
        "Users=root",
        "StartTime=now",
        "Duration=10",
        "Flags=MAINT,IGNORE_JOBS",
    )
    cluster.run("scontrol", "create", "reservation", *arguments)
    until(lambda: "rack7" in cluster.run("sacctmgr", "-nP", "show", "reservation"), "slurmdbd has the reservation")
    run_ingest(cluster, tmp_path / "db", "--reservations")
    found = rows(tmp_path / "db", "reservations", name="rack7")
    assert [row["node"] for row in found] == ["n3", "n4"]
    assert all(row["maintenance"] and row["end_time"] - row["start_time"] == 600 for row in found)
    cluster.run("scontrol", "delete", "ReservationName=rack7")


def test_exclusions_are_read_from_squeue(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = cluster.sbatch("true", "--exclude=n[1-2]", "--hold", "--partition=low")
    array = cluster.sbatch("true", "--exclude=n3", "--hold", "--partition=low", "--array=1-3")
    plain = cluster.sbatch("true", "--hold", "--partition=low")
    run_ingest(cluster, tmp_path / "db", "--exclusions")
    found = {(row["job_id"], row["node"]) for row in store_rows(tmp_path / "db", "exclusions")}
    assert found == {(int(job), "n1"), (int(job), "n2"), (int(array), "n3")}
    assert {row["source"] for row in store_rows(tmp_path / "db", "exclusions")} == {"squeue"}
    squeue_text = cluster.run("squeue", "--all", "-o", "%10A %20V %30x %5j")
    (tmp_path / "squeue.txt").write_text(squeue_text)
    run_ingest(
        cluster, tmp_path / "db2", "--exclusions", tmp_path / "squeue.txt", "--cluster", "test", "--timezone", "UTC"
    )
    assert store_rows(tmp_path / "db2", "exclusions") == store_rows(tmp_path / "db", "exclusions")
    cluster.run("scancel", job, array, plain)


def test_nodes_are_stored_with_gpus_and_leaf_switches(cluster: SlurmCluster, tmp_path: Path) -> None:
    run_ingest(cluster, tmp_path / "db", "--nodes", "--topology")
    found = store_rows(tmp_path / "db", "nodes")
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
    run_ingest(cluster, tmp_path / "db2", *flags)
    assert [{**row, "partitions": ""} for row in store_rows(tmp_path / "db2", "nodes")] == [
        {**row, "partitions": ""} for row in found
    ]


def test_slurmctld_log_has_victims_and_preemptors(cluster: SlurmCluster, tmp_path: Path) -> None:
    exclusive = ("--exclusive", "--gres=gpu:8")
    start = int(time.time())
    victims = [cluster.sbatch("sleep 3000", "-w", "n1", "-p", "low", *exclusive)]
    victims.append(cluster.sbatch("sleep 3000", "-w", "n2", "-p", "brief", *exclusive))
    victims.append(cluster.sbatch("sleep 3000", "-w", "n3", "-p", "low", "--array=7", *exclusive))
    for job in victims:
        cluster.wait_job(job, "RUNNING")
    preemptors = [cluster.sbatch("sleep 3000", "-w", f"n{number}", "-p", "high", *exclusive) for number in (1, 2)]
    array = cluster.sbatch("sleep 3000", "-w", "n3", "-p", "high", "--array=4-5%1", *exclusive)
    for job in (*preemptors, f"{array}_4"):
        cluster.wait_job(job, "RUNNING")
    log = cluster.directory / "log" / "slurmctld.log"
    run_ingest(cluster, tmp_path / "db", "--slurmctld-log", log, "--cluster", "test", "--timezone", "UTC")
    found = store_rows(tmp_path / "db", "preemptions")
    assert all(start <= row["time"] <= time.time() for row in found)
    preemptions = {
        (row["job_id"], row["preemptor_job_id"], row["mode"], row["preemptor_array_task_id"]) for row in found
    }
    assert preemptions == {
        (int(victims[0]), int(preemptors[0]), "requeued", None),
        (int(victims[1]), int(preemptors[1]), "cancelled", None),
        (int(victims[2]), int(array), "requeued", 4),
    }
    # The log has the array's id, although the task runs under another one, so the task is stored too.
    assert cluster.job(f"{array}_4")["JobId"] != array
    cluster.run("scancel", *victims, *preemptors, array)
