"""The node's state in Slurm, read again right before a step. A missing or unknown answer is a problem.

The functions block, so the daemon does not use this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from healthd.agent.repair.journal import Request
from healthd.agent.repair.requirements import Requirement
from healthd.agent.repair.step_result import Run
from healthd.agent.slurm import repair_claim
from healthd.agent.slurm.policy import is_idle
from healthd.common.model import NodeState
from healthd.common.slurm import commands
from healthd.common.slurm.builtin_reasons import strip_appended
from healthd.common.slurm.commands import Argv, Command, CommandResult
from healthd.common.slurm.drain_reason import parse_claim
from healthd.common.slurm.node_states import MAINTENANCE, POWER, REBOOT
from healthd.common.slurm.output import (
    SlurmError,
    describe_failure,
    has_no_steps,
    parse_claims,
    parse_in_service,
    parse_job_numbers,
    parse_listpids,
    parse_node,
    parse_node_names,
    parse_reservation_names,
    require_partitions,
)

MAX_NAMED = 3
STOP_RESERVATION = "healthd-no-repair"  # while Slurm has this reservation, no node takes a repair step


def cluster_requirements(request: Request, run: Run) -> Iterator[Requirement]:
    """Yield the requirements on the cluster: its reservations, the claims of other nodes, and their partitions.

    After a query that failed, the others are unknown without a query, because Slurm may be away and each query waits.
    """
    node = functools.cache(lambda: _read_node(request, run))
    tests: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("stop", f"Slurm has no reservation {STOP_RESERVATION}", lambda: _stop_problem(request, run)),
        ("claims", "max_concurrent allows this repair", lambda: _claims_problem(request, node(), run)),
        ("in_service", "another node of each partition is in service", lambda: _service_problem(request, node(), run)),
    )
    failure = ""
    for name, text, find in tests:
        found = Requirement(name, text, None, failure) if failure else _requirement(name, text, find)
        failure = found.problem if found.met is None else ""
        yield found


def jobs_requirement(request: Request, run: Run) -> Requirement:
    """Return the requirement that slurmd and slurmctld have no job on this node."""
    return _requirement("slurm_jobs", "Slurm has no job on this node", lambda: _jobs_problem(request, run))


def _requirement(name: str, text: str, find: Callable[[], str]) -> Requirement:
    try:
        problem = find()
    except SlurmError as error:
        return Requirement(name, text, None, str(error))
    return Requirement(name, text, not problem, problem)


def cluster_problem(request: Request, run: Run) -> str:
    """Return why the cluster does not allow the step, as one sentence, or ""."""
    return next((r.problem for r in cluster_requirements(request, run) if not r.met), "")


def own_problem(request: Request, run: Run) -> str:
    """Return why the jobs or the state of this node in Slurm do not allow the step, as one sentence, or "".

    The state is read last before a step, because an operator may change it at any time.
    """
    try:
        return _jobs_problem(request, run) or node_problem(_read_node(request, run), request)
    except SlurmError as error:
        return str(error)


def _read_node(request: Request, run: Run) -> NodeState:
    return parse_node(_query(commands.node(request.node), request, run).stdout, request.node)


def node_problem(node: NodeState, request: Request) -> str:
    """Return why this state does not allow a step, or "". The Reason must be healthd's, with the claim of the step."""
    if parse_claim(request.reason) is not request.step:
        return "the Reason of this repair does not claim its step"
    if node.unread_rows:
        return f"the state of {node.name} in Slurm is incomplete"
    if strip_appended(node.reason) != request.reason:
        return f'the Reason in Slurm is "{node.reason}", not that of this repair'
    if found := node.flags & (MAINTENANCE | REBOOT | POWER):
        return f"the node's state in Slurm is {'+'.join(sorted(found))}"
    if not is_idle(node, request.is_booted):
        return f"the node is not drained and idle in Slurm, but {'+'.join(sorted(node.flags))}"
    return ""


def _jobs_problem(request: Request, run: Run) -> str:
    """Return which jobs are still on this node by slurmd or slurmctld, including suspended ones. Raises SlurmError."""
    listpids = commands.listpids(request.node)
    result = run(Command(listpids, request.command_timeout_seconds))
    if result.status != 0 and not has_no_steps(result):
        raise SlurmError(describe_failure(listpids, result))
    local = parse_listpids(result.text) if result.status == 0 else []
    found = local or parse_job_numbers(_query(commands.jobs_on_node(request.node), request, run).text)
    return f"{_jobs(found)} still on the node" if found else ""


def _stop_problem(request: Request, run: Run) -> str:
    names = parse_reservation_names(_query(commands.reservations(), request, run).text)
    return f"the reservation {STOP_RESERVATION} exists" if STOP_RESERVATION in names else ""


def _claims_problem(request: Request, node: NodeState, run: Run) -> str:
    """Return why the repairs of other nodes leave no room for this one, or "". Raises SlurmError.

    Newer claims than this node's count, too (repair_claim.py).
    """
    max_concurrent = request.settings.max_concurrent
    claims = parse_claims(_query(commands.claims(), request, run).stdout)
    claimed_at = node.reason_time if repair_claim.is_counted(parse_claim(node.reason)) else 0.0
    others = repair_claim.other_claims(claims, request.node, claimed_at)
    nodes = 0
    if others and repair_claim.needs_cluster_size(max_concurrent):
        nodes = len(parse_node_names(_query(commands.node_names(), request, run).stdout))
    return repair_claim.count_problem(others, repair_claim.limit_for(max_concurrent, nodes))


def _service_problem(request: Request, node: NodeState, run: Run) -> str:
    fleet = _query(commands.fleet(), request, run)
    return repair_claim.service_problem(parse_in_service(fleet.stdout, require_partitions(node)))


def _jobs(numbers: Sequence[str]) -> str:
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    noun, verb = ("job", "is") if len(numbers) == 1 else ("jobs", "are")
    return f"{noun} {', '.join(numbers[:MAX_NAMED])}{more} {verb}"


def _query(argv: Argv, request: Request, run: Run) -> CommandResult:
    """Return the result of a query. Raises SlurmError if it failed."""
    result = run(Command(argv, request.command_timeout_seconds))
    if result.status != 0:
        raise SlurmError(describe_failure(argv, result))
    return result
