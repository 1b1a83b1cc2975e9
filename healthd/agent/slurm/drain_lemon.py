"""Drain lemons by commands on the head node (`healthd fleet lemons --apply`). Generators yield the commands, as in
reconcile.py.

The command only drains and never resumes nodes. It skips nodes that are already drained or down, or whose drain would
exceed a limit. The fleet limit counts the drains by daemons and by this command (output.parse_fleet). The lower limit
of fleet_limit.py applies, because a lemon can wait. Lemons drained by earlier runs are counted too
(output.parse_lemons). The command stops if Slurm does not answer.
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
from healthd.common.slurm.lemon_command import is_node_name, lemon_reason
from healthd.common.slurm.node_states import DRAINED_STATES, NOT_RESUMABLE
from healthd.common.slurm.output import (
    NoSuchNode,
    SlurmError,
    describe_failure,
    parse_fleet,
    parse_lemons,
    parse_node,
    require_partitions,
)
from healthd.common.text import printable
from healthd.common.values import Value

T = TypeVar("T")
Steps = Generator[Command, CommandResult, T]


class LemonResult(Value, frozen=True):
    """Result for one node. `text` is one sentence."""

    node: str
    done: bool
    text: str


def drain(
    name: str, evidence: str, max_lemons: int, limits: FleetLimits, command_timeout_seconds: float
) -> Steps[LemonResult]:
    """Drain one lemon. `max_lemons` is the number of the cluster's nodes that may be drained as lemons.

    Raises SlurmError if Slurm does not answer or refuses.
    """
    if not is_node_name(name):
        return LemonResult(name, False, "skipped: not a valid node name")
    slurm = _SlurmClient(name, command_timeout_seconds)
    try:
        node = yield from slurm.node()
    except NoSuchNode as error:
        return LemonResult(name, False, f"skipped: {error}")
    why = skip_reason(node)
    if not why:
        lemons = parse_lemons((yield from slurm.read(commands.drained_nodes())))
        if len(lemons) >= max_lemons:
            why = f"limit: {len(lemons)} nodes in the cluster are already drained as lemons; the limit is {max_lemons}"
    if not why:
        partitions = require_partitions(node)
        counts = parse_fleet((yield from slurm.read(commands.fleet())), partitions, float("inf"))
        count = fleet_limit.tightest(counts, limits, own_hardware=False)
        if not fleet_limit.has_room(count, limits, own_hardware=False):
            why = (
                f"fleet limit: healthd keeps {count.drained} of {count.nodes} nodes in partition {count.name} drained; "
                f"the limit is {fleet_limit.limit_for(count.nodes, limits, own_hardware=False)}"
            )
    if not why:
        why = skip_reason((yield from slurm.node()))  # another tool may have drained it in the meantime
    if why:
        return LemonResult(name, False, f"skipped: {why}")
    yield from slurm.read(commands.drain(name, lemon_reason(evidence)), changes=True)
    node = yield from slurm.node()
    if node.flags.isdisjoint(DRAINED_STATES) or not node.reason.startswith(LEMON.strip()):
        state = printable("+".join(sorted(node.flags)))
        raise SlurmError(f"{name} was drained, but its state in Slurm is {state}")
    return LemonResult(name, True, f"drained: {printable(node.reason)}")


def skip_reason(node: NodeState) -> str:
    """Return the reason why a node must not be drained, or "" if it may be.

    The Reason alone is not evidence, because from 24.11 on it outlives its drain.
    """
    found = sorted(node.flags & (DRAINED_STATES | NOT_RESUMABLE))
    return f"already {'+'.join(found)} in Slurm{_reason_note(node)}" if found else ""


def _reason_note(node: NodeState) -> str:
    user_note = f" by {printable(node.reason_user)}" if node.reason_user else ""
    return f': "{printable(node.reason)}"{user_note}' if node.reason else ""


class _SlurmClient(Value, frozen=True):
    name: str
    command_timeout_seconds: float

    def read(self, argv: Argv, changes: bool = False) -> Steps[bytes]:
        result = yield Command(argv, self.command_timeout_seconds, changes)
        if result.status != 0:
            raise SlurmError(describe_failure(argv, result))
        return result.stdout

    def node(self) -> Steps[NodeState]:
        return parse_node((yield from self.read(commands.node(self.name))), self.name)
