"""Tests of events that happen on every node now and then, with a real Slurm and daemon: only lasting faults drain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, condition, wait_for_rounds, xid_line
from machine import Machine
from slurm_cluster import SlurmCluster, start_job

# As `healthd baseline` would write it, with two rounds per second. The test must query the status within the
# confirmation time.
CONFIG = """
[checks.gpu_count]
expected = 8
[checks.gpu_nvlink]
links = 18
[checks.ib_link]
expected_gbps = { "mlx5_0/1" = 400, "mlx5_1/1" = 400 }
confirm_seconds = 20.0
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=4) as running:
        yield running


@pytest.fixture
def daemon(cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path) -> Iterator[Healthd]:
    flags = ("--mode", "act", "--node-name", node, "--interval", "0.5", "--root", str(machine.root))
    options: dict[str, Any] = {"config": CONFIG, "env": cluster.env, "fake_nvml": str(machine.scenario)}
    with Healthd(*flags, directory=tmp_path, **options) as running:
        status = running.wait_until(lambda s: s["health"] == "healthy", "the node is healthy")
        assert status["conditions"] == []
        yield running


@pytest.fixture
def job(cluster: SlurmCluster, node: str) -> str:
    """Start a job on the node with all its GPUs, so that a fault of any of them requeues it."""
    return start_job(cluster, node, f"--gres=gpu:{cluster.gpus}")


def assert_node_and_job_are_unchanged(cluster: SlurmCluster, node: str, job: str) -> None:
    node_state = cluster.node(node)
    assert (node_state.flags.isdisjoint({"DRAIN", "DOWN"}), node_state.reason) == (True, "")
    state = cluster.job(job)
    assert (state["JobState"], state["Restarts"]) == ("RUNNING", "0")


def test_slurmd_restart_changes_nothing(cluster: SlurmCluster, node: str, daemon: Healthd, job: str) -> None:
    cluster.stop_slurmd(node)
    wait_for_rounds(daemon, 2)
    cluster.start_slurmd(node)
    status = wait_for_rounds(daemon, 2)
    assert (status["health"], status["slurm"]["problem"]) == ("healthy", "")
    assert_node_and_job_are_unchanged(cluster, node, job)
    # A drain of healthd does not end by it either.
    daemon.kernel_line(xid_line(79))
    cluster.wait_job(job, "PENDING")
    drained = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
    cluster.stop_slurmd(node)
    wait_for_rounds(daemon, 2)
    cluster.start_slurmd(node)
    wait_for_rounds(daemon, 3)
    status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is healthd's own")
    entry = condition(status, "gpu_xid/79")
    assert entry is not None
    assert entry["state"] == "open"
    after = cluster.node(node)
    assert (after.reason, after.reason_time) == (drained.reason, drained.reason_time)


def test_storm_of_xid_13_does_not_drain_and_hides_no_other_xid(
    cluster: SlurmCluster, node: str, daemon: Healthd, job: str
) -> None:
    text = "pid=4711, name=python3, Graphics SM Warp Exception on (GPC 4, TPC 0, SM 1): Out Of Range Address"
    for _ in range(5):
        daemon.kernel_line(*(f"NVRM: Xid (PCI:0000:{bus}:00): 13, {text}" for bus in ("1b", "43", "61") * 200))
        status = wait_for_rounds(daemon, 0)
    daemon.wait_until(
        lambda s: len([entry for entry in s["conditions"] if entry["code"] == "gpu_xid/13"]) == 3, "they are reported"
    )
    status = wait_for_rounds(daemon, 2)
    assert (status["health"], status["decision"]["action"]) == ("warning", "leave")
    assert_node_and_job_are_unchanged(cluster, node, job)
    # One line of another kind among them is not lost.
    lines = [f"NVRM: Xid (PCI:0000:1b:00): 13, {text}"] * 500
    daemon.kernel_line(*lines, xid_line(79), *lines)
    cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
    assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"


def test_driver_upgrade_in_pause_drains_only_for_lasting_fault(
    cluster: SlurmCluster, node: str, daemon: Healthd, machine: Machine, job: str
) -> None:
    assert "done" in daemon.request(command="pause", seconds=600, why="driver upgrade")
    for scenario, code in (  # new library, module unloaded, no GPUs yet, links in training
        ('library = "mismatch"', "gpu_access/driver_mismatch"),
        ('library = "driver_not_loaded"', "gpu_access/driver_not_loaded"),
        ("".join(f"[gpu.{index}]\ngone = true\n" for index in range(8)), "gpu_count/missing"),
        ("[gpu.5]\npersistence = false\nnvlink_inactive = [0, 1, 2, 3]", "gpu_nvlink/inactive"),
    ):
        machine.gpus(scenario)
        status = daemon.wait_until(lambda s, code=code: condition(s, code) is not None, f"{code} is reported")
        assert status["decision"]["action"] == "leave"
    assert_node_and_job_are_unchanged(cluster, node, job)
    machine.gpus()
    wait_for_rounds(daemon, 2)
    assert "done" in daemon.request(command="unpause")
    status = wait_for_rounds(daemon, 3)
    assert (status["pause"], status["decision"]["action"]) == (None, "leave")
    # A condition that waits for a reboot is still reported, and does not act.
    assert {entry["code"] for entry in status["conditions"] if entry["severity"] != "info"} <= {"gpu_count/missing"}
    assert_node_and_job_are_unchanged(cluster, node, job)
    # The same again, but one GPU does not return.
    assert "done" in daemon.request(command="repaired", code="gpu_count/missing")
    assert "done" in daemon.request(command="pause", seconds=600, why="driver upgrade")
    machine.gpus("[gpu.3]\ngone = true")
    wait_for_rounds(daemon, 2)
    assert_node_and_job_are_unchanged(cluster, node, job)
    assert "done" in daemon.request(command="unpause")
    cluster.wait_state(node, "DRAIN", reason="healthd: gpu_count/missing 0000:61:00.0: ")


def test_port_down_for_less_than_confirm_time_does_not_drain(
    cluster: SlurmCluster, node: str, daemon: Healthd, machine: Machine, job: str
) -> None:
    machine.port(0, up=False)
    machine.count(0, link_downed=1)
    status = daemon.wait_until(lambda s: condition(s, "ib_link/down") is not None, "the port is reported")
    down = condition(status, "ib_link/down")
    assert down is not None
    assert down["state"] == "pending"
    machine.port(0)
    status = wait_for_rounds(daemon, 3)
    assert (status["health"], status["conditions"]) == ("healthy", [])
    assert_node_and_job_are_unchanged(cluster, node, job)
    machine.port(0, up=False)
    cluster.wait_state(node, "DRAIN", reason="healthd: ib_link/down mlx5_0/1: ")
    assert cluster.job(job)["Restarts"] == "0", "a job that survives it continues"
    machine.port(0)
    cluster.wait_state(node, without=("DRAIN",))
