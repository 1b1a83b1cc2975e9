"""What several files need, most of them of the cluster that each has for itself."""

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
    """A test that fails shows what its cluster's slurmctld said last: one that fails by chance does so once."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("slurmctld.log", cluster.log("slurmctld")[-6000:]))
    return report


@pytest.fixture(scope="module")
def unused(cluster: SlurmCluster) -> Iterator[str]:
    return iter(list(cluster.names))


@pytest.fixture
def node(cluster: SlurmCluster, unused: Iterator[str]) -> Iterator[str]:
    """A node that no test has used yet. What is left of its drain afterwards would count for the fleet limit."""
    name = next(unused)
    yield name
    cluster.attempt("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for a socket's path."""
    path = Path(tempfile.mkdtemp(prefix="healthd."))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """What the node is made of, well."""
    machine = Machine(tmp_path)
    machine.now()
    return machine
