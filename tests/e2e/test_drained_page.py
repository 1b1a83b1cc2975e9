"""Tests of docs/drained.md, from the Reason to the repair.

Each command that can run here runs as on the page, on a node that a real healthd has drained in a real Slurm.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from healthd_daemon import REPOSITORY, Healthd, xid_line
from slurm_cluster import SlurmCluster

PAGE = (REPOSITORY / "docs/drained.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"(?ms)^```\n(.*?)^```", PAGE) for line in block.splitlines() if line]
# Commands of programs that this machine may lack, or whose log a container lacks.
NOT_RUN_HERE = ("sacct ", "journalctl ", "nvidia-bug-report.sh", "ipmitool ")
PENDING_REMAP = 'profile = "dgx-h100"\n[gpu.3]\nremap_pending = true\n'
HEALTHD_SCRIPT = """\
#!/bin/sh
# healthd as on a node, where its folders are those of the settings
command=$1; shift
case $command in
    status|repaired|ack|pause|unpause) set -- --runtime-dir "{run}" "$@";;
    events) set -- --state-dir "{state}" "$@";;
    check|record) set -- --config "{config}" --fake-nvml "{nvml}" "$@";;
    explain) set -- --config "{config}" "$@";;
esac
exec "{python}" -m healthd "$command" "$@"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2, gpus=0) as running:
        yield running


class ShellNode:
    """A node with a daemon in mode act, and a shell on it."""

    def __init__(self, cluster: SlurmCluster, name: str, folder: Path, scenario: str) -> None:
        nvml = folder / "nvml.toml"
        nvml.write_text(scenario)
        flags = ("--mode", "act", "--node-name", name, "--interval", "1")
        self.daemon = Healthd(*flags, directory=folder, env=cluster.env, fake_nvml=str(nvml), config='mode = "act"')
        self.programs = folder / "bin"
        self.programs.mkdir()
        paths = {"run": self.daemon.run_dir, "state": folder / "state", "config": self.daemon.config, "nvml": nvml}
        self._program("healthd", HEALTHD_SCRIPT.format(python=sys.executable, **paths))
        self._program("hostname", f"#!/bin/sh\necho {name}\n")
        self.folder = folder

    def _program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def types(self, command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.programs}:{self.daemon.env['PATH']}"
        return subprocess.run(
            ["bash", "-c", command],
            env={**self.daemon.env, "PATH": path, "COLUMNS": "200"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


def the(beginning: str) -> str:
    """Return the one command of the page that begins with this text."""
    (command,) = dict.fromkeys(line for line in COMMANDS if line.startswith(beginning))
    return command


def test_page_from_reason_of_lost_gpu_to_repair(cluster: SlurmCluster, tmp_path: Path) -> None:
    node = ShellNode(cluster, "n1", tmp_path, 'profile = "dgx-h100"\n')
    with node.daemon as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 0000:61:00.0: ")
        node_output = node.types(the("scontrol show node"))
        assert "Reason=healthd: gpu_xid/79" in node_output.stdout
        explanation = node.types(the("healthd explain"))
        assert explanation.returncode == 0
        assert explanation.stdout.startswith("gpu_xid/79  critical\npart: 0000:61:00.0\n")
        assert "healthd drains the node and requeues the batch jobs" in " ".join(explanation.stdout.split())
        status = node.types(the("healthd status"))
        assert (status.returncode, "gpu_xid/79 0000:61:00.0" in status.stdout) == (2, True)
        daemon.wait_until(lambda s: not s["stream"]["waiting"], "the stream is written")
        past_events = node.types(the("healthd events --since 1d"))
        assert (past_events.returncode, "gpu_xid/79" in past_events.stdout) == (0, True)
        recorded = node.types(the("healthd record"))
        assert (recorded.returncode, (tmp_path / "evidence.json.gz").exists()) == (0, True)
        assert node.types("healthd events --since 7d --json > events.jsonl").returncode == 0
        assert "gpu_xid/79" in (tmp_path / "events.jsonl").read_text()
        assert node.types(the("healthd repaired")).returncode == 0
        cluster.wait_state("n1", "IDLE", without=("DRAIN",))


def test_page_acknowledges_fault_and_node_is_resumed(cluster: SlurmCluster, tmp_path: Path) -> None:
    node = ShellNode(cluster, "n2", tmp_path, PENDING_REMAP)
    with node.daemon:
        cluster.wait_state("n2", "DRAIN", reason="healthd: gpu_row_remap/pending 0000:61:00.0: ")
        assert node.types(the("healthd ack")).returncode == 0
        cluster.wait_state("n2", "IDLE", without=("DRAIN",))
        assert node.types(the("healthd pause")).returncode == 0
        assert "paused" in node.types(the("healthd status")).stdout
        assert node.types(the("healthd unpause")).returncode == 0
        cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=broken fan, ticket 12")
        explanation = node.types(the("healthd explain")).stdout
        assert "Either a Reason set by a person or a script, or a kernel line that no rule recognises" in explanation
        assert node.types(the("scontrol update NodeName=")).returncode == 0
        cluster.wait_state("n2", "IDLE", without=("DRAIN",))


def test_every_command_of_page_is_run_or_listed_as_not_run() -> None:
    text = Path(__file__).read_text("utf-8")
    beginnings = re.findall(r'the\("([^"]+)"\)', text)
    run = [line for line in COMMANDS if line.startswith(tuple(beginnings)) or f'types("{line}")' in text]
    checks = [line for line in COMMANDS if line.startswith("healthd check")]  # as in README, which has its own test
    assert [line for line in COMMANDS if line not in run + checks and not line.startswith(NOT_RUN_HERE)] == []
