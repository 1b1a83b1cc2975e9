"""A backup slurmctld takes over before a change by healthd was saved, on newer versions of Slurm."""

from __future__ import annotations

import pytest
import slurm_versions
from failover import cluster_with_backup, lose_a_drain, lose_a_resume


@pytest.mark.parametrize("version", slurm_versions.DEBIAN)
def test_a_drain_that_is_lost_in_a_failover_is_put_back(version: str) -> None:
    with cluster_with_backup(version) as cluster:
        lose_a_drain(cluster)


@pytest.mark.parametrize("version", slurm_versions.DEBIAN)
def test_a_drain_that_comes_back_in_a_failover_after_its_resume_is_lifted_again(version: str) -> None:
    with cluster_with_backup(version) as cluster:
        lose_a_resume(cluster)
