"""Slurm commands that hang, are slow or are missing: the daemon continues.

A pause or a new mode set meanwhile also applies to the reconciliation already running. The commands are scripts; the
daemon is real.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from frozen import HangFs
from healthd_daemon import Healthd, xid_line
from waiting import until

from healthd.common.slurm.commands import FLEET_COLUMNS, NODE_COLUMNS


def print_record(columns: tuple[tuple[str, int], ...], *values: str) -> str:
    """Return the shell command that prints one record of these columns."""
    widths = "".join(f"%-{width}s" for _, width in columns)
    return f"printf '{widths}\\n' {' '.join(values)}"


PRINT_NODE = print_record(NODE_COLUMNS, "gpu", "1", "idle", "Unknown", "Unknown", "none", "'(null)'")
PRINT_FLEET = print_record(FLEET_COLUMNS, "gpu", "idle", "Unknown", "none", "8")
SINFO_BODY = f'case " $* " in *" -n "*) {PRINT_NODE};; *) {PRINT_FLEET};; esac'


@pytest.fixture
def slow_slurm(tmp_path: Path) -> dict[str, str]:
    """Return a PATH with a sinfo that does not end while `slow` exists, and a scontrol that logs its changes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {
        "sinfo": f"echo read >>{tmp_path}/reads; while [ -e {tmp_path}/slow ]; do sleep 0.1; done; {SINFO_BODY}",
        "scontrol": f'case $1 in update | requeue*) echo "$@" >>{tmp_path}/changes;; esac',
    }.items():
        program = programs / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


def count_reads(folder: Path) -> int:
    return len((folder / "reads").read_text().split()) if (folder / "reads").exists() else 0


def wait_for_read(folder: Path, before: int) -> None:
    until(lambda: count_reads(folder) > before, "healthd reads Slurm")


def wait_for_first_read(daemon: Healthd) -> None:
    daemon.wait_until(lambda s: s["slurm"]["read_at"] > 0, "the daemon knows the node")


def is_idle(daemon: Healthd) -> bool:
    """Compare CPU times while this test computes for one second. A spinning daemon would use as much, however busy
    the machine."""
    assert daemon.process is not None
    before, cpu_end = cpu_seconds(daemon.process.pid), time.process_time() + 1.0
    while time.process_time() < cpu_end:
        pass
    return cpu_seconds(daemon.process.pid) - before < 0.5


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_slurm_on_dead_file_server_does_not_stop_daemon(tmp_path: Path) -> None:
    with HangFs(tmp_path) as server:
        path = f"{server.path}/bin:{os.environ['PATH']}"
        with Healthd("--mode", "act", "--node-name", "n1", env={"PATH": path}) as daemon:
            daemon.kernel_line(xid_line(79))
            daemon.wait_until(lambda s: s["health"] == "unhealthy", "the fault is known")
            time.sleep(0.5)
            assert daemon.status()["health"] == "unhealthy"
            assert daemon.verdict().startswith("drain ")
            assert daemon.stop() == 0, "before the server answers"
            server.release()


def test_pause_applies_to_running_reconciliation(tmp_path: Path, slow_slurm: dict[str, str]) -> None:
    with Healthd("--mode", "act", "--node-name", "n1", env=slow_slurm) as daemon:
        wait_for_first_read(daemon)
        (tmp_path / "slow").touch()
        before = count_reads(tmp_path)
        daemon.kernel_line(xid_line(79))
        wait_for_read(tmp_path, before)
        assert "done" in daemon.request(command="pause", seconds=600, why="driver upgrade")
        (tmp_path / "slow").unlink()
        daemon.wait_until(lambda s: "paused" in s["decision"]["text"], "the decision waits for the pause")
        time.sleep(1)
        assert not (tmp_path / "changes").exists()
        assert not daemon.verdict().startswith("drain")


def test_observe_mode_applies_to_running_reconciliation(tmp_path: Path, slow_slurm: dict[str, str]) -> None:
    with Healthd("--node-name", "n1", config='mode = "act"\n', env=slow_slurm) as daemon:
        wait_for_first_read(daemon)
        (tmp_path / "slow").touch()
        before = count_reads(tmp_path)
        daemon.kernel_line(xid_line(79))
        wait_for_read(tmp_path, before)
        assert daemon.process is not None
        daemon.configure('mode = "observe"\n')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: s["mode"] == "observe", "the daemon observes")
        assert is_idle(daemon), "it does not spin over a command it no longer needs"
        (tmp_path / "slow").unlink()
        daemon.configure('mode = "act"\n')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: s["mode"] == "act", "the daemon acts")
        time.sleep(2.5)
        assert not (tmp_path / "changes").exists(), "a decision from observe mode does not drain"


def test_occupied_metrics_port_disables_only_metrics() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Healthd("--listen", f"127.0.0.1:{port}", "--interval", "1") as daemon:
            assert any("no metrics page" in problem for problem in daemon.status()["problems"])
            other.close()
            daemon.wait_until(lambda s: not s["problems"], "the page is served once the port is free")


def test_fault_during_reconciliation_is_handled_right_after_it(tmp_path: Path, slow_slurm: dict[str, str]) -> None:
    # No round would wake the daemon later.
    with Healthd("--mode", "act", "--node-name", "n1", "--interval", "3600", env=slow_slurm) as daemon:
        wait_for_first_read(daemon)
        (tmp_path / "slow").touch()
        before = count_reads(tmp_path)
        daemon.kernel_line(xid_line(79))
        wait_for_read(tmp_path, before)
        daemon.kernel_line(xid_line(119, pci="0000:43:00", text="Timeout waiting for RPC from GPU!"))
        daemon.wait_until(lambda s: len(s["conditions"]) == 2, "both conditions are open")
        (tmp_path / "slow").unlink()
        wait_for_read(tmp_path, before + 1)
        changes = tmp_path / "changes"
        until(lambda: changes.exists() and "Reason=healthd: gpu_xid/" in changes.read_text(), "the daemon drains")


def test_observe_mode_does_not_retry_failing_slurm(tmp_path: Path, slow_slurm: dict[str, str]) -> None:
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    with Healthd("--node-name", "n1", config='mode = "act"\n', env=slow_slurm) as daemon:
        daemon.kernel_line(xid_line(79))
        daemon.wait_until(lambda s: s["slurm"]["problem"] != "", "Slurm fails")
        assert daemon.process is not None
        daemon.configure('mode = "observe"\n')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda s: s["mode"] == "observe", "the daemon observes")
        time.sleep(6)  # the retry would have been after 5 s
        assert is_idle(daemon)
