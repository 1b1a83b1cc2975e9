"""A backup slurmctld takes over before a change by healthd was saved, on newer versions of Slurm."""

from __future__ import annotations

import pytest
import slurm_versions
from failover import check_lost_drain, check_lost_resume, cluster_with_backup


@pytest.mark.parametrize("version", slurm_versions.DEBIAN)
def test_drain_lost_in_failover_is_restored(version: str) -> None:
    with cluster_with_backup(version) as cluster:
        check_lost_drain(cluster)


@pytest.mark.parametrize("version", slurm_versions.DEBIAN)
def test_drain_restored_by_failover_after_resume_is_lifted(version: str) -> None:
    with cluster_with_backup(version) as cluster:
        check_lost_resume(cluster)
