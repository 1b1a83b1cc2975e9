"""Fixtures that several files use, most of them for the cluster of each file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from machine import Machine
from slurm_cluster import SlurmCluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of slurmctld's log to the report of a failed test: a rare failure may not happen again."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("slurmctld.log", cluster.log("slurmctld")[-6000:]))
    return report


@pytest.fixture(scope="module")
def unused_nodes(cluster: SlurmCluster) -> Iterator[str]:
    return iter(list(cluster.names))


@pytest.fixture
def node(cluster: SlurmCluster, unused_nodes: Iterator[str]) -> Iterator[str]:
    """Yield a node that no test has used yet. Its drain is removed afterwards, because it would count for the fleet
    limit."""
    name = next(unused_nodes)
    yield name
    cluster.attempt("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Create a directory whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="healthd."))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Create the files of a healthy node."""
    machine = Machine(tmp_path)
    machine.now()
    return machine
