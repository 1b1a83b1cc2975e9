"""Jobs that Slurm reports on a node right before a repair step: also suspended ones, but no job of another node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, start_job
from waiting import until

from healthd.common.slurm import commands
from healthd.common.slurm.output import parse_job_numbers

pytestmark = pytest.mark.one_python


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as running:
        yield running


def jobs(cluster: SlurmCluster, node: str) -> list[str]:
    return parse_job_numbers(cluster.run(*commands.jobs_on_node(node)))


def test_running_and_suspended_job_are_on_their_node_only(cluster: SlurmCluster) -> None:
    first, second = cluster.names
    assert jobs(cluster, first) == []
    job = start_job(cluster, first)
    assert (jobs(cluster, first), jobs(cluster, second)) == ([job], [])
    cluster.run("scontrol", "suspend", job)
    cluster.wait_job(job, "SUSPENDED")
    assert jobs(cluster, first) == [job]
    cluster.run("scontrol", "resume", job)
    cluster.run("scancel", job)
    until(lambda: jobs(cluster, first) == [], "the job has left its node")
