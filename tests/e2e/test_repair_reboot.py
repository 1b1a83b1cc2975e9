"""healthd reboots a drained node of a real Slurm in mode "act", from the fault to the resume.

A boot of a test's node: the daemon and slurmd are killed, /run is emptied, and the kernel's boot id changes. The
cluster's RebootProgram only records that Slurm ran it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import pytest
from healthd_daemon import wait_for_rounds
from repair_site import CLAIM, PENDING, RepairedNode
from repair_site import REBOOT_CONFIG as CONFIG
from slurm_cluster import SlurmCluster, start_job
from slurm_look import drain, resume, with_slurm, write_script
from waiting import until

XID_119 = "healthd: gpu_xid/119 "
FAILED = "(repair failed: a person must act)"

pytestmark = [pytest.mark.one_python, with_slurm(None, "24.11")]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    conf = ["ResumeTimeout=600"]
    with SlurmCluster(nodes=24, gpus=0, version=request.param, reboots=True, extra_conf=conf) as running:
        yield running


@contextlib.contextmanager
def repaired_node(cluster: SlurmCluster, name: str, directory: Path, config: str = CONFIG) -> Iterator[RepairedNode]:
    found = RepairedNode(cluster, name, directory, config)
    try:
        found.start()
        yield found
    finally:
        print(found.daemon.log.read_text()[-6000:])
        print(found.events("repair"))
        if found.daemon.process is not None and found.daemon.process.poll() is None:
            found.daemon.kill()
        cluster.run("scancel", "--state=PENDING", check=False)
        found.unreserve()
        cluster.reset_node(name)


@pytest.fixture
def repaired(cluster: SlurmCluster, node: str, tmp_path: Path) -> Iterator[RepairedNode]:
    with repaired_node(cluster, node, tmp_path) as found:
        yield found


# --- the whole repair


def test_reboot_repairs_node_and_no_job_starts_before_its_checks(repaired: RepairedNode) -> None:
    cluster, node = repaired.cluster, repaired.name
    repaired.fail()
    repaired.wait_reboot()
    state = repaired.state
    assert state.flags >= {"DOWN", "DRAIN", "REBOOT_ISSUED"}
    assert state.reason.startswith(XID_119)
    assert CLAIM in state.reason
    assert repaired.refuses_jobs()
    job = cluster.sbatch("sleep 600", "-w", node, "-t", "10")
    repaired.go_down()
    repaired.daemon.start()
    assert repaired.refuses_jobs()
    cluster.start_slurmd(node, "-b")
    started = cluster.wait_job(job, "RUNNING")["StartTime"]
    resumed = [event for event in repaired.events("resume") if event["stage"] == "sent"]
    sent = datetime.fromisoformat(resumed[-1]["time"].replace("Z", "+00:00")).timestamp()
    assert datetime.fromisoformat(started).timestamp() >= int(sent)
    repaired.wait_stage("succeeded")
    assert repaired.stages() == ["claimed", "taken", "succeeded"]
    assert (repaired.reboots, repaired.state.reason) == (1, "")
    (entry,) = repaired.journal()["entries"]
    assert (entry["step"], entry["outcome"]) == ("reboot", "taking")
    assert not repaired.refuses_jobs()


def test_daemon_killed_during_boot_requests_no_second_reboot(repaired: RepairedNode) -> None:
    repaired.fail()
    repaired.wait_reboot()
    for _ in range(2):
        repaired.daemon.kill()
        repaired.daemon.start()
        wait_for_rounds(repaired.daemon, 2)
    repaired.boot()
    repaired.wait_in_service()
    repaired.wait_stage("succeeded")
    assert repaired.reboots == 1


def test_fault_that_returns_during_boot_needs_a_person(repaired: RepairedNode) -> None:
    repaired.fail()
    repaired.wait_reboot()
    repaired.go_down()
    repaired.daemon.start()
    repaired.fail()
    repaired.cluster.start_slurmd(repaired.name, "-b")
    repaired.wait_stage("gave_up")
    until(lambda: repaired.state.reason.endswith(FAILED), "the Reason says so")
    wait_for_rounds(repaired.daemon, 3)
    assert "DRAIN" in repaired.state.flags
    assert (repaired.reboots, repaired.stages()) == (1, ["claimed", "taken", "failed", "gave_up"])


def test_machine_that_does_not_boot_in_time_needs_a_person(cluster: SlurmCluster, node: str, tmp_path: Path) -> None:
    """No power cycle follows: RebootProgram may do nothing, so the node may not have been rebooted at all."""
    config = CONFIG.replace("[slurm]", "boot_timeout_seconds = 5.0\n[slurm]").replace('"]', '", "power_cycle"]')
    with repaired_node(cluster, node, tmp_path, config) as repaired:
        repaired.fail()
        repaired.wait_stage("gave_up")
        assert repaired.stages() == ["claimed", "failed", "gave_up"]
        assert "DRAIN" in repaired.state.flags
        assert repaired.reboots == 1


def test_only_max_concurrent_nodes_reboot_at_a_time(
    cluster: SlurmCluster, unused_nodes: Iterator[str], tmp_path: Path
) -> None:
    names = [next(unused_nodes) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(repaired_node(cluster, name, tmp_path / name)) for name in names]
        for found in nodes:
            found.fail()
        until(lambda: any(found.reboots for found in nodes), "one node reboots")
        first, second = sorted(nodes, key=lambda found: -found.reboots)
        until(lambda: "DRAIN" in second.state.flags, "the other node is drained")
        wait_for_rounds(second.daemon, 3)
        assert (second.reboots, CLAIM in second.state.reason) == (0, False)
        first.boot()
        first.wait_in_service()
        second.wait_reboot()
        second.boot()
        second.wait_in_service()
        assert [found.reboots for found in nodes] == [1, 1]


# --- operators, at each boundary


def test_stop_reservation_prevents_reboot_until_it_is_deleted(repaired: RepairedNode) -> None:
    repaired.reserve()
    repaired.fail()
    repaired.wait_stage("refused")
    until(lambda: CLAIM not in repaired.state.reason, "the claim is removed")
    assert (repaired.reboots, "DRAIN" in repaired.state.flags) == (0, True)
    assert "entries" not in repaired.journal()
    repaired.unreserve()
    repaired.wait_reboot()
    repaired.boot()
    repaired.wait_in_service()


def test_reason_of_an_operator_before_the_claim_prevents_reboot(repaired: RepairedNode) -> None:
    job = start_job(repaired.cluster, repaired.name, "--no-requeue")
    repaired.fail()
    repaired.cluster.wait_state(repaired.name, "DRAIN", reason=XID_119)
    drain(repaired.cluster, repaired.name, "operator: keep")
    repaired.cluster.run("scancel", job)
    repaired.daemon.wait_until(lambda status: "foreign_drain" in repaired.obstacles(status), "the drain is foreign")
    wait_for_rounds(repaired.daemon, 3)
    assert (repaired.reboots, repaired.state.reason, repaired.stages()) == (0, "operator: keep", [])


def test_node_reboots_once_its_job_has_ended(repaired: RepairedNode) -> None:
    job = start_job(repaired.cluster, repaired.name, "--no-requeue")
    repaired.fail()
    repaired.cluster.wait_state(repaired.name, "DRAIN", reason=XID_119)
    repaired.wait_obstacles("jobs")
    repaired.cluster.run("scancel", job)
    repaired.wait_reboot()
    repaired.boot()
    repaired.wait_in_service()


def drain_by_operator(repaired: RepairedNode) -> None:
    drain(repaired.cluster, repaired.name, "operator: keep")


def undrain_by_operator(repaired: RepairedNode) -> None:
    repaired.cluster.run("scontrol", "update", f"NodeName={repaired.name}", "State=UNDRAIN")


def resume_by_operator(repaired: RepairedNode) -> None:
    resume(repaired.cluster, repaired.name)


Act: TypeAlias = Callable[[RepairedNode], None]
OPERATORS = pytest.mark.parametrize("act", [drain_by_operator, undrain_by_operator, resume_by_operator])


def assert_operator_decides(repaired: RepairedNode, act: Act) -> None:
    """Assert that healthd neither replaces the operator's Reason nor drains the node again."""
    wait_for_rounds(repaired.daemon, 3)
    state = repaired.state
    if act is drain_by_operator:
        assert "DRAIN" in state.flags
        assert state.reason == "operator: keep"
    else:
        assert "DRAIN" not in state.flags
        assert not repaired.refuses_jobs()


@OPERATORS
def test_operator_right_before_the_step_prevents_it(
    repaired: RepairedNode, act: Callable[[RepairedNode], None]
) -> None:
    with repaired.held_before_step():
        repaired.fail()
        repaired.wait_until_held()
        assert CLAIM in repaired.state.reason
        act(repaired)
    repaired.wait_stage("refused", "stopped")
    assert_operator_decides(repaired, act)
    assert repaired.reboots == 0
    assert "entries" not in repaired.journal()


def test_stop_reservation_right_before_the_step_prevents_it(repaired: RepairedNode) -> None:
    with repaired.held_before_step():
        repaired.fail()
        repaired.wait_until_held()
        repaired.reserve()
    repaired.wait_stage("refused")
    assert (repaired.reboots, "DRAIN" in repaired.state.flags) == (0, True)
    repaired.unreserve()


def test_slurmctld_that_is_away_right_before_the_step_delays_it(repaired: RepairedNode) -> None:
    with repaired.held_before_step():
        repaired.fail()
        repaired.wait_until_held()
        repaired.cluster.kill_slurmctld(signal.SIGTERM)
    repaired.wait_stage("refused")
    repaired.cluster.start_slurmctld()
    repaired.wait_reboot()
    repaired.boot()
    repaired.wait_in_service()
    assert repaired.reboots == 1


@OPERATORS
def test_operator_during_the_boot_decides(repaired: RepairedNode, act: Act) -> None:
    repaired.fail()
    repaired.wait_reboot()
    act(repaired)
    repaired.boot()
    repaired.cluster.wait_state(repaired.name, without=PENDING)
    repaired.wait_stage("stopped", "succeeded")
    assert_operator_decides(repaired, act)
    assert repaired.reboots == 1


@OPERATORS
def test_operator_after_the_boot_decides(repaired: RepairedNode, act: Act) -> None:
    repaired.fail()
    repaired.wait_reboot()
    repaired.go_down()
    repaired.daemon.start()
    repaired.wait_stage("taken")
    act(repaired)
    repaired.cluster.start_slurmd(repaired.name, "-b")
    repaired.cluster.wait_state(repaired.name, without=PENDING)
    repaired.wait_stage("stopped", "succeeded")
    assert_operator_decides(repaired, act)
    assert repaired.reboots == 1


def test_slurmctld_that_is_away_during_the_boot_delays_the_resume(repaired: RepairedNode) -> None:
    repaired.fail()
    repaired.wait_reboot()
    repaired.cluster.wait_state(repaired.name, "REBOOT_ISSUED")
    repaired.cluster.kill_slurmctld(signal.SIGTERM)
    repaired.boot()
    repaired.wait_stage("taken")
    repaired.cluster.start_slurmctld()
    repaired.wait_in_service()
    assert repaired.reboots == 1


# --- boots that Slurm takes for a failure


def test_node_that_boots_after_resume_timeout_returns(cluster: SlurmCluster, tmp_path: Path) -> None:
    with (
        SlurmCluster(nodes=2, gpus=0, version=cluster.version, reboots=True, extra_conf=["ResumeTimeout=5"]) as late,
        repaired_node(late, "n1", tmp_path) as repaired,
    ):
        repaired.fail()
        repaired.wait_reboot()
        late.wait_state("n1", "DOWN", without=("REBOOT_ISSUED",))
        repaired.boot()
        repaired.wait_in_service()
        repaired.wait_stage("succeeded")
        assert repaired.stages() == ["claimed", "taken", "succeeded"]


def test_systemd_reboots_without_reboot_program(cluster: SlurmCluster, tmp_path: Path) -> None:
    programs, record = tmp_path / "programs", tmp_path / "systemctl"
    programs.mkdir()
    write_script(programs / "systemctl", f'echo "$*" >>{record}')
    with SlurmCluster(nodes=2, gpus=0, version=cluster.version) as plain:
        plain.env["PATH"] = f"{programs}:{plain.env['PATH']}"
        with repaired_node(plain, "n1", tmp_path / "n1") as repaired:
            repaired.fail()
            until(record.exists, "systemctl reboot")
            repaired.boot()
            plain.wait_state("n1", without=("NOT_RESPONDING",))
            repaired.wait_in_service()
            repaired.wait_stage("succeeded")
    assert record.read_text() == "reboot --check-inhibitors=yes\n"
