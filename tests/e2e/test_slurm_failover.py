"""A backup slurmctld takes over before a change by healthd was saved, on this machine's own Slurm."""

from __future__ import annotations

from failover import check_lost_drain, check_lost_resume, cluster_with_backup


def test_drain_lost_in_failover_is_restored() -> None:
    with cluster_with_backup(None) as cluster:
        check_lost_drain(cluster)


def test_drain_restored_by_failover_after_resume_is_lifted() -> None:
    with cluster_with_backup(None) as cluster:
        check_lost_resume(cluster)
