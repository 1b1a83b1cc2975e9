"""A real daemon short of threads, processes, file descriptors or space in its runtime directory.

It keeps running and reports what it could not do.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import EVERY_SECOND, Healthd, condition, wait_for_rounds, xid_line
from of_this_run import name_with_run
from requirements import require_root
from waiting import until

from healthd.host.shortage import ACCEPT_PAUSE_SECONDS

LISTENING = '[metrics]\nlisten = "127.0.0.1:0"\n'


@pytest.fixture
def pids_cgroup() -> Iterator[Path]:
    """Yield a cgroup (version 1 or 2) with a limit for processes and threads."""
    require_root()
    v1_root = Path("/sys/fs/cgroup/pids")
    folder = (v1_root if v1_root.is_dir() else Path("/sys/fs/cgroup")) / name_with_run("pids")
    folder.mkdir()
    try:
        if not (folder / "pids.max").exists():
            (folder.parent / "cgroup.subtree_control").write_text("+pids")
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup is empty")
        folder.rmdir()


def test_daemon_survives_pids_limit_and_recovers(pids_cgroup: Path) -> None:
    """For example when a fork bomb reaches pids.max or the machine's threads-max."""
    daemon = Healthd(config=EVERY_SECOND + LISTENING, directory=Path(tempfile.mkdtemp(prefix="healthd.")))
    with daemon:
        assert daemon.process is not None
        move_to_cgroup(daemon.process.pid, pids_cgroup)
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.worker_pid(), 9)  # the daemon must start the next one
        (pids_cgroup / "pids.max").write_text((pids_cgroup / "pids.current").read_text())
        status = daemon.wait_until(lambda s: s["shortages"].get("processes", 0) >= 2, "no process can be started")
        assert status["problems"]
        daemon.kernel_line(xid_line(79))
        daemon.wait_until(lambda s: bool(condition(s, "gpu_xid/79")), "the kernel log is still read")
        (pids_cgroup / "pids.max").write_text("max")
        last_status = wait_for_rounds(daemon, 2)
        assert not any("could not be started" in str(result) for result in last_status["results"])


def test_daemon_starts_under_pids_limit(pids_cgroup: Path) -> None:
    """The limit is already reached when systemd restarts the daemon."""
    daemon = Healthd(config=EVERY_SECOND + LISTENING, directory=Path(tempfile.mkdtemp(prefix="healthd.")), wait=False)
    limit_script = f'echo $$ > {pids_cgroup}/cgroup.procs; echo 1 > {pids_cgroup}/pids.max; exec "$@"'
    argv = daemon.argv
    daemon.argv = lambda: ["sh", "-c", limit_script, "sh", *argv()]  # type: ignore[method-assign]
    with daemon:
        daemon.wait_until(lambda s: s["shortages"].get("threads", 0) > 0, "the daemon runs without its metrics page")
        (pids_cgroup / "pids.max").write_text("max")
        wait_for_rounds(daemon, 2)


def move_to_cgroup(pid: int, cgroup: Path) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        (cgroup / "tasks" if (cgroup / "tasks").exists() else cgroup / "cgroup.threads").write_text(task)


def lowest_free_descriptor(pid: int) -> int:
    """Return the lowest unused descriptor of a process that opens and closes nothing at present."""
    seen: list[set[int]] = [set()]

    def is_stable() -> bool:
        seen.append(set(map(int, os.listdir(f"/proc/{pid}/fd"))))
        return seen[-1] == seen[-2]

    until(is_stable, "the process opens and closes no descriptor")
    return next(number for number in range(len(seen[-1]) + 1) if number not in seen[-1])


def test_daemon_without_descriptors_sheds_connections_and_rests() -> None:
    with Healthd(config="interval_seconds = 3600.0\n", directory=Path(tempfile.mkdtemp(prefix="healthd."))) as daemon:
        assert daemon.process is not None
        pid = daemon.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        path = str(daemon.run_dir / "healthd.sock")
        started_at = time.monotonic()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free_descriptor(pid), hard))
        for _ in range(3):  # each group connects after the rejection of the previous one
            with contextlib.ExitStack() as sockets:
                waiting = [sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(20)]
                for client in waiting:
                    client.settimeout(120)
                    client.connect(path)
                for client in waiting:
                    assert b'"again": true' in client.recv(4096)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        status = daemon.wait_until(lambda s: s["shortages"].get("file_descriptors", 0) > 0, "the shortage is reported")
        assert any("file descriptors" in problem for problem in status["problems"])
        # Each failed accept(2) counts as a shortage, and the listener pauses after it. A loop without pauses counts
        # thousands per second.
        longest_pauses = (time.monotonic() - started_at) / ACCEPT_PAUSE_SECONDS
        assert status["shortages"]["file_descriptors"] <= longest_pauses + 10


def test_verdict_is_written_without_free_inode_in_runtime_directory() -> None:
    require_root()
    directory = Path(tempfile.mkdtemp(prefix="healthd."))
    run_dir = directory / "run"
    run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=60,mode=755", str(directory), str(run_dir)], check=True)
    try:
        with Healthd("--mode", "act", config=EVERY_SECOND, directory=directory) as daemon:
            assert daemon.verdict().split()[0] in ("ok", "warning", "unknown")
            with contextlib.suppress(OSError):
                for number in range(100):
                    (run_dir / f"filler{number}").touch()
            daemon.kernel_line(xid_line(79))
            # No Slurm here: no fleet count can allow a drain.
            until(lambda: (line := daemon.verdict()).startswith("warning ") and "gpu_xid/79" in line)
            completed = subprocess.run(
                [daemon.python, "-m", "healthd", "hook", "healthcheck", "--runtime-dir", str(run_dir)],
                env=daemon.env,
                check=False,
                capture_output=True,
                text=True,
            )
            assert (completed.returncode, "gpu_xid/79" in completed.stdout) == (0, True)
    finally:
        subprocess.run(["umount", str(run_dir)], check=True)
