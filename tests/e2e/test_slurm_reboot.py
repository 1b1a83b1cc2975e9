"""A real Slurm reboots nodes that healthd has drained: the table of docs/adr/0043.

The tests play the node: the cluster's RebootProgram only records that it ran, and `boot` starts slurmd as after a boot.
A release of Slurm that behaves differently fails here. healthd's repair relies on these facts.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import Node, SlurmCluster
from slurm_look import drain, with_every_slurm

from healthd.common.slurm import commands
from healthd.common.slurm.builtin_reasons import APPENDED
from healthd.common.slurm.output import parse_fleet

REASON = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
REPAIR = "healthd: gpu_xid/79 repair 2/3"
ISSUED = f"{REPAIR} : reboot issued"
COMPLETE = f"{ISSUED} : reboot complete"
TIMED_OUT = f"{ISSUED} : reboot timed out"
UNEXPECTED = "Node unexpectedly rebooted"
PENDING = ("REBOOT_REQUESTED", "REBOOT_ISSUED", "NOT_RESPONDING", "COMPLETING")
RESERVATION = "healthd-no-repair"
# Some facts changed between 22.05 and this release, the first one by 24.05.4: a reboot ASAP without nextstate keeps the
# drain of a node that was drained before.
NEWER = (24, 11)
SCHEDULING_SECONDS = 6.0  # sched_interval and bf_interval are 2 s

pytestmark = with_every_slurm


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with SlurmCluster(
        nodes=14, gpus=0, version=request.param, reboots=True, extra_conf=["ResumeTimeout=600"]
    ) as running:
        yield running


def request_reboot(cluster: SlurmCluster, name: str, *words: str, reason: str = REPAIR) -> None:
    """Drain the node, request a reboot and wait until the node's slurmd runs RebootProgram."""
    drain(cluster, name, REASON)
    count = cluster.reboot_count(name)
    cluster.run("scontrol", "reboot", *words, *([f"reason={reason}"] if reason else []), name)
    cluster.wait_reboot(name, count + 1)


def booted(cluster: SlurmCluster, name: str) -> Node:
    """Boot the node and return its state once it has registered."""
    cluster.boot(name)
    return cluster.wait_state(name, without=PENDING)


def reboot(cluster: SlurmCluster, name: str, *words: str, reason: str = REPAIR) -> Node:
    request_reboot(cluster, name, *words, reason=reason)
    node = cluster.node(name)
    assert (node.flags - {"PLANNED"}, node.reason) == (
        {"DOWN", "DRAIN", "REBOOT_ISSUED"},
        f"{reason or REASON} : reboot issued",
    )
    return booted(cluster, name)


def is_newer(cluster: SlurmCluster) -> bool:
    """Return True for the releases on which a drain survives more than on 22.05."""
    return cluster.release() >= NEWER


def is_waiting(cluster: SlurmCluster, job: str) -> bool:
    """Return True if the scheduler has run several times and the job still waits."""
    time.sleep(SCHEDULING_SECONDS)
    return cluster.job(job)["JobState"] == "PENDING"


def test_reboot_without_asap_and_nextstate_keeps_drain_and_reason(cluster: SlurmCluster, node: str) -> None:
    drain(cluster, node, REASON)
    job = cluster.sbatch("sleep 600", "-w", node, "-t", "10")
    result = reboot(cluster, node)
    assert (result.flags, result.reason) == ({"IDLE", "DRAIN"}, ISSUED)
    assert ISSUED.endswith(APPENDED)
    assert is_waiting(cluster, job), "no job starts before a resume"
    cluster.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
    cluster.wait_job(job, "RUNNING")
    cluster.run("scancel", job)


def test_reboot_with_nextstate_down_removes_drain(cluster: SlurmCluster, node: str) -> None:
    job = cluster.sbatch("sleep 600", "-w", node, "-t", "10", "-H")
    result = reboot(cluster, node, "ASAP", "nextstate=DOWN")
    assert (result.flags, result.reason) == ({"DOWN"}, COMPLETE)
    cluster.run("scontrol", "release", job)
    assert is_waiting(cluster, job)
    cluster.run("scancel", job)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={REASON}")
    assert cluster.node(node).flags == {"DOWN", "DRAIN"}
    cluster.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
    assert cluster.node(node).flags - {"NOT_RESPONDING"} == {"DOWN"}, "UNDRAIN does not end DOWN"
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.wait_state(node, "IDLE", without=("DOWN", "DRAIN"))


def test_reboot_with_nextstate_resume_starts_jobs_without_check(cluster: SlurmCluster, node: str) -> None:
    drain(cluster, node, REASON)
    job = cluster.sbatch("sleep 600", "-w", node, "-t", "10")
    result = reboot(cluster, node, "ASAP", "nextstate=RESUME")
    assert "DRAIN" not in result.flags
    cluster.wait_job(job, "RUNNING")
    assert cluster.node(node).reason == ""
    cluster.run("scancel", job)


@pytest.mark.parametrize("reason", [REPAIR, ""])
def test_reboot_asap_without_nextstate_keeps_drain_only_from_24_05_on(
    cluster: SlurmCluster, node: str, reason: str
) -> None:
    drain(cluster, node, REASON)
    job = cluster.sbatch("sleep 600", "-w", node, "-t", "10")
    result = reboot(cluster, node, "ASAP", reason=reason)
    if is_newer(cluster):
        assert (result.flags, result.reason) == ({"IDLE", "DRAIN"}, f"{reason or REASON} : reboot issued")
        assert is_waiting(cluster, job)
    else:
        assert "DRAIN" not in result.flags
        cluster.wait_job(job, "RUNNING")
    cluster.run("scancel", job)


def test_reboot_waits_for_last_job(cluster: SlurmCluster, node: str) -> None:
    job = cluster.sbatch("sleep 600", "-w", node)
    cluster.wait_job(job, "RUNNING")
    drain(cluster, node, REASON)
    cluster.run("scontrol", "reboot", f"reason={REPAIR}", node)
    cluster.wait_state(node, "DRAIN", "REBOOT_REQUESTED")
    time.sleep(SCHEDULING_SECONDS)
    assert cluster.reboot_count(node) == 0
    again = cluster.attempt("scontrol", "reboot", f"reason={REPAIR}", node)
    assert (again.returncode, again.stdout) == (0, ""), "a second request changes nothing"
    cluster.run("scancel", job)
    cluster.wait_reboot(node)
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}
    assert cluster.reboot_count(node) == 1


@pytest.mark.parametrize(("words", "stays_drained"), [((), False), (("ASAP", "nextstate=DOWN"), True)])
def test_cancel_reboot_removes_drain_unless_nextstate_is_down(
    cluster: SlurmCluster, node: str, words: tuple[str, ...], stays_drained: bool
) -> None:
    job = cluster.sbatch("sleep 600", "-w", node)
    cluster.wait_job(job, "RUNNING")
    drain(cluster, node, REASON)
    cluster.run("scontrol", "reboot", *words, f"reason={REPAIR}", node)
    cluster.run("scontrol", "cancel_reboot", node)
    state = cluster.node(node)
    assert "REBOOT_REQUESTED" not in state.flags
    assert ("DRAIN" in state.flags, state.reason) == ((True, REPAIR) if stays_drained else (False, ""))
    assert cluster.attempt("scontrol", "cancel_reboot", node).returncode == 1, "nothing is pending"
    cluster.run("scancel", job)


def test_issued_reboot_cannot_be_cancelled(cluster: SlurmCluster, node: str) -> None:
    request_reboot(cluster, node)
    assert cluster.attempt("scontrol", "cancel_reboot", node).returncode == 1
    assert cluster.node(node).flags >= {"DOWN", "DRAIN", "REBOOT_ISSUED"}
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}


def test_operator_changes_during_reboot_persist(cluster: SlurmCluster, node: str) -> None:
    request_reboot(cluster, node)
    drain(cluster, node, "operator: keep")
    result = booted(cluster, node)
    assert (result.flags, result.reason) == ({"IDLE", "DRAIN"}, "operator: keep")
    time.sleep(2)  # Slurm compares the times of the request and of the last boot in whole seconds
    request_reboot(cluster, node)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
    assert cluster.node(node).flags >= {"DOWN", "REBOOT_ISSUED"}
    assert booted(cluster, node).flags == {"IDLE"}
    time.sleep(2)
    request_reboot(cluster, node)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert cluster.node(node).flags.isdisjoint({"DRAIN", "REBOOT_ISSUED"}), "the node counts as idle while it boots"
    # Slurm notices the boot ("Node unexpectedly rebooted", DOWN) unless slurmd answers a ping before it registers.
    assert booted(cluster, node).flags in ({"IDLE"}, {"DOWN"})
    cluster.reset_node(node)


def test_slurmd_restart_without_boot_does_not_end_reboot(cluster: SlurmCluster, node: str) -> None:
    request_reboot(cluster, node)
    cluster.stop_slurmd(node)
    cluster.start_slurmd(node)
    time.sleep(SCHEDULING_SECONDS)
    assert cluster.node(node).flags >= {"DOWN", "DRAIN", "REBOOT_ISSUED"}
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}


def test_second_reboot_without_reason_loses_reason_on_22_05(cluster: SlurmCluster, node: str) -> None:
    assert reboot(cluster, node).reason == ISSUED
    time.sleep(2)
    cluster.run("scontrol", "reboot", node)
    cluster.wait_reboot(node, 2)
    expected = ISSUED if is_newer(cluster) else "reboot issued"  # 22.05 loses the drain's reason
    assert cluster.wait_state(node, "REBOOT_ISSUED").reason == expected
    booted(cluster, node)
    time.sleep(2)
    cluster.run("scontrol", "reboot", f"reason={REPAIR}", node)
    cluster.wait_reboot(node, 3)
    assert cluster.wait_state(node, "REBOOT_ISSUED").reason == ISSUED
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}


def test_slurmctld_restart_during_reboot_keeps_drain(cluster: SlurmCluster, node: str) -> None:
    request_reboot(cluster, node)
    cluster.kill_slurmctld(15)
    cluster.start_slurmctld()
    state = cluster.node(node)
    assert (state.flags, state.reason) == ({"DOWN", "DRAIN", "REBOOT_ISSUED"}, ISSUED)
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}
    assert cluster.reboot_count(node) == 1


def test_fleet_query_shows_reboots_of_other_nodes(cluster: SlurmCluster, node: str) -> None:
    request_reboot(cluster, node)
    output = subprocess.run(commands.fleet(), env=cluster.env | commands.ENVIRONMENT, capture_output=True, check=True)
    rows = [row for row in output.stdout.decode().splitlines() if "reboot_issued" in row]
    assert len(rows) == 1
    assert "down+drain+reboot_issued" in rows[0]
    drained = {count.name: count.drained for count in parse_fleet(output.stdout, {"gpu"}, time.time())}
    assert drained["gpu"] >= 1, "a node that reboots still counts for the fleet limit"
    assert booted(cluster, node).flags == {"IDLE", "DRAIN"}


class SlurmUserCluster(SlurmCluster):
    """A slurmctld that runs as another user than root."""

    def _write_files(self) -> None:
        super()._write_files()
        conf = self.directory / "slurm.conf"
        conf.write_text(conf.read_text().replace("SlurmUser=root", "SlurmUser=daemon"))
        for name in ("log/slurmctld.log", "slurmctld.pid"):
            (self.directory / name).touch()
        for name in ("state", "log", "log/slurmctld.log", "slurmctld.pid"):
            shutil.chown(self.directory / name, "daemon")


def test_reboot_makes_slurm_user_the_author_of_the_reason(cluster: SlurmCluster) -> None:
    with SlurmUserCluster(nodes=1, gpus=0, version=cluster.version, reboots=True) as other:
        drain(other, "n1", REPAIR)
        before = other.node("n1")
        time.sleep(2)
        request_reboot(other, "n1")
        node = other.wait_state("n1", "REBOOT_ISSUED")
        assert (before.user, node.user) == ("root", "daemon")
        assert node.reason_time > before.reason_time
        assert booted(other, "n1") == replace(node, flags=frozenset({"IDLE", "DRAIN"}))


# --- what the site's settings change


def cluster_with(cluster: SlurmCluster, *conf: str, nodes: int = 3, slurmd_timeout: int = 300) -> SlurmCluster:
    return SlurmCluster(
        nodes=nodes, gpus=0, version=cluster.version, reboots=True, slurmd_timeout=slurmd_timeout, extra_conf=conf
    )


def register_again(cluster: SlurmCluster, name: str) -> None:
    """Restart the node's slurmd, which registers. slurmctld also asks for this each third of SlurmdTimeout."""
    cluster.stop_slurmd(name)
    cluster.start_slurmd(name)
    time.sleep(SCHEDULING_SECONDS)


@pytest.mark.parametrize("return_to_service", [0, 1, 2])
def test_next_registration_starts_jobs_after_nextstate_down(cluster: SlurmCluster, return_to_service: int) -> None:
    with cluster_with(cluster, f"ReturnToService={return_to_service}", "ResumeTimeout=600") as other:
        jobs = [other.sbatch("sleep 600", "-w", name, "-t", "10", "-H") for name in ("n1", "n2")]
        request_reboot(other, "n1", "ASAP", "nextstate=DOWN")
        request_reboot(other, "n2")
        assert [booted(other, name).flags for name in ("n1", "n2")] == [{"DOWN"}, {"IDLE", "DRAIN"}]
        other.run("scontrol", "release", *jobs)
        for name in ("n1", "n2"):
            register_again(other, name)
        if return_to_service == 2:
            other.wait_job(jobs[0], "RUNNING")
        else:
            assert other.node("n1").flags == {"DOWN"}
        node = other.node("n2")
        assert (node.flags, node.reason) == ({"IDLE", "DRAIN"}, ISSUED)
        assert other.job(jobs[1])["JobState"] == "PENDING"


@pytest.mark.parametrize("return_to_service", [0, 1, 2])
def test_reboot_that_times_out_leaves_node_down(cluster: SlurmCluster, return_to_service: int) -> None:
    with cluster_with(cluster, f"ReturnToService={return_to_service}", "ResumeTimeout=5") as other:
        request_reboot(other, "n1")
        other.stop_slurmd("n1")
        keeps_drain = is_newer(other)
        node = other.wait_state("n1", "DOWN", without=("REBOOT_ISSUED",))
        assert node.flags - {"NOT_RESPONDING"} == ({"DOWN", "DRAIN"} if keeps_drain else {"DOWN"})
        assert node.reason == TIMED_OUT
        other.boot("n1")
        time.sleep(SCHEDULING_SECONDS)
        node = other.wait_state("n1", without=("NOT_RESPONDING",))
        drain_flags = {"DRAIN"} if keeps_drain else set()
        assert node.flags == {"IDLE" if return_to_service == 2 else "DOWN"} | drain_flags
        assert node.reason == ("" if return_to_service == 2 and not keeps_drain else TIMED_OUT)


@pytest.mark.parametrize("return_to_service", [0, 1, 2])
def test_quick_reboot_outside_slurm_keeps_drain(cluster: SlurmCluster, return_to_service: int) -> None:
    """n1 is drained, n2 is not."""
    with cluster_with(cluster, f"ReturnToService={return_to_service}") as other:
        drain(other, "n1", REASON)
        time.sleep(2)
        for name in ("n1", "n2"):
            other.boot(name)
        time.sleep(SCHEDULING_SECONDS)
        back = "IDLE" if return_to_service == 2 else "DOWN"
        node = other.wait_state("n1", without=("NOT_RESPONDING",))
        assert (node.flags, node.reason) == ({"IDLE" if is_newer(other) else back, "DRAIN"}, REASON)
        node = other.wait_state("n2", without=("NOT_RESPONDING",))
        assert (node.flags, node.reason) == ({back}, "" if return_to_service == 2 else UNEXPECTED)


@pytest.mark.parametrize("return_to_service", [0, 1, 2])
def test_reboot_outside_slurm_longer_than_slurmd_timeout_keeps_drain(
    cluster: SlurmCluster, return_to_service: int
) -> None:
    with cluster_with(cluster, f"ReturnToService={return_to_service}", nodes=1, slurmd_timeout=20) as other:
        drain(other, "n1", REASON)
        other.stop_slurmd("n1")
        reason = f"{REASON} : Not responding" if is_newer(other) else REASON
        assert other.wait_state("n1", "DOWN", "DRAIN").reason == reason
        other.boot("n1")
        time.sleep(SCHEDULING_SECONDS)
        node = other.wait_state("n1", without=("NOT_RESPONDING",))
        assert (node.flags, node.reason) == ({"IDLE" if return_to_service == 2 else "DOWN", "DRAIN"}, reason)


# --- what healthd reads before a step


def test_reboot_without_reboot_program_is_refused(cluster: SlurmCluster) -> None:
    with SlurmCluster(nodes=1, gpus=0, version=cluster.version) as other:
        drain(other, "n1", REASON)
        refused = other.attempt("scontrol", "reboot", f"reason={REPAIR}", "n1")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "RebootProgram isn't defined" in refused.stderr
        node = other.node("n1")
        assert (node.flags, node.reason) == ({"IDLE", "DRAIN"}, REASON)
        assert reboot_program(other) == "(null)"
        missing = other.attempt("scontrol", "reboot", "nosuch")
        assert missing.returncode == 1
    assert Path(reboot_program(cluster)) == cluster.directory / "reboot"


def reboot_program(cluster: SlurmCluster) -> str:
    (line,) = (line for line in cluster.run(*commands.config()).splitlines() if line.startswith("RebootProgram "))
    return line.partition("=")[2].strip()


def test_reservation_as_stop_is_visible_in_any_state(cluster: SlurmCluster) -> None:
    """A missing reservation and an unreachable slurmctld have the same status if the reservation is named."""
    show = ("scontrol", "-o", "show", "reservation")
    name = cluster.names[-1]
    absent = cluster.attempt(*show, RESERVATION)
    assert (absent.returncode, absent.stdout, absent.stderr) == (1, f"Reservation {RESERVATION} not found\n", "")
    absent = cluster.attempt(*show)
    assert (absent.returncode, absent.stdout, absent.stderr) == (0, "No reservations in the system\n", "")
    for start, state in (("now", "ACTIVE"), ("now+300days", "INACTIVE")):
        words = (f"ReservationName={RESERVATION}", f"StartTime={start}", "Duration=1", "Users=root", "Flags=OVERLAP")
        cluster.run("scontrol", "create", "reservation", *words, f"Nodes={name}")
        present = cluster.run(*show)
        assert present.startswith(f"ReservationName={RESERVATION} ")
        assert f" State={state} " in present
        assert cluster.run(*show, RESERVATION) == present
        if state == "INACTIVE":  # it keeps no job from its node
            job = cluster.sbatch("sleep 600", "-w", name, "-t", "10")
            cluster.wait_job(job, "RUNNING")
            cluster.run("scancel", job)
        cluster.run("scontrol", "delete", f"ReservationName={RESERVATION}")
    with SlurmCluster(nodes=1, gpus=0, version=cluster.version) as other:
        other.kill_slurmctld()
        environment = other.env | other.short_timeout_environment
        away = subprocess.run(show, env=environment, capture_output=True, text=True)
        assert (away.returncode, away.stdout) == (1, "")
        assert "slurm_load_reservations error" in away.stderr
