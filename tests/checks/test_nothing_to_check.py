"""A check without anything to check reports that with a reason, and does not count as passed."""

from __future__ import annotations

import importlib
import itertools
import json
import os

import pytest
from fakes import BOOT, NOW, PLAIN_SNAPSHOT
from slurm_text import columns
from status_daemon import StatusDaemon

from healthd.agent.conditions.impairments import PROGRAMS, limits, reported_health
from healthd.agent.doctor import result as doctor_line
from healthd.agent.doctor import service, slurm, visibility
from healthd.agent.kernel_log.file import FollowedFile
from healthd.agent.reporting.status import status_json, verdict_line
from healthd.agent.scheduler import one_round
from healthd.agent.settings import layers, registry
from healthd.agent.settings.config import KernelLogConfig, Settings
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.requests import Run, RunAnswer
from healthd.agent.worker.results import make_result
from healthd.cli import doctor
from healthd.cli.main import main
from healthd.cli.terminal import HEALTH_STATUS
from healthd.common.history import History
from healthd.common.model import (
    NO_GPU,
    CheckResult,
    Finding,
    Health,
    KernelLogStatus,
    Mode,
    NothingToCheck,
    Outcome,
    Severity,
    SlurmStatus,
)
from healthd.common.slurm.commands import NODE_COLUMNS, CommandResult
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

CHECKS = {name: check for name, check in registry.built_in_checks().items() if check.has_run}
# Checks whose healthy test node has nothing to check, or which need nothing (exec, mount: one run per table).
ALWAYS = {name for name, check in CHECKS.items() if check.per}


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - ALWAYS))
def test_run_on_empty_machine_has_a_reason_or_fails(name, tmp_path):
    """A completed run without a finding would be listed as passed, although there was nothing to check."""
    check = CHECKS[name]
    try:
        results = list(check.run(Host(str(tmp_path)), check.config(), History({}, NOW, BOOT)))
    except (OSError, ValueError, RuntimeError, NvmlError):
        return
    assert any(isinstance(item, NothingToCheck | Finding) for item in results), results
    assert all(item.reason for item in results if isinstance(item, NothingToCheck))


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_run_on_complete_healthy_node_passes(name, tmp_path):
    healthy = importlib.import_module(f"tests.checks.test_{name}").healthy
    host, config = healthy(tmp_path)
    results = list(CHECKS[name].run(host, config, History({}, NOW, BOOT)))
    assert [item for item in results if isinstance(item, NothingToCheck)] == []


def make_reply(*items, error=""):
    findings = tuple(item for item in items if isinstance(item, Finding))
    nothing = tuple(item for item in items if isinstance(item, NothingToCheck))
    request, answer = Request("cpu", 10.0, Run("cpu", "", {})), RunAnswer(findings=findings, nothing_to_check=nothing)
    return Reply(request, Outcome.FAILED if error else Outcome.COMPLETED, 0.1, error, True, answer)


def test_result_keeps_reason_unless_it_has_a_finding_or_failed():
    check, fault = CHECKS["cpu"], Finding(Severity.WARNING, "cpu/governor", "", "m")

    def nothing_to_check(reply):
        return make_result(check, check.config(), reply, NOW, 0.0).nothing_to_check

    assert nothing_to_check(make_reply(NO_GPU)) == NO_GPU
    assert nothing_to_check(make_reply()) is None
    assert nothing_to_check(make_reply(NO_GPU, fault)) is None
    assert nothing_to_check(make_reply(NO_GPU, error="broken")) is None


def test_checks_without_result_are_counted_by_reason():
    every = registry.built_in_checks()
    loaded = resolve_settings(
        {"checks": {"cpu": {"enabled": False}}}, "healthd.toml", {}, every, layers.layers_without_baseline
    )
    without_result = registry.without_result(every, loaded)
    assert (without_result["off"], without_result["not_set_up"], without_result["idle"]) == (
        ["cpu"],
        ["exec", "match", "mount"],
        ["gpu_processes"],
    )
    assert without_result["kernel_log_only"] == [name for name, check in every.items() if not check.has_run]
    ran = [name for name in loaded.checks if every[name.check].has_run and not every[name.check].when]
    assert len(ran) + sum(map(len, without_result.values())) == len(every)


# --- requirements of healthd


CASES = list(itertools.product(Mode, (True, False), (True, False)))


def no_program(_name):
    return None


def some_program(name):
    return f"/usr/bin/{name}"


def slurm_answers(argv):
    return CommandResult(1, b"", "Unable to contact slurm controller")


@pytest.mark.parametrize(("mode", "log_readable", "slurm_installed"), CASES)
def test_status_check_and_doctor_agree_on_missing_requirements(mode, log_readable, slurm_installed, tmp_path):
    """Status and check printed "healthy" with exit status 0 although the doctor exited with 2."""
    log = tmp_path / "kmsg"
    if log_readable:
        log.write_text("")
    missing = "" if slurm_installed else "no scontrol, sinfo, squeue on PATH"
    snapshot = PLAIN_SNAPSHOT
    snapshot = type(snapshot)(
        **{
            **{name: getattr(snapshot, name) for name in snapshot.__slots__},
            "mode": mode.value,
            "kernel_log": KernelLogStatus(str(log), log_readable, problem="" if log_readable else "no such file"),
            "slurm": SlurmStatus(problem=missing if mode is not Mode.OBSERVE else ""),
        }
    )
    settings = Settings(mode=mode, kernel_log=KernelLogConfig(source=str(log), trust_file=True))
    status = HEALTH_STATUS[status_json(snapshot)["health"]]
    found = one_round.RoundResult(
        "n1", NOW, snapshot.verdict, (), (), BOOT, None, limits=limits(mode, str(log), True, "", missing)
    )
    check = HEALTH_STATUS[one_round.round_json(found)["health"]]
    states = {line.state for line in service.kernel_log(settings)}
    if not slurm_installed:
        states |= {line.state for line in slurm.lines(settings, slurm_answers, no_program)}
    fails = doctor_line.State.FAILED in states
    needed = not log_readable or (not slurm_installed and mode is not Mode.OBSERVE)
    assert fails == needed
    assert (status != 0) == needed
    # Without a daemon, `check` reads the log itself, and reports "unknown" if it cannot.
    assert (check != 0) == (not slurm_installed and mode is not Mode.OBSERVE)
    assert verdict_line(snapshot, False, NOW).startswith("ok "), "a problem of healthd itself never refuses a job"


NO_CONTROLLER = 'echo "slurm_load_node: Unable to contact slurm controller (connect failure)" >&2; exit 1'


def slurm_programs(folder, sinfo):
    """Create Slurm's programs in a folder. `sinfo`: the script of that program."""
    folder.mkdir()
    for name in PROGRAMS:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{sinfo if name == 'sinfo' else 'exit 1'}\n")
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def table_of(*rows):
    return b"".join(columns(row, NODE_COLUMNS) for row in rows)


IDLE_ROW = ("gpu", "1", "idle", "Unknown", "Unknown", "none", "gpu:8")
BAD_ROW = ("night", "1", "???", "", "", "", "")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (None, "Unable to contact slurm controller"),
        (b"", 'Slurm has no node "n1" in any partition'),
        (table_of(IDLE_ROW, BAD_ROW), "1 row from sinfo could not be read"),
        (table_of(IDLE_ROW), ""),
    ],
    ids=["away", "unknown node", "unreadable row", "available"],
)
@pytest.mark.parametrize("mode", Mode)
def test_check_reports_unavailable_slurm_like_status_and_doctor(mode, table, problem, tmp_path, monkeypatch, capsys):
    (tmp_path / "table").write_bytes(table or b"")
    script = NO_CONTROLLER if table is None else f"exec cat {tmp_path}/table"
    monkeypatch.setenv("PATH", slurm_programs(tmp_path / "bin", script))
    log = tmp_path / "kmsg"
    log.write_text("")
    config = tmp_path / "healthd.toml"
    config.write_text(f'mode = "{mode.value}"\nnode_name = "n1"\n[kernel_log]\nsource = "{log}"\ntrust_file = true\n')
    main(["check", "--json", "--config", str(config), "cpu"])
    found = json.loads(capsys.readouterr().out)["limits"]
    expected = bool(problem) and mode is not Mode.OBSERVE
    assert [problem in sentence for sentence in found] == [True] * expected
    (line,) = (
        each
        for each in slurm.lines(Settings(mode=mode, node_name="n1"), run_slurm_command)
        if each.topic == "Slurm node"
    )
    assert (line.state is not doctor_line.State.OK) == bool(problem)


def run_slurm_command(argv):
    """Answer the doctor's commands: sinfo runs, slurmctld responds to the others."""
    if argv[0] == "sinfo":
        return slurm.run(argv)
    return CommandResult(0, b"AuthType = auth/slurm\n")


def test_check_with_unreadable_kernel_log_is_not_healthy(tmp_path):
    import time

    from healthd.agent.worker.client import WorkerClient
    from healthd.agent.worker.process import worker_setup

    every = {"gpu_xid": registry.built_in_checks()["gpu_xid"]}
    loaded = resolve_settings({"root": str(tmp_path)}, "healthd.toml", {}, every, layers.layers_without_baseline)

    def open_unreadable():
        raise PermissionError(13, "Permission denied", "/dev/kmsg")

    runner = WorkerClient(worker_setup(loaded.settings), "", time.monotonic)
    try:
        document = one_round.round_json(one_round.run_round(loaded, every, runner, open_unreadable))
    finally:
        runner.close(1.0)
    assert HEALTH_STATUS[document["health"]] != 0


@pytest.mark.parametrize("health", Health)
def test_limits_change_only_healthy(health):
    assert reported_health(health, ()) is health
    assert reported_health(health, ("no log",)) is (Health.WARNING if health is Health.HEALTHY else health)


def test_kernel_log_that_is_off_is_no_limit():
    assert limits(Mode.ACT, "off", False, "off", "") == ()


def test_doctor_runs_the_checks_of_a_round():
    """The doctor counted checks that run only on a drained, idle node, so its number differed from that of status."""
    every = registry.built_in_checks()
    loaded = resolve_settings({}, "healthd.toml", {}, every, layers.layers_without_baseline)
    round_runs = [run for run in loaded.checks if not every[run.check].when]
    assert len(round_runs) < len(loaded.checks)
    assert list(doctor.round_settings(loaded, every).checks) == round_runs


def test_doctor_counts_checks_like_status():
    results = [CheckResult(name, "", Outcome.COMPLETED, 0.0, 0.0) for name in ("cpu", "clock", "gpu_access")]
    results += [CheckResult("gpu_ecc", "", Outcome.COMPLETED, 0.0, 0.0, nothing_to_check=NO_GPU)]
    (line,) = (
        line for line in visibility.lines(results, visibility.Environment(False, False, True)) if line.topic == "checks"
    )
    assert line.message.startswith("3 of 4 can check this node, 1 has nothing")


def run_check(tmp_path, capsys, mode="observe", log="off"):
    file = tmp_path / "healthd.toml"
    file.write_text(
        f'mode = "{mode}"\nruntime_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
        f'[kernel_log]\nsource = "{log}"\n'
    )
    status = main(["check", "--json", "--config", str(file), "--fake-nvml", "dgx-h100", "gpu_count"])
    return status, json.loads(capsys.readouterr().out)["limits"]


def test_check_warns_about_missing_kernel_log_file(tmp_path, capsys):
    """Check printed "healthy" with exit status 0, although status warned and the doctor exited with 2."""
    status, (limit,) = run_check(tmp_path, capsys, log=f"{tmp_path}/gone.log")
    assert status == HEALTH_STATUS["warning"]
    assert f"{tmp_path}/gone.log" in limit
    (tmp_path / "there.log").touch()
    assert run_check(tmp_path, capsys, log=f"{tmp_path}/there.log") == (0, [])


@pytest.mark.parametrize("daemon_mode", ["drain", "observe"])
def test_check_queries_slurmctld_only_without_a_daemon_of_its_mode(tmp_path, capsys, monkeypatch, daemon_mode):
    monkeypatch.setattr("healthd.agent.conditions.impairments.missing_programs", lambda _: [])
    monkeypatch.setattr("healthd.agent.slurm.blocking.node_problem", lambda *_: "sinfo: asked by check")
    (tmp_path / "run").mkdir(mode=0o755)
    with StatusDaemon(tmp_path / "run", mode=daemon_mode, limits=["sinfo: asked by the daemon"]):
        status, (limit,) = run_check(tmp_path, capsys, mode="drain")
    source = "the daemon" if daemon_mode == "drain" else "check"
    assert (status, f"asked by {source}" in limit) == (1, True)


def test_unreadable_log_file_is_not_reported_as_missing(tmp_path, monkeypatch):
    log = tmp_path / "kern.log"
    log.touch()
    real = os.open

    def refused(path, *flags, **more):
        if path == str(log):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *flags, **more)

    monkeypatch.setattr(os, "open", refused)
    (line,) = service.kernel_log(Settings(kernel_log=KernelLogConfig(source=str(log), trust_file=True)))
    assert line.state is doctor_line.State.FAILED
    assert "cannot be read: Permission denied" in line.message
    followed = FollowedFile(str(log), None)
    assert followed.missing.endswith("cannot be read: Permission denied")
    log.unlink()
    monkeypatch.undo()
    followed.read()
    assert followed.missing.endswith("does not exist yet")
    followed.close()
