"""What several files with a cluster of their own need of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster


@pytest.fixture(scope="module")
def unused(cluster: SlurmCluster) -> Iterator[str]:
    return iter(list(cluster.names))


@pytest.fixture
def node(cluster: SlurmCluster, unused: Iterator[str]) -> Iterator[str]:
    """A node that no test has used yet. What is left of its drain afterwards would count for the fleet limit."""
    name = next(unused)
    yield name
    cluster.attempt("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")
