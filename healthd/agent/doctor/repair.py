"""Test what healthd would do about a repair, and find other programs that may drain or reboot this node.

If two programs drain, resume or reboot the same node, each undoes the other's work. A node needs one owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from healthd.agent.doctor.result import Line, absent_line, limited_line, ok_line
from healthd.agent.doctor.slurm import Run, run
from healthd.agent.settings.config import Settings
from healthd.common.model import RepairMode, RepairStep
from healthd.common.slurm import commands
from healthd.common.slurm.output import parse_setting
from healthd.common.text import is_decimal

DOCUMENT = "docs/repair.md"
NOT_SET = ("", "(null)")
# Slurm does not power nodes off without both settings (slurm.conf(5)); -1 and INFINITE disable it.
NEVER = ("NONE", "INFINITE", "-1", "-1 SEC")
# Programs by the beginning of their command line: path or name of the program (NVIDIA/NVSentinel, health-monitors/;
# Base Command Manager, "Cluster Management Daemon"; leptonai/gpud).
PROGRAMS = {
    "/cm/local/apps/cmd/": "Base Command Manager (cmd) may drain, power off or reinstall it",
    "gpu-health-monitor": "NVSentinel (gpu-health-monitor) may cordon, drain or reboot it",
    "syslog-health-monitor": "NVSentinel (syslog-health-monitor) may cordon, drain or reboot it",
    "gpud": "gpud may reboot it",
}


def lines(settings: Settings, run: Run = run) -> Iterator[Line]:
    """Yield the results: the repair mode, and the other owners of this node."""
    config = _slurm_config(run)
    yield _repair_line(settings, config)
    owners = list(dict.fromkeys((*slurm_owners(config), *program_owners(command_lines(settings.root)))))
    if owners:
        yield limited_line("other owners", "; ".join(owners), f"let one program own a node: {DOCUMENT}")
    else:
        unread = "" if config else "; slurm.conf could not be read"
        yield ok_line("other owners", f"no other program was found that drains or reboots this node{unread}")


def _slurm_config(run: Run) -> str:
    """Return the output of `scontrol show config`, or "" if Slurm does not answer, which another line reports."""
    try:
        result = run(commands.config())
    except (OSError, TimeoutError):
        return ""
    return result.text if result.status == 0 else ""


def _repair_line(settings: Settings, config: str) -> Line:
    if settings.repair.mode is RepairMode.OFF:
        return absent_line("repair", 'repair.mode is "off"')
    reboot = parse_setting(config, "RebootProgram")
    steps = ", ".join(step.value for step in settings.repair.order) or RepairStep.PERSON.value
    how = f"Slurm reboots nodes with {reboot}" if reboot not in NOT_SET else "slurm.conf has no RebootProgram"
    return ok_line("repair", f"healthd reports the step that a drained node needs ({steps}) and takes none; {how}")


def slurm_owners(config: str) -> Iterator[str]:
    """Yield a sentence for each setting in slurm.conf that may change this node. `config` is `scontrol show config`."""
    health_check = parse_setting(config, "HealthCheckProgram")
    if health_check not in NOT_SET and "healthd" not in health_check:
        yield f"HealthCheckProgram={health_check} may drain it"
    suspend, after = parse_setting(config, "SuspendProgram"), parse_setting(config, "SuspendTime")
    if suspend not in NOT_SET and after.upper() not in (*NEVER, *NOT_SET):
        yield f"SuspendProgram={suspend} powers it off after {after} without a job"


def program_owners(command_lines: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each running program that may change this node."""
    for command in command_lines:
        path = command.partition("\0")[0]
        for start, sentence in PROGRAMS.items():
            if path.startswith(start) if start.startswith("/") else os.path.basename(path) == start:
                yield sentence


def command_lines(root: str) -> Iterator[str]:
    """Yield the command line of each process of root, with NUL between its words. Users cannot imitate these."""
    proc = os.path.join(root, "proc")
    for pid in filter(is_decimal, os.listdir(proc)):
        try:
            path = os.path.join(proc, pid, "cmdline")
            if os.stat(path).st_uid == 0:
                with open(path, encoding="utf-8", errors="replace") as file:
                    yield file.read(4096)
        except OSError:
            continue  # it has exited
