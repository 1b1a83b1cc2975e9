"""Bad days that no other test tells (docs/bad-days.md has them all), each to its end: what Slurm and healthd hold."""

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
from healthd_daemon import REPOSITORY, Healthd, condition, rounds, xid
from machine import Machine
from requirements import require_root
from slurm_cluster import SlurmCluster, running_job
from slurm_look import program
from waiting import until

HOUR = 3600.0
LOST = "[gpu.3]\nlost = true\n"
# Before anything else is imported: the wall clock of this process and its children, as a file says.
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
    # slurmd_timeout: slurmctld has a node register again each third of it, and takes one that comes late for a boot
    with SlurmCluster(nodes=8, gpus=0, slurmd_timeout=600) as running:
        yield running


def healthd(cluster: SlurmCluster, node: str, machine: Machine, **options: Any) -> Healthd:
    flags = ("--mode", "act", "--node-name", node, "--interval", "1", "--root", str(machine.root))
    settings: dict[str, Any] = {"env": cluster.env, "fake_nvml": str(machine.scenario)}
    return Healthd(*flags, directory=machine.root.parent, **{**settings, **options})


def test_the_node_reboots_between_the_drain_and_the_requeue(
    cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path
) -> None:
    job = running_job(cluster, node)
    scontrol = shutil.which("scontrol")
    (tmp_path / "bin").mkdir()
    # The requeue never gets through: the node goes down first.
    program(tmp_path / "bin" / "scontrol", f'case "$1" in requeue*) exec sleep 600;; esac\nexec {scontrol} "$@"')
    with healthd(cluster, node, machine, env={**cluster.env, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}) as daemon:
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        until(lambda: "running: scontrol requeue" in daemon.log.read_text(), "it wants to requeue")
        copy = tmp_path / "state" / "ledger.json"
        until(lambda: copy.exists() and "healthd: gpu_xid/79" in copy.read_text(), "the copy knows of the drain")
        daemon.kill()
        cluster.stop_slurmd(node, signal.SIGKILL)
        shutil.rmtree(tmp_path / "run")  # tmpfs
        (tmp_path / "bin" / "scontrol").unlink()
        machine.write({"/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n"})
        time.sleep(2.1)  # slurmctld compares whole seconds
        cluster.start_slurmd(node, "-b")
        daemon.start()
        # Slurm itself requeues what ran on a node that booted; the fault waited for a boot.
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        status = daemon.until(lambda s: s["health"] == "healthy", "the boot has ended the fault")
        assert [c["cleared_by"] for c in status["cleared"]] == ["reboot"]
        found = cluster.node(node)
        if "DOWN" in found.flags:  # "Node unexpectedly rebooted": for a person, as without healthd
            assert found.reason.startswith("healthd: gpu_xid/79 ")
            said = "repaired, but the node is DOWN"
            daemon.until(lambda s: s["decision"]["text"].startswith(said), "the DOWN is left to a person")
            cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        cluster.wait_state(node, "IDLE", without=("DRAIN", "DOWN"))
        rounds(daemon, 2)
        assert "DRAIN" not in cluster.node(node).flags
        assert cluster.job(job)["Restarts"] == "1"
        assert daemon.status()["conditions"] == []


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_the_clock_jumps_by_an_hour(
    cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path, jump: float
) -> None:
    job = running_job(cluster, node)
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(CLOCK.format(path=str(offset)))
    env = {**cluster.env, "PYTHONPATH": f"{tmp_path}/early:{REPOSITORY}"}
    daemon = healthd(cluster, node, machine, env=env)
    daemon.env["PYTHONPATH"] = env["PYTHONPATH"]
    with daemon:
        daemon.kernel_line(xid(79))
        drained = cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert "done" in daemon.ask(command="pause", seconds=40, why="the clock")
        machine.gpus(LOST)
        rounds(daemon, 1)
        before = daemon.status()
        offset.write_text(str(jump))
        until(lambda: "the clock was set by" in daemon.log.read_text(), "the jump is noticed")
        rounds(daemon, 2)
        status = daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is ours")
        # the fault stands, with its time as the new clock tells it; the drain was neither sent again nor lifted
        for code in ("gpu_xid/79", "gpu_access/lost"):
            old, new = condition(before, code), condition(status, code)
            assert old is not None
            assert new is not None
            assert (new["state"], new["since"]) == ("open", pytest.approx(old["since"] + jump, abs=0.5))
        assert status["decision"]["action"] == "leave"
        found = cluster.node(node)
        assert (found.reason, found.reason_time) == (drained.reason, drained.reason_time)
        # the pause lasts as long as was said, no hour more and not a second less
        assert status["pause"]["until"] == pytest.approx(before["pause"]["until"] + jump, abs=0.5)
        daemon.until(lambda s: s["pause"] is None, "the pause ends in time", 300)
        machine.gpus()
        rounds(daemon, 3)
        for code in ("gpu_xid/79", "gpu_access/lost"):
            assert "done" in daemon.ask(command="repaired", code=code)
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        # and what comes afterwards acts at once
        daemon.kernel_line(xid(79, pci="0000:1b:00"))
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


def test_the_disk_of_the_state_directory_is_full(
    cluster: SlurmCluster, node: str, machine: Machine, tmp_path: Path
) -> None:
    with full_disk(tmp_path / "full") as disk, healthd(cluster, node, machine) as daemon:
        daemon.stop()
        daemon.flags += ("--state-dir", str(disk))
        daemon.start()
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        until(lambda: "could not save copy" in daemon.log.read_text(), "it is said")
        rounds(daemon, 2)
        first = daemon.until(lambda s: len(s["problems"]) == 2, "both troubles are told")
        assert first["health"] == "unhealthy", "checks, decisions and the live ledger go on"
        problem, stream = first["problems"]
        assert "events have not been written: " in stream
        assert problem.startswith(f"{disk}: the ledger is not copied, and a reboot would lose it: ")
        assert "No space left on device" in problem
        daemon.kill()
        daemon.start()  # the live ledger is not on that disk
        rounds(daemon, 1)
        status = daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is ours")
        assert condition(status, "gpu_xid/79") is not None
        assert [path.name for path in disk.iterdir() if path.name.endswith(".new")] == []
        (disk / "filler").unlink()
        until(
            lambda: (disk / "ledger.json").exists() and "gpu_xid/79" in (disk / "ledger.json").read_text(),
            "the copy is made up for when there is room",
        )
        daemon.until(lambda s: not s["problems"], "the trouble is over")
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/79")
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


def test_run_is_full_when_the_daemon_is_killed_after_its_drain(
    cluster: SlurmCluster, node: str, machine: Machine
) -> None:
    with small_disk(machine.root.parent / "run") as disk, healthd(cluster, node, machine) as daemon:
        fill(disk)
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/79 ")
        daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "it is read back")
        assert daemon.status()["problems"] == []
        daemon.kill()
        daemon.start()  # the disk is still full
        rounds(daemon, 1)
        status = daemon.until(lambda s: s["slurm"]["owner"] == "healthd", "the drain is ours")
        assert condition(status, "gpu_xid/79") is not None
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/79")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))


def test_the_same_xid_comes_back_after_its_repair(cluster: SlurmCluster, node: str, machine: Machine) -> None:
    with healthd(cluster, node, machine) as daemon:
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN")
        first = condition(rounds(daemon, 1), "gpu_xid/79")
        assert first is not None
        assert first["clears"] == "reboot"
        said = daemon.ask(command="repaired", code="gpu_xid/79", why="reseated, ticket 12")["done"]
        assert said == "repaired: gpu_xid/79 0000:61:00.0: reseated, ticket 12; all checks run now"
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        daemon.kernel_line(xid(79))
        cluster.wait_state(node, "DRAIN")
        second = condition(rounds(daemon, 1), "gpu_xid/79")
        assert second is not None
        assert second["clears"] == "operator"
        # a boot is no longer enough
        daemon.kill()
        machine.write({"/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n"})
        daemon.start()
        third = condition(rounds(daemon, 2), "gpu_xid/79")
        assert third is not None
        assert third["state"] == "open"
        assert "DRAIN" in cluster.node(node).flags
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/79", why="GPU replaced")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))


def test_an_operator_knows_of_a_fault_and_wants_the_node_for_a_while(
    cluster: SlurmCluster, node: str, machine: Machine
) -> None:
    machine.gpus(LOST)
    with healthd(cluster, node, machine) as daemon:
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        said = daemon.ask(command="ack", code="gpu_access/lost", part=None, seconds=600, why="the job needs seven")
        assert said == {
            "done": "acknowledged for 10 min by root (uid 0): gpu_access/lost 0000:61:00.0: the job needs seven"
        }
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        job = running_job(cluster, node)
        daemon.kill()
        daemon.start()
        status = rounds(daemon, 2)
        found = condition(status, "gpu_access/lost")
        assert found is not None
        assert (found["state"], found["ack"]["who"]) == ("acknowledged", "root (uid 0)")
        assert (status["health"], daemon.verdict().split()[0]) == ("warning", "warning")
        assert "DRAIN" not in cluster.node(node).flags
        # another fault is another matter
        daemon.kernel_line(xid(119, pci="0000:43:00", text="Timeout after 6s of waiting for RPC response from GPU."))
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_xid/119 ")
        assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
        assert "done" in daemon.ask(command="repaired", code="gpu_xid/119")
        cluster.wait_state(node, "IDLE", without=("DRAIN",))
        later = running_job(cluster, node)
        daemon.ask(command="ack", code="gpu_access/lost", part=None, seconds=1, why="enough")
        cluster.wait_state(node, "DRAIN", reason="healthd: gpu_access/lost ")
        assert "the ack by root (uid 0) ended, it expired: enough" in daemon.log.read_text()
        rounds(daemon, 2)
        assert cluster.job(later)["JobState"] == "RUNNING", "it was let in beside a fault that was known"
