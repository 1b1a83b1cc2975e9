"""The step "reboot": through Slurm if slurm.conf has a RebootProgram, otherwise through systemd.

`scontrol reboot` without ASAP and nextstate keeps the drain, and its Reason if the command names it
(docs/adr/0043-steps-of-a-repair.md). Older releases lose the drain if the boot is late (`slurm_reboot_problem`).
"""

from __future__ import annotations

from functools import partial

from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.step_result import PreparedStep, Run, StepResult, last_error, run_command
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.output import describe_failure, is_refused, parse_setting
from healthd.common.text import regex

NOT_SET = "(null)"
SYSTEMD_REBOOT: Argv = ("systemctl", "reboot", "--check-inhibitors=yes")
# From this release on, slurmctld keeps the drain of a node whose reboot has timed out ("Does not remove drain state in
# case it was set by scontrol update nodename", src/slurmctld/node_mgr.c: check_node_timers()).
KEEPS_DRAIN_SINCE = (23, 11, 6)
_VERSION = regex(r"([0-9]{2})\.([0-9]{2})\.([0-9]{1,3})")
# Slurm reads a list of nodes here, "ALL" included.
_NODE = regex(r"(?!(?i:all|asap|reason|nextstate)\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*")


def prepare_reboot(request: Request, run: Run = run_command) -> PreparedStep | StepResult:
    """Return the command that reboots this node, or why the node cannot be rebooted. Nothing is changed.

    The command ends as soon as Slurm or systemd has accepted the request.
    """
    if not _NODE.fullmatch(request.node) or not request.reason:
        return StepResult(Outcome.REFUSED, "the request has no node name or no Reason")
    config = run(Command(commands.config(), request.command_timeout_seconds))
    if config.status != 0:
        return StepResult(Outcome.REFUSED, describe_failure(commands.config(), config))
    program = parse_setting(config.text, "RebootProgram")
    if not program:
        return StepResult(Outcome.REFUSED, "scontrol show config printed no RebootProgram")
    if program == NOT_SET:
        return PreparedStep(SYSTEMD_REBOOT, _systemd_result)
    lacks_version = not _VERSION.match(parse_setting(config.text, "SLURM_VERSION"))
    if lacks_version or not parse_setting(config.text, "ReturnToService"):
        return StepResult(Outcome.REFUSED, "scontrol show config printed no SLURM_VERSION or ReturnToService")
    if problem := slurm_reboot_problem(config.text):
        return StepResult(Outcome.IMPOSSIBLE, problem)
    argv = commands.reboot(request.node, request.reason)
    return PreparedStep(argv, partial(_slurm_result, argv))


def slurm_reboot_problem(config: str) -> str:
    """Return the reason why this cluster's Slurm must not reboot nodes, or "". `config` is `scontrol show config`.

    With ReturnToService = 2, a late boot ends the drain, and the node starts jobs before any check.
    """
    version = _VERSION.match(parse_setting(config, "SLURM_VERSION"))
    is_returned = parse_setting(config, "ReturnToService") == "2"
    if version is None or not is_returned or tuple(map(int, version.groups())) >= KEEPS_DRAIN_SINCE:
        return ""
    since = ".".join(f"{number:02}" if index < 2 else str(number) for index, number in enumerate(KEEPS_DRAIN_SINCE))
    return (
        f"Slurm {version[0]} with ReturnToService = 2 starts jobs if a reboot takes longer than ResumeTimeout: set "
        f"ReturnToService = 1, or update Slurm to {since} or later"
    )


# errno(3) of a D-Bus call whose answer was lost: the shutdown may have begun.
LOST_ANSWER = regex(r"(?i)timed out|connection reset|not connected|disconnected|broken pipe|no reply")


def _slurm_result(argv: Argv, result: CommandResult) -> StepResult:
    """Return the result of `scontrol reboot`.

    If the answer does not exclude a reboot, the step stays under way until the machine boots, or does not in time.
    """
    if "Skipping reboot" in result.stderr:  # from 24.11 on, with status 0; 22.05 is silent
        return StepResult(Outcome.REFUSED, f"Slurm did not accept the reboot: {last_error(result)}")
    if result.status == 0:
        return StepResult(None)
    problem = describe_failure(argv, result)
    if "RebootProgram isn't defined" in result.stderr:
        problem = "slurm.conf on this node has no RebootProgram, although slurmctld has one"
    return StepResult(Outcome.REFUSED if is_refused(result) else None, problem)


def _systemd_result(result: CommandResult) -> StepResult:
    """Return the result of `systemctl reboot`."""
    if result.status == 0:
        return StepResult(None)
    if result.status is None:
        return StepResult(None, "systemctl reboot did not end in time; systemd may still reboot the node")
    problem = f"systemctl reboot: {last_error(result)}"
    if LOST_ANSWER.search(result.stderr):
        return StepResult(None, f"{problem}; systemd may still reboot the node")
    if regex(r"(?i)inhibit").search(result.stderr) and "--check-inhibitors" not in result.stderr:
        return StepResult(Outcome.REFUSED, problem)
    # systemd did not begin the reboot. Releases before 248 do not have --check-inhibitors.
    return StepResult(Outcome.IMPOSSIBLE, f"{problem}; set RebootProgram in slurm.conf, or reboot the node by hand")
