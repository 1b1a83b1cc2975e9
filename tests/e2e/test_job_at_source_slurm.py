"""Tests of the job that caused a kernel line, with a real slurmd: with cgroups, and without (scontrol listpids).

GPU 3 of the fake machine is 0000:61:00.0 and /dev/nvidia3; a job uses it by opening a file with such a path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, xid_line
from of_this_run import name_with_run
from requirements import require
from slurm_cluster import SlurmCluster
from waiting import until

PCI = "0000:61:00.0"
FREEZER = Path("/sys/fs/cgroup/freezer")


class CgroupCluster(SlurmCluster):
    """A cluster whose jobs have cgroups (v1 with only the freezer), those of node N below freezer/slurm_N.

    Therefore the node names contain the name of the run.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes=nodes, extra_conf=["ProctrackType=proctrack/cgroup"])
        self.names = [name_with_run(name) for name in self.names]

    def _write_files(self) -> None:
        super()._write_files()
        if self.release() >= (23, 11):
            require("this test needs a Slurm that sets up cgroup/v1 by itself (CgroupAutomount)")
        (self.directory / "cgroup.conf").write_text("CgroupAutomount=yes\nCgroupPlugin=cgroup/v1\n")


@pytest.fixture(scope="module", params=["no_cgroups", "cgroups"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    if request.param == "no_cgroups":
        with SlurmCluster(nodes=4) as running:
            yield running
        return
    if not os.access(FREEZER, os.W_OK):
        require("this test needs cgroup/v1 with a freezer")
    with CgroupCluster(nodes=4) as running:
        yield running
    for directory in sorted(FREEZER.glob(f"slurm_{name_with_run('')}*/**/"), reverse=True):
        directory.rmdir()


@pytest.fixture
def node(cluster: SlurmCluster, unused_nodes: Iterator[str]) -> Iterator[str]:
    """Yield an unused node. All these nodes are one machine, so a leftover job would have the next test's GPU open."""
    yield next(unused_nodes)
    cluster.run("scancel", "--signal=KILL", "--full", "-u", "root")
    until(lambda: not cluster.run("squeue", "-h", "-t", "RUNNING,COMPLETING"), "no job remains")


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    device = tmp_path / "dev/nvidia3"
    device.parent.mkdir()
    device.touch()
    return device


def daemon_on(cluster: SlurmCluster, node: str, tmp_path: Path, mode: str = "act") -> Healthd:
    flags = ("--mode", mode, "--node-name", node, "--interval", "60")
    return Healthd(*flags, directory=tmp_path, env=cluster.env)


def job_with_gpu(cluster: SlurmCluster, node: str, gpu: Path) -> str:
    """Start a job on the node that has the GPU open."""
    ready = gpu.parent / f"ready.{time.monotonic_ns()}"
    job = cluster.sbatch(f"exec 9< {gpu}; echo > {ready}; sleep 3000 & wait", "-w", node, "-n1", "--no-requeue")
    until(ready.exists, "the job has started")
    return job


def wait_for_job(daemon: Healthd, code: str) -> dict[str, Any]:
    status = daemon.wait_until(lambda s: bool((condition(s, code, PCI) or {}).get("job")), f"{code} has its job")
    return condition(status, code, PCI) or {}


def test_process_in_kernel_line_names_job(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    with daemon_on(cluster, node, tmp_path) as daemon:
        line = xid_line(13, text="Graphics Exception: ESR 0x1").replace("'<unknown>'", "$$")
        script = tmp_path / "job.sh"
        script.write_text(f'#!/bin/bash\necho "{line}" >> {daemon.kernel_log}\nsleep 3000\n')
        job = cluster.sbatch(f"exec bash {script}", "-w", node)
        assert wait_for_job(daemon, "gpu_xid/13")["job"] == job
        result = subprocess.run(
            [sys.executable, "-m", "healthd", "status", "--runtime-dir", str(daemon.run_dir)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert f"job {job}" in result.stdout


def test_lost_gpu_names_only_jobs_with_open_device(cluster: SlurmCluster, node: str, tmp_path: Path, gpu: Path) -> None:
    other = tmp_path / "dev/nvidia4"
    other.touch()
    with daemon_on(cluster, node, tmp_path) as daemon:
        job_with_gpu(cluster, node, other)
        jobs = [job_with_gpu(cluster, node, gpu) for _ in range(2)]
        with open(gpu) as own_file:  # a process without a job has it open, too
            daemon.kernel_line(xid_line(79))
            lost_gpu = wait_for_job(daemon, "gpu_xid/79")
            assert not own_file.closed
        assert lost_gpu["job"] == ",".join(jobs)
        assert (lost_gpu["state"], lost_gpu["count"]) == ("open", 1), "a job found later is not a second fault"
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79")
    ledger = json.loads((daemon.run_dir / "ledger.json").read_text())
    (stored,) = (entry for entry in ledger["conditions"] if entry["code"] == "gpu_xid/79")
    assert stored["job"] == ",".join(jobs)


def test_gpu_names_job_of_ended_process(cluster: SlurmCluster, node: str, tmp_path: Path, gpu: Path) -> None:
    with daemon_on(cluster, node, tmp_path) as daemon:
        job = job_with_gpu(cluster, node, gpu)
        ended_process = subprocess.Popen(["true"])
        ended_process.wait()
        daemon.kernel_line(xid_line(31, text="Ch 00000008").replace("'<unknown>'", str(ended_process.pid)))
        assert wait_for_job(daemon, "gpu_xid/31")["job"] == job


def test_observe_mode_reads_cgroups_only_and_names_no_job_for_other_process(
    cluster: SlurmCluster, node: str, tmp_path: Path, gpu: Path
) -> None:
    uses_cgroups = isinstance(cluster, CgroupCluster)
    with daemon_on(cluster, node, tmp_path, mode="observe") as daemon:
        job = job_with_gpu(cluster, node, gpu)
        daemon.kernel_line(xid_line(13, text="x").replace("'<unknown>'", str(os.getpid())), xid_line(79))
        daemon.wait_until(lambda s: condition(s, "gpu_xid/79") is not None, "the Xid is a condition")
        if uses_cgroups:
            daemon.wait_until(lambda s: (condition(s, "gpu_xid/79") or {})["job"] == job, "the cgroup names the job")
        else:
            time.sleep(0.5)
        status = daemon.status()
        jobs = {entry["code"]: entry["job"] for entry in status["conditions"]}
        assert jobs["gpu_xid/13"] == ""
        assert jobs["gpu_xid/79"] == (job if uses_cgroups else "")
