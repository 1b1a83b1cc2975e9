"""Test of the largest job of an NVLink domain with a real slurmctld and topology/block."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from waiting import until

from healthd.common.slurm.blocks import fits, largest_job, parse_topology

BLOCKS = "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes={sizes}\n"
NAMES = [f"n{number}" for number in range(1, 9)]
EXCLUSIVE = ("--exclusive", "-t", "5")


def drained_nodes(cluster: SlurmCluster) -> set[str]:
    lines = cluster.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
    return {line.split()[0] for line in lines if "drain" in line.lower()}


def drain(cluster: SlurmCluster, drained: Collection[str]) -> None:
    """Drain these nodes, and resume the others."""
    before = drained_nodes(cluster)
    for name in before.difference(drained):
        cluster.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    for name in set(drained).difference(before):
        cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
    # Slurm marks a resumed node with "*" until slurmd has answered, and may start no job on it.
    until(lambda: drained_nodes(cluster) == set(drained), "the nodes are drained or resumed")
    until(lambda: "*" not in cluster.run("sinfo", "-h", "-N", "-o", "%T"), "all nodes respond", 180.0)


def can_run(cluster: SlurmCluster, nodes: int) -> bool:
    """Return True if Slurm starts a job of this many nodes while no other job runs."""
    until(lambda: not re.search("ALLOC|MIX|COMP", cluster.run("sinfo", "-h", "-o", "%T").upper()), "no job runs")
    job = cluster.sbatch("true", "-N", str(nodes), *EXCLUSIVE)
    states: list[str] = []

    def is_decided() -> bool:
        fields = cluster.job(job)
        states[:] = [fields["JobState"]]
        return states[0] != "PENDING" or fields["Reason"] not in ("None", "Priority")

    until(is_decided, "Slurm has tried to start the job")
    cluster.run("scancel", job, check=False)
    until(lambda: re.search("COMPLET|CANCEL|FAIL", cluster.job(job)["JobState"]) is not None, "the job is over")
    return states[0] != "PENDING"


@pytest.mark.parametrize("version", ["24.11"])
@pytest.mark.parametrize("sizes", ["4", "3", "2,4"])
def test_largest_job_is_that_of_slurm(version: str, sizes: str) -> None:
    topology_conf = BLOCKS.format(sizes=sizes)
    directory = Path(tempfile.mkdtemp(prefix="slurm."))
    (directory / "topology.conf").write_text(topology_conf)
    with SlurmCluster(directory, nodes=8, extra_conf=["TopologyPlugin=topology/block"], version=version) as cluster:
        topology = parse_topology(cluster.run("scontrol", "show", "topology"))
        assert topology == parse_topology(topology_conf)
        assert topology is not None
        for drained in ((), ("n1",), ("n1", "n2", "n5", "n6"), ("n1", "n2", "n3", "n4", "n8")):
            drain(cluster, drained)
            available = [len(block.nodes.difference(drained)) for block in topology.blocks]
            possible = {nodes for nodes in range(1, 9) if can_run(cluster, nodes)}
            assert possible == {nodes for nodes in range(1, 9) if fits(nodes, available, topology)}, drained
            assert max(possible) == largest_job(available, topology)
