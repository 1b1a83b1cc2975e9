"""Tests of the fixtures that cause faults: they work and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
import slurm_versions
import stories
from frozen import FrozenFilesystem, HangFs, in_d_state, pending_signals, wait_for_d_state
from slurm_cluster import SlurmCluster, process_of, processes
from slurm_look import listed_pids
from waiting import until

HERE = Path(__file__).parent


def write_to(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", 'echo x > "$0"', str(path)])


def mounted_below(directory: Path) -> bool:
    return f" {directory}/" in Path("/proc/mounts").read_text()


def test_write_to_frozen_filesystem_is_in_d_state_until_thaw(tmp_path: Path) -> None:
    with FrozenFilesystem(tmp_path) as disk:
        with disk.frozen():
            writer = write_to(disk.path / "file")
            wait_for_d_state(writer.pid)
            assert pending_signals(writer.pid) == set()
            writer.kill()
            assert pending_signals(writer.pid) == {signal.SIGKILL}
            assert in_d_state(writer.pid)
        assert writer.wait(120) == -signal.SIGKILL
    assert not mounted_below(tmp_path)


def test_failing_test_leaves_nothing_frozen(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), FrozenFilesystem(tmp_path) as disk:
        disk.freeze()
        writer = write_to(disk.path / "file")
        wait_for_d_state(writer.pid)
        raise ZeroDivisionError
    writer.wait(120)
    assert not mounted_below(tmp_path)


@pytest.mark.parametrize("fixture", ["FrozenFilesystem", "HangFs"])
def test_killed_test_leaves_nothing_mounted(tmp_path: Path, fixture: str) -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {str(HERE)!r}); from pathlib import Path; from frozen import {fixture}\n"
        f"fs = {fixture}(Path({str(tmp_path)!r})).__enter__(); getattr(fs, 'freeze', int)()\n"
        f"print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        test.stdout.readline()
        assert mounted_below(tmp_path)
        test.kill()
    deadline = time.monotonic() + 120
    while mounted_below(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mounted_below(tmp_path)


def test_hanging_mount_blocks_each_process_that_accesses_it(tmp_path: Path) -> None:
    with HangFs(tmp_path) as mount:
        reader = subprocess.Popen(["stat", "-f", str(mount.path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        mount.wait_for_requests(reader.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.3)
        reader.kill()
        wait_for_d_state(reader.pid)
    assert reader.wait(120) != 0
    assert os.listdir(mount.path) == []


def test_unavailable_slurm_skips_tests_for_sid_and_fails_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: dict[str, str] = {}
    for name, value in {"CACHE": tmp_path, "MIRROR": "http://127.0.0.1:9/debian", "RETRY_SECONDS": 0.0}.items():
        monkeypatch.setattr(slurm_versions, name, value)
    monkeypatch.setattr(slurm_versions, "_build_errors", failed)
    with pytest.raises(pytest.skip.Exception, match=r"no Slurm 26.05 to be had from Debian sid: .*exit status"):
        slurm_versions.programs("26.05")
    assert not (tmp_path / "slurm-26.05").exists()
    failed["24.11"] = failed["26.05"]  # no second attempt
    with pytest.raises(pytest.fail.Exception, match=r"no Slurm 24.11 to be had from Debian trixie: .*exit status"):
        slurm_versions.programs("24.11")


@pytest.mark.parametrize("version", ["", *slurm_versions.DEBIAN])
def test_cluster_with_running_job_leaves_no_process(version: str) -> None:
    """A slurmstepd and its job are not children of the test, and the job lacks the cluster's environment."""
    with SlurmCluster(nodes=1, gpus=0, version=version) as cluster:
        job = cluster.sbatch("sleep 3000", "-w", "n1", "--export=NONE")
        until(lambda: len(listed_pids(cluster, job, "n1")) == 2, "the script and its sleep run")
        script = min(
            filter(None, map(process_of, listed_pids(cluster, job, "n1"))), key=lambda process: process.started
        )
        stepd = process_of(script.parent)
        assert stepd is not None
        title = Path(f"/proc/{stepd.pid}/cmdline").read_text()
        assert title.startswith(f"slurmstepd: [{job}.batch]"), title
        started = {stepd, *filter(None, map(process_of, listed_pids(cluster, job, "n1")))}
    assert {(process.pid, process.started) for process in started}.isdisjoint(
        (process.pid, process.started) for process in processes()
    )


class ClusterWithoutJobs:
    """A cluster that rejects jobs; its nodes are idle."""

    def sbatch(self, *_: str) -> str:
        raise TimeoutError("sbatch: no answer")

    def run(self, *command: str, check: bool = True) -> None:
        assert command[0] != "scancel", "there is no job"

    def wait_state(self, *_: str, without: tuple[str, ...], timeout: float) -> None:
        pass


ROW = stories.Row("gpu_access/lost", "", stories.nothing, stories.nothing)


def test_story_with_rejected_job_fails_and_returns_its_node() -> None:
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    free.put("n1")
    with pytest.raises(AssertionError, match="gpu_access/lost on n1: TimeoutError: sbatch: no answer"):
        stories.run_story(ROW, cast(SlurmCluster, ClusterWithoutJobs()), free)
    assert free.get_nowait() == "n1"


def test_story_leaving_bad_node_fails_and_node_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave_it_lost(scene: stories.Scene) -> None:
        scene.cluster.stop_slurmd(scene.node, signal.SIGKILL)
        scene.cluster.run("scontrol", "update", f"NodeName={scene.node}", "State=DOWN", "Reason=lost")

    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    free.put("n1")
    monkeypatch.setattr(stories, "check_story", leave_it_lost)
    with SlurmCluster(nodes=1, gpus=0) as cluster:
        monkeypatch.setattr(stories, "IDLE_SECONDS", 1.0)
        with pytest.raises(TimeoutError, match="n1 not IDLE"):
            stories.run_story(ROW, cluster, free)
        assert free.qsize() == 1
        monkeypatch.setattr(stories, "check_story", stories.nothing)
        monkeypatch.setattr(stories, "IDLE_SECONDS", 120.0)
        stories.run_story(ROW, cluster, free)


def test_story_without_free_node_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "FREE_NODE_SECONDS", 0.01)
    with pytest.raises(AssertionError, match="gpu_access/lost: no node was free in"):
        stories.run_story(ROW, cast(SlurmCluster, ClusterWithoutJobs()), queue.SimpleQueue())
