"""The node's state in Slurm right before a step, read again. Any answer that is missing or unknown is a problem.

The caller waits for the answers, so the daemon does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from healthd.agent.repair.journal import Request
from healthd.agent.repair.obstacles import MAINTENANCE
from healthd.agent.repair.requirements import STOP_RESERVATION
from healthd.agent.repair.step_result import Run
from healthd.agent.slurm.policy import is_idle
from healthd.common.model import NodeState
from healthd.common.slurm import commands
from healthd.common.slurm.builtin_reasons import strip_appended
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.node_states import POWER, REBOOT
from healthd.common.slurm.output import (
    SlurmError,
    describe_failure,
    has_no_steps,
    parse_job_numbers,
    parse_listpids,
    parse_node,
    parse_reservation_names,
)

MAX_NAMED = 3


def slurm_problem(request: Request, run: Run) -> str:
    """Return why Slurm's state does not allow the step now, as one sentence, or ""."""
    try:
        if STOP_RESERVATION in parse_reservation_names(_query(commands.reservations(), request, run).text):
            return f"Slurm has a reservation {STOP_RESERVATION}"
        node = parse_node(_query(commands.node(request.node), request, run).stdout, request.node)
        return node_problem(node, request.reason) or _jobs_problem(request, run)
    except SlurmError as error:
        return str(error)


def node_problem(node: NodeState, reason: str) -> str:
    """Return why this state does not allow a step, or "". `reason` is the Reason of healthd's drain with its claim."""
    if node.unread_rows:
        return f"the state of {node.name} in Slurm is incomplete"
    if strip_appended(node.reason) != reason:
        return f'the Reason in Slurm is "{node.reason}", not the one of this repair'
    if found := node.flags & (MAINTENANCE | REBOOT | POWER):
        return f"the node's state in Slurm is {'+'.join(sorted(found))}"
    if not is_idle(node):
        return f"the node is not drained and idle in Slurm, but {'+'.join(sorted(node.flags))}"
    return ""


def _jobs_problem(request: Request, run: Run) -> str:
    """Return the jobs that slurmd or slurmctld still has on this node, also suspended ones. Raises SlurmError."""
    listpids = commands.listpids(request.node)
    result = run(Command(listpids, request.command_timeout_seconds))
    if result.status != 0 and not has_no_steps(result):
        raise SlurmError(describe_failure(listpids, result))
    local = parse_listpids(result.text) if result.status == 0 else []
    found = local or parse_job_numbers(_query(commands.jobs_on_node(request.node), request, run).text)
    return f"{_jobs(found)} on the node" if found else ""


def _jobs(numbers: Sequence[str]) -> str:
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"{'job' if len(numbers) == 1 else 'jobs'} {', '.join(numbers[:MAX_NAMED])}{more}"


def _query(argv: Argv, request: Request, run: Run) -> CommandResult:
    """Return the result of a query. Raises SlurmError if it failed."""
    result = run(Command(argv, request.command_timeout_seconds))
    if result.status != 0:
        raise SlurmError(describe_failure(argv, result))
    return result
