"""Run a Slurm command and block until it ends, for programs that may wait. The daemon uses driver.py instead."""

from __future__ import annotations

import select
import time

from healthd.common.slurm import commands
from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult
from healthd.common.slurm.output import SlurmError, describe_failure, describe_unread, parse_node
from healthd.host.child_process import Child


def run(command: Command) -> CommandResult:
    """Run the command. The status is 127 if the program is missing, or None if the deadline passed."""
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


def node_problem(node_name: str, seconds: float) -> str:
    """Return the reason why this node cannot be read from Slurm, worded as the daemon's `problem`, or "" if it can be
    read.
    """
    argv = commands.node(node_name)
    result = run(Command(argv, seconds))
    if result.status != 0:
        return describe_failure(argv, result)
    try:
        return describe_unread(parse_node(result.stdout, node_name).unread_rows)
    except SlurmError as error:
        return str(error)
