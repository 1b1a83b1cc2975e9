"""Failovers between two real slurmctlds immediately after a change by healthd.

A slurmctld saves the first of several changes at once and the others within 5 s. So these tests change another node
first, and kill the primary immediately after healthd's own change.
"""

from __future__ import annotations

import time

from msgspec.structs import replace
from slurm_cluster import SlurmCluster
from slurm_look import ACT, HEALTHY, XID, NodeController, condition, faulty

from healthd.agent.slurm.policy import Owner
from healthd.common.model import Severity

POLICY = replace(ACT, command_timeout_seconds=60)
DEGRADED = faulty(condition(Severity.DEGRADED))
SECONDS = 120.0


def cluster_with_backup(version: str | None) -> SlurmCluster:
    return SlurmCluster(nodes=2, gpus=0, backup=True, version=version)


def save_state_now(cluster: SlurmCluster) -> None:
    """Make slurmctld save now, so that its next save is 5 s away."""
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=x")
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")


def wait_saved(cluster: SlurmCluster, text: str) -> None:
    end = time.monotonic() + SECONDS
    file = cluster.directory / "state/node_state"
    while not (file.exists() and text.encode() in file.read_bytes()):
        assert time.monotonic() < end, "slurmctld has not saved the node"
        time.sleep(0.2)


def check_lost_drain(cluster: SlurmCluster) -> None:
    """Check that the drain is repeated, and that a later resume by an operator counts as such."""
    healthd = NodeController(cluster, "n1", POLICY)
    save_state_now(cluster)
    assert healthd.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    cluster.kill_slurmctld()
    reports = [healthd.reconcile_until_settled(DEGRADED, SECONDS)]
    assert not any(report.acknowledged for report in reports)
    assert (reports[-1].owner, healthd.record.reason) == (Owner.HEALTHD, XID)
    assert "DRAIN" in cluster.node("n1").flags

    unsaved = healthd.record.unsaved_change
    if unsaved is not None:  # simulates that WRITTEN_SECONDS have passed
        healthd.record = replace(healthd.record, unsaved_change=replace(unsaved, sent_at=0.0))
    assert healthd.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    healthd.record = replace(healthd.record, confirmed_at=time.time() + 3)
    cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert healthd.reconcile_once(DEGRADED).acknowledged


def check_lost_resume(cluster: SlurmCluster) -> None:
    """Check that the drain which the backup restores is recognised as healthd's own and lifted again."""
    healthd = NodeController(cluster, "n1", POLICY)
    assert healthd.reconcile_once(DEGRADED).owner is Owner.HEALTHD
    wait_saved(cluster, XID)
    save_state_now(cluster)
    assert healthd.reconcile_once(HEALTHY).resumed
    cluster.kill_slurmctld()
    end = time.monotonic() + SECONDS
    while (
        (report := healthd.reconcile_once(HEALTHY)).problem or not report.settled or "DRAIN" in cluster.node("n1").flags
    ):
        assert not report.acknowledged
        assert time.monotonic() < end, report
        time.sleep(0.5)
    assert (report.owner, healthd.record.reason, healthd.record.adopted_reason) == (Owner.NONE, "", "")
