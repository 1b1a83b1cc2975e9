"""The actions of healthd in each state that a real slurmctld can give a node: the table of docs/slurm.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from slurm_cluster import SlurmCluster
from slurm_look import ACT, HEALTHY, XID, Healthd, condition, faulty, make_idle, on_slurm, program

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.policy import Owner
from healthd.common.model import Leave, Resume, Severity

NO_LIMIT = replace(ACT, fleet=FleetLimits(limit_percent=100, own_hardware_limit_percent=100))
DEGRADED = faulty(condition(Severity.DEGRADED))
pytestmark = on_slurm(None, "24.11")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    nothing = program(tmp_path_factory.mktemp("programs") / "nothing", "exit 0")
    more = [
        *(f"RebootProgram={nothing}", f"SuspendProgram={nothing}", f"ResumeProgram={nothing}"),
        *("SuspendTime=36000", "SuspendTimeout=30", "ResumeTimeout=600", "ResumeRate=0", "SuspendRate=0"),
        "KillWait=15",  # a test may notice an ending job this late
        "NodeName=f1 NodeAddr=127.0.0.1 CPUs=16 State=FUTURE",
        "NodeName=c1 NodeAddr=127.0.0.1 Port=1 CPUs=16 RealMemory=8000 State=CLOUD",
    ]
    with SlurmCluster(nodes=13, extra_conf=more, version=getattr(request, "param", None)) as running:
        yield running


def reserve(cluster: SlurmCluster, node: str, flags: str) -> None:
    words = (f"ReservationName={node}", "StartTime=now", "Duration=60", f"Nodes={node}", f"Flags={flags}", "Users=root")
    cluster.run("scontrol", "create", "reservation", *words)


def is_drained_and_resumed(healthd: Healthd, *flags: str) -> None:
    """Check that DEGRADED drains the node and clean checks resume it, with `flags` set all the time."""
    cluster, name = healthd.cluster, healthd.node
    assert healthd.look(DEGRADED).owner is Owner.HEALTHD
    assert cluster.wait_state(name, "DRAIN", *flags).reason == XID
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    cluster.wait_state(name, *flags, without=("DRAIN",))


def is_drained_and_not_resumed(healthd: Healthd, *flags: str) -> None:
    """Check that the drain stays with `flags`, even when all is clean: Slurm has not finished with the node."""
    cluster, name = healthd.cluster, healthd.node
    assert healthd.look(DEGRADED).owner is Owner.HEALTHD
    report = healthd.look(HEALTHY)
    assert isinstance(report.decision, Leave)
    assert report.decision.why.startswith("repaired, but the node is ")
    assert not report.settled, "the node is read again"
    cluster.wait_state(name, "DRAIN", *flags)


def test_in_maintenance_and_in_a_reservation_a_failing_node_is_drained(cluster: SlurmCluster) -> None:
    reserve(cluster, "n1", "MAINT,IGNORE_JOBS")
    reserve(cluster, "n2", "IGNORE_JOBS")
    cluster.wait_state("n1", "MAINTENANCE")
    cluster.wait_state("n2", "RESERVED")
    is_drained_and_resumed(Healthd(cluster, "n1", NO_LIMIT), "MAINTENANCE")
    is_drained_and_resumed(Healthd(cluster, "n2", NO_LIMIT), "RESERVED")


def test_a_failing_node_that_is_planned_for_a_large_job_is_drained(cluster: SlurmCluster) -> None:
    first = cluster.sbatch("sleep 600", "-w", "n3", "--exclusive", "-t", "20")
    cluster.wait_job(first, "RUNNING")
    large = cluster.sbatch("sleep 600", "-w", "n3,n4", "-N2", "--exclusive", "-t", "20")
    cluster.wait_state("n4", "PLANNED")
    assert Healthd(cluster, "n4", NO_LIMIT).look(DEGRADED).owner is Owner.HEALTHD
    assert cluster.wait_state("n4", "DRAIN").reason == XID
    cluster.run("scancel", first, large)


def test_a_pending_reboot_is_not_cancelled_by_a_resume(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("sleep 600", "-w", "n5")
    cluster.wait_job(job, "RUNNING")
    cluster.run("scontrol", "reboot", "n5")
    cluster.wait_state("n5", "REBOOT_REQUESTED")
    is_drained_and_not_resumed(Healthd(cluster, "n5", NO_LIMIT), "REBOOT_REQUESTED")


@pytest.mark.parametrize(("state", "node"), [("FAIL", "n6"), ("DOWN", "n7")])
def test_a_node_that_a_person_set_fail_or_down_is_theirs(cluster: SlurmCluster, state: str, node: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=fan broken")
    healthd = Healthd(cluster, node, NO_LIMIT)
    for verdict in (DEGRADED, HEALTHY):
        assert healthd.look(verdict).owner is Owner.OTHER
        assert cluster.wait_state(node, state, without=("DRAIN",)).reason == "fan broken"
    assert healthd.changes() == []


def test_jobs_of_a_node_that_a_person_lets_fail_are_requeued_all_the_same(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n8", NO_LIMIT)
    job = healthd.running("sleep 600")
    cluster.run("scontrol", "update", "NodeName=n8", "State=FAIL", "Reason=fan broken")
    cluster.wait_state("n8", "FAIL")
    assert healthd.look(faulty()).requeued == (job,)
    assert cluster.node("n8").reason == "fan broken"


def test_a_drained_node_whose_slurmd_goes_away_stays_ours_and_is_not_lifted_from_down(
    cluster: SlurmCluster,
) -> None:
    # No other node may lose its slurmd in this test.
    with SlurmCluster(nodes=1, slurmd_timeout=15, version=cluster.version) as short:
        healthd = Healthd(short, "n1", NO_LIMIT)
        healthd.look(DEGRADED)
        short.stop_slurmd("n1")
        short.wait_state("n1", "DOWN", "DRAIN")
        is_drained_and_not_resumed(healthd, "DOWN")
        assert short.node("n1").reason in (XID, f"{XID} : Not responding")
        short.start_slurmd("n1")
        short.wait_state("n1", "DOWN", "DRAIN", without=("NOT_RESPONDING",))
        is_drained_and_not_resumed(healthd, "DOWN")


def test_a_drained_node_that_registers_with_a_gpu_less_stays_ours_until_it_has_all(cluster: SlurmCluster) -> None:
    healthd, conf = Healthd(cluster, "n10", NO_LIMIT), cluster.directory / "gres.conf"
    healthd.look(DEGRADED)
    all_gpus = conf.read_text()
    conf.write_text(all_gpus.replace("dev/n10/nvidia[0-7]", "dev/n10/nvidia[0-6]"))
    cluster.stop_slurmd("n10")
    cluster.start_slurmd("n10")
    cluster.wait_state("n10", "INVALID_REG", "DRAIN")
    is_drained_and_not_resumed(healthd, "INVALID_REG")
    conf.write_text(all_gpus)
    cluster.stop_slurmd("n10")
    cluster.start_slurmd("n10")
    cluster.wait_state("n10", "DRAIN", without=("INVALID_REG", "NOT_RESPONDING"))
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    cluster.wait_state("n10", "IDLE", without=("DRAIN",))


def test_slurms_own_drain_of_a_node_with_a_gpu_less_is_left_to_people(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n11", NO_LIMIT)
    healthd.look(DEGRADED)
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    conf = cluster.directory / "gres.conf"
    conf.write_text(conf.read_text().replace("dev/n11/nvidia[0-7]", "dev/n11/nvidia[0-6]"))
    cluster.stop_slurmd("n11")
    cluster.start_slurmd("n11")
    words = cluster.wait_state("n11", "INVALID_REG", "DRAIN").reason
    # 24.11 keeps the reason of a finished drain, and drains with it.
    assert words == XID if cluster.version == "24.11" else words.startswith("gres/gpu count ")
    changed = healthd.changes()
    over = healthd.memory.ended_drain
    assert over is not None
    # As if slurmctld had run for longer than the clocks may differ.
    healthd.memory = replace(healthd.memory, ended_drain=replace(over, ended_at=over.ended_at + 3))
    a_minute_later = replace(healthd.memory, ended_drain=replace(over, is_saved=True))
    for verdict, memory in ((DEGRADED, healthd.memory), (HEALTHY, healthd.memory), (HEALTHY, a_minute_later)):
        healthd.memory = memory
        report = healthd.look(verdict)
        assert (report.owner, report.adopted) == (Owner.OTHER, None)
    assert cluster.node("n11").reason == words
    assert healthd.changes() == changed


def test_a_drain_that_power_saving_takes_away_is_put_back_and_nobody_has_acknowledged(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n12", NO_LIMIT)
    healthd.look(DEGRADED)
    cluster.run("scontrol", "update", "NodeName=n12", "State=POWER_DOWN")
    cluster.wait_state("n12", "POWERING_DOWN", without=("DRAIN",))
    report = healthd.look(DEGRADED)
    assert not report.acknowledged
    assert report.owner is Owner.HEALTHD
    assert "DRAIN" in cluster.node("n12").flags
    cluster.wait_state("n12", "POWERED_DOWN")
    is_drained_and_not_resumed(healthd, "POWERED_DOWN")
    cluster.run("scontrol", "update", "NodeName=n12", "State=POWER_UP")
    cluster.wait_state("n12", "POWERING_UP", "DRAIN")
    healthd.boot_id = "boot-2"
    is_drained_and_not_resumed(healthd, "POWERING_UP")
    assert cluster.node("n12").reason == XID, "22.05 has dropped the reason meanwhile"


def test_a_node_that_is_to_be_switched_off_after_its_jobs_is_not_opened_by_a_resume(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n13", NO_LIMIT)
    make_idle(cluster, "n13")  # also when the slurmd of a busy machine did not answer in time
    job = healthd.running("sleep 600")
    healthd.look(DEGRADED)
    cluster.run("scontrol", "update", "NodeName=n13", "State=POWER_DOWN_ASAP")
    is_drained_and_not_resumed(healthd, "POWER_DOWN")
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_cloud_node_is_drained_and_a_future_node_is_not_known_to_slurm(cluster: SlurmCluster) -> None:
    cloud = Healthd(cluster, "c1", NO_LIMIT)
    assert cloud.look(DEGRADED).owner is Owner.HEALTHD
    node = cloud.look(DEGRADED).node  # 22.05 hides it from `scontrol show node` while it is off
    assert node is not None
    assert (node.flags >= {"CLOUD", "DRAIN"}, node.reason) == (True, XID)
    assert Healthd(cluster, "f1", NO_LIMIT).look(DEGRADED).problem == 'Slurm has no node "f1" in any partition'


def test_a_node_whose_last_job_is_ending_is_resumed_without_waiting(cluster: SlurmCluster) -> None:
    healthd = Healthd(cluster, "n3", NO_LIMIT)
    make_idle(cluster, "n3")  # also when the slurmd of a busy machine did not answer in time
    job = healthd.running("trap '' TERM; sleep 600 & sleep 600")
    healthd.look(DEGRADED)
    cluster.run("scancel", job)
    cluster.wait_state("n3", "COMPLETING")
    assert isinstance(healthd.look(HEALTHY).decision, Resume)
    cluster.wait_state("n3", without=("DRAIN",))
