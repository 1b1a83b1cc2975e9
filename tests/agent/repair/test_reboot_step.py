"""The step "reboot": which command reboots the node, and the meaning of each answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from waiting import until

from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.reboot_step import prepare_reboot, slurm_reboot_problem
from healthd.agent.repair.step_result import StepResult, run_command, take_prepared
from healthd.common.model import RepairStep
from healthd.common.slurm.commands import Command, CommandResult

REASON = "healthd: gpu_xid/119 0000:1b:00.0: GSP timeout, 'a' \"b\" (repair: reboot)"
REQUEST = Request("20261129T120000Z-reboot", "/var/lib/healthd", "n1", "boot", RepairStep.REBOOT, REASON)
CONFIG = """\
Configuration data as of 2026-11-29T12:00:00
RebootProgram           = {program}
ResumeProgram           = (null)
ReturnToService         = {returns}
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = {version}
"""


def config(program: str = "/sbin/reboot", returns: str = "0", version: str = "24.11.5") -> CommandResult:
    return CommandResult(0, CONFIG.format(program=program, returns=returns, version=version).encode())


class Answers:
    """Fake commands: `scontrol show config` prints `config`, and the reboot ends with `reboot`."""

    def __init__(self, config: CommandResult, reboot: CommandResult) -> None:
        self.config, self.reboot = config, reboot
        self.changes: list[tuple[str, ...]] = []

    def __call__(self, command: Command) -> CommandResult:
        assert command.deadline_seconds == REQUEST.command_timeout_seconds
        if command.argv == ("scontrol", "show", "config"):
            assert not command.changes
            return self.config
        assert command.changes
        self.changes.append(command.argv)
        return self.reboot


def take(config: CommandResult, status: int | None = 0, stderr: str = "") -> tuple[StepResult, list[tuple[str, ...]]]:
    answers = Answers(config, CommandResult(status, b"", stderr))
    return take_reboot(REQUEST, answers), answers.changes


def take_reboot(request: Request, answers: Answers, problem: str = "") -> StepResult:
    """Prepare the reboot, and take it. The check between them returns `problem`."""
    step = prepare_reboot(request, answers)
    assert answers.changes == []
    if isinstance(step, StepResult):
        return step
    return take_prepared(step, request.command_timeout_seconds, lambda: problem, answers)


def test_problem_right_before_the_command_prevents_it() -> None:
    answers = Answers(config(), CommandResult(0))
    assert take_reboot(REQUEST, answers, "an operator changed the state") == StepResult(
        Outcome.REFUSED, "an operator changed the state"
    )
    assert answers.changes == []


def test_slurm_reboots_with_the_drains_reason_and_without_asap() -> None:
    result, changes = take(config())
    assert result == StepResult(None)
    assert changes == [("scontrol", "reboot", f"reason={REASON}", "n1")]


def test_systemd_reboots_without_reboot_program() -> None:
    result, changes = take(config("(null)", returns="2", version="22.05.8"))
    assert result == StepResult(None)
    assert changes == [("systemctl", "reboot", "--check-inhibitors=yes")]


@pytest.mark.parametrize(
    ("status", "stderr", "outcome"),
    [
        (0, "Skipping reboot of nodes n1 due to current node state.\n", Outcome.REFUSED),
        (1, "scontrol: error: RebootProgram isn't defined\nscontrol_reboot_nodes error: error\n", Outcome.REFUSED),
        (1, "scontrol_reboot_nodes error: Invalid node name specified\n", Outcome.REFUSED),
        (1, "scontrol_reboot_nodes error: Access/permission denied\n", Outcome.REFUSED),
        (1, "slurm_load: Unable to contact slurm controller (connect failure)\n", Outcome.REFUSED),
        (127, "scontrol: No such file or directory", Outcome.REFUSED),
        (1, "scontrol_reboot_nodes error: Socket timed out on send/recv operation\n", None),
        (None, "", None),
    ],
)
def test_slurm_answers_that_exclude_a_reboot_are_refusals(status: int | None, stderr: str, outcome: object) -> None:
    result, changes = take(config(), status, stderr)
    assert (result.outcome, bool(result.problem), len(changes)) == (outcome, True, 1)


@pytest.mark.parametrize(
    ("status", "stderr", "outcome"),
    [
        (1, 'Operation inhibited by "dnf" (PID 7 "dnf", user root), reason is "upgrade".\n', Outcome.REFUSED),
        (1, "systemctl: unrecognized option '--check-inhibitors=yes'\n", Outcome.IMPOSSIBLE),
        (1, "System has not been booted with systemd as init system (PID 1). Can't operate.\n", Outcome.IMPOSSIBLE),
        (127, "systemctl: No such file or directory", Outcome.IMPOSSIBLE),
        (1, "Failed to start reboot.target: Transaction is destructive.\n", Outcome.IMPOSSIBLE),
        (1, "Failed to connect to bus: No such file or directory\n", Outcome.IMPOSSIBLE),
        (1, "", Outcome.IMPOSSIBLE),
        (1, "Failed to reboot system via logind: Connection timed out\n", None),
        (1, "Call to Reboot failed: Transport endpoint is not connected\n", None),
        (None, "", None),
    ],
)
def test_systemd_answers(status: int | None, stderr: str, outcome: object) -> None:
    result, changes = take(config("(null)"), status, stderr)
    assert (result.outcome, bool(result.problem), len(changes)) == (outcome, True, 1)


@pytest.mark.parametrize(
    "answer",
    [
        CommandResult(None),
        CommandResult(1, b"", "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"),
        CommandResult(127, b"", "scontrol: No such file or directory"),
        CommandResult(0),
        CommandResult(0, b"a new format"),
        CommandResult(0, b"RebootProgram = /sbin/reboot\nReturnToService = 0\n"),
        CommandResult(0, b"RebootProgram = /sbin/reboot\nReturnToService = 0\nSLURM_VERSION = master\n"),
        CommandResult(0, b"RebootProgram = /sbin/reboot\nSLURM_VERSION = 24.11.5\n"),
        CommandResult(0, b"RebootProgram =\nReturnToService = 0\nSLURM_VERSION = 24.11.5\n"),
    ],
)
def test_unknown_configuration_is_refused_without_a_change(answer: CommandResult) -> None:
    result, changes = take(answer)
    assert (result.outcome, bool(result.problem), changes) == (Outcome.REFUSED, True, [])


@pytest.mark.parametrize(
    ("version", "returns", "is_possible"),
    [
        ("22.05.8", "2", False),
        ("22.05.8", "1", True),
        ("22.05.8", "0", True),
        ("23.02.8", "2", False),
        ("23.11.5", "2", False),
        ("23.11.6", "2", True),
        ("23.11.10", "2", True),
        ("24.11.5", "2", True),
        ("26.05.0-0rc1", "2", True),
    ],
)
def test_release_that_starts_jobs_after_a_late_boot_reboots_nothing(
    version: str, returns: str, is_possible: bool
) -> None:
    result, changes = take(config(returns=returns, version=version))
    assert result.outcome is (None if is_possible else Outcome.IMPOSSIBLE)
    assert len(changes) == is_possible


@pytest.mark.parametrize("node", ["", "ALL", "all", "n[1-9]", "n1,n2", "asap", "nextstate=DOWN", "-n1", "n 1", "n1\n"])
def test_request_that_is_not_one_node_is_refused(node: str) -> None:
    answers = Answers(config(), CommandResult(0))
    assert take_reboot(replace(REQUEST, node=node), answers).outcome is Outcome.REFUSED
    assert answers.changes == []


def test_request_without_reason_is_refused() -> None:
    answers = Answers(config(), CommandResult(0))
    assert take_reboot(replace(REQUEST, reason=""), answers).outcome is Outcome.REFUSED
    assert answers.changes == []


@given(st.binary(max_size=200), st.none() | st.integers(-9, 255), st.text(max_size=100))
def test_any_output_has_a_result_and_a_problem_unless_it_is_under_way(
    output: bytes, status: int | None, stderr: str
) -> None:
    result, _ = take(CommandResult(0, output), status, stderr)
    assert result.outcome is None or result.problem
    assert result.outcome not in (Outcome.DONE, Outcome.TAKING)
    slurm_reboot_problem(output.decode("utf-8", "replace"))


def test_run_command_kills_the_process_group_at_the_deadline(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $! $$ > {pids}; wait"
    result = run_command(Command(("/bin/sh", "-c", script), 1.0))
    assert result.status is None
    until(lambda: all(map(has_ended, pids.read_text().split())), "the process group ends")


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_run_command_passes_environment_and_reports_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/a")
    assert run_command(Command(("sh", "-c", "echo $SLURM_CONF; exit 3"), 9.0)).text == "/a\n"
    result = run_command(Command(("/nonexistent/program",), 9.0))
    assert (result.status, bool(result.stderr)) == (127, True)
