"""Tests with ranks of a job that report their steps to the real `healthd run`, and the GPU of the one that slows
down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from healthd_daemon import Healthd, condition, wait_for_rounds
from waiting import until

from healthd import client

CONFIG = """
interval_seconds = 1.0
root = "{root}"
[checks.failslow]
client = true
"""
# The process of each rank: healthd reads its open files and its cgroup.
RANK_PROGRAM = """
import os, sys
from healthd import client
client.SEND_SECONDS = 0.0
os.environ["RANK"] = sys.argv[1]
print(os.getpid(), flush=True)
seconds = 0.0
def clock():
    return seconds
client.time.perf_counter = clock
for line in sys.stdin:
    step, busy = map(float, line.split())
    seconds += step
    client.step(busy=busy)
    print("stepped", flush=True)
"""


class Gang:
    """Eight ranks of job 4711, each on its own GPU, in a fake /proc."""

    def __init__(self, root: Path, sock: Path) -> None:
        self.root = root
        environment = {**os.environ, "HEALTHD_SOCKET": str(sock)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK_PROGRAM, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(8)
        ]
        for rank, process in enumerate(self.ranks):
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            self.add_process(pid, rank)

    def add_process(self, pid: int, rank: int) -> None:
        proc_dir = self.root / f"proc/{pid}"
        (proc_dir / "fd").mkdir(parents=True)
        (proc_dir / "fd/7").symlink_to(f"/dev/nvidia{rank}")
        (proc_dir / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n")

    def step(self, seconds: float, slow: int | None = None) -> None:
        """Run one iteration: the rank `slow` computes 1.5 times as long, and the others wait for it."""
        length = seconds * 1.5 if slow is not None else seconds
        for rank, process in enumerate(self.ranks):
            assert process.stdin is not None
            busy = 0.8 * (length if rank == slow else seconds)
            process.stdin.write(f"{length} {busy}\n")
            process.stdin.flush()
        for process in self.ranks:
            assert process.stdout is not None
            process.stdout.readline()

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


def make_tree(folder: Path, run_dir: Path) -> Path:
    root = folder / "tree"
    for number in range(8):
        gpu = root / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {number}\n")
    run_link = root / str(run_dir).lstrip("/")  # a check reads everything below the tree
    run_link.parent.mkdir(parents=True)
    run_link.symlink_to(run_dir)
    return root


def live_process_pid(daemon: Healthd) -> int | None:
    assert daemon.process is not None
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    for pid in children:
        try:
            if b"healthd.failslow.live" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        except OSError:
            continue
    return None


@pytest.fixture
def daemon(tmp_path):
    run_dir = tmp_path / "run"
    root = make_tree(tmp_path, run_dir)
    with Healthd(directory=tmp_path, config=CONFIG.format(root=root)) as running:
        yield running


def test_gpu_of_slower_rank_warns_and_drains_nothing(daemon, tmp_path):
    sock = tmp_path / "run/failslow.sock"
    until(lambda: connects(sock), "the live process listens")
    gang = Gang(tmp_path / "tree", sock)
    try:
        for _ in range(40):
            gang.step(0.5)
        assert condition(daemon.status(), "failslow/gpu") is None

        def gpu_condition(status):
            gang.step(0.5, slow=5)
            return condition(status, "failslow/gpu")

        status = daemon.wait_until(gpu_condition, "the slow GPU is reported")
        slow_gpu = condition(status, "failslow/gpu", "0000:05:00.0")
        assert slow_gpu is not None
        assert slow_gpu["severity"] == "warning"
        assert "job 4711 is" in slow_gpu["message"]
        assert "slowed by rank 5" in slow_gpu["message"]
        job = condition(status, "failslow/job")
        assert job is not None
        assert (job["subject"], job["severity"]) == ("", "warning")
        status = wait_for_rounds(daemon, 2)
        assert [entry["code"] for entry in status["conditions"] if entry["severity"] in ("degraded", "critical")] == []
        assert daemon.verdict().startswith("warning ")

        def has_ended(status):
            gang.step(0.5)
            return condition(status, "failslow/gpu") is None and condition(status, "failslow/job") is None

        daemon.wait_until(has_ended, "the conditions end with the slowdown")
    finally:
        gang.end()


def test_paused_detection_reports_nothing_until_unpaused(daemon, tmp_path):
    sock = tmp_path / "run/failslow.sock"
    until(sock.exists, "the socket exists")
    daemon.request(command="failslow-pause", seconds=3600, why="a benchmark")
    daemon.stop()
    daemon.start()
    assert daemon.status()["detection_pause"]["why"] == "a benchmark"
    until(lambda: live_process_pid(daemon) and connects(sock), "the live process listens")
    gang = Gang(tmp_path / "tree", sock)
    try:
        for _ in range(40):
            gang.step(0.5)
        for _ in range(40):
            gang.step(0.5, slow=5)

        def is_monitored(status):
            gang.step(0.5, slow=5)
            return largest_reading(status, "failslow_jobs") == 1 and largest_reading(
                status, "failslow_lost_seconds_total"
            )

        status = daemon.wait_until(is_monitored, "the job is monitored, and its loss is counted")
        assert largest_reading(status, "failslow_paused_until_timestamp_seconds") > 0
        assert condition(status, "failslow/job") is None
        daemon.request(command="failslow-unpause")

        def job_condition(status):
            gang.step(0.5, slow=5)
            return condition(status, "failslow/job")

        daemon.wait_until(job_condition, "the slow job is reported after the pause")
    finally:
        gang.end()


def largest_reading(status, name):
    """Return the largest value of this observation of check failslow, or 0 if there is none."""
    results = [result for result in status["results"] if result["check"] == "failslow"]
    return max(
        (
            observation["value"]
            for result in results
            for observation in result["observations"]
            if observation["name"] == name
        ),
        default=0,
    )


def test_killed_live_process_is_replaced(daemon, tmp_path):
    sock = tmp_path / "run/failslow.sock"
    until(sock.exists, "the socket exists")
    first = live_process_pid(daemon)  # the process that created the socket
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: live_process_pid(daemon) not in (None, first), "another process runs")
    until(lambda: connects(sock), "the live process listens")
    daemon.wait_until(lambda s: not [t for t in s["problems"] if "fail-slow" in t], "no problem remains")


def connects(sock: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        try:
            stream.connect(str(sock))
        except OSError:
            return False
    return True


def test_reload_starts_and_ends_live_process(tmp_path):
    """It is off by default: no process, no socket."""
    with Healthd(directory=tmp_path, config="interval_seconds = 1.0\n") as running:
        assert live_process_pid(running) is None
        sock = tmp_path / "run/failslow.sock"
        assert not sock.exists()
        settings = running.config.read_text()
        running.config.write_text(f"{settings}\n[checks.failslow]\nclient = true\n")
        running.request(command="reload")
        until(lambda: live_process_pid(running), "the process runs")
        until(sock.exists, "the socket exists")
        pid = live_process_pid(running)
        running.config.write_text(f"{settings}\n[checks.failslow]\nclient = true\nslow_percent = 25.0\n")
        running.request(command="reload")
        wait_for_rounds(running, 1)
        assert live_process_pid(running) == pid, "its data about running jobs are not lost"
        running.config.write_text(settings)
        running.request(command="reload")
        until(lambda: live_process_pid(running) is None, "the process has ended")
        until(lambda: not sock.exists(), "the socket is removed")
        assert client.SOCKET == "/run/healthd/failslow.sock"


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_live_process_ends_with_killed_daemon(daemon, tmp_path):
    until((tmp_path / "run/failslow.sock").exists, "the socket exists")
    pid = live_process_pid(daemon)
    assert pid is not None
    daemon.kill()
    until(lambda: has_ended(pid), "the process has ended")
    daemon.start()
    until(lambda: live_process_pid(daemon), "another process runs")
