"""Tests of the problems of healthd: each is a sentence with the first command to solve it."""

from __future__ import annotations

import shlex
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from healthd.agent.daemon import Daemon
from healthd.agent.hooks.result import HookResult
from healthd.agent.reporting.status import Problem
from healthd.agent.settings.config import Settings
from healthd.common import guard
from healthd.common.model import KernelLogStatus, SlurmStatus, StreamStatus
from healthd.host import shortage


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a daemon started by systemd, without recorded shortages."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setattr(shortage, "_last", {})


def problems_with(**changes: Any) -> tuple[Problem, ...]:
    """Return the problems of a daemon whose parts have these values."""
    parts: dict[str, Any] = {
        "settings_file": "/etc/healthd/healthd.toml",
        "reload_problem": "",
        "files_problem": "",
        "metrics_problems": (),
        "web_problem": "",
        "textfile_problem": "",
        "save_failed": False,
        "verdict_problem": "",
        "copy_problem": "",
        "stream": StreamStatus(),
        "lost_events": 0,
        "kernel_log": KernelLogStatus("kmsg", True),
        "slurm": SlurmStatus(),
        "hooks_problem": "",
        "hook_results": {},
        "evidence_problem": "",
        "repair_problem": "",
        **changes,
    }
    namespace = SimpleNamespace
    daemon = namespace(
        settings=Settings(runtime_dir="/run/healthd", state_dir="/var/lib/healthd"),
        settings_file=parts["settings_file"],
        reload_problem=parts["reload_problem"],
        publisher=namespace(**{name: parts[name] for name in ("metrics_problems", "web_problem", "verdict_problem")}),
        replies=namespace(
            files=namespace(problem=parts["files_problem"]),
            textfile=namespace(problem=parts["textfile_problem"]),
            ledger_copy=namespace(problem=parts["copy_problem"]),
            delivery=namespace(status=parts["stream"]),
        ),
        store=namespace(
            save_failed=parts["save_failed"],
            ledger=namespace(outbox=namespace(dropped=parts["lost_events"]), evidence=None),
        ),
        kernel_events=namespace(listener=namespace(status=parts["kernel_log"])),
        controller=namespace(status=parts["slurm"]),
        failslow=namespace(problem=""),
        gpu_events=namespace(problem=""),
        hooks=namespace(problem=parts["hooks_problem"], results=parts["hook_results"]),
        before_resume=namespace(problem=""),
        repair=namespace(program=namespace(problem=parts["repair_problem"])),
        evidence=namespace(problem=lambda case: parts["evidence_problem"]),
        now=time.time,
    )
    return Daemon.problems(cast(Daemon, daemon))


def test_no_problem_by_default():
    assert problems_with() == ()


def test_failed_reload_suggests_check_and_reload():
    (problem,) = problems_with(reload_problem="x.toml: mode: is wrong", settings_file="/etc/a b.toml")
    assert problem.sentence == "the settings were not reloaded: x.toml: mode: is wrong"
    assert problem.command == "healthd config check '/etc/a b.toml' && systemctl reload healthd"


def test_each_problem_has_command_in_urgency_order():
    shortage.record(shortage.THREADS)
    guard.drop(guard.SLURM, ValueError("no number"))
    problems = problems_with(
        files_problem="healthd's files were removed",
        reload_problem="no",
        metrics_problems=("no metrics page: 127.0.0.1:9478: Address already in use",),
        web_problem="metrics page: node.crt: the certificate expires 2126-10-29 13:08 UTC",
        textfile_problem="no metrics in /x/a.prom: No space left on device",
        hooks_problem="the request is not served",
        hook_results={"on_drain": HookResult(1, "exit status 1"), "on_resume": HookResult(4)},
        save_failed=True,
        copy_problem="No space left on device",
        stream=StreamStatus(waiting=3, problem="No space left on device"),
        lost_events=4,
        kernel_log=KernelLogStatus("kmsg", False, problem="Operation not permitted"),
        slurm=SlurmStatus(problem="slurmctld does not answer"),
        repair_problem="the request is not served",
        evidence_problem="/var/lib/healthd/evidence: No space left on device",
        verdict_problem="/run/healthd/verdict: the verdict cannot be written: Input/output error",
    )
    summary = [(problem.sentence.split(":")[0], (shlex.split(problem.command) or [""])[0]) for problem in problems]
    assert summary == [
        ("healthd's files were removed", "systemctl"),
        ("the settings were not reloaded", "healthd"),
        ("slurm", "scontrol"),
        ("/run/healthd", "ls"),
        ("/run/healthd/verdict", "ls"),
        ("/var/lib/healthd", "ls"),
        ("/var/lib/healthd", "ls"),
        ("4 stream events were lost", ""),
        ("kernel log", "ls"),
        ("repair", "systemctl"),
        ("evidence", "systemctl"),
        ("no metrics page", "ss"),
        ("metrics page", "healthd"),
        ("no metrics in /x/a.prom", "healthd"),
        ("hooks do not run", "systemctl"),
        ("hook on_drain failed", "healthd"),
        ("healthd could not get threads once since it started; skipped work is retried", "systemctl"),
        ("slurm", "journalctl"),
    ]


def test_disabled_kernel_log_suggests_config_show():
    (problem,) = problems_with(kernel_log=KernelLogStatus("off", False, problem="disabled"))
    assert problem == ("kernel log: disabled", "healthd config show | grep kernel_log")


@pytest.mark.parametrize(
    ("log", "next_command"),
    [
        (KernelLogStatus("/var/log/kern.log", True, problem="only observed", observed=True), "healthd config show"),
        (KernelLogStatus("/var/log/kern.log", False, problem="not there", observed=True), "ls -l /var/log/kern.log"),
        (KernelLogStatus("journal", False, problem="no journal"), "journalctl -k -n 1"),
        (KernelLogStatus("kmsg", False, problem="Operation not permitted"), "ls -l /dev/kmsg; dmesg"),
    ],
)
def test_kernel_log_problem_suggests_command_for_source(log, next_command):
    (problem,) = problems_with(kernel_log=log)
    assert problem.command.partition(" |")[0] == next_command
