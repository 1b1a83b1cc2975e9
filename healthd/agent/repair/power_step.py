"""The step "power cycle": runs the site's command, if its BMC is proven to be that of this machine."""

from __future__ import annotations

import os
from functools import partial

from healthd.agent.repair.bmc import LOCAL_ADDRESS, Proof, prove_address, prove_board, target_problem
from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.step_result import PreparedStep, Run, StepResult, last_error, run_command
from healthd.agent.settings.config import RepairConfig
from healthd.common import ownership
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.host.program import find_program

MAX_SERIAL_BYTES = 200


def prepare_power_cycle(request: Request, run: Run = run_command) -> PreparedStep | StepResult:
    """Return the site's command with the proof of its target, or why there is no proof. Nothing is changed.

    The command returns at once, unless it switches the machine off before.
    """
    proof = prove_bmc(request.settings, request.root, request.command_timeout_seconds, run)
    if not proof.evidence:
        return StepResult(Outcome.IMPOSSIBLE, proof.problem)
    argv = request.settings.power_cycle_command
    try:
        argv = _trusted(argv)
    except OSError as error:
        return StepResult(Outcome.IMPOSSIBLE, _describe("repair.power_cycle_command", argv, error))
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
    """Return the proof that the power command reaches the BMC of this machine. Nothing is changed.

    `seconds` is the deadline of each command.
    """
    power, bmc = settings.power_cycle_command, settings.bmc_command
    if not power:
        return Proof(problem="repair.power_cycle_command is not set")
    try:
        power = _trusted(power)
    except OSError as error:
        return Proof(problem=_describe("repair.power_cycle_command", power, error))
    proof = _prove_by_serial(power, bmc, root, seconds, run)
    if proof.evidence:
        return proof
    by_address = _prove_by_address(power, seconds, run)
    return by_address if by_address.evidence else proof


def _prove_by_address(power: Argv, seconds: float, run: Run) -> Proof:
    try:
        result = run(Command(_trusted(LOCAL_ADDRESS), seconds))
    except OSError as error:
        return Proof(problem=_describe("the address of this machine's BMC", LOCAL_ADDRESS, error))
    return prove_address(result.text, power) if result.status == 0 else Proof(problem=last_error(result))


def _prove_by_serial(power: Argv, bmc: Argv, root: str, seconds: float, run: Run) -> Proof:
    if not bmc:
        return Proof(problem="repair.bmc_command is not set")
    try:
        bmc = _trusted(bmc)
    except OSError as error:
        return Proof(problem=_describe("repair.bmc_command", bmc, error))
    if problem := target_problem(power, bmc):
        return Proof(problem=problem)
    result = run(Command(bmc, seconds))
    if result.status is None:
        return Proof(problem=f"repair.bmc_command: {bmc[0]} did not end in time")
    if result.status != 0:
        return Proof(problem=f"repair.bmc_command: {bmc[0]}: {last_error(result)}")
    return prove_board(result.text, read_board_serial(root), power, bmc)


def _trusted(argv: Argv) -> Argv:
    """Return the command with the path of its program, which only root can write. Raises OSError."""
    return find_program(argv[0]), *argv[1:]


def _describe(setting: str, argv: Argv, error: OSError) -> str:
    return f"{setting}: {error if isinstance(error, ownership.Untrusted) else f'{argv[0]}: {error.strerror}'}"


def read_board_serial(root: str) -> str:
    """Return the serial number of this machine's board from DMI, or "". Only root can read it."""
    try:
        with open(os.path.join(root, "sys/class/dmi/id/board_serial"), encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(MAX_SERIAL_BYTES).split())
    except OSError:
        return ""
