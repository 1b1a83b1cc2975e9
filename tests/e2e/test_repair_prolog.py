"""The prolog of a real slurmd during a repair: jobs start when healthd, or an operator, resumes the node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import xid_line
from slurm_cluster import SlurmCluster
from test_prolog_epilog import install
from test_repair_reset import CONFIG, Site, repairs_during

pytestmark = pytest.mark.one_python


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    install(tmp_path, [])
    defaults = tmp_path / "default"
    run_dir = folder / "daemon/run"
    defaults.write_text(
        defaults.read_text().replace(f"HEALTHD_RUNTIME_DIR={tmp_path}/run", f"HEALTHD_RUNTIME_DIR={run_dir}")
    )
    conf = [f"Prolog={tmp_path}/prolog", "PrologFlags=Alloc"]
    with SlurmCluster(nodes=1, gpus=0, extra_conf=conf) as cluster:
        yield Site(cluster, "n1", folder, CONFIG)


def slow_down_sinfo(site: Site) -> None:
    """Delay sinfo from healthd's resume on, so that jobs start before healthd reads the result of the resume."""
    programs = site.folder / "programs"
    resumed, (scontrol, sinfo) = site.folder / "resumed", map(shutil.which, ("scontrol", "sinfo"))
    texts = {
        "scontrol": f'case "$*" in *UNDRAIN*) touch {resumed} ;; esac\nexec {scontrol} "$@"',
        "sinfo": f'[ ! -e {resumed} ] || sleep 5\nexec {sinfo} "$@"',
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)


def test_waiting_jobs_start_when_healthd_resumes_the_node(site: Site) -> None:
    site.set_mode("waits")
    slow_down_sinfo(site)
    with site.daemon as daemon:
        daemon.kernel_line(xid_line(119))
        repairs_during(site)
        assert daemon.verdict().startswith("drain ")
        jobs = [site.cluster.sbatch("true", "-w", "n1") for _ in range(3)]
        (site.folder / "go").touch()
        site.wait_for_stages("claimed", "taken", "succeeded")
        for job in jobs:
            fields = site.cluster.wait_job(job, "COMPLETED")
            assert fields["Restarts"] == "0", "no prolog has refused it"
        assert "DRAIN" not in site.cluster.node("n1").flags
