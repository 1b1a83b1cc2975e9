"""Drain of a lemon (`healthd fleet lemons --apply`), from the head node: a generator of commands, like reconcile.py.

It only drains, and never resumes. It skips a node that is already drained or down, and one that would exceed a limit.
The fleet limit counts drains by daemons and by this command together (output.parse_fleet), against the lower limit of
fleet_limit.py, because a lemon can wait. All drained lemons count, regardless of the run that drained them
(output.parse_lemons). It ends if Slurm does not answer.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm import fleet_limit
from healthd.common.model import NodeState
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.drain_reason import LEMON
from healthd.common.slurm.lemon_command import is_node_name, reason
from healthd.common.slurm.node_states import NOT_TO_RESUME, TAKEN
from healthd.common.slurm.output import (
    NoSuchNode,
    SlurmTrouble,
    known_partitions,
    parse_fleet,
    parse_lemons,
    parse_node,
    what_failed,
)
from healthd.common.text import printable
from healthd.common.values import Value

T = TypeVar("T")
Steps = Generator[Command, CommandResult, T]


class Drained(Value, frozen=True):
    """Result for one node. text: a sentence."""

    node: str
    done: bool
    words: str


def drain(name: str, words: str, most: int, limits: FleetLimits, command_timeout_seconds: float) -> Steps[Drained]:
    """Drain one lemon. max_lemons: how many nodes of the cluster may be drained as lemons.

    Raises SlurmError if Slurm does not answer or refuses.
    """
    if not is_node_name(name):
        return Drained(name, False, "left: not a valid node name")
    looking = _Looking(name, command_timeout_seconds)
    try:
        node = yield from looking.node()
    except NoSuchNode as none:
        return Drained(name, False, f"left: {none}")
    why = why_left(node)
    if not why:
        lemons = parse_lemons((yield from looking.read(commands.out())))
        if len(lemons) >= most:
            why = f"limit: {len(lemons)} nodes of the cluster are already drained as lemons; the limit is {most}"
    if not why:
        partitions = known_partitions(node)
        counts = parse_fleet((yield from looking.read(commands.fleet())), partitions, float("inf"))
        count = fleet_limit.strictest(counts, limits, own_hardware=False)
        if not fleet_limit.has_room(count, limits, own_hardware=False):
            why = (
                f"fleet limit: healthd keeps {count.drained} of {count.nodes} nodes in partition {count.name} drained; "
                f"the limit is {fleet_limit.allowed(count.nodes, limits, own_hardware=False)}"
            )
    if not why:
        why = why_left((yield from looking.node()))  # another tool may have drained it in the meantime
    if why:
        return Drained(name, False, f"left: {why}")
    yield from looking.read(commands.drain(name, reason(words)), changes=True)
    node = yield from looking.node()
    if node.flags.isdisjoint(TAKEN) or not node.reason.startswith(LEMON.strip()):
        state = printable("+".join(sorted(node.flags)))
        raise SlurmTrouble(f"{name} was drained, but its state in Slurm is {state}")
    return Drained(name, True, f"drained: {printable(node.reason)}")


def why_left(node: NodeState) -> str:
    """Return why a node must not be drained; "" = it may be. The Reason alone is no evidence: from 24.11 on it outlives
    its drain.
    """
    found = sorted(node.flags & (TAKEN | NOT_TO_RESUME))
    return f"already {'+'.join(found)} in Slurm{_says(node)}" if found else ""


def _says(node: NodeState) -> str:
    who = f" by {printable(node.reason_user)}" if node.reason_user else ""
    return f': "{printable(node.reason)}"{who}' if node.reason else ""


class _Looking(Value, frozen=True):
    name: str
    command_timeout_seconds: float

    def read(self, argv: Argv, changes: bool = False) -> Steps[bytes]:
        result = yield Command(argv, self.command_timeout_seconds, changes)
        if result.status != 0:
            raise SlurmTrouble(what_failed(argv, result))
        return result.stdout

    def node(self) -> Steps[NodeState]:
        return parse_node((yield from self.read(commands.node(self.name))), self.name)
