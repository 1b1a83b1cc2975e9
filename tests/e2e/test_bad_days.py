"""Bad days that have no other test (docs/bad-days.md lists all), each to its end: the final state of Slurm and
healthd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, wait_for_rounds, xid_line
from machine import Machine
from requirements import require_root
from slurm_cluster import SlurmCluster, start_job
from slurm_look import write_script
from waiting import until

HOUR = 3600.0
LOST_GPU = "[gpu.3]\nlost = true\n"
# Imported before anything else: shifts the wall clock of this process and its children by the offset in a file.
CLOCK = """\
import time
right = time.time
def now():
    try:
        with open({path!r}) as file:
            return right() + float(file.read() or 0)
    except OSError:
        return right()
time.time = now
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    # slurmctld makes a node register each third of slurmd_timeout, and takes a late answer for a reboot.
    with SlurmCluster(nodes=8, gpus=0, slurmd_timeout=600) as running:
        yield running


def daemon_on(cluster: SlurmCluster, node: str, machine: Machine, **options: Any) -> Healthd:
    flags = ("--mode", "act", "--node-name", node, "--interval", "1", "--root", str(machine.root))
    default_options: dict[str, Any] = {"env": cluster.env, "fake_nvml": str(machine.scenario)}
    return Healthd(*flags, directory=machine.root.parent, **{**default_options, **options})


def test_reboot_between_drain_and_requeue(cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path) -> None:
    job = start_job(cluster, node)
    scontrol = shutil.which("scontrol")
    (tmp_path / "bin").mkdir()
    # The requeue never succeeds: the node goes down first.
    write_script(tmp_path / "bin" / "scontrol", f'case "$1" in requeue*) exec sleep 600;; esac\nexec {scontrol} "$@"')
    with daemon_on(
        cluster, node, machine, env={**cluster.env, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    ) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        until(lambda: "running: scontrol requeue" in daemon.log.read_text(), "the requeue has started")
        copy = tmp_path / "state" / "ledger.json"
        until(lambda: copy.exists() and "healthd: gpu_xid/79" in copy.read_text(), "the copy contains the drain")
        daemon.kill()
        cluster.stop_slurmd(node, signal.SIGKILL)
        shutil.rmtree(tmp_path / "run")  # a tmpfs is empty after a reboot
        (tmp_path / "bin" / "scontrol").unlink()
        machine.write({"/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n"})
        time.sleep(2.1)  # slurmctld compares whole seconds
        cluster.start_slurmd(node, "-b")
        daemon.start()
        # Slurm itself requeues jobs of a node that rebooted; the fault ends with the boot.
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        status = daemon.wait_until(lambda s: s["health"] == "healthy", "the boot has cleared the fault")
        assert [condition_cleared["cleared_by"] for condition_cleared in status["cleared"]] == ["reboot"]
        node_state = cluster.node(node)
        if "DOWN" in node_state.flags:  # "Node unexpectedly rebooted": left to an operator, as without healthd
            assert node_state.reason.startswith("healthd: gpu_xid/79 ")
            decision_text = "repaired, but the node is DOWN"
            daemon.wait_until(
                lambda s: s["decision"]["text"].startswith(decision_text), "the DOWN state is left to an operator"
            )
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        cluster.wait_state(node, "IDLE", without=("DRAIN", "DOWN"))
        wait_for_rounds(daemon, 2)
        assert "DRAIN" not in cluster.node(node).flags
        assert cluster.job(job)["Restarts"] == "1"
        assert daemon.status()["conditions"] == []


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_clock_jump_of_hour(cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path, jump: float) -> None:
    job = start_job(cluster, node)
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(CLOCK.format(path=str(offset)))
    env = {**cluster.env, "PYTHONPATH": f"{tmp_path}/early:{REPOSITORY}"}
    daemon = daemon_on(cluster, node, machine, env=env)
    daemon.env["PYTHONPATH"] = env["PYTHONPATH"]
    with daemon:
        daemon.kernel_line(xid_line(79))
        drained = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert "done" in daemon.request(command="pause", seconds=40, why="the clock")
        machine.gpus(LOST_GPU)
        wait_for_rounds(daemon, 1)
        before = daemon.status()
        offset.write_text(str(jump))
        until(lambda: "the clock was set by" in daemon.log.read_text(), "the jump is detected")
        wait_for_rounds(daemon, 2)
        status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is healthd's own")
        # The fault stays open, with its time on the new clock; the drain was neither repeated nor lifted.
        for code in ("gpu_xid/79", "gpu_access/lost"):
            old, new = condition(before, code), condition(status, code)
            assert old is not None
            assert new is not None
            assert (new["state"], new["since"]) == ("open", pytest.approx(old["since"] + jump, abs=0.5))
        assert status["decision"]["action"] == "leave"
        node_state = cluster.node(node)
        assert (node_state.reason, node_state.reason_time) == (drained.reason, drained.reason_time)
        # The pause keeps its length.
        assert status["pause"]["until"] == pytest.approx(before["pause"]["until"] + jump, abs=0.5)
        daemon.wait_until(lambda s: s["pause"] is None, "the pause ends in time", 300)
        machine.gpus()
        wait_for_rounds(daemon, 3)
        for code in ("gpu_xid/79", "gpu_access/lost"):
            assert "done" in daemon.request(command="repaired", code=code)
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        # Later faults act at once.
        daemon.kernel_line(xid_line(79, pci="0000:1b:00"))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 0000:1b:00.0: ")
        assert "operator resumed" not in daemon.log.read_text()
    assert cluster.job(job)["Restarts"] == "1"


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[Path]:
    require_root()
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0755", "tmpfs", path], check=True)
    try:
        (path / "filler").write_bytes(b"x" * (1 << 20))
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_full_disk_of_state_directory(cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path) -> None:
    with full_disk(tmp_path / "full") as disk, daemon_on(cluster, node, machine) as daemon:
        daemon.stop()
        daemon.flags += ("--state-dir", str(disk))
        daemon.start()
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        until(lambda: "could not save copy" in daemon.log.read_text(), "the error is logged")
        wait_for_rounds(daemon, 2)
        first = daemon.wait_until(lambda s: len(s["problems"]) == 2, "both problems are reported")
        assert first["health"] == "unhealthy", "checks, decisions and the live ledger continue"
        problem, stream = first["problems"]
        assert "events have not been written: " in stream
        assert problem.startswith(f"{disk}: the ledger is not copied, and a reboot would lose it: ")
        assert "No space left on device" in problem
        daemon.kill()
        daemon.start()  # the live ledger is on another disk
        wait_for_rounds(daemon, 1)
        status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is healthd's own")
        assert condition(status, "gpu_xid/79") is not None
        assert [path.name for path in disk.iterdir() if path.name.endswith(".new")] == []
        (disk / "filler").unlink()
        until(
            lambda: (disk / "ledger.json").exists() and "gpu_xid/79" in (disk / "ledger.json").read_text(),
            "the copy is saved once there is room",
        )
        daemon.wait_until(lambda s: not s["problems"], "the problem has ended")
        assert "done" in daemon.request(command="repaired", code="gpu_xid/79")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    require_root()
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_full_runtime_directory_when_daemon_is_killed_after_drain(
    cluster: SlurmCluster, node: str, machine: Machine
) -> None:
    with small_disk(machine.root.parent / "run") as disk, daemon_on(cluster, node, machine) as daemon:
        fill(disk)
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is read back")
        assert daemon.status()["problems"] == []
        daemon.kill()
        daemon.start()  # the disk is still full
        wait_for_rounds(daemon, 1)
        status = daemon.wait_until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is healthd's own")
        assert condition(status, "gpu_xid/79") is not None
        assert "done" in daemon.request(command="repaired", code="gpu_xid/79")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))


def test_same_xid_returns_after_repair(cluster: SlurmCluster, node: str, machine: Machine) -> None:
    with daemon_on(cluster, node, machine) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN")
        first = condition(wait_for_rounds(daemon, 1), "gpu_xid/79")
        assert first is not None
        assert first["clears"] == "reboot"
        message = daemon.request(command="repaired", code="gpu_xid/79", why="reseated, ticket 12")["done"]
        assert message == "repaired: gpu_xid/79 0000:61:00.0: reseated, ticket 12; all checks run now"
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        daemon.kernel_line(xid_line(79))
        cluster.wait_state(node, "DRAIN")
        second = condition(wait_for_rounds(daemon, 1), "gpu_xid/79")
        assert second is not None
        assert second["clears"] == "operator"
        # a reboot is no longer enough
        daemon.kill()
        machine.write({"/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n"})
        daemon.start()
        third = condition(wait_for_rounds(daemon, 2), "gpu_xid/79")
        assert third is not None
        assert third["state"] == "open"
        assert "DRAIN" in cluster.node(node).flags
        assert "done" in daemon.request(command="repaired", code="gpu_xid/79", why="GPU replaced")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))


def test_operator_acknowledges_fault_for_limited_time(cluster: SlurmCluster, node: str, machine: Machine) -> None:
    machine.gpus(LOST_GPU)
    with daemon_on(cluster, node, machine) as daemon:
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        answer = daemon.request(
            command="ack", code="gpu_access/lost", part=None, seconds=600, why="the job needs seven"
        )
        assert answer == {
            "done": "acknowledged for 10 min by root (uid 0): gpu_access/lost 0000:61:00.0: the job needs seven"
        }
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        job = start_job(cluster, node)
        daemon.kill()
        daemon.start()
        status = wait_for_rounds(daemon, 2)
        acknowledged = condition(status, "gpu_access/lost")
        assert acknowledged is not None
        assert (acknowledged["state"], acknowledged["ack"]["who"]) == ("acknowledged", "root (uid 0)")
        assert (status["health"], daemon.verdict().split()[0]) == ("warning", "warning")
        assert "DRAIN" not in cluster.node(node).flags
        # another fault still acts
        daemon.kernel_line(
            xid_line(119, pci="0000:43:00", text="Timeout after 6s of waiting for RPC response from GPU.")
        )
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/119 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert "done" in daemon.request(command="repaired", code="gpu_xid/119")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        later = start_job(cluster, node)
        daemon.request(command="ack", code="gpu_access/lost", part=None, seconds=1, why="enough")
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        assert "the ack by root (uid 0) ended, it expired: enough" in daemon.log.read_text()
        wait_for_rounds(daemon, 2)
        assert cluster.job(later)["JobState"] == "RUNNING", "it started while the fault was acknowledged"
