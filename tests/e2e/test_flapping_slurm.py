"""Tests of a fault that comes and goes, with a real Slurm: the node is not drained and resumed endlessly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import Healthd, wait_for_rounds
from slurm_cluster import SlurmCluster

WAIT_SECONDS = 24.0  # long enough to observe the wait
CONFIG = """
checks_dir = "{checks}"
[checks.flaps]
clear_after = 1
[fleet]
limit_percent = 100.0
own_hardware_limit_percent = 100.0
jitter_seconds = 0.0
[slurm]
requeue_retry_seconds = 1.0
shared_wait_seconds = {wait}
shared_max_wait_seconds = {longest}
"""
SITE_CHECK = """
from healthd.common.model import Finding, Severity

def run(host, config, past):
    if host.exists("{fault}"):
        yield Finding(Severity.DEGRADED, "flaps/fault", "", "it is there", shared_cause={shared})
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2, gpus=0) as running:
        yield running


class FlappingNode:
    """A daemon with a check that reports a fault while a file exists."""

    def __init__(self, cluster: SlurmCluster, node: str, folder: Path, shared: bool) -> None:
        self.cluster, self.node, self.fault = cluster, node, folder / "fault"
        checks = folder / "checks.d"
        checks.mkdir(mode=0o755)
        (checks / "flaps.py").write_text(SITE_CHECK.format(fault=self.fault, shared=shared))
        (checks / "flaps.py").chmod(0o644)
        config = CONFIG.format(checks=checks, wait=WAIT_SECONDS, longest=2 * WAIT_SECONDS)
        flags = ("--mode", "drain", "--node-name", node, "--interval", "0.5")
        self.daemon = Healthd(*flags, directory=folder, config=config, env=cluster.env, fake_nvml="")

    def start_fault(self) -> None:
        self.fault.touch()
        self.cluster.wait_state(self.node, "DRAIN", reason="healthd: flaps/fault")

    def end_fault(self) -> None:
        self.fault.unlink()
        self.daemon.wait_until(lambda s: not s["conditions"], "no condition is open")

    def wait_until_free(self) -> None:
        self.cluster.wait_state(self.node, "IDLE", without=("DRAIN",))


def test_flapping_own_hardware_needs_operator_after_two_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    flaps = FlappingNode(cluster, "n1", tmp_path, shared=False)
    with flaps.daemon as daemon:
        for _ in range(2):
            flaps.start_fault()
            flaps.end_fault()
            flaps.wait_until_free()
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "none", "the resume is confirmed")
        daemon.kill()
        daemon.start()
        flaps.start_fault()
        flaps.end_fault()
        waiting_text = "clean, but drained 3 times within an hour for the node's own hardware"
        daemon.wait_until(lambda s: s["decision"]["text"].startswith(waiting_text), "it waits for an operator")
        wait_for_rounds(daemon, 4)
        assert "DRAIN" in cluster.node("n1").flags
        assert cluster.node("n1").reason.endswith("(3 times in an hour: an operator must resume it)")
        cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        flaps.wait_until_free()
        daemon.wait_until(lambda s: s["decision"]["text"] == "nothing to do", "the operator's resume is accepted")
        for _ in range(2):
            flaps.start_fault()
            flaps.end_fault()
            flaps.wait_until_free()
        flaps.start_fault()
        flaps.end_fault()
        status = daemon.wait_until(lambda s: s["decision"]["text"].startswith(waiting_text), "it waits again")
        assert status["decision"]["text"].endswith('or run "healthd repaired flaps/fault"')
        assert "done" in daemon.request(command="repaired", code="flaps/fault")
        flaps.wait_until_free()


def test_flapping_shared_cause_is_resumed_later_each_time(cluster: SlurmCluster, tmp_path: Path) -> None:
    flaps = FlappingNode(cluster, "n2", tmp_path, shared=True)
    with flaps.daemon as daemon:
        flaps.start_fault()
        flaps.end_fault()
        flaps.wait_until_free()
        for times in (2, 3):
            flaps.start_fault()
            flaps.end_fault()
            decision_text = f"clean, but drained {times} times in a row"
            daemon.wait_until(
                lambda s, decision_text=decision_text: s["decision"]["text"].startswith(decision_text), decision_text
            )
            assert "DRAIN" in cluster.node("n2").flags
            flaps.wait_until_free()
    log = daemon.log.read_text()
    assert log.count("State=DRAIN") == log.count("State=UNDRAIN") == 3
    assert "resumed after 0.4 min without a fault" in log
    assert "resumed after 0.8 min without a fault" in log
