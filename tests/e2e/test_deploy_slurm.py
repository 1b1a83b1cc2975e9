"""Tests of the shipped lines for slurm.conf in a real slurmctld and slurmd, with the scripts that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from healthd_daemon import Healthd, xid_line
from slurm_cluster import SlurmCluster
from test_prolog_epilog import SCRIPTS, install
from waiting import until

LINES = (SCRIPTS / "healthd.conf").read_text()
SHIPPED_SETTINGS = re.findall(r"(?m)^(\w+)=(\S+)$", LINES)


@contextmanager
def cluster_with(tmp_path: Path, lines: str, version: str | None = None) -> Iterator[SlurmCluster]:
    """Run a cluster that includes these lines; lines and scripts are in `tmp_path` instead of /etc/slurm."""
    install(tmp_path, [])
    conf = tmp_path / "healthd.conf"
    conf.write_text(lines.replace("/etc/slurm/healthd-", f"{tmp_path}/"))
    with SlurmCluster(nodes=1, extra_conf=[f"Include {conf}"], version=version) as cluster:
        yield cluster


def daemon_on(cluster: SlurmCluster, tmp_path: Path, flags: Sequence[str] = ("--mode", "act")) -> Healthd:
    more_flags = ("--node-name", "n1", "--interval", "300")  # a verdict is valid for three intervals, even after a kill
    return Healthd(*flags, *more_flags, directory=tmp_path, env=cluster.env)


@pytest.mark.parametrize("version", [None, "24.11", "26.05"])
def test_shipped_prolog_keeps_job_away_from_drained_node(tmp_path: Path, version: str | None) -> None:
    with cluster_with(tmp_path, LINES, version) as cluster:
        shown = cluster.run("scontrol", "show", "config")
        effective = dict(re.findall(r"(?m)^(\w+)(?:\[0\])?\s*= (.*?)(?: sec)?$", shown))  # Prolog[0] since 24.11
        for name, value in SHIPPED_SETTINGS:
            words = value.replace("/etc/slurm/healthd-", f"{tmp_path}/").upper().split(",")
            assert set(words) <= set(effective[name].upper().split(",")), name

        output = tmp_path / "job"
        with daemon_on(cluster, tmp_path) as daemon:
            job = cluster.sbatch("echo the job runs", f"--output={output}")
            cluster.wait_job(job, "COMPLETED")
            daemon.kernel_line(xid_line(79))
            cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79")
            assert daemon.verdict().startswith("drain ")
            daemon.kill()  # the verdict still contains the decision; below, Slurm loses the drain, as in a race
        cluster.stop_slurmd("n1")
        cluster.start_slurmd("n1")
        until(lambda: "health_check failed: rc:2 output:drain: gpu_xid/79" in cluster.log("slurmd.n1"))

        cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        job = cluster.sbatch("echo the job runs", f"--output={output}.kept-away")
        cluster.wait_state("n1", "DRAIN", reason="Prolog error")
        cluster.wait_job(job, "PENDING")
        assert "accepts no jobs: gpu_xid/79" in cluster.log("slurmd.n1")


def test_slurmd_without_healthd_logs_failed_health_check_and_takes_jobs(tmp_path: Path) -> None:
    with cluster_with(tmp_path, LINES) as cluster:
        cluster.wait_job(cluster.sbatch("true"), "COMPLETED")
        until(lambda: "health_check failed: rc:3 output:no verdict" in cluster.log("slurmd.n1"))


def test_slurm_runs_prologs_of_directory_in_reverse_order(tmp_path: Path) -> None:
    """healthd's prolog is called zz-healthd (docs/prolog-epilog.md), so that a drained node rejects a job before
    other prologs run."""
    folder, order = tmp_path / "prolog.d", tmp_path / "order"
    folder.mkdir()
    for name in ("00-site", "50-site", "zz-healthd"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >>{order}\n")
        (folder / name).chmod(0o755)
    with cluster_with(tmp_path, f"Prolog={folder}/*\n") as cluster:
        cluster.wait_job(cluster.sbatch("true"), "COMPLETED")
    assert order.read_text().split() == ["zz-healthd", "50-site", "00-site"]
