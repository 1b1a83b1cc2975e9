"""Generates the commands that reserve nodes for maintenance, validate them in a job, and remove the reservation.

No job is killed or displaced. Without the flag IGNORE_JOBS, which healthd does not set, slurmctld refuses to reserve
nodes that have jobs ("Requested nodes are busy"). The flag MAINT would take nodes from another reservation, so healthd
requires that each node is idle and not reserved. When the reservation exists, only its own job can start on its nodes.

healthd always removes the reservation. slurmctld does not delete a reservation in use, so its job is cancelled first.
If healthd is killed (kill -9), the reservation still ends: it has a duration, and PURGE_COMP ends it a minute after its
last job. This was observed with 22.05, 24.11 and 26.05, and is documented in scontrol(1): FLAGS=MAINT, PURGE_COMP
(since 20.02).
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.slurm.commands import Argv, Command, CommandResult, column_format
from healthd.common.slurm.output import describe_unread, readable_records
from healthd.common.text import printable, regex
from healthd.validation.transfers import Transfer, parse_transfer

COMMAND_SECONDS = 30.0
IMMEDIATE_SECONDS = 60  # maximum time that the job may wait for its reserved nodes
PASS_SECONDS = 120.0  # time for one pass of transfers, over all rails of a node in turn
SPARE_SECONDS = 120.0  # time for starting and ending job steps
FREE_STATES = frozenset({"IDLE", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
# number of attempts to delete the reservation, one per second, because an epilog may keep the job running for a while
MAX_DELETES = 60
FIRST_PORT = 18515  # first TCP port, which is perftest's default; each pair in a pass has its own range of ports
PORTS_A_PAIR = 64

STATE_COLUMNS = (("NodeList", 65), ("NodeAddr", 65), ("StateComplete", 200))
_LINE = regex(r"\s*([0-9]{1,6}): ?(.*)")
_GRANTED = regex(r"Granted job allocation ([0-9]{1,12})")
Pair = tuple[str, str]  # sender, receiver


class NoReservation(HealthdError):
    """No validation took place. The message is one sentence with the reason."""


class Stopped(HealthdError):
    """A request to stop. It is raised in the generator, which then cleans up."""


class ReservationRequest(NamedTuple):
    """Request for a validation of several nodes.

    Attributes:
        nodes: names of the nodes.
        name: name for the reservation and the job.
        user: user who may use the reservation.
        program: path of `healthd` on the nodes.
        seconds: time limit for each node's own validation, or 0 for no such validation.
        options: further arguments for `healthd validate` on each node.
        passes: senders and receivers in each pass.
        mndiag_seconds: time limit for DCGM's diagnostic over all nodes, or 0 for no such diagnostic.
    """

    nodes: tuple[str, ...]
    name: str
    user: str
    program: str
    seconds: float
    options: tuple[str, ...]
    passes: tuple[tuple[Pair, ...], ...]
    mndiag_seconds: float = 0.0


class NodesResult(NamedTuple):
    """Result of a validation of several nodes.

    Attributes:
        documents: documents from the nodes that reported one.
        transfers: transfers from all passes.
        problems: errors that occurred.
        mndiag: document of DCGM's diagnostic over all nodes, or None if it was not requested or reported nothing.
    """

    documents: tuple[dict[str, Any], ...]
    transfers: tuple[Transfer, ...]
    problems: tuple[str, ...]
    mndiag: dict[str, Any] | None = None


Steps = Generator[Command, CommandResult, NodesResult]


def job_minutes(request: ReservationRequest) -> int:
    """Return the time limit of the job in minutes."""
    mndiag = request.mndiag_seconds + SPARE_SECONDS if request.mndiag_seconds else 0.0
    return math.ceil((request.seconds + PASS_SECONDS * len(request.passes) + SPARE_SECONDS + mndiag) / 60)


def validate(request: ReservationRequest) -> Steps:
    """Validate the nodes. Raises NoReservation.

    If Stopped is raised in this generator, the generator removes the reservation and re-raises it.
    """
    addresses = _addresses(request, (yield Command(_states(request.nodes), COMMAND_SECONDS)))
    problems: list[str] = []
    is_refused = False
    try:
        created = yield Command(_create(request), COMMAND_SECONDS, changes=True)
        # After a timeout, the reservation may exist anyway. Continue: if the next commands fail, it is removed.
        if is_refused := created.status not in (0, None):
            raise NoReservation(f"Slurm did not reserve {','.join(request.nodes)}: {_last_line(created)}")
        job = _job(request, (yield Command(_allocate(request), IMMEDIATE_SECONDS + COMMAND_SECONDS, changes=True)))
        documents, transfers = yield from _measure(request, job, addresses, problems)
        diagnosed = (yield from _diagnose(request, job, problems)) if request.mndiag_seconds else None
    finally:
        if not is_refused:
            yield from _remove(request, problems)
    return NodesResult(tuple(documents), tuple(transfers), tuple(problems), diagnosed)


def _measure(
    request: ReservationRequest, job: str, addresses: Mapping[str, str], problems: list[str]
) -> Generator[Command, CommandResult, tuple[list[dict[str, Any]], list[Transfer]]]:
    documents: list[dict[str, Any]] = []
    transfers: list[Transfer] = []
    if request.seconds:
        result = yield Command(_step(request, job, _node_arguments(request)), request.seconds + SPARE_SECONDS)
        documents = [item for item in json_documents(result.text) if "results" in item]
        if len(documents) < len(request.nodes):
            answering_nodes = {item.get("node") for item in documents}
            silent = [name for name in request.nodes if name not in answering_nodes]
            problems.append(f"{','.join(silent)} reported nothing: {_last_line(result)}")
    for number, pairs in enumerate(request.passes, 1):
        arguments = ("--pair", pairs_as_text(pairs, addresses))
        result = yield Command(_step(request, job, arguments), PASS_SECONDS + COMMAND_SECONDS)
        pass_transfers = [found for item in json_documents(result.text) for found in _transfers(item)]
        transfers += pass_transfers
        silent_pairs = [
            f"{a}>{b}" for a, b in pairs if (a, b) not in {(item.sender, item.receiver) for item in pass_transfers}
        ]
        if silent_pairs:
            problems.append(f"pass {number}: {', '.join(silent_pairs)} reported nothing: {_last_line(result)}")
    return documents, transfers


def _diagnose(
    request: ReservationRequest, job: str, problems: list[str]
) -> Generator[Command, CommandResult, dict[str, Any] | None]:
    """Run DCGM's diagnostic from the first node over all nodes."""
    arguments = ("--mndiag", ",".join(request.nodes), "--force", "--json", "--seconds", f"{request.mndiag_seconds:.0f}")
    step = _step(request, job, arguments, request.nodes[:1])
    result = yield Command(step, request.mndiag_seconds + SPARE_SECONDS)
    found = next((item for item in json_documents(result.text) if "mndiag" in item), None)
    if found is None:
        problems.append(f"dcgmi mndiag on {request.nodes[0]} reported nothing: {_last_line(result)}")
    return found


def _remove(request: ReservationRequest, problems: list[str]) -> Generator[Command, CommandResult, None]:
    """Cancel the jobs in the reservation, then delete it. A reservation that no longer exists counts as deleted."""
    yield Command(("scancel", f"--reservation={request.name}"), COMMAND_SECONDS, changes=True)
    last = CommandResult(None)
    for _ in range(MAX_DELETES):
        delete = ("scontrol", "delete", f"ReservationName={request.name}")
        last = yield Command(delete, COMMAND_SECONDS, changes=True)
        if last.status == 0 or "reservation is invalid" in last.stderr or "not found" in last.stderr:
            return
        yield Command(("sleep", "1"), COMMAND_SECONDS)
    problems.append(
        f"the reservation {request.name} could not be deleted ({_last_line(last)}). The reservation ends by itself; "
        f"to delete it now: scontrol delete ReservationName={request.name}"
    )


# --- the commands


def _states(nodes: Sequence[str]) -> Argv:
    return ("sinfo", "-h", "-a", "-N", "-n", ",".join(nodes), "-O", column_format(STATE_COLUMNS))


def _create(request: ReservationRequest) -> Argv:
    return (
        *("scontrol", "create", "reservation", f"ReservationName={request.name}", "StartTime=now"),
        *(f"Duration={job_minutes(request) + 2}", f"Users={request.user}", f"Nodes={','.join(request.nodes)}"),
        "Flags=MAINT,PURGE_COMP=00:01:00",
    )


def _allocate(request: ReservationRequest) -> Argv:
    count = len(request.nodes)
    return (
        *("salloc", "--no-shell", f"--job-name={request.name}", f"--reservation={request.name}", "--exclusive"),
        *(f"--nodes={count}", f"--nodelist={','.join(request.nodes)}", f"--time={job_minutes(request)}"),
        f"--immediate={IMMEDIATE_SECONDS}",
    )


def _step(request: ReservationRequest, job: str, arguments: Sequence[str], nodes: Sequence[str] = ()) -> Argv:
    """Return a command that runs one task on each node, or on `nodes`. --label marks each output line with its task."""
    count = len(nodes or request.nodes)
    chosen = (f"--nodelist={','.join(nodes)}",) if nodes else ()
    command = 'exec "$0" validate --node-name "$SLURMD_NODENAME" "$@"'
    return (
        *("srun", f"--jobid={job}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *chosen,
        *("--label", "--kill-on-bad-exit=0", "sh", "-c", command, request.program, *arguments),
    )


def _node_arguments(request: ReservationRequest) -> tuple[str, ...]:
    return ("--why", "nodes", "--force", "--json", "--seconds", f"{request.seconds:.0f}", *request.options)


def pairs_as_text(pairs: Sequence[Pair], addresses: Mapping[str, str]) -> str:
    """Return the argument for `healthd validate --pair`: "SENDER RECEIVER ADDRESS PORT" pairs separated by commas."""
    ports = (FIRST_PORT + PORTS_A_PAIR * (number % 512) for number in range(len(pairs)))
    return ",".join(f"{a} {b} {addresses.get(b) or b} {port}" for (a, b), port in zip(pairs, ports, strict=True))


# --- output of the commands


def _addresses(request: ReservationRequest, result: CommandResult) -> dict[str, str]:
    """Return each node's address. Raises NoReservation unless all nodes are idle and not reserved.

    A row that cannot be read is skipped, and reported if a node is missing.
    """
    if result.status != 0:
        raise NoReservation(f"sinfo does not list the nodes: {_last_line(result)}")
    states: dict[str, tuple[str, str]] = {}
    rows, unread = readable_records(result.stdout, STATE_COLUMNS)
    for record in rows:
        name, address, state = (value.decode("utf-8", "backslashreplace") for value in record)
        states[name] = (address, state.upper())
    if missing := [name for name in request.nodes if name not in states]:
        unread_text = f": {describe_unread(unread)}" if unread else ""
        raise NoReservation(f"sinfo does not list node {printable(missing[0])}{unread_text}")
    taken = [
        f"{name} is {states[name][1]}" for name in request.nodes if not set(states[name][1].split("+")) <= FREE_STATES
    ]
    if taken:
        requirement = "each node must be idle, not drained and not reserved; run healthd validate on a drained node"
        raise NoReservation(f"{', '.join(map(printable, taken[:8]))}: {requirement}")
    return {name: address for name, (address, _) in states.items()}


def _job(request: ReservationRequest, result: CommandResult) -> str:
    granted = _GRANTED.search(result.stderr + result.text)
    if result.status != 0 or granted is None:
        raise NoReservation(f"Slurm did not start a job in the reservation {request.name}: {_last_line(result)}")
    return granted[1]


def json_documents(text: str) -> list[dict[str, Any]]:
    """Return the JSON documents in `srun --label` output.

    The lines of each task are joined first. Other output is skipped.
    """
    lines_by_task: dict[str, list[str]] = {}
    for line in text.split("\n"):
        if found := _LINE.fullmatch(line):
            lines_by_task.setdefault(found[1], []).append(found[2])
    documents = []
    for lines in lines_by_task.values():
        try:
            document = json.loads("\n".join(lines))
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            documents.append(document)
    return documents


def _transfers(document: Mapping[str, Any]) -> list[Transfer]:
    rows = document.get("transfers")
    if not isinstance(rows, list):
        return []
    return [found for row in rows if (found := parse_transfer(row)) is not None]


def _last_line(result: CommandResult) -> str:
    if result.status is None:
        return "no answer in time"
    lines = [line for line in (result.stderr + "\n" + result.text).splitlines() if line.strip()]
    return printable(" ".join(lines[-1].split()))[:200] if lines else f"status {result.status}"
