"""The step "power cycle": the site's command, once its BMC is proven to be that of this machine."""

from __future__ import annotations

import os
from functools import partial

from healthd.agent.repair.bmc import KINDS, LOCAL_ADDRESS, Proof, prove_address, prove_chassis
from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.step_result import PreparedStep, Run, StepResult, last_error, run_command
from healthd.agent.settings.config import RepairConfig
from healthd.common import ownership
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.host.program import find_program

MAX_SERIAL_BYTES = 200


def prepare_power_cycle(request: Request, run: Run = run_command) -> PreparedStep | StepResult:
    """Return the site's command with the proof of its target, or why there is no proof. Nothing is changed.

    The command ends at once, if the machine still runs then.
    """
    argv = request.settings.power_cycle_command
    proof = prove_bmc(request.settings, request.root, request.command_timeout_seconds, run)
    if not proof.evidence:
        return StepResult(Outcome.IMPOSSIBLE, proof.problem)
    return PreparedStep(argv, partial(_power_result, argv[0], proof.evidence))


def _power_result(program: str, proof: str, result: CommandResult) -> StepResult:
    """Return the result of the site's command."""
    if result.status == 0:
        return StepResult(None, proof=proof)
    if result.status is None:
        return StepResult(None, f"{program} did not end in time; it may still power cycle the machine", proof)
    outcome = Outcome.IMPOSSIBLE if result.status == 127 else Outcome.FAILED
    return StepResult(outcome, f"{program}: {last_error(result)}", proof)


def prove_bmc(settings: RepairConfig, root: str, seconds: float, run: Run = run_command) -> Proof:
    """Return the proof that the power command reaches the BMC of this machine. This changes nothing.

    Each command may take `seconds`.
    """
    power, bmc = settings.power_cycle_command, settings.bmc_command
    if not power:
        return Proof(problem="repair.power_cycle_command is not set")
    if problem := _program_problem(power):
        return Proof(problem=f"repair.power_cycle_command: {problem}")
    proof = _prove_by_serial(power, bmc, root, seconds, run)
    if proof.evidence:
        return proof
    local = run(Command(LOCAL_ADDRESS, seconds))
    by_address = prove_address(local.text, power) if local.status == 0 else Proof()
    return by_address if by_address.evidence else proof


def _prove_by_serial(power: Argv, bmc: Argv, root: str, seconds: float, run: Run) -> Proof:
    if not bmc:
        return Proof(problem="repair.bmc_command is not set")
    if problem := _program_problem(bmc):
        return Proof(problem=f"repair.bmc_command: {problem}")
    result = run(Command(bmc, seconds))
    if result.status is None:
        return Proof(problem=f"repair.bmc_command: {bmc[0]} did not end in time")
    if result.status != 0:
        return Proof(problem=f"repair.bmc_command: {bmc[0]}: {last_error(result)}")
    return prove_chassis(result.text, read_serials(root), power, bmc)


def _program_problem(argv: Argv) -> str:
    """Return the reason why root must not run this program, or ""."""
    try:
        find_program(argv[0])
    except ownership.Untrusted as error:
        return str(error)
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"
    return ""


def read_serials(root: str) -> dict[str, str]:
    """Return this machine's serial numbers by kind, from DMI. Only root can read them."""
    return {kind: _read(os.path.join(root, "sys/class/dmi/id", f"{kind}_serial")) for kind in KINDS}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(MAX_SERIAL_BYTES).split())
    except OSError:
        return ""
