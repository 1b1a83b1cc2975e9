"""Evidence with a real Slurm: logs at once while a job runs, the rest on the idle node; kills, an operator, a full
disk. The bug report is a fake program that hangs until the test lets it end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, xid_line
from slurm_cluster import SlurmCluster, start_job
from waiting import until

# Records its pid and its parent's, and hangs until the file `go` exists.
BUG_REPORT = """#!/bin/bash
echo "$$ $PPID" >>{folder}/runs
echo "Start of NVIDIA bug report log file" | gzip >"$3.gz"
until [ -e {folder}/go ]; do sleep 0.1; done
echo "End of NVIDIA bug report log file" | gzip >>"$3.gz"
"""
SECONDS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=6, gpus=0) as running:
        yield running


class Site:
    """A node with the fake bug report."""

    def __init__(self, cluster: SlurmCluster, node: str, folder: Path) -> None:
        self.cluster, self.node, self.folder = cluster, node, folder
        programs = folder / "programs"
        programs.mkdir()
        (programs / "nvidia-bug-report.sh").write_text(BUG_REPORT.format(folder=folder))
        (programs / "nvidia-bug-report.sh").chmod(0o755)
        (folder / "daemon").mkdir()
        flags = ("--mode", "drain", "--node-name", node, "--interval", "1")
        config = "[evidence]\ntimeout_seconds = 600.0\n"
        self.daemon = Healthd(*flags, directory=folder / "daemon", env=cluster.env, config=config, programs=programs)

    def runs(self) -> list[tuple[int, int]]:
        """Return (pid, parent) of each run of the bug report."""
        path = self.folder / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(parent)) for pid, parent in map(str.split, lines)]

    def let_bug_report_end(self) -> None:
        (self.folder / "go").touch()

    def wait_for_stage(self, *stages: str) -> dict[str, Any]:
        status = self.daemon.wait_until(
            lambda s: s["evidence"] is not None and s["evidence"]["stage"] in stages, f"evidence: {stages}", SECONDS
        )
        evidence: dict[str, Any] = status["evidence"]
        return evidence

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "healthd", "evidence", *words, "--state-dir", str(self.folder / "daemon/state")]
        return subprocess.run(
            argv, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=SECONDS
        )

    def events(self) -> list[tuple[str, str]]:
        """Return (stage, part) of the events in the stream."""
        path = self.folder / "daemon/state/events.jsonl"
        events = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [(event["stage"], event["part"]) for event in events if event["event"] == "evidence"]


@pytest.fixture
def site(cluster: SlurmCluster, node: str, directory: Path) -> Site:
    return Site(cluster, node, directory)


def members(path: str) -> dict[str, int]:
    with tarfile.open(path) as tar:
        return {member.name.partition("/")[2]: member.size for member in tar}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_logs_are_saved_while_job_runs_and_the_rest_on_idle_node(site: Site) -> None:
    job = start_job(site.cluster, site.node)
    site.let_bug_report_end()
    with site.daemon as daemon:
        assert daemon.status()["evidence"] is None
        daemon.kernel_line(xid_line(79))
        waiting = site.wait_for_stage("waiting")
        assert {"first/kernel.log", "first/journal.log", "first/record.rec"} <= members(waiting["path"]).keys()
        assert site.cluster.job(job)["JobState"] == "RUNNING"
        assert site.runs() == []
        site.cluster.run("scancel", job)
        done = site.wait_for_stage("done")
        assert (done["error"], done["problems"], done["stuck_pids"]) == ("", [], [])
        assert {"first/record.rec", "full/nvidia-bug-report.log.gz", "full/hardware.json"} <= members(
            done["path"]
        ).keys()
        assert len(site.runs()) == 1
        assert os.stat(done["path"]).st_mode & 0o777 == 0o600
        (row,) = json.loads(site.command("list", "--json").stdout)["evidence"]
        assert (row["id"], row["parts"], row["error"]) == (done["id"], ["first", "full"], "")
        shown = json.loads(site.command("show", "--json").stdout)
        assert shown["node"] == site.node
        assert shown["causes"][0]["text"].startswith("gpu_xid/79")
        assert shown["causes"][0]["event"]
        expected = [("begun", "first"), ("saved", "first"), ("begun", "full"), ("saved", "full")]
        until(lambda: site.events() == expected, "the events are written")


def test_operator_who_resumes_stops_bug_report(site: Site) -> None:
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(79))
        until(site.runs, "the bug report runs", SECONDS)
        ((pid, _),) = site.runs()
        # A drain that disappears within seconds may be slurmctld's loss (docs/slurm.md); healthd then sets it again.
        time.sleep(10)
        site.cluster.run("scontrol", "update", f"nodename={site.node}", "state=resume")
        done = site.wait_for_stage("done")
        until(lambda: not is_running(pid), "the bug report has ended", SECONDS)
        assert "first/kernel.log" in members(done["path"])
        daemon.wait_until(
            lambda s: s["evidence"]["path"] and "full/hardware.json" in members(s["evidence"]["path"]),
            "what was collected until then is saved",
            SECONDS,
        )
        assert site.cluster.node(site.node).flags.isdisjoint({"DRAIN"})


def test_killed_daemon_and_collector_lose_nothing(site: Site) -> None:
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(79))
        until(site.runs, "the bug report runs", SECONDS)
        (first_pid, collector) = site.runs()[0]
        os.kill(collector, 9)
        until(lambda: len(site.runs()) == 2, "the daemon starts another collector", SECONDS)
        assert not is_running(first_pid), "the next collector ended it"
        daemon.kill()
        daemon.start()
        site.let_bug_report_end()
        done = site.wait_for_stage("done")
        assert done["error"] == ""
        assert "full/nvidia-bug-report.log.gz" in members(done["path"])
        assert [pid for pid, _ in site.runs() if is_running(pid)] == []


def test_full_disk_is_a_problem_and_the_node_drains_anyway(site: Site) -> None:
    state = site.folder / "daemon/state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "healthd-test", str(state)], check=True)
    try:
        with site.daemon as daemon:
            daemon.kernel_line(xid_line(79))
            status = daemon.wait_until(
                lambda s: s["evidence"] is not None and s["evidence"]["error"], "the evidence failed", SECONDS
            )
            assert [problem for problem in status["problems"] if problem.startswith("evidence: ")]
            until(lambda: "DRAIN" in site.cluster.node(site.node).flags, "drained", SECONDS)
            done = site.wait_for_stage("done")
            assert done["path"] == ""
            assert os.listdir(state / "evidence") == []
            until(lambda: ("failed", "first") in site.events(), "the event is written", SECONDS)
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)
