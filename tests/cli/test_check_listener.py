"""Tests of `healthd check NAME` for checks that only read the kernel log: the result comes from the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from status_daemon import StatusDaemon

from healthd.agent.settings import registry
from healthd.cli import check as cli_check
from healthd.cli import flags
from healthd.cli.main import main
from tests.agent.reporting.test_next_steps import condition

ROOT = Path(__file__).parents[2]
KERNEL_LOG_CHECKS = sorted(
    name for name, check in registry.built_in_checks().items() if check.reads_kernel_log and not check.has_run
)
HEALTHY_ROUND = {"health": "healthy", "unknown": [], "conditions": [], "results": []}


def run_check(folder: Path, *names: str) -> tuple[int, dict[str, Any]]:
    settings = folder / "healthd.toml"
    (folder / "log").touch()
    settings.write_text(f'runtime_dir = "{folder}"\nstate_dir = "{folder}"\n[kernel_log]\nsource = "{folder}/log"\n')
    argv = [sys.executable, "-m", "healthd", "check", *names, "--json", "--config", str(settings)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def open_condition(severity: str = "critical", **changes: Any) -> dict[str, Any]:
    return condition(severity=severity, **changes)


def merged(*conditions: dict[str, Any], health: str = "healthy", problem: str = "") -> dict[str, Any]:
    daemon_report = {
        "checks": ["gpu_xid"],
        "since": 1.0,
        "kernel_log": {},
        "conditions": [*conditions],
        "problem": problem,
    }
    return cli_check.merge_daemon_report({**HEALTHY_ROUND, "health": health}, daemon_report)


def test_some_built_in_checks_only_read_kernel_log():
    assert {"gpu_xid", "sxid", "kernel", "mlx5", "filesystem"} <= set(KERNEL_LOG_CHECKS)


def test_check_is_unknown_without_daemon(tmp_path):
    status, document = run_check(tmp_path, *KERNEL_LOG_CHECKS)
    assert (status, document["health"], document["from_daemon"]["checks"]) == (3, "unknown", KERNEL_LOG_CHECKS)
    assert [text.split()[0] for text in document["unknown"]] == list(KERNEL_LOG_CHECKS)
    assert all(f"{tmp_path}/healthd.sock" in text for text in document["unknown"])


def test_check_reports_only_its_own_conditions_of_daemon(tmp_path):
    with StatusDaemon(
        tmp_path, conditions=[open_condition(), open_condition(check="mount", code="mount/missing")]
    ) as daemon:
        status, document = run_check(tmp_path, "gpu_xid")
        assert (status, [c["code"] for c in document["from_daemon"]["conditions"]]) == (2, ["gpu_xid/79"])
        status, document = run_check(tmp_path, "sxid")
        assert (status, document["health"], document["from_daemon"]["conditions"]) == (0, "healthy", [])
        daemon.document["kernel_log"] |= {"alive": False, "problem": "Operation not permitted"}
        status, document = run_check(tmp_path, "sxid")
        assert status == 3
        assert document["from_daemon"]["problem"].endswith("no kernel log: Operation not permitted")


def test_check_with_run_does_not_query_daemon(tmp_path):
    with StatusDaemon(tmp_path, conditions=[open_condition()]) as daemon:
        _, document = run_check(tmp_path, "clock")
        assert ("from_daemon" in document, daemon.requests) == (False, 0)


@pytest.mark.parametrize(
    ("conditions", "health"),
    [
        ([], "healthy"),
        ([open_condition("info")], "healthy"),
        ([open_condition("warning")], "warning"),
        ([open_condition("degraded")], "degraded"),
        ([open_condition("degraded"), open_condition("critical")], "unhealthy"),
        ([open_condition("critical", state="acknowledged")], "warning"),
        ([open_condition("critical", observed=True)], "warning"),
    ],
)
def test_health_follows_conditions_of_daemon(conditions, health):
    assert merged(*conditions)["health"] == health


def test_health_is_worst_of_round_and_daemon_report():
    assert merged(open_condition("warning"), health="degraded")["health"] == "degraded"
    assert merged(health="warning", problem="no daemon")["health"] == "unknown"
    assert merged(health="unhealthy", problem="no daemon")["health"] == "unhealthy"


def test_unreadable_daemon_answer_is_reported_as_problem(tmp_path):
    with StatusDaemon(tmp_path) as daemon:
        daemon.document = {"conditions": 7}
        report = cli_check.query_daemon(["gpu_xid"], str(tmp_path))
    assert "different version" in report["problem"]


@pytest.mark.parametrize("words", [["status", "--json"], ["check", "gpu_xid", "--json"]])
def test_settings_error_still_queries_daemon_and_is_noted(tmp_path, capsys, monkeypatch, words):
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(flags.runtime_dir, "__defaults__", (str(tmp_path),))
    with StatusDaemon(tmp_path) as daemon:
        assert main([*words, "--config", str(file)]) < 3
    assert daemon.requests == 1
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("healthd: note: ")
    assert f"{file}: not TOML: " in note
    assert note.endswith(f"; using runtime_dir {tmp_path}")


def test_missing_settings_file_and_wrong_runtime_dir_exit_64(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    assert main(["status", "--config", str(file)]) == 64
    file.write_text("runtime_dir = 7\n")
    assert main(["status", "--config", str(file)]) == 64
    missing, wrong_type = capsys.readouterr().err.splitlines()
    assert missing.endswith("no such file")
    assert f"{file}: runtime_dir: " in wrong_type
