"""Tests of a fault that comes and goes, with a real Slurm: the node is not drained and resumed endlessly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import Healthd, rounds
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
CHECK = """
from healthd.common.model import Finding, Severity

def run(host, config, past):
    if host.exists("{fault}"):
        yield Finding(Severity.DEGRADED, "flaps/fault", "", "it is there", shared_cause={shared})
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2, gpus=0) as running:
        yield running


class Flapping:
    """A daemon with a check that reports a fault while a file exists."""

    def __init__(self, cluster: SlurmCluster, node: str, folder: Path, shared: bool) -> None:
        self.cluster, self.node, self.fault = cluster, node, folder / "fault"
        checks = folder / "checks.d"
        checks.mkdir(mode=0o755)
        (checks / "flaps.py").write_text(CHECK.format(fault=self.fault, shared=shared))
        (checks / "flaps.py").chmod(0o644)
        config = CONFIG.format(checks=checks, wait=WAIT_SECONDS, longest=2 * WAIT_SECONDS)
        flags = ("--mode", "drain", "--node-name", node, "--interval", "0.5")
        self.daemon = Healthd(*flags, directory=folder, config=config, env=cluster.env, fake_nvml="")

    def comes(self) -> None:
        self.fault.touch()
        self.cluster.wait_state(self.node, "DRAIN", reason="healthd: flaps/fault")

    def goes(self) -> None:
        self.fault.unlink()
        self.daemon.until(lambda s: not s["conditions"], "no condition is open")

    def is_free(self) -> None:
        self.cluster.wait_state(self.node, "IDLE", without=("DRAIN",))


def test_own_hardware_that_comes_and_goes_is_given_back_twice_in_an_hour_and_then_by_a_person(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    flaps = Flapping(cluster, "n1", tmp_path, shared=False)
    with flaps.daemon as daemon:
        for _ in range(2):
            flaps.comes()
            flaps.goes()
            flaps.is_free()
        daemon.until(lambda s: s["slurm"]["owner"] == "none", "the resume is confirmed")
        daemon.kill()
        daemon.start()
        flaps.comes()
        flaps.goes()
        waits = "clean, but drained 3 times within an hour for the node's own hardware"
        daemon.until(lambda s: s["decision"]["text"].startswith(waits), "it waits for an operator")
        rounds(daemon, 4)
        assert "DRAIN" in cluster.node("n1").flags
        assert cluster.node("n1").reason.endswith("(3 times in an hour: an operator must resume it)")
        cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        flaps.is_free()
        daemon.until(lambda s: s["decision"]["text"] == "nothing to do", "the operator's resume is accepted")
        for _ in range(2):
            flaps.comes()
            flaps.goes()
            flaps.is_free()
        flaps.comes()
        flaps.goes()
        status = daemon.until(lambda s: s["decision"]["text"].startswith(waits), "it waits again")
        assert status["decision"]["text"].endswith('or run "healthd repaired flaps/fault"')
        assert "done" in daemon.ask(command="repaired", code="flaps/fault")
        flaps.is_free()


def test_a_shared_cause_that_comes_and_goes_is_given_back_by_itself_each_time_later(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    flaps = Flapping(cluster, "n2", tmp_path, shared=True)
    with flaps.daemon as daemon:
        flaps.comes()
        flaps.goes()
        flaps.is_free()
        for times in (2, 3):
            flaps.comes()
            flaps.goes()
            words = f"clean, but drained {times} times in a row"
            daemon.until(lambda s, words=words: s["decision"]["text"].startswith(words), words)
            assert "DRAIN" in cluster.node("n2").flags
            flaps.is_free()
    log = daemon.log.read_text()
    assert log.count("State=DRAIN") == log.count("State=UNDRAIN") == 3
    assert "resumed after 0.4 min without a fault" in log
    assert "resumed after 0.8 min without a fault" in log
