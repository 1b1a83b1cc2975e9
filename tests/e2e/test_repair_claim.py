"""The claim of a repair with a real slurmctld: visible to all nodes, counted, and removed. With every Slurm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import slurm_versions
from msgspec.structs import replace
from slurm_cluster import SlurmCluster
from slurm_look import ACT, HEALTHY, XID, NodeController, faulty, with_every_slurm
from waiting import until

from healthd.agent.slurm.policy import Owner
from healthd.agent.slurm.reconcile import MAX_CLOCK_SKEW_SECONDS
from healthd.common.model import DrainRecord, Leave, RepairClaim, RepairStep, Resume
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Command
from healthd.common.slurm.drain_reason import with_claim
from healthd.common.slurm.output import Claim, parse_boot_time, parse_claims, parse_in_service, parse_node_names

RESET, REBOOT = RepairClaim(RepairStep.GPU_RESET), RepairClaim(RepairStep.REBOOT)
BOOTED = RepairClaim(RepairStep.REBOOT, is_booted=True)
CLAIMED_RESET, CLAIMED_REBOOT = f"{XID} (repair: gpu_reset)", f"{XID} (repair: reboot)"
FAULT = faulty(fault_time=1.0)

pytestmark = with_every_slurm


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with SlurmCluster(
        nodes=4, gpus=0, version=request.param, reboots=True, extra_conf=["ResumeTimeout=600"]
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def idle_nodes(cluster: SlurmCluster) -> Iterator[None]:
    yield
    for name in cluster.names:
        if cluster.node(name).flags != {"IDLE"}:
            cluster.reset_node(name)


def controller(cluster: SlurmCluster, name: str, claim: RepairClaim | None = None) -> NodeController:
    """Return the controller of a node that healthd has drained, without a claim."""
    drained = NodeController(cluster, name)
    assert drained.reconcile_once(FAULT).owner is Owner.HEALTHD
    drained.policy = replace(ACT, claim=claim)
    return drained


def claims(cluster: SlurmCluster) -> dict[str, Claim]:
    found = parse_claims(query(cluster, commands.claims()))
    return {claim.node: claim for claim in found}


def query(cluster: SlurmCluster, argv: tuple[str, ...]) -> bytes:
    return subprocess.run(argv, env=cluster.env | commands.ENVIRONMENT, capture_output=True, check=True).stdout


def boot_time(cluster: SlurmCluster, name: str) -> float:
    return parse_boot_time(query(cluster, commands.node_record(name)).decode())


def end_hold(waiting: NodeController) -> None:
    assert waiting.record.claim_hold is not None
    waiting.record = replace(waiting.record, claim_hold=replace(waiting.record.claim_hold, until=time.time() - 1))


def test_second_node_waits_until_first_removes_its_claim(cluster: SlurmCluster) -> None:
    first, second = (controller(cluster, name, RESET) for name in ("n1", "n2"))
    first.reconcile_once(FAULT)
    assert first.state().reason == CLAIMED_RESET
    assert (first.record.claim, first.record.claim_hold) == (RepairStep.GPU_RESET, None)
    assert list(claims(cluster)) == ["n1"]

    second.reconcile_once(FAULT)
    hold = second.record.claim_hold
    assert hold is not None
    assert (hold.times, second.record.claim, second.state().reason) == (1, None, XID)
    assert hold.until > time.time()
    sent = len(second.change_commands())
    second.reconcile_once(FAULT)
    assert second.record.claim_hold == hold, "it is not tried again before the hold ends"

    first.policy = ACT
    first.reconcile_once(FAULT)
    assert (first.state().reason, first.record.claim, claims(cluster)) == (XID, None, {})
    end_hold(second)
    second.reconcile_once(FAULT)
    assert second.record.claim is RepairStep.GPU_RESET
    assert list(claims(cluster)) == ["n2"]
    assert len(second.change_commands()) == sent + 1

    second.policy = replace(ACT, claim=RepairClaim(RepairStep.PERSON))
    second.reconcile_once(FAULT)
    assert second.state().reason == f"{XID} (repair failed: a person must act)"
    assert (second.record.claim, claims(cluster)) == (RepairStep.PERSON, {}), "a failed repair is not counted"


def test_simultaneous_claims_exceed_limit_at_no_time_for_long(cluster: SlurmCluster) -> None:
    controllers = [controller(cluster, name, RESET) for name in ("n1", "n2", "n3")]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda node: node.reconcile_once(FAULT), controllers))
    confirmed = {node.node for node in controllers if node.record.claim}
    assert len(confirmed) <= 1
    assert set(claims(cluster)) == confirmed


def test_claim_in_last_partition_with_a_node_in_service_waits(cluster: SlurmCluster) -> None:
    cluster.run("scontrol", "create", "PartitionName=pair", "Nodes=n[1-2]", "Hidden=YES")
    try:
        other, node = controller(cluster, "n2"), controller(cluster, "n1", RESET)
        node.reconcile_once(FAULT)
        assert node.record.claim is None
        assert node.record.claim_hold is not None
        other.reconcile_once(HEALTHY)
        cluster.wait_state("n2", "IDLE", without=("DRAIN", "NOT_RESPONDING"))
        end_hold(node)
        node.reconcile_once(FAULT)
        assert node.record.claim is RepairStep.GPU_RESET
        found = parse_in_service(query(cluster, commands.fleet()), {"gpu", "pair"})
        assert [(each.name, each.nodes, each.in_service) for each in found] == [("gpu", 4, 3), ("pair", 2, 1)]
        assert parse_node_names(query(cluster, commands.node_names())) == set(cluster.names)
        assert list(claims(cluster)) == ["n1"], "a node in two partitions is counted once"
    finally:
        cluster.run("scontrol", "delete", "PartitionName=pair")


def test_claim_of_killed_daemon_is_recognised_and_confirmed(cluster: SlurmCluster) -> None:
    class Killed(Exception):
        pass

    def kill(command: Command) -> None:
        if command.changes:
            raise Killed

    node = controller(cluster, "n1", RESET)
    node.after = kill
    with pytest.raises(Killed):
        node.reconcile_once(FAULT)
    assert node.state().reason == CLAIMED_RESET
    restarted = NodeController(cluster, "n1", node.policy, record=node.record)
    restarted.reconcile_once(FAULT)
    assert (restarted.record.claim, restarted.record.reason) == (RepairStep.GPU_RESET, CLAIMED_RESET)
    assert restarted.change_commands() == []


def test_operator_removes_claim_of_dead_node(cluster: SlurmCluster) -> None:
    """As in docs/repair.md, without State=: the node stays drained and DOWN."""
    dead, other = controller(cluster, "n1", RESET), controller(cluster, "n2", RESET)
    dead.reconcile_once(FAULT)
    cluster.run("scontrol", "update", "NodeName=n1", "State=DOWN", f"Reason={CLAIMED_RESET}")
    other.reconcile_once(FAULT)
    assert (other.record.claim, claims(cluster).keys()) == (None, {"n1"})
    cluster.run("scontrol", "update", "NodeName=n1", "Reason=broken, ticket 4711")
    assert cluster.node("n1").flags >= {"DOWN", "DRAIN"}
    end_hold(other)
    other.reconcile_once(FAULT)
    assert (other.record.claim, claims(cluster).keys()) == (RepairStep.GPU_RESET, {"n2"})

    cluster.boot("n1")
    report = dead.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Leave)
    assert (report.owner, report.record.claim) == (Owner.OTHER, None), "healthd does not resume the node"
    assert dead.state().reason == "broken, ticket 4711"


def test_reason_that_slurm_replaced_hides_no_claim(cluster: SlurmCluster) -> None:
    """From 24.11 on, slurmctld replaces the Reason of a node that registers with fewer GPUs."""
    with SlurmCluster(nodes=4, gpus=2, version=cluster.version) as other:
        first, second = controller(other, "n1", RESET), controller(other, "n2", RESET)
        first.reconcile_once(FAULT)
        assert first.record.claim is RepairStep.GPU_RESET
        gres = other.directory / "gres.conf"
        gres.write_text(gres.read_text().replace("n1/nvidia[0-1]", "n1/nvidia0"))
        other.boot("n1")
        other.wait_state("n1", "INVALID_REG")
        is_replaced = other.node("n1").reason != CLAIMED_RESET
        assert is_replaced is (cluster.version in slurm_versions.DEBIAN)
        assert [(claim.node, claim.is_hidden) for claim in claims(other).values()] == [("n1", is_replaced)]
        second.reconcile_once(FAULT)
        hold = second.record.claim_hold
        assert (second.record.claim, second.state().reason) == (None, XID)
        assert hold is not None
        assert hold.problem.startswith("n1 (perhaps) " if is_replaced else "n1 ")

        first.reconcile_once(FAULT)
        assert (first.state().reason, first.record.claim) == (CLAIMED_RESET, RepairStep.GPU_RESET)
        assert [(claim.node, claim.is_hidden) for claim in claims(other).values()] == [("n1", False)]
        end_hold(second)
        second.reconcile_once(FAULT)
        assert second.record.claim is None


def test_operator_reason_ends_claim(cluster: SlurmCluster) -> None:
    node = controller(cluster, "n1", RESET)
    node.reconcile_once(FAULT)
    cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=operator: keep")
    report = node.reconcile_once(FAULT)
    assert (report.owner, report.record.claim, node.state().reason) == (Owner.OTHER, None, "operator: keep")
    assert claims(cluster) == {}


def test_reboot_keeps_claim_until_resume(cluster: SlurmCluster) -> None:
    node, other = controller(cluster, "n1", REBOOT), controller(cluster, "n2", RESET)
    node.reconcile_once(FAULT)
    assert node.record.claim is RepairStep.REBOOT
    job = cluster.sbatch("sleep 600", "-w", "n1", "-t", "10")
    cluster.run("scontrol", "reboot", f"reason={node.record.reason}", "n1")
    cluster.wait_reboot("n1")
    assert claims(cluster)["n1"].is_renewed, "a node that boots is counted, whatever its time stamp"
    other.reconcile_once(FAULT)
    assert (other.record.claim, claims(cluster).keys()) == (None, {"n1"})

    cluster.boot("n1")
    cluster.wait_state("n1", "DRAIN", without=("REBOOT_ISSUED", "NOT_RESPONDING"))
    node.boot_id, node.policy = "boot-2", replace(ACT, claim=BOOTED)
    changes = len(node.change_commands())
    report = node.reconcile_once(replace(HEALTHY, may_resume=False))
    assert isinstance(report.decision, Leave)
    assert (report.owner, report.record.claim) == (Owner.HEALTHD, RepairStep.REBOOT)
    assert len(node.change_commands()) == changes, "the suffix of Slurm is no foreign Reason"
    assert claims(cluster).keys() == {"n1"}
    assert cluster.job(job)["JobState"] == "PENDING"
    report = node.reconcile_once(HEALTHY)
    assert (report.resumed, report.record.claim) == (True, None)
    cluster.wait_job(job, "RUNNING")
    assert claims(cluster) == {}, "24.11 keeps the Reason of an ended drain, which is no claim"
    cluster.run("scancel", job)


def test_requested_reboot_is_counted(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("sleep 600", "-w", "n1")
    cluster.wait_job(job, "RUNNING")
    node = controller(cluster, "n1", REBOOT)
    node.reconcile_once(FAULT)
    cluster.run("scontrol", "reboot", f"reason={node.record.reason}", "n1")
    cluster.wait_state("n1", "DRAIN", "REBOOT_REQUESTED")
    assert [(claim.node, claim.is_renewed) for claim in claims(cluster).values()] == [("n1", True)]
    assert node.reconcile_once(FAULT).record.claim is RepairStep.REBOOT
    cluster.run("scontrol", "cancel_reboot", "n1")
    cluster.run("scancel", job)


@pytest.mark.parametrize("is_drained", [True, False])
def test_node_down_after_boot_is_resumed_only_after_own_step(cluster: SlurmCluster, is_drained: bool) -> None:
    """ReturnToService is 0: a node that is not drained is DOWN after a boot."""
    node = controller(cluster, "n1", REBOOT)
    node.reconcile_once(FAULT)
    assert node.record.claim is RepairStep.REBOOT
    if is_drained:
        cluster.run("scontrol", "update", "NodeName=n1", "State=DOWN", f"Reason={CLAIMED_REBOOT}")
    else:
        cluster.run("scontrol", "update", "NodeName=n1", "State=UNDRAIN")
    time.sleep(2)  # Slurm compares the time of the boot with that of the last answer in whole seconds
    cluster.boot("n1")
    flags = {"DOWN", "DRAIN"} if is_drained else {"DOWN"}
    until(lambda: cluster.node("n1").flags == flags, "the node is down after its boot")
    node.boot_id = "boot-2"
    report = node.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Leave)
    assert node.state().flags == flags
    node.policy = replace(ACT, claim=BOOTED)
    report = node.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Resume)
    assert report.resumed
    assert node.change_commands()[-1] == commands.resume("n1")
    cluster.wait_state("n1", "IDLE", without=("DOWN", "DRAIN"))


def test_drain_that_timed_out_reboot_removed_is_set_again(cluster: SlurmCluster) -> None:
    with SlurmCluster(nodes=2, gpus=0, version=cluster.version, reboots=True, extra_conf=["ResumeTimeout=5"]) as other:
        node = controller(other, "n1", REBOOT)
        node.reconcile_once(FAULT)
        other.run("scontrol", "reboot", f"reason={node.record.reason}", "n1")
        other.wait_reboot("n1")
        node.reconcile_once(FAULT)
        assert node.record.claim is RepairStep.REBOOT
        other.stop_slurmd("n1")
        down = other.wait_state("n1", "DOWN", without=("REBOOT_ISSUED",))
        assert down.reason == f"{CLAIMED_REBOOT} : reboot issued : reboot timed out"
        assert claims(other).keys() == {"n1"}
        other.boot("n1")
        other.wait_state("n1", "DOWN", without=("NOT_RESPONDING",))
        node.boot_id, node.policy = "boot-2", replace(ACT, claim=BOOTED)
        report = node.reconcile_once(replace(HEALTHY, may_resume=False))
        assert (report.owner, report.record.claim) == (Owner.HEALTHD, RepairStep.REBOOT)
        assert node.state().flags == {"DOWN", "DRAIN"}
        assert with_claim(node.state().reason, None) == XID
        assert node.reconcile_once(HEALTHY).resumed
        other.wait_state("n1", "IDLE", without=("DOWN", "DRAIN"))
        assert node.record.claim is None


def test_node_is_not_resumed_before_slurmd_has_registered(cluster: SlurmCluster) -> None:
    node = controller(cluster, "n1", REBOOT)
    node.reconcile_once(FAULT)
    node.policy = replace(ACT, claim=BOOTED, booted_at=time.time() + MAX_CLOCK_SKEW_SECONDS + 60)
    started = time.time()
    time.sleep(2)  # Slurm compares the time of the boot with that of the last answer in whole seconds
    cluster.boot("n1")
    until(lambda: boot_time(cluster, "n1") > started, "slurmd registers")
    assert isinstance(node.reconcile_once(HEALTHY).decision, Leave)
    node.policy = replace(ACT, claim=BOOTED, booted_at=time.time())
    until(lambda: node.reconcile_once(HEALTHY).resumed, "the node is resumed")


def test_claim_without_own_drain_is_not_written(cluster: SlurmCluster) -> None:
    node = NodeController(cluster, "n1", replace(ACT, claim=RESET), record=DrainRecord())
    report = node.reconcile_once(HEALTHY)
    assert isinstance(report.decision, Leave)
    assert (node.state().flags, node.change_commands()) == ({"IDLE"}, [])
