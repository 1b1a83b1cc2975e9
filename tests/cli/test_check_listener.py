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
LISTENERS = sorted(
    name for name, check in registry.built_in_checks().items() if check.reads_kernel_log and not check.has_run
)
ROUND = {"health": "healthy", "unknown": [], "conditions": [], "results": []}


def check(folder: Path, *names: str) -> tuple[int, dict[str, Any]]:
    settings = folder / "healthd.toml"
    (folder / "log").touch()
    settings.write_text(f'runtime_dir = "{folder}"\nstate_dir = "{folder}"\n[kernel_log]\nsource = "{folder}/log"\n')
    argv = [sys.executable, "-m", "healthd", "check", *names, "--json", "--config", str(settings)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def stands(severity: str = "critical", **changes: Any) -> dict[str, Any]:
    return condition(severity=severity, **changes)


def together(*conditions: dict[str, Any], health: str = "healthy", problem: str = "") -> dict[str, Any]:
    heard = {"checks": ["gpu_xid"], "since": 1.0, "kernel_log": {}, "conditions": [*conditions], "problem": problem}
    return cli_check.merge_daemon_report({**ROUND, "health": health}, heard)


def test_there_are_checks_that_only_listen():
    assert {"gpu_xid", "sxid", "kernel", "mlx5", "filesystem"} <= set(LISTENERS)


def test_without_a_daemon_each_of_them_is_unknown(tmp_path):
    status, document = check(tmp_path, *LISTENERS)
    assert (status, document["health"], document["from_daemon"]["checks"]) == (3, "unknown", LISTENERS)
    assert document["unknown"] == [
        f"{name} only reads the kernel log: healthd is not running (no {tmp_path}/healthd.sock)" for name in LISTENERS
    ]


def test_the_daemons_conditions_of_that_check_and_no_others_count(tmp_path):
    with StatusDaemon(tmp_path, conditions=[stands(), stands(check="mount", code="mount/missing")]) as daemon:
        status, document = check(tmp_path, "gpu_xid")
        assert (status, [c["code"] for c in document["from_daemon"]["conditions"]]) == (2, ["gpu_xid/79"])
        status, document = check(tmp_path, "sxid")
        assert (status, document["health"], document["from_daemon"]["conditions"]) == (0, "healthy", [])
        daemon.document["kernel_log"] |= {"alive": False, "problem": "Operation not permitted"}
        status, document = check(tmp_path, "sxid")
        assert (status, document["from_daemon"]["problem"]) == (
            3, "the daemon reads no kernel log: Operation not permitted"
        )  # fmt: skip


def test_a_round_of_all_checks_asks_nobody(tmp_path):
    with StatusDaemon(tmp_path, conditions=[stands()]) as daemon:
        _, document = check(tmp_path, "clock")
        assert ("from_daemon" in document, daemon.asked) == (False, 0)


@pytest.mark.parametrize(
    ("conditions", "health"),
    [
        ([], "healthy"),
        ([stands("info")], "healthy"),
        ([stands("warning")], "warning"),
        ([stands("degraded")], "degraded"),
        ([stands("degraded"), stands("critical")], "unhealthy"),
        ([stands("critical", state="acknowledged")], "warning"),
        ([stands("critical", observed=True)], "warning"),
    ],
)
def test_health_follows_what_the_daemon_has_heard_as_its_own_does(conditions, health):
    assert together(*conditions)["health"] == health


def test_the_worse_of_what_was_looked_at_and_what_was_heard_counts():
    assert together(stands("warning"), health="degraded")["health"] == "degraded"
    assert together(health="warning", problem="no daemon")["health"] == "unknown"
    assert together(health="unhealthy", problem="no daemon")["health"] == "unhealthy"


def test_an_answer_of_another_version_is_trouble_and_no_traceback(tmp_path):
    with StatusDaemon(tmp_path) as daemon:
        daemon.document = {"conditions": 7}
        heard = cli_check.query_daemon(["gpu_xid"], str(tmp_path))
    assert heard["problem"] == "the daemon has another version, and this version cannot read its answer"


@pytest.mark.parametrize("words", [["status", "--json"], ["check", "gpu_xid", "--json"]])
def test_a_typo_in_the_settings_takes_no_daemon_away_and_is_told(tmp_path, capsys, monkeypatch, words):
    file = tmp_path / "healthd.toml"
    file.write_text("mode = \n")
    monkeypatch.setattr(flags.runtime_dir, "__defaults__", (str(tmp_path),))
    with StatusDaemon(tmp_path) as daemon:
        assert main([*words, "--config", str(file)]) < 3
    assert daemon.asked == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"healthd: note: the settings have an error ({file}: not TOML: ")
    assert told.endswith(f"; assuming runtime_dir {tmp_path}")


def test_a_file_that_is_not_there_and_a_wrong_runtime_dir_are_wrong_use(tmp_path, capsys):
    file = tmp_path / "healthd.toml"
    assert main(["status", "--config", str(file)]) == 64
    file.write_text("runtime_dir = 7\n")
    assert main(["status", "--config", str(file)]) == 64
    missing, wrong = capsys.readouterr().err.splitlines()
    assert missing.endswith("no such file")
    assert "runtime_dir: must be text" in wrong
