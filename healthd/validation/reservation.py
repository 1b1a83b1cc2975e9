"""A maintenance reservation of some nodes, a job in it that validates them, and its end: a generator of commands.

It kills no job and displaces none. slurmctld refuses a reservation of nodes that have jobs ("Requested nodes are
busy") unless IGNORE_JOBS is asked for, which is not; MAINT alone would take nodes from another's reservation, so each
node must be idle and in none. From then on nothing but the job in it starts there. The reservation is always removed
again, and after kill -9 it ends by itself: it has a duration, and PURGE_COMP ends it a minute after its last job.
slurmctld does not delete one that is in use, so its job is cancelled first.
Seen with 22.05, 24.11 and 26.05, and written in scontrol(1): FLAGS=MAINT, PURGE_COMP (since 20.02).
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
from healthd.validation.transfers import Transfer, transfer_of

COMMAND_SECONDS = 30.0
IMMEDIATE_SECONDS = 60  # how long the job may wait for its nodes: nobody else can have them
PASS_SECONDS = 120.0  # one pass of transfers, all rails of a node one after another
SPARE_SECONDS = 120.0  # for the start and the end of steps
FREE = frozenset({"IDLE", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
MOST_DELETES = 60  # one a second: an epilog may hold the job for a while
FIRST_PORT = 18515  # perftest's own; each pair of a pass has a range of its own
PORTS_A_PAIR = 64

STATE_COLUMNS = (("NodeList", 65), ("NodeAddr", 65), ("StateComplete", 200))
_LINE = regex(r"\s*([0-9]{1,6}): ?(.*)")
_GRANTED = regex(r"Granted job allocation ([0-9]{1,12})")
Pair = tuple[str, str]  # sender, receiver


class NoReservation(HealthdError):
    """Nothing was validated: one sentence for a person."""


class Stopped(HealthdError):
    """A person has had enough: thrown into the generator, which then cleans up."""


class Wanted(NamedTuple):
    """nodes: their names. name: of the reservation and the job. user: who may use it. program: `healthd` on the nodes.
    seconds: of each node's own validation; 0 = none. options: of it, as its node's `healthd validate` takes them.
    passes: who sends to whom in which pass."""

    nodes: tuple[str, ...]
    name: str
    user: str
    program: str
    seconds: float
    options: tuple[str, ...]
    passes: tuple[tuple[Pair, ...], ...]


class Found(NamedTuple):
    """documents: of the nodes that told one. transfers: of all passes. trouble: what went wrong on the way."""

    documents: tuple[dict[str, Any], ...]
    transfers: tuple[Transfer, ...]
    problems: tuple[str, ...]


Steps = Generator[Command, CommandResult, Found]


def minutes(wanted: Wanted) -> int:
    """How long the job may run."""
    return math.ceil((wanted.seconds + PASS_SECONDS * len(wanted.passes) + SPARE_SECONDS) / 60)


def validate(wanted: Wanted) -> Steps:
    """Raises NoReservation; Stopped if that is thrown in. In both cases the reservation is removed before."""
    addresses = _addresses(wanted, (yield Command(_states(wanted.nodes), COMMAND_SECONDS)))
    problems: list[str] = []
    is_refused = False
    try:
        made = yield Command(_create(wanted), COMMAND_SECONDS, changes=True)
        # A deadline that passed says nothing of whether it was made: what follows fails then, and it is removed.
        if is_refused := made.status not in (0, None):
            raise NoReservation(f"Slurm makes no reservation of {','.join(wanted.nodes)}: {_words(made)}")
        job = _job(wanted, (yield Command(_allocate(wanted), IMMEDIATE_SECONDS + COMMAND_SECONDS, changes=True)))
        documents, transfers = yield from _measure(wanted, job, addresses, problems)
    finally:
        if not is_refused:
            yield from _remove(wanted, problems)
    return Found(tuple(documents), tuple(transfers), tuple(problems))


def _measure(
    wanted: Wanted, job: str, addresses: Mapping[str, str], problems: list[str]
) -> Generator[Command, CommandResult, tuple[list[dict[str, Any]], list[Transfer]]]:
    documents: list[dict[str, Any]] = []
    transfers: list[Transfer] = []
    if wanted.seconds:
        ran = yield Command(_step(wanted, job, _own(wanted)), wanted.seconds + SPARE_SECONDS)
        documents = [one for one in printed(ran.text) if "results" in one]
        if len(documents) < len(wanted.nodes):
            told = {one.get("node") for one in documents}
            silent = [name for name in wanted.nodes if name not in told]
            problems.append(f"{','.join(silent)} told nothing: {_words(ran)}")
    for number, pairs in enumerate(wanted.passes, 1):
        arguments = ("--pair", pairs_as_text(pairs, addresses))
        ran = yield Command(_step(wanted, job, arguments), PASS_SECONDS + COMMAND_SECONDS)
        told_now = [found for one in printed(ran.text) for found in _transfers(one)]
        transfers += told_now
        silent_pairs = [f"{a}>{b}" for a, b in pairs if (a, b) not in {(one.sender, one.receiver) for one in told_now}]
        if silent_pairs:
            problems.append(f"pass {number}: {', '.join(silent_pairs)} told nothing: {_words(ran)}")
    return documents, transfers


def _remove(wanted: Wanted, problems: list[str]) -> Generator[Command, CommandResult, None]:
    """Cancel what runs in it, then delete it. One that is not there any more is removed."""
    yield Command(("scancel", f"--reservation={wanted.name}"), COMMAND_SECONDS, changes=True)
    last = CommandResult(None)
    for _ in range(MOST_DELETES):
        delete = ("scontrol", "delete", f"ReservationName={wanted.name}")
        last = yield Command(delete, COMMAND_SECONDS, changes=True)
        if last.status == 0 or "reservation is invalid" in last.stderr or "not found" in last.stderr:
            return
        yield Command(("sleep", "1"), COMMAND_SECONDS)
    problems.append(
        f"the reservation {wanted.name} could not be deleted ({_words(last)}): it ends by itself, or by "
        f"scontrol delete ReservationName={wanted.name}"
    )


# --- the commands


def _states(nodes: Sequence[str]) -> Argv:
    return ("sinfo", "-h", "-a", "-N", "-n", ",".join(nodes), "-O", column_format(STATE_COLUMNS))


def _create(wanted: Wanted) -> Argv:
    return (
        *("scontrol", "create", "reservation", f"ReservationName={wanted.name}", "StartTime=now"),
        *(f"Duration={minutes(wanted) + 2}", f"Users={wanted.user}", f"Nodes={','.join(wanted.nodes)}"),
        "Flags=MAINT,PURGE_COMP=00:01:00",
    )


def _allocate(wanted: Wanted) -> Argv:
    count = len(wanted.nodes)
    return (
        *("salloc", "--no-shell", f"--job-name={wanted.name}", f"--reservation={wanted.name}", "--exclusive"),
        *(f"--nodes={count}", f"--nodelist={','.join(wanted.nodes)}", f"--time={minutes(wanted)}"),
        f"--immediate={IMMEDIATE_SECONDS}",
    )


def _step(wanted: Wanted, job: str, arguments: Sequence[str]) -> Argv:
    """One task a node. --label, so that lines of several nodes can be told apart."""
    count = len(wanted.nodes)
    here = 'exec "$0" validate --node-name "$SLURMD_NODENAME" "$@"'
    return (
        *("srun", f"--jobid={job}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *("--label", "--kill-on-bad-exit=0", "sh", "-c", here, wanted.program, *arguments),
    )


def _own(wanted: Wanted) -> tuple[str, ...]:
    return ("--why", "nodes", "--force", "--json", "--seconds", f"{wanted.seconds:.0f}", *wanted.options)


def pairs_as_text(pairs: Sequence[Pair], addresses: Mapping[str, str]) -> str:
    """ "SENDER RECEIVER ADDRESS PORT", pairs apart by commas: what `healthd validate --pair` takes."""
    ports = (FIRST_PORT + PORTS_A_PAIR * (number % 512) for number in range(len(pairs)))
    return ",".join(f"{a} {b} {addresses.get(b) or b} {port}" for (a, b), port in zip(pairs, ports, strict=True))


# --- what they say


def _addresses(wanted: Wanted, shown: CommandResult) -> dict[str, str]:
    """Return the address of each node. Raises NoReservation unless each is idle and not in a reservation.

    A row that cannot be read is skipped, and reported if a node is missing."""
    if shown.status != 0:
        raise NoReservation(f"sinfo does not list the nodes: {_words(shown)}")
    states: dict[str, tuple[str, str]] = {}
    rows, unread = readable_records(shown.stdout, STATE_COLUMNS)
    for record in rows:
        name, address, state = (value.decode("utf-8", "backslashreplace") for value in record)
        states[name] = (address, state.upper())
    if missing := [name for name in wanted.nodes if name not in states]:
        rest = f": {describe_unread(unread)}" if unread else ""
        raise NoReservation(f"sinfo lists no node {printable(missing[0])}{rest}")
    taken = [f"{name} is {states[name][1]}" for name in wanted.nodes if not set(states[name][1].split("+")) <= FREE]
    if taken:
        why = "each must be idle, undrained and in no reservation; a drained node is validated on itself"
        raise NoReservation(f"{', '.join(map(printable, taken[:8]))}: {why}")
    return {name: address for name, (address, _) in states.items()}


def _job(wanted: Wanted, ran: CommandResult) -> str:
    granted = _GRANTED.search(ran.stderr + ran.text)
    if ran.status != 0 or granted is None:
        raise NoReservation(f"Slurm starts no job in the reservation {wanted.name}: {_words(ran)}")
    return granted[1]


def printed(text: str) -> list[dict[str, Any]]:
    """The JSON documents in what `srun --label` printed: each task's lines are put together again. What is none is
    passed over."""
    of_task: dict[str, list[str]] = {}
    for line in text.split("\n"):
        if found := _LINE.fullmatch(line):
            of_task.setdefault(found[1], []).append(found[2])
    documents = []
    for lines in of_task.values():
        try:
            document = json.loads("\n".join(lines))
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            documents.append(document)
    return documents


def _transfers(document: Mapping[str, Any]) -> list[Transfer]:
    told = document.get("transfers")
    if not isinstance(told, list):
        return []
    return [found for one in told if (found := transfer_of(one)) is not None]


def _words(ran: CommandResult) -> str:
    if ran.status is None:
        return "no answer in time"
    lines = [line for line in (ran.stderr + "\n" + ran.text).splitlines() if line.strip()]
    return printable(" ".join(lines[-1].split()))[:200] if lines else f"status {ran.status}"
