"""Test what healthd can do about a repair, and find other programs that may drain or reboot this node.

In mode "act", this tests everything that does not depend on the node's current state: the journal, the unit that takes
the steps, whether the requirements can be read, and each step in repair.order. Nothing is changed. The proof of the BMC
runs repair.bmc_command.

If two programs drain, resume or reboot the same node, each undoes the other's work. A node needs one owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from healthd.agent.doctor.result import Line, absent_line, failed_line, limited_line, ok_line
from healthd.agent.doctor.service import SYSTEMD_DIR, unit_line
from healthd.agent.doctor.slurm import COMMAND_TIMEOUT_SECONDS, Run, run
from healthd.agent.repair.journal import JOURNAL_FILE, identity_problem, parse_journal, survives_reboot
from healthd.agent.repair.journal_file import machine_identity
from healthd.agent.repair.node_reading import hangs, own_pids, read_node
from healthd.agent.repair.power_step import prove_bmc
from healthd.agent.repair.reboot_step import slurm_reboot_problem
from healthd.agent.repair.requirements import requirements
from healthd.agent.settings.config import Settings
from healthd.common import ownership
from healthd.common.model import RepairMode, RepairStep
from healthd.common.slurm import commands
from healthd.common.slurm.output import parse_setting
from healthd.common.text import is_decimal
from healthd.common.values import DecodeError
from healthd.host.host import Host
from healthd.host.program import find_program

DOCUMENT = "docs/repair.md"
UNIT = "healthd-repair.path"
NOT_SET = ("", "(null)")
# Slurm does not power nodes off without both settings (slurm.conf(5)); -1 and INFINITE disable it.
NEVER = ("NONE", "INFINITE", "-1", "-1 SEC")
# Programs by the beginning of their path, or by their name (NVIDIA/NVSentinel, health-monitors/; Base Command Manager,
# "Cluster Management Daemon"; leptonai/gpud).
PROGRAMS = {
    "/cm/local/apps/cmd/": "Base Command Manager (cmd) may drain, power off or reinstall it",
    "gpu-health-monitor": "NVSentinel (gpu-health-monitor) may cordon, drain or reboot it",
    "syslog-health-monitor": "NVSentinel (syslog-health-monitor) may cordon, drain or reboot it",
    "gpud": "gpud may reboot it",
}


def lines(settings: Settings, run: Run = run, systemd_dir: str = SYSTEMD_DIR) -> Iterator[Line]:
    """Yield the results: the repair mode and what it needs, and the other owners of this node."""
    config = _slurm_config(run)
    yield from _repair_lines(settings, config, systemd_dir)
    owners = list(dict.fromkeys((*slurm_owners(config), *program_owners(command_lines(settings.root)))))
    if owners:
        yield limited_line("other owners", "; ".join(owners), f"let one program own a node: {DOCUMENT}")
    else:
        unread = "" if config else "; slurm.conf could not be read"
        yield ok_line("other owners", f"found no other program that drains or reboots this node{unread}")


def _slurm_config(run: Run) -> str:
    """Return the output of `scontrol show config`, or "" if Slurm does not answer, which another line reports."""
    try:
        result = run(commands.config())
    except (OSError, TimeoutError):
        return ""
    return result.text if result.status == 0 else ""


def _repair_lines(settings: Settings, config: str, systemd_dir: str) -> Iterator[Line]:
    mode, order = settings.repair.mode, settings.repair.order
    if mode is RepairMode.OFF:
        yield absent_line("repair", 'repair.mode is "off"')
        return
    steps = ", ".join(step.value for step in order) or RepairStep.PERSON.value
    how = _reboot_text(config)
    if mode is RepairMode.ADVISE:
        yield ok_line("repair", f"healthd reports the step that a drained node needs ({steps}) and takes none; {how}")
        return
    yield ok_line("repair", f"healthd repairs this node after its own drains ({steps}); {how}")
    yield _journal_line(settings)
    if os.path.isdir(systemd_dir):
        yield unit_line("repair unit", UNIT, "no step is taken")
    yield _requirements_line(settings)
    if RepairStep.GPU_RESET in order:
        yield _reset_line(settings.root)
    if RepairStep.REBOOT in order:
        yield _reboot_line(config, systemd_dir)
    if RepairStep.POWER_CYCLE in order:
        yield _power_cycle_line(settings)


def _reboot_text(config: str) -> str:
    program = parse_setting(config, "RebootProgram")
    return f"Slurm reboots nodes with {program}" if program not in NOT_SET else "slurm.conf has no RebootProgram"


def _journal_line(settings: Settings) -> Line:
    """Test that the journal has survived a reboot. Otherwise healthd takes no step."""
    topic, path = "repair journal", os.path.join(settings.state_dir, JOURNAL_FILE)
    try:
        journal = parse_journal(ownership.read(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        message = f"no {path} yet: the daemon creates it, and takes no step before the next boot of this node"
        return limited_line(topic, message, "systemctl restart healthd")
    except PermissionError as error:
        fix = ("sudo healthd doctor",) if os.geteuid() else ()
        return failed_line(topic, f"{path}: {error.strerror}: no step is taken", *fix)
    except (OSError, DecodeError) as error:
        return failed_line(topic, f"{path} cannot be read: {error}: no step is taken", f"mv {path} {path}.broken")
    machine = machine_identity(settings.root)
    problem = identity_problem(journal, settings.node_name, machine)
    if problem and os.geteuid() == 0:  # another user cannot read the product UUID
        commands = (f"rm {path}", "systemctl restart healthd") if machine else ()
        return failed_line(topic, f"{path}: {problem}: no step is taken", *commands)
    if not survives_reboot(journal, Host(settings.root).boot_id().strip()):
        message = f"{path} is from this boot: no step is taken before a reboot has shown that state_dir survives it"
        return limited_line(topic, message, "reboot this node once when it has no jobs")
    return ok_line(topic, f"{path} has survived a reboot; {len(journal.entries)} steps are recorded")


def _requirements_line(settings: Settings) -> Line:
    """Test that each requirement on this node can be read. Whether it is met is tested before each step."""
    topic = "requirements"
    if os.geteuid() != 0:
        return limited_line(topic, "only root can read the requirements of a step", "sudo healthd doctor")
    reading = read_node(settings.root)
    found = requirements(reading, settings.repair.stop_services, own_pids(reading, RepairStep.REBOOT))
    unknown = [f"{r.text} ({r.problem})" if r.problem else r.text for r in found if r.met is None]
    if unknown:
        message = f"cannot be tested: {'; '.join(unknown)}; no step is taken while one of these is unknown"
        return failed_line(topic, message, f"healthd repair ({DOCUMENT})")
    return ok_line(topic, "all requirements of a step can be read on this node")


def _reset_line(root: str) -> Line:
    topic = "GPU reset"
    if not os.path.isdir(os.path.join(root, "proc/driver/nvidia")):
        return absent_line(topic, "no NVIDIA driver is loaded")
    try:
        return ok_line(topic, f"{find_program('nvidia-smi')} resets GPUs, if their type allows it ({DOCUMENT})")
    except OSError as error:
        return failed_line(topic, f"nvidia-smi: {error.strerror or error}: no GPU is reset", "install nvidia-utils")


def _reboot_line(config: str, systemd_dir: str) -> Line:
    topic = "reboot"
    if not config:
        return limited_line(topic, "slurm.conf could not be read, so this node is not rebooted", "scontrol show config")
    if parse_setting(config, "RebootProgram") in NOT_SET:
        if os.path.isdir(systemd_dir):
            return ok_line(topic, "systemd reboots this node, because Slurm has no RebootProgram")
        return failed_line(topic, "neither Slurm nor systemd can reboot this node", "RebootProgram in slurm.conf")
    if problem := slurm_reboot_problem(config):
        return failed_line(topic, problem, "ReturnToService=1 in slurm.conf")
    return ok_line(topic, _reboot_text(config))


def _power_cycle_line(settings: Settings) -> Line:
    topic = "power cycle"
    if os.geteuid() != 0:
        message = "only root can read the serial number that proves the BMC"
        return limited_line(topic, message, "sudo healthd doctor")
    proof = prove_bmc(settings.repair, settings.root, COMMAND_TIMEOUT_SECONDS)
    if proof.evidence:
        return ok_line(topic, proof.evidence)
    return failed_line(topic, f"{proof.problem}: the machine is not power cycled", f"repair.bmc_command ({DOCUMENT})")


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
    """Yield the command line of each process of root, with NUL between its words. Users cannot imitate these.

    A process that hangs in the kernel is left out, because a read of its command line may never return.
    """
    proc = os.path.join(root, "proc")
    for pid in filter(is_decimal, os.listdir(proc)):
        try:
            path = os.path.join(proc, pid, "cmdline")
            if os.stat(path).st_uid == 0 and not hangs(os.path.join(proc, pid)):
                with open(path, encoding="utf-8", errors="replace") as file:
                    yield file.read(4096)
        except OSError:
            continue  # it has exited
