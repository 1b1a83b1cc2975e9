"""One Slurm command, run to its end or its deadline, for a program that may wait. The daemon uses driver.py instead."""

from __future__ import annotations

import select
import time

from healthd.machine.child import Child
from healthd.slurm.commands import ENVIRONMENT, Command, CommandResult


def run(command: Command) -> CommandResult:
    """Run the command. A program that does not exist gives the status 127, a deadline that passed None."""
    deadline = time.monotonic() + command.deadline_seconds
    started = time.time()
    try:
        child = Child(command.argv, deadline, time.monotonic, ENVIRONMENT)
    except OSError as error:
        return CommandResult(127, b"", f"{command.argv[0]}: {error.strerror}", started)
    while not child.step():
        descriptors = [descriptor for descriptor, _ in child.waits()]
        select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))
    out, err = child.output()
    return CommandResult(child.status, out, err, started, time.time() - started)
