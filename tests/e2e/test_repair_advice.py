"""Repair advice with a real Slurm: the step for a drained node, and what prevents it, from the fault to the resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, wait_for_rounds, xid_line
from slurm_cluster import SlurmCluster, start_job
from waiting import until

pytestmark = pytest.mark.one_python
PCI = "0000:61:00.0"
CONFIG = '[repair]\nmode = "advise"\n'


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=4, gpus=0) as running:
        yield running


def daemon_on(cluster: SlurmCluster, node: str, tmp_path: Path, config: str = CONFIG) -> Healthd:
    flags = ("--mode", "act", "--node-name", node, "--interval", "1")
    return Healthd(*flags, directory=tmp_path, env=cluster.env, config=config)


def obstacles(status: dict[str, Any]) -> set[str]:
    return {obstacle["obstacle"] for obstacle in status["repair"]["obstacles"]}


def advice(daemon: Healthd) -> list[tuple[str, str]]:
    """Return (step, why) of each advice in the event stream."""
    lines = (daemon.directory / "state" / "events.jsonl").read_text().splitlines()
    return [(e["step"], e["why"]) for e in map(json.loads, lines) if e["event"] == "repair"]


def test_advice_follows_node_from_drain_to_relapse(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    job = start_job(cluster, node, "--no-requeue")
    with daemon_on(cluster, node, tmp_path) as daemon:
        assert wait_for_rounds(daemon, 1)["repair"]["step"] is None
        daemon.kernel_line(xid_line(119))
        status = daemon.wait_until(lambda s: s["repair"]["step"] and obstacles(s) == {"jobs"}, "advised during the job")
        assert (status["repair"]["step"], status["repair"]["next"]) == ("gpu_reset", "reboot")
        assert status["repair"]["parts"] == [PCI]
        cluster.run("scancel", job)
        daemon.wait_until(lambda s: obstacles(s) == set(), "nothing prevents the step on the idle node")
        daemon.kill()
        daemon.start()
        daemon.wait_until(lambda s: s["repair"]["step"] == "gpu_reset" and obstacles(s) == set(), "the same advice")
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=under test")
        daemon.wait_until(lambda s: obstacles(s) == {"foreign_drain"}, "a person took over")
        until(lambda: advice(daemon) == [("gpu_reset", "remedy")], "advised once")


def test_advice_for_observed_node_needs_no_slurm(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    flags = ("--mode", "observe", "--node-name", node, "--interval", "1")
    with Healthd(*flags, directory=tmp_path, env=cluster.env, config=CONFIG) as daemon:
        before = cluster.sdiag_counts()
        daemon.kernel_line(xid_line(79))
        status = daemon.wait_until(lambda s: s["repair"]["step"] == "reboot", "advised")
        assert obstacles(status) == {"observe"}
        wait_for_rounds(daemon, 2)
        after = cluster.sdiag_counts()
        assert after.get("REQUEST_NODE_INFO_SINGLE", 0) == before.get("REQUEST_NODE_INFO_SINGLE", 0)


def test_repair_is_silent_by_default(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with daemon_on(cluster, node, tmp_path, config="") as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        status = wait_for_rounds(daemon, 1)
        assert status["repair"] is None
        assert advice(daemon) == []
