"""The result of a step's command, as the executor records it in the journal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from healthd.agent.repair.journal import Outcome
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.values import Value
from healthd.host.program import run_program

MAX_ERROR_LENGTH = 200
Run: TypeAlias = Callable[[Command], CommandResult]
Check: TypeAlias = Callable[[], str]  # returns why the step must not be taken now, or ""


class StepResult(Value, frozen=True):
    """The result of a step's command.

    outcome  None if the step is under way: the machine will boot, and the journal keeps Outcome.TAKING
    problem  why the step failed, was not taken or is uncertain, as one sentence without a full stop, or ""
    proof    evidence of the effect, or of the right target, or ""
    """

    outcome: Outcome | None
    problem: str = ""
    proof: str = ""


class PreparedStep(NamedTuple):
    """A step that consists of one command. Nothing has been changed yet.

    argv    the command that boots the machine
    result  converts the command's result
    """

    argv: Argv
    result: Callable[[CommandResult], StepResult]


def take_prepared(step: PreparedStep, seconds: float, check: Check, run: Run) -> StepResult:
    """Take the step right after `check`. `seconds` is the deadline of the command."""
    if problem := check():
        return StepResult(Outcome.REFUSED, problem)
    return step.result(run(Command(step.argv, seconds, changes=True)))


def run_command(command: Command) -> CommandResult:
    """Run a command in this process's environment. At its deadline, its process group is killed; the status is None.

    The status is 127 if the program could not be started. Each stream is cut off at 64 KiB.
    """
    started = time.time()
    try:
        result = run_program(command.argv, command.deadline_seconds, {**os.environ, **commands.ENVIRONMENT})
    except TimeoutError:
        return CommandResult(None, started=started, seconds=time.time() - started)
    except OSError as error:
        return CommandResult(127, b"", f"{command.argv[0]}: {error.strerror or error}", started)
    return CommandResult(result.status, result.stdout.encode(), result.stderr, started, time.time() - started)


def last_error(result: CommandResult) -> str:
    """Return the last line of a command's standard error, or its exit status."""
    lines = [line.strip() for line in result.stderr.split("\n") if line.strip()]
    return lines[-1][:MAX_ERROR_LENGTH] if lines else f"exit status {result.status}"
