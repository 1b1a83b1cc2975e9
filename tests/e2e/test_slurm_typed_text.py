"""Text typed by people into a real Slurm does not change the counts, output or requeues of healthd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from slurm_cluster import SlurmCluster
from slurm_look import ACT, HEALTHY, NodeController, condition, faulty

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.policy import Owner
from healthd.common.model import Leave, Severity

CRITICAL = faulty(condition(Severity.CRITICAL))
LIMIT_OF_TWO = replace(ACT, fleet=FleetLimits(own_hardware_limit_percent=0.0, own_hardware_limit_min_nodes=2))
REASONS = [
    "L\u00fcfter tot",
    "\u0417\u0430\u043c\u0435\u043d\u0430 GPU",
    "bad\nfan",
    "a\x85b",
    "\U0001f525",
    "caf\udce9",
    "\u0416" * 225,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=5, extra_conf=["PartitionName=gro\u00dfer Nodes=n5"]) as running:
        running.run("scontrol", "update", "PartitionName=gpu", "Nodes=n[1-4]")
        yield running


@pytest.mark.parametrize("reason", REASONS)
def test_fleet_limit_holds_with_any_reason_of_another_node(cluster: SlurmCluster, reason: str) -> None:
    cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", f"Reason={reason}")
    first, second, third = (NodeController(cluster, name, LIMIT_OF_TWO) for name in ("n1", "n2", "n3"))
    try:
        assert first.reconcile_once(CRITICAL).owner is Owner.HEALTHD
        assert second.reconcile_once(CRITICAL).owner is Owner.HEALTHD
        held_report = third.reconcile_once(CRITICAL)
        assert held_report.problem == ""
        assert isinstance(held_report.decision, Leave)
        assert held_report.record.hold is not None
        hold = held_report.record.hold
        assert (hold.partition, hold.nodes, hold.drained, hold.limit) == ("gpu", 4, 2, 2)
        assert "DRAIN" not in cluster.node("n3").flags
    finally:
        for controller in (first, second):
            controller.reconcile_until_settled(HEALTHY)
        cluster.run("scontrol", "update", "NodeName=n4", "State=RESUME")


def test_node_only_in_partition_with_umlaut_is_drained(cluster: SlurmCluster) -> None:
    controller = NodeController(cluster, "n5", LIMIT_OF_TWO)
    report = controller.reconcile_once(CRITICAL)
    assert (report.owner, report.problem) == (Owner.HEALTHD, "")
    assert report.node is not None
    assert report.node.partitions == {"gro\u00dfer"}
    assert report.node.gpu_count == 8
    controller.reconcile_until_settled(HEALTHY)


@pytest.mark.parametrize("reason", ["\u0416" * 225, "x" * 399 + "\u00fc", "L\u00fcfter tot"])
def test_operator_reason_is_reported_unchanged_and_does_not_hide_gpus(cluster: SlurmCluster, reason: str) -> None:
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", f"Reason={reason}")
    try:
        report = NodeController(cluster, "n3", LIMIT_OF_TWO).reconcile_once(HEALTHY)
        assert report.node is not None
        assert report.node.gpu_count == report.node.single_type_gpu_count == 8
        assert reason.startswith(report.node.reason.partition("\\x")[0])
        assert "gpu" not in report.node.reason
    finally:
        cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")
