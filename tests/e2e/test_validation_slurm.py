"""A validation with a real Slurm: a starting job ends it, and a drained node is validated before its resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, wait_for_rounds
from slurm_cluster import SlurmCluster
from test_prolog_epilog import node_with_scripts
from trees import write
from waiting import until

OUTPUTS = REPOSITORY / "tests/data/validation"
GOOD_OUTPUT, WRONG_OUTPUT = "nccl_all_reduce_h100_13_columns.txt", "nccl_wrong_results.txt"
TOOL = """\
#!/bin/sh
# Signals its start, waits for permission, and prints a captured output of such a tool.
echo $$ >>"{folder}/runs"
while [ ! -e "{folder}/go" ]; do sleep 0.1; done
exec cat "{folder}/output"
"""


class Tool:
    """all_reduce_perf, first on `path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tools"
        self.folder.mkdir()
        program = self.folder / "all_reduce_perf"
        program.write_text(TOOL.format(folder=self.folder))
        program.chmod(0o755)
        self.set_output(GOOD_OUTPUT)

    def set_output(self, name: str) -> None:
        (self.folder / "output").write_bytes((OUTPUTS / name).read_bytes())

    def allow_end(self) -> None:
        (self.folder / "go").touch()

    def block_end(self) -> None:
        (self.folder / "go").unlink()

    @property
    def runs(self) -> list[int]:
        """The pids of its runs."""
        runs = self.folder / "runs"
        return [int(line) for line in runs.read_text().split()] if runs.exists() else []

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        return {**env, "PATH": f"{self.folder}:{env['PATH']}", "PYTHONPATH": str(REPOSITORY)}


def folder_options(directory: Path) -> list[str]:
    return ["--runtime-dir", str(directory / "run"), "--state-dir", str(directory / "state")]


def stored_validation(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "state/validation.json").read_text())
    return document


def test_starting_job_ends_validation_and_all_its_programs(tmp_path: Path) -> None:
    with node_with_scripts(tmp_path, [], ["PrologFlags=Alloc"]) as node:
        tool, settings = Tool(tmp_path), tmp_path / "healthd.toml"
        settings.write_text('profile = "none"\nbaseline_file = ""\n')
        argv = [sys.executable, "-m", "healthd", "validate", "--only", "nccl", "--config", str(settings)]
        process = subprocess.Popen(
            [*argv, "--seconds", "600", *folder_options(tmp_path)], env=tool.environment(node.cluster.env)
        )
        try:
            until(lambda: tool.runs, "its program is running")
            job, output = node.submit()
            node.cluster.wait_job(job, "COMPLETED")
            assert output.read_text() == "the job runs\n"
            assert process.wait(240) == 3, "nothing was measured"
        finally:
            process.kill()
        until(lambda: not Path(f"/proc/{tool.runs[0]}").exists(), "its program has ended")
        assert stored_validation(tmp_path)["stopped_by"] in ("a job", "a signal")
        assert "DRAIN" not in node.cluster.node("n1").flags


CONFIG = """\
profile = "none"
baseline_file = ""
[checks.exec.site]
command = ["/bin/sh", "-c", "[ ! -e {folder}/bad ] || exit 2"]
clear_after = 1
timeout_seconds = 30.0
[checks.validation]
before_resume = true
before_resume_seconds = 300.0
"""
DRAIN_REASON = "healthd: exec/critical site"


class ValidatedNode:
    """n1 with its daemon, and a site's program as its health check."""

    def __init__(self, cluster: SlurmCluster, folder: Path, tool: Tool) -> None:
        self.cluster, self.folder, self.tool = cluster, folder, tool
        off = "".join(f"[checks.{name}]\nenabled = false\n" for name in OTHER_CHECKS)
        flags = ("--mode", "act", "--node-name", "n1", "--interval", "0.5")
        config = CONFIG.format(folder=folder) + off
        env = tool.environment(cluster.env)
        self.daemon = Healthd(*flags, config=config, env=env, directory=folder, fake_nvml="")

    def drain_and_repair(self) -> None:
        """Cause a fault, wait for the drain, and end the fault."""
        (self.folder / "bad").touch()
        self.cluster.wait_state("n1", "DRAIN", "IDLE", reason=DRAIN_REASON)
        (self.folder / "bad").unlink()

    def start_validation(self) -> None:
        """Wait until the tool of a validation is running and the resume waits for it."""
        before = len(self.tool.runs)
        self.drain_and_repair()
        until(lambda: len(self.tool.runs) > before, "its program is running")
        self.daemon.wait_until(
            lambda s: "until the validation has ended" in str(s["decision"]), "the decision is to wait"
        )


def other_checks() -> list[str]:
    from healthd.agent.settings import registry

    built_in = registry.built_in_checks()
    return [name for name, check in built_in.items() if not check.per and name not in ("validation", "processes")]


OTHER_CHECKS = other_checks()


@pytest.fixture
def node(tmp_path: Path) -> Any:
    with SlurmCluster(nodes=1, gpus=0) as cluster:
        validated_node = ValidatedNode(cluster, tmp_path, Tool(tmp_path))
        with validated_node.daemon:
            yield validated_node


def test_drained_node_is_validated_once_before_resume(node: ValidatedNode) -> None:
    node.start_validation()
    wait_for_rounds(node.daemon, 3)  # checks run meanwhile
    assert "DRAIN" in node.cluster.node("n1").flags
    node.tool.allow_end()
    node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))
    assert (stored_validation(node.folder)["why"], stored_validation(node.folder)["verdict"]) == ("before_resume", "ok")
    wait_for_rounds(node.daemon, 3)
    assert len(node.tool.runs) == 1
    assert "DRAIN" not in node.cluster.node("n1").flags
    node.drain_and_repair()
    node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))
    assert len(node.tool.runs) == 2, "each drain is validated"


def test_failed_validation_keeps_drain_over_restart_until_manual_pass(node: ValidatedNode) -> None:
    node.tool.set_output(WRONG_OUTPUT)
    node.tool.allow_end()
    node.drain_and_repair()
    node.daemon.wait_until(lambda s: condition(s, "validation/failed") is not None, "the validation has failed")
    status = wait_for_rounds(node.daemon, 3)
    assert status["health"] == "degraded"
    assert node.cluster.wait_state("n1", "DRAIN").reason.startswith("healthd: ")
    node.daemon.stop()
    node.daemon.start()
    wait_for_rounds(node.daemon, 3)
    assert "DRAIN" in node.cluster.node("n1").flags
    assert len(node.tool.runs) == 1, "it is not repeated automatically"
    node.tool.set_output(GOOD_OUTPUT)
    argv = [sys.executable, "-m", "healthd", "validate", "--only", "nccl", "--config", str(node.daemon.config)]
    subprocess.run([*argv, *folder_options(node.folder)], env=node.daemon.env, timeout=400, check=True)
    node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))


def test_new_fault_ends_validation_and_another_follows(node: ValidatedNode) -> None:
    node.start_validation()
    (node.folder / "bad").touch()
    until(lambda: not Path(f"/proc/{node.tool.runs[0]}").exists(), "its program has ended")
    node.tool.allow_end()
    (node.folder / "bad").unlink()
    node.cluster.wait_state("n1", "IDLE", without=("DRAIN",))
    assert len(node.tool.runs) == 2


def test_operator_resume_ends_validation(node: ValidatedNode) -> None:
    node.start_validation()
    node.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    until(lambda: not Path(f"/proc/{node.tool.runs[0]}").exists(), "its program has ended")
    assert "DRAIN" not in node.cluster.node("n1").flags


SLURM_SCOPE = "/sys/fs/cgroup/system.slice/slurmstepd.scope"


@pytest.mark.parametrize("another_job", [False, True], ids=["alone", "beside_another_job"])
def test_epilog_of_last_job_validates_node_and_next_job_runs(tmp_path: Path, another_job: bool) -> None:
    with node_with_scripts(tmp_path, ["HEALTHD_EPILOG_SECONDS=60"], ["PrologFlags=Alloc"]) as node:
        (tmp_path / f"tree{SLURM_SCOPE}").mkdir(parents=True)
        if another_job:
            write(tmp_path / "tree", {f"{SLURM_SCOPE}/job_99/cgroup.procs": "1\n"})
        off = "".join(f"[checks.{name}]\nenabled = false\n" for name in OTHER_CHECKS)
        config = f'profile = "none"\nbaseline_file = ""\n[checks.validation]\nepilog = true\nepilog_seconds = 20\n{off}'
        flags = ("--mode", "act", "--node-name", "n1", "--interval", "60", "--root", str(tmp_path / "tree"))
        with Healthd(*flags, config=config, env=node.cluster.env, directory=tmp_path, fake_nvml=""):
            for _ in range(2):
                job, output = node.submit()
                node.cluster.wait_job(job, "COMPLETED")
                assert output.read_text() == "the job runs\n"
            node.cluster.wait_state("n1", "IDLE", without=("COMPLETING", "DRAIN"))
            document = tmp_path / "state/validation.json"
            assert document.exists() is not another_job
            if not another_job:
                assert (stored_validation(tmp_path)["why"], stored_validation(tmp_path)["stopped_by"]) == ("epilog", "")
