"""Tests of each dashboard query in a real Prometheus.

Over the made-up day of the pictures each panel has data, and with a real healthd with a fault no query fails.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd, xid_line
from ports import free_ports
from requirements import require_programs
from waiting import until

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import board_figure as board

# A healthy machine of this kind has no data for these panels.
EMPTY_WITHOUT_PART = {"InfiniBand errors", "Fleet limit in use", "Failing checks"}
EMPTY_WITHOUT_MONITORED_JOBS = {
    *("Slow jobs", "GPUs lost to slow jobs", "Nodes with slow jobs", "Slowdown of the slowest job"),
    "Step monitoring: drops and overhead",
}
EMPTY_WITHOUT_VALIDATION = {"Validations", "Last validation"}
EMPTY_WITHOUT_REPAIR = {"Nodes by repair step", "Repairs in progress, and failed", "Late repairs"}
EMPTY_WITHOUT_SLURM = {"Drained for", "Drain in Slurm", "Drained nodes"}
EMPTY_WITHOUT_PROBLEMS = {"Problems of healthd itself"}


@pytest.fixture(autouse=True)
def require_prometheus() -> None:
    require_programs("prometheus", "promtool", packages="prometheus")


def test_each_panel_has_data_of_made_up_day(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)
        with board.prometheus(board.history(), tmp_path, port) as url:
            for name in ("fleet", "node"):
                for panel in board.panels(name):
                    for target in panel["targets"]:
                        found = board.run_query(url, target, board.BEGIN, board.END, board.VARIABLES)
                        assert found, (panel["title"], target["expr"])


def two_clusters() -> Iterator[str]:
    """Yield the same day in two clusters with equal node names, and a third-party exporter that is down."""
    lines = list(board.history())
    for line in lines[:-1]:
        if line.startswith("#"):
            yield line
            continue
        for cluster in ("c1", "c2"):
            yield line.replace("{", f'{{cluster="{cluster}",', 1)
        if line.startswith("up{") and 'instance="gpu-001:' in line:
            yield f'up{{job="dcgm",instance="gpu-001:9400"}} 0 {line.rpartition(" ")[2]}'
    yield lines[-1]


def test_clusters_with_equal_node_names_and_other_exporters_are_separate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "BEGIN", board.END - 2 * board.STEP)
    with contextlib.ExitStack() as ports:
        port = free_ports(1, ports)
        with board.prometheus(two_clusters(), tmp_path, port) as url:
            for name in ("fleet", "node"):
                for panel in board.panels(name):
                    for target in panel["targets"]:  # none fails; one of two clusters is half of both
                        both = board.run_query(url, target, board.BEGIN, board.END, board.VARIABLES)
                        first = board.run_query(
                            url, target, board.BEGIN, board.END, {**board.VARIABLES, "cluster": "c1"}
                        )
                        assert len(first) <= len(both)
                        if panel["type"] == "stat" and not target["legendFormat"] and name == "fleet":
                            assert float(both[0]["value"][1]) == 2 * float(first[0]["value"][1]), panel["title"]


@contextlib.contextmanager
def run_prometheus(target: str, folder: Path, port: int) -> Iterator[str]:
    job = {"job_name": "healthd", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "scrape.json").write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
    argv = ["prometheus", f"--config.file={folder}/scrape.json", f"--storage.tsdb.path={folder}/tsdb"]
    with open(folder / "prometheus.log", "wb") as log:
        server = subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_real_healthd_with_fault_fills_expected_panels(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listen = f"127.0.0.1:{free_ports(1, stack)}"
        config = "interval_seconds = 1.0\n[checks.disk_space]\n"  # enabled, whatever disk this machine has
        node = stack.enter_context(Healthd("--listen", listen, "--node-name", "gpu-1", config=config))
        url = stack.enter_context(run_prometheus(listen, tmp_path, free_ports(1, stack)))
        node.kernel_line(xid_line(79))
        variables = {"cluster": ".*", "job": "healthd", "instance": listen, "node": "gpu-1"}

        def query_now(query: str) -> list[dict[str, Any]]:
            with contextlib.suppress(OSError):
                return board.run_query(url, {"expr": query, "instant": True}, 0, int(time.time()), variables)
            return []

        def has_data(panel: dict[str, Any]) -> bool:
            """Return True if the panel had data in the last 600 s. On a busy machine a scrape can time out."""
            now = int(time.time())
            found = [board.run_query(url, target, now - 600, now, variables) for target in panel["targets"]]
            return any(found)

        until(lambda: bool(query_now('healthd_condition_open{code="gpu_xid/79"} == 1')), "the fault is scraped", 120)
        until(lambda: bool(query_now("rate(healthd_gpu_pcie_replays_total[15m])")), "and scraped again", 120)
        expected = EMPTY_WITHOUT_PART | EMPTY_WITHOUT_SLURM | EMPTY_WITHOUT_PROBLEMS
        expected |= EMPTY_WITHOUT_MONITORED_JOBS | EMPTY_WITHOUT_VALIDATION | EMPTY_WITHOUT_REPAIR
        for name in ("fleet", "node"):
            for panel in board.panels(name):
                until(lambda panel=panel: has_data(panel) or panel["title"] in expected, panel["title"])
