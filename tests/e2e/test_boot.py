"""Tests of booting nodes with a real slurmctld and slurmd.

A faulty node is drained before slurmd starts and stays drained whatever slurmd's registration does to the drain; a node
without its ledger restores the condition from its Reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, condition, have_all_run_since, xid_line
from machine import Machine
from slurm_cluster import SlurmCluster
from slurm_look import with_slurm, write_script
from waiting import until

pytestmark = with_slurm(None, "24.11")
CONFIG = "[checks.gpu_count]\nexpected = 8\n"
LOST_GPU = "[gpu.3]\nlost = true\n"
LOST_REASON = "healthd: gpu_access/lost 0000:61:00.0: "
INTERVAL_SECONDS = 600  # only the first round runs


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reboot_program = write_script(tmp_path_factory.mktemp("programs") / "nothing", "exit 0")
    conf_lines = [f"RebootProgram={reboot_program}", "ReturnToService=2", "ResumeTimeout=600"]
    version = getattr(request, "param", None)
    with SlurmCluster(nodes=6, extra_conf=conf_lines, slurmd_timeout=15, version=version) as running:
        yield running


class BootingNode:
    """A node, its daemon (which the test starts), and a service manager that waits for READY."""

    def __init__(self, cluster: SlurmCluster, node: str, directory: Path, manager: socket.socket) -> None:
        self.cluster, self.node, self.directory, self.manager = cluster, node, directory, manager
        self.machine = Machine(directory)
        self.machine.now()
        flags = ("--mode", "act", "--node-name", node, "--interval", str(INTERVAL_SECONDS))
        flags += ("--root", str(self.machine.root))
        options: dict[str, Any] = {"config": CONFIG, "fake_nvml": str(self.machine.scenario), "wait": False}
        env = {**cluster.env, "NOTIFY_SOCKET": str(directory / "notify")}
        self.daemon = Healthd(*flags, directory=directory, env=env, **options)

    def go_down(self, *lost: str) -> None:
        """Stop daemon and slurmd abruptly and empty /run; `lost`: further directories that are removed."""
        if self.daemon.process is not None:
            self.daemon.kill()
        self.cluster.stop_slurmd(self.node, signal.SIGKILL)
        for name in ("run", *lost):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        shutil.rmtree(self.machine.root / "proc/4711", ignore_errors=True)
        self.machine.write({"/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n"})

    def start_healthd(self) -> None:
        """Start healthd as systemd does: wait for READY, before slurmd starts."""
        self.daemon.start()
        self.wait_ready()

    def start_slurmd(self) -> None:
        self.cluster.start_slurmd(self.node, "-b")
        self.machine.write({"/proc/4711/comm": "slurmd\n"})

    def wait_ready(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while True:
            self.manager.settimeout(max(0.01, end - time.monotonic()))
            if b"READY=1" in self.manager.recv(1 << 16).split(b"\n"):
                return

    def has_sent_ready(self) -> bool:
        self.manager.settimeout(0.01)
        try:
            while b"READY=1" not in self.manager.recv(1 << 16).split(b"\n"):
                pass
        except TimeoutError:
            return False
        return True

    def flags(self) -> frozenset[str]:
        return self.cluster.node(self.node).flags

    def submit_job(self) -> str:
        return self.cluster.sbatch("sleep 600", "-w", self.node)

    def has_never_run(self, job: str) -> bool:
        job_state = self.cluster.job(job)
        return (job_state["JobState"], job_state["Restarts"], job_state["StartTime"]) == (
            "PENDING",
            "0",
            job_state["StartTime"],
        )


@pytest.fixture
def booting(cluster: SlurmCluster, unused_nodes: Iterator[str], tmp_path: Path) -> Iterator[BootingNode]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        booting_node = BootingNode(cluster, next(unused_nodes), tmp_path, manager)
        try:
            yield booting_node
        except BaseException:
            print(booting_node.daemon.log.read_text()[-6000:])
            raise
        finally:
            cluster.run("scancel", "--state=PENDING", check=False)
            if booting_node.daemon.process is not None and booting_node.daemon.process.poll() is None:
                booting_node.daemon.kill()


def test_faulty_node_is_drained_before_slurmd_starts(booting: BootingNode) -> None:
    cluster, node = booting.cluster, booting.node
    booting.go_down()
    cluster.wait_state(node, "DOWN")
    job = booting.submit_job()
    booting.machine.gpus(LOST_GPU)
    booting.start_healthd()
    assert "DRAIN" in booting.flags(), "before READY, so before slurmd"
    assert cluster.node(node).reason.startswith(LOST_REASON)
    assert booting.daemon.verdict().startswith("drain "), "for the prolog"
    time.sleep(10)  # slurmd starts late
    booting.start_slurmd()
    cluster.wait_state(node, "DRAIN", without=("NOT_RESPONDING",))
    time.sleep(5)
    assert booting.has_never_run(job)
    assert cluster.node(node).reason.startswith(LOST_REASON)


def test_healthy_node_is_ready_and_gets_its_job(booting: BootingNode) -> None:
    booting.go_down()
    booting.cluster.wait_state(booting.node, "DOWN")
    job = booting.submit_job()
    booting.start_healthd()
    booting.start_slurmd()
    booting.cluster.wait_job(job, "RUNNING")


@pytest.mark.parametrize("late_seconds", [0, 25])
def test_drain_removed_by_requested_reboot_is_restored_after_registration(
    booting: BootingNode, late_seconds: int
) -> None:
    cluster, node = booting.cluster, booting.node
    booting.start_healthd()
    cluster.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", "Reason=new kernel", node)
    cluster.wait_state(node, "REBOOT_ISSUED")
    booting.go_down()
    booting.machine.gpus(LOST_GPU)
    booting.start_healthd()
    assert "DRAIN" in booting.flags()
    time.sleep(late_seconds)
    assert "DRAIN" in booting.flags(), "the wait for slurmd does not remove it"
    booting.start_slurmd()
    cluster.wait_state(node, without=("REBOOT_ISSUED", "NOT_RESPONDING", "DOWN"))
    registered = time.monotonic()
    cluster.wait_state(node, "DRAIN", reason=LOST_REASON, timeout=INTERVAL_SECONDS / 4)
    print(f"{node}: drained again {time.monotonic() - registered:.1f} s after slurmd had registered")
    status = booting.daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is healthd's own")
    lost_condition = condition(status, "gpu_access/lost")
    assert lost_condition is not None
    assert lost_condition["state"] == "open", "no operator resumed the node; the reboot did"
    assert "an operator resumed" not in booting.daemon.log.read_text()


def test_ready_waits_for_late_slurmctld(booting: BootingNode) -> None:
    cluster = booting.cluster
    booting.go_down()
    cluster.wait_state(booting.node, "DOWN")
    booting.machine.gpus(LOST_GPU)
    cluster.kill_slurmctld(signal.SIGTERM)
    booting.daemon.env |= cluster.short_timeout_environment  # READY waits for a minute
    try:
        booting.daemon.start()
        booting.daemon.wait_until(lambda s: s["slurm"]["problem"] != "", "slurmctld is down")
        until(lambda: booting.daemon.verdict().startswith("warning "), "the drain needs a count of the fleet")
        assert not booting.has_sent_ready()
    finally:
        cluster.start_slurmctld()
    booting.wait_ready()
    assert "DRAIN" in booting.flags()


def test_diskless_node_restores_condition_from_reason(booting: BootingNode) -> None:
    cluster, node, daemon = booting.cluster, booting.node, booting.daemon
    booting.start_healthd()
    daemon.kernel_line(xid_line(79))
    before = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 0000:61:00.0: ")
    booting.go_down("state")
    os.truncate(daemon.kernel_log, 0)
    booting.start_healthd()
    booting.start_slurmd()
    status = daemon.wait_until(
        lambda s: condition(s, "gpu_xid/79", "0000:61:00.0") is not None, "the condition is adopted"
    )
    adopted = condition(status, "gpu_xid/79")
    assert adopted is not None
    assert (adopted["state"], adopted["clears"]) == ("acknowledged", "operator")
    assert adopted["message"] == "adopted from the node's Reason in Slurm"
    assert status["slurm"]["owner"] == "unrecorded_healthd"
    # All checks pass, but a drain that this healthd has not recorded must be lifted by an operator.
    assert "done" in daemon.request(command="repaired", code="gpu_xid/79", part="0000:61:00.0")
    daemon.wait_until(lambda s: have_all_run_since(s, status["time"]), "all checks have run")
    after = cluster.wait_state(node, "DRAIN", reason=before.reason)
    assert after.reason == before.reason
