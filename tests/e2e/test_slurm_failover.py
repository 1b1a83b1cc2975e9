"""A backup slurmctld takes over before a change by healthd was saved, on this machine's own Slurm."""

from __future__ import annotations

from failover import cluster_with_backup, lose_a_drain, lose_a_resume


def test_a_drain_that_is_lost_in_a_failover_is_put_back() -> None:
    with cluster_with_backup(None) as cluster:
        lose_a_drain(cluster)


def test_a_drain_that_comes_back_in_a_failover_after_its_resume_is_lifted_again() -> None:
    with cluster_with_backup(None) as cluster:
        lose_a_resume(cluster)
