"""The actions of healthd in each state that a real slurmctld can give a node: the table of docs/slurm.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from slurm_cluster import SlurmCluster
from slurm_look import ACT, HEALTHY, XID, NodeController, condition, faulty, make_idle, with_slurm, write_script

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.policy import Owner
from healthd.common.model import Leave, Resume, Severity

NO_LIMIT = replace(ACT, fleet=FleetLimits(limit_percent=100, own_hardware_limit_percent=100))
DEGRADED = faulty(condition(Severity.DEGRADED))
pytestmark = with_slurm(None, "24.11")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    empty_program = write_script(tmp_path_factory.mktemp("programs") / "nothing", "exit 0")
    extra_conf = [
        *(f"RebootProgram={empty_program}", f"SuspendProgram={empty_program}", f"ResumeProgram={empty_program}"),
        *("SuspendTime=36000", "SuspendTimeout=30", "ResumeTimeout=600", "ResumeRate=0", "SuspendRate=0"),
        "KillWait=15",  # a test may notice an ending job this late
        "NodeName=f1 NodeAddr=127.0.0.1 CPUs=16 State=FUTURE",
        "NodeName=c1 NodeAddr=127.0.0.1 Port=1 CPUs=16 RealMemory=8000 State=CLOUD",
    ]
    with SlurmCluster(nodes=13, extra_conf=extra_conf, version=getattr(request, "param", None)) as running:
        yield running


def reserve(cluster: SlurmCluster, node: str, flags: str) -> None:
    words = (f"ReservationName={node}", "StartTime=now", "Duration=60", f"Nodes={node}", f"Flags={flags}", "Users=root")
    cluster.run("scontrol", "create", "reservation", *words)


def check_drain_and_resume(healthd: NodeController, *flags: str) -> None:
    """Check that DEGRADED drains the node and clean checks resume it, with `flags` set all the time."""
    cluster, name = healthd.cluster, healthd.node
    assert healthd.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    assert cluster.wait_state(name, "DRAIN", *flags).reason == XID
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    cluster.wait_state(name, *flags, without=("DRAIN",))


def check_drain_without_resume(healthd: NodeController, *flags: str) -> None:
    """Check that the drain stays with `flags`, even when all is clean: Slurm has not finished with the node."""
    cluster, name = healthd.cluster, healthd.node
    assert healthd.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    report = healthd.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Leave)
    assert report.decision.why.startswith("repaired, but the node is ")
    assert not report.settled, "the node is read again"
    cluster.wait_state(name, "DRAIN", *flags)


def test_failing_node_in_maintenance_or_reservation_is_drained(cluster: SlurmCluster) -> None:
    reserve(cluster, "n1", "MAINT,IGNORE_JOBS")
    reserve(cluster, "n2", "IGNORE_JOBS")
    cluster.wait_state("n1", "MAINTENANCE")
    cluster.wait_state("n2", "RESERVED")
    check_drain_and_resume(NodeController(cluster, "n1", NO_LIMIT), "MAINTENANCE")
    check_drain_and_resume(NodeController(cluster, "n2", NO_LIMIT), "RESERVED")


def test_failing_planned_node_is_drained(cluster: SlurmCluster) -> None:
    first = cluster.sbatch("sleep 600", "-w", "n3", "--exclusive", "-t", "20")
    cluster.wait_job(first, "RUNNING")
    large = cluster.sbatch("sleep 600", "-w", "n3,n4", "-N2", "--exclusive", "-t", "20")
    cluster.wait_state("n4", "PLANNED")
    assert NodeController(cluster, "n4", NO_LIMIT).reconcile_once(DEGRADED).owner is Owner.HEALTHD
    assert cluster.wait_state("n4", "DRAIN").reason == XID
    cluster.run("scancel", first, large)


def test_resume_does_not_cancel_pending_reboot(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("sleep 600", "-w", "n5")
    cluster.wait_job(job, "RUNNING")
    cluster.run("scontrol", "reboot", "n5")
    cluster.wait_state("n5", "REBOOT_REQUESTED")
    check_drain_without_resume(NodeController(cluster, "n5", NO_LIMIT), "REBOOT_REQUESTED")


@pytest.mark.parametrize(("state", "node"), [("FAIL", "n6"), ("DOWN", "n7")])
def test_node_set_fail_or_down_by_operator_stays_theirs(cluster: SlurmCluster, state: str, node: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=fan broken")
    healthd = NodeController(cluster, node, NO_LIMIT)
    for verdict in (DEGRADED, HEALTHY):
        assert healthd.reconcile_once(verdict).owner is Owner.OTHER
        assert cluster.wait_state(node, state, without=("DRAIN",)).reason == "fan broken"
    assert healthd.change_commands() == []


def test_jobs_of_node_set_fail_by_operator_are_requeued(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n8", NO_LIMIT)
    job = healthd.start_job("sleep 600")
    cluster.run("scontrol", "update", "NodeName=n8", "State=FAIL", "Reason=fan broken")
    cluster.wait_state("n8", "FAIL")
    assert healthd.reconcile_once(faulty()).requeued == (job,)
    assert cluster.node("n8").reason == "fan broken"


def test_drained_node_without_slurmd_stays_owned_and_down(
    cluster: SlurmCluster,
) -> None:
    # No other node may lose its slurmd in this test.
    with SlurmCluster(nodes=1, slurmd_timeout=15, version=cluster.version) as short_cluster:
        healthd = NodeController(short_cluster, "n1", NO_LIMIT)
        healthd.reconcile_once(DEGRADED)
        short_cluster.stop_slurmd("n1")
        short_cluster.wait_state("n1", "DOWN", "DRAIN")
        check_drain_without_resume(healthd, "DOWN")
        assert short_cluster.node("n1").reason in (XID, f"{XID} : Not responding")
        short_cluster.start_slurmd("n1")
        short_cluster.wait_state("n1", "DOWN", "DRAIN", without=("NOT_RESPONDING",))
        check_drain_without_resume(healthd, "DOWN")


def test_drained_node_registering_with_fewer_gpus_stays_drained(cluster: SlurmCluster) -> None:
    healthd, conf = NodeController(cluster, "n10", NO_LIMIT), cluster.directory / "gres.conf"
    healthd.reconcile_once(DEGRADED)
    all_gpus = conf.read_text()
    conf.write_text(all_gpus.replace("dev/n10/nvidia[0-7]", "dev/n10/nvidia[0-6]"))
    cluster.stop_slurmd("n10")
    cluster.start_slurmd("n10")
    cluster.wait_state("n10", "INVALID_REG", "DRAIN")
    check_drain_without_resume(healthd, "INVALID_REG")
    conf.write_text(all_gpus)
    cluster.stop_slurmd("n10")
    cluster.start_slurmd("n10")
    cluster.wait_state("n10", "DRAIN", without=("INVALID_REG", "NOT_RESPONDING"))
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    cluster.wait_state("n10", "IDLE", without=("DRAIN",))


def test_slurm_drain_for_missing_gpu_is_left_to_operators(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n11", NO_LIMIT)
    healthd.reconcile_once(DEGRADED)
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    conf = cluster.directory / "gres.conf"
    conf.write_text(conf.read_text().replace("dev/n11/nvidia[0-7]", "dev/n11/nvidia[0-6]"))
    cluster.stop_slurmd("n11")
    cluster.start_slurmd("n11")
    reason = cluster.wait_state("n11", "INVALID_REG", "DRAIN").reason
    # 24.11 keeps the reason of a finished drain, and drains with it.
    assert reason == XID if cluster.version == "24.11" else reason.startswith("gres/gpu count ")
    changed = healthd.change_commands()
    ended_drain = healthd.record.ended_drain
    assert ended_drain is not None
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.record = replace(healthd.record, ended_drain=replace(ended_drain, ended_at=ended_drain.ended_at + 3))
    saved_record = replace(healthd.record, ended_drain=replace(ended_drain, is_saved=True))
    for verdict, record in ((DEGRADED, healthd.record), (HEALTHY, healthd.record), (HEALTHY, saved_record)):
        healthd.record = record
        report = healthd.reconcile_once(verdict)
        assert (report.owner, report.adopted) == (Owner.OTHER, None)
    assert cluster.node("n11").reason == reason
    assert healthd.change_commands() == changed


def test_drain_removed_by_power_saving_is_restored_without_acknowledgement(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n12", NO_LIMIT)
    healthd.reconcile_once(DEGRADED)
    cluster.run("scontrol", "update", "NodeName=n12", "State=POWER_DOWN")
    cluster.wait_state("n12", "POWERING_DOWN", without=("DRAIN",))
    report = healthd.reconcile_once(DEGRADED)
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert "DRAIN" in cluster.node("n12").flags
    cluster.wait_state("n12", "POWERED_DOWN")
    check_drain_without_resume(healthd, "POWERED_DOWN")
    cluster.run("scontrol", "update", "NodeName=n12", "State=POWER_UP")
    cluster.wait_state("n12", "POWERING_UP", "DRAIN")
    healthd.boot_id = "boot-2"
    check_drain_without_resume(healthd, "POWERING_UP")
    assert cluster.node("n12").reason == XID, "22.05 has dropped the reason meanwhile"


def test_resume_does_not_reopen_node_to_be_powered_down_after_jobs(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n13", NO_LIMIT)
    make_idle(cluster, "n13")  # also when the slurmd of a busy machine did not answer in time
    job = healthd.start_job("sleep 600")
    healthd.reconcile_once(DEGRADED)
    cluster.run("scontrol", "update", "NodeName=n13", "State=POWER_DOWN_ASAP")
    check_drain_without_resume(healthd, "POWER_DOWN")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_cloud_node_is_drained_and_future_node_is_unknown(cluster: SlurmCluster) -> None:
    cloud = NodeController(cluster, "c1", NO_LIMIT)
    assert cloud.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    node = cloud.reconcile_once(DEGRADED).node  # 22.05 hides it from `scontrol show node` while it is off
    assert node is not None
    assert (node.flags >= {"CLOUD", "DRAIN"}, node.reason) == (True, XID)
    assert (
        NodeController(cluster, "f1", NO_LIMIT).reconcile_once(DEGRADED).problem
        == 'Slurm has no node "f1" in any partition'
    )


def test_node_with_ending_last_job_is_resumed_without_wait(cluster: SlurmCluster) -> None:
    healthd = NodeController(cluster, "n3", NO_LIMIT)
    make_idle(cluster, "n3")  # also when the slurmd of a busy machine did not answer in time
    job = healthd.start_job("trap '' TERM; sleep 600 & sleep 600")
    healthd.reconcile_once(DEGRADED)
    cluster.run("scancel", job)
    cluster.wait_state("n3", "COMPLETING")
    assert isinstance(healthd.reconcile_once(HEALTHY).decision, Resume)
    cluster.wait_state("n3", without=("DRAIN",))
