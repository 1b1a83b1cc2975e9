"""`healthd validate --nodes`: runs the commands from reservation.py and always removes the reservation.

`--pair` runs on each node of a pass of transfers: the node sends to another node, receives from another node, or does
neither.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult
from healthd.common.text import is_decimal, regex
from healthd.host.child_process import Child
from healthd.validation import document as documents
from healthd.validation import domain, parts, programs
from healthd.validation.measurement import NotUnderstood
from healthd.validation.reservation import NodesResult, ReservationRequest, Steps, Stopped
from healthd.validation.tool_paths import Tools
from healthd.validation.tools import perftest
from healthd.validation.transfers import AssessedTransfer, Transfer, judge, suspects

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RAIL_SECONDS = 30.0  # time limit for each port, including the wait for the other node
RETRY_SECONDS = 0.5
MAX_RAILS = 64  # number of TCP ports that reservation.py assigns to a pair
_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,253}")
_REFUSED = ("Couldn't connect", "Unable to init the socket")


def run(steps: Steps, report: Callable[[str], object]) -> NodesResult:
    """Run all steps of the generator. The first signal raises Stopped in it; its clean-up always completes.

    `report` is called with each command that changes something. Raises the exceptions of the generator.
    """
    with _received_signals() as received:
        result: CommandResult | None = None
        stopped = False
        try:
            command = next(steps)
            while True:
                if command.changes:
                    report(" ".join(command.argv))
                result = _run(command, received if not stopped else [])
                if received and not stopped:
                    stopped = True
                    command = steps.throw(Stopped("stopped by a signal; the reservation was removed"))
                else:
                    command = steps.send(result)
        except StopIteration as end:
            found: NodesResult = end.value
            return found


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Yield a list to which received signals are added. A signal also ends a wait."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, note) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _run(command: Command, received: list[int]) -> CommandResult:
    """Run a command until it ends. After its deadline or a signal, terminate it and wait for at most two seconds."""
    try:
        child = Child(command.argv, time.monotonic() + command.deadline_seconds, time.monotonic, ENVIRONMENT)
    except OSError as error:
        return CommandResult(127, b"", f"{command.argv[0]}: {error.strerror}")
    is_terminating = False
    while not child.step():
        if received and not is_terminating:
            is_terminating, child.deadline = True, min(child.deadline, time.monotonic() + 2.0)
            child.terminate()
        waiting = select.poll()
        for descriptor, _ in child.waits():
            waiting.register(descriptor, select.POLLIN)
        waiting.poll(min(max(child.deadline - time.monotonic(), 0.0), 0.5) * 1000)
    out, err = child.output()
    return CommandResult(child.status, out, err)


# --- results


def as_document(request: ReservationRequest, found: NodesResult) -> dict[str, Any]:
    """Return the document described in docs/json.md.

    `verdict` is the worst verdict for any node, transfer or DCGM's diagnostic. Without a fault, it is "not_measured" if
    a node or the diagnostic was requested and has no result.
    """
    judged = judge(found.transfers)
    rows = [_row(entry) for entry in judged]
    verdict_by_node = {str(entry.get("node")): str(entry.get("verdict")) for entry in found.documents}
    verdicts = {*verdict_by_node.values(), *(entry.verdict for entry in judged)}
    is_incomplete = bool(request.seconds) and any(name not in verdict_by_node for name in request.nodes)
    if request.mndiag_seconds:
        diagnosis = str((found.mndiag or {}).get("verdict"))
        verdicts.add(diagnosis)
        is_incomplete = is_incomplete or diagnosis not in ("ok", "failed")
    words = ("failed", "slow") if is_incomplete else ("failed", "slow", "ok")
    worst = next((word for word in words if word in verdicts), "not_measured")
    return {
        "schema": documents.SCHEMA,
        "nodes": [{"node": name, "verdict": verdict_by_node.get(name, "not_measured")} for name in request.nodes],
        "documents": list(found.documents),
        "transfers": rows,
        "suspects": [
            {"what": entry.kind, "names": list(entry.names), "message": entry.message} for entry in suspects(judged)
        ],
        "mndiag": found.mndiag,
        "problems": list(found.problems),
        "verdict": worst,
    }


def _row(assessed: AssessedTransfer) -> dict[str, Any]:
    measured = assessed.transfer
    return {
        "sender": measured.sender,
        "receiver": measured.receiver,
        "rail": measured.rail,
        "gbits": measured.gbits,
        "verdict": assessed.verdict,
        "expected": assessed.expected,
        "message": assessed.message,
    }


def as_text(document: dict[str, Any]) -> str:
    """Return the document as text: the nodes, problems between them, and suspects."""
    lines = [f"{entry['node']}: {entry['verdict'].replace('_', ' ')}" for entry in document["nodes"]]
    for node_document in document["documents"]:
        bad_results = [
            entry for entry in node_document.get("results", []) if entry.get("verdict") in ("failed", "slow")
        ]
        lines += [
            f"  {node_document.get('node')} {entry['verdict']}: {entry['test']} {entry['part']}: {entry['message']}"
            for entry in bad_results
        ]
    rows = document["transfers"]
    if rows:
        lines += ["", "Between nodes"]
        lines += [
            f"  {row['sender']} > {row['receiver']} {row['rail']}  {row['verdict']}  {row['message']}".rstrip()
            for row in rows
        ]
    if document["mndiag"] is not None:
        lines += ["", "DCGM multi-node diagnostic", *domain.as_text(document["mndiag"]).splitlines()]
    if document["suspects"]:
        lines += ["", "Suspects"]
        lines += [
            f"  {entry['what']} {' > '.join(entry['names'])}: {entry['message']}" for entry in document["suspects"]
        ]
    if document["problems"]:
        lines += ["", "Not measured", *(f"  {sentence}" for sentence in document["problems"])]
    return "\n".join(lines) + "\n"


# --- one node in a pass


class InvalidPass(HealthdError):
    """The --pair argument is invalid. The message is one sentence for the caller."""


class Role(NamedTuple):
    """This node's role in a pair. `port` is the first of the pair's TCP ports."""

    sender: str
    receiver: str
    address: str
    port: int
    sends: bool


def role_in_pass(text: str, node: str) -> Role | None:
    """Return the role of `node` in a pass, or None if it has none. Raises InvalidPass.

    The text of a pass is from reservation.pairs_as_text.
    """
    found = None
    for pair in text.split(","):
        fields = pair.split()
        if (
            len(fields) != 4
            or not all(_NAME.fullmatch(name) for name in fields[:2])
            or not _ADDRESS.fullmatch(fields[2])
        ):
            raise InvalidPass(f'--pair: "{pair[:80]}" is not "SENDER RECEIVER ADDRESS PORT"')
        if not is_decimal(fields[3]) or len(fields[3]) > 5 or not 0 < int(fields[3]) <= 65535 - MAX_RAILS:
            raise InvalidPass(f'--pair: "{fields[3][:20]}" is not a port with room for {MAX_RAILS} rails')
        if node in fields[:2] and found is None:
            found = Role(fields[0], fields[1], fields[2], int(fields[3]), node == fields[0])
    return found


def transfer(role: Role, tools: Tools, root: str, stop: int) -> list[Transfer]:
    """Take part in a pass of transfers.

    Return one transfer for each rail if this node is the sender. Return [] if it is the receiver.

    perftest's ib_write_bw runs on each active port in turn. The sender's first port is paired with the receiver's first
    port, and so on. The sender does not know when the receiver starts to listen, so it tries again for a limited time.
    """
    rails = list(parts.read_parts(root).ports)[:MAX_RAILS]
    program = tools.get("ib_write_bw", "")
    if not program or not rails:
        why = "ib_write_bw was not found" if not program else "no active InfiniBand or RoCE port in sysfs"
        side = f"{role.sender if role.sends else role.receiver}: {why}"
        return [Transfer(role.sender, role.receiver, "", None, "not_measured", side)] if role.sends else []
    if not role.sends:
        for number, rail in enumerate(rails):
            server, _ = perftest.commands(program, rail, role.port + number)
            programs.run([programs.Command(server)], RAIL_SECONDS, stop)
        return []
    return [_send(role, program, rail, role.port + number, stop) for number, rail in enumerate(rails)]


def _send(role: Role, program: str, rail: str, port: int, stop: int) -> Transfer:
    _, (*client, _) = perftest.commands(program, rail, port)
    until = time.monotonic() + RAIL_SECONDS
    output, ending = "", "ended"
    while (remaining := until - time.monotonic()) > 0 and not programs.is_stop_requested(stop):
        (ended,) = programs.run([programs.Command((*client, role.address))], remaining, stop)
        output, ending = f"{ended.stdout}\n{ended.stderr}", ended.ending
        if ending != "ended" or not any(text in output for text in _REFUSED):
            break
        time.sleep(RETRY_SECONDS)
    try:
        (measured,) = perftest.parse(output, rail)
    except NotUnderstood as error:
        why = f"{error}" if ending == "ended" else f"ib_write_bw did not end within {RAIL_SECONDS:.0f} s"
        return Transfer(role.sender, role.receiver, rail, None, "not_measured", why)
    return Transfer(role.sender, role.receiver, rail, measured.value, measured.state, measured.message)


def pair_document(node: str, transfers: list[Transfer]) -> dict[str, Any]:
    return {"node": node, "transfers": [entry._asdict() for entry in transfers]}
