"""Drains a lemon (`healthd fleet lemons --apply`), from the head node: a generator of commands, like reconcile.py.

It only ever drains. A node that is out, by whomever, is left; so is one that the fleet cannot spare: what healthd's
daemons and this command hold drained is counted together (output.parse_fleet), against the lower limit of
fleet_limit.py, since a lemon can wait. All lemons that are out count, whichever run drained them (output.parse_lemons).
Slurm that does not answer ends it. Nothing here resumes.
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
    """How it ended for one node. words: a sentence."""

    node: str
    done: bool
    words: str


def drain(name: str, words: str, most: int, limits: FleetLimits, command_timeout_seconds: float) -> Steps[Drained]:
    """most: how many nodes of the whole cluster may be out as lemons. Raises SlurmTrouble where Slurm does not answer
    or refuses."""
    if not is_node_name(name):
        return Drained(name, False, "left: this is no name of a node")
    looking = _Looking(name, command_timeout_seconds)
    try:
        node = yield from looking.node()
    except NoSuchNode as none:
        return Drained(name, False, f"left: {none}")
    why = why_left(node)
    if not why:
        lemons = parse_lemons((yield from looking.read(commands.out())))
        if len(lemons) >= most:
            why = f"held: {len(lemons)} of the cluster's nodes are out as lemons already, and at most {most} may be"
    if not why:
        partitions = known_partitions(node)
        counts = parse_fleet((yield from looking.read(commands.fleet())), partitions, float("inf"))
        count = fleet_limit.strictest(counts, limits, own_hardware=False)
        if not fleet_limit.has_room(count, limits, own_hardware=False):
            why = (
                f"held by the fleet limit: healthd holds {count.drained} of the {count.nodes} nodes of partition "
                f"{count.name}, and may hold {fleet_limit.allowed(count.nodes, limits, own_hardware=False)}"
            )
    if not why:
        why = why_left((yield from looking.node()))  # whoever was faster meanwhile
    if why:
        return Drained(name, False, f"left: {why}")
    yield from looking.read(commands.drain(name, reason(words)), changes=True)
    node = yield from looking.node()
    if node.flags.isdisjoint(TAKEN) or not node.reason.startswith(LEMON.strip()):
        state = printable("+".join(sorted(node.flags)))
        raise SlurmTrouble(f"{name} was drained, and Slurm has it {state} now")
    return Drained(name, True, f"drained: {printable(node.reason)}")


def why_left(node: NodeState) -> str:
    """Why a node must not be touched; "" = it may be. Whoever drained it. A reason alone says nothing: from 24.11 on it
    outlives its drain."""
    found = sorted(node.flags & (TAKEN | NOT_TO_RESUME))
    return f"Slurm has it {'+'.join(found)} already{_says(node)}" if found else ""


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
