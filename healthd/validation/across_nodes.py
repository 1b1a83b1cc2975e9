"""`healthd validate --nodes`: runs the commands of reservation.py, and has them clean up whatever ends it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult
from healthd.host.child_process import Child
from healthd.validation import document as documents
from healthd.validation.reservation import Found, Steps, Stopped
from healthd.validation.transfers import Judged, judge, suspects

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(steps: Steps, say: Callable[[str], object]) -> Found:
    """Run it to its end. A signal is thrown into it once; what it does then is done, whatever comes. `say` is told of
    each command that changes something. Raises what the generator raises."""
    with _signalled() as told:
        result: CommandResult | None = None
        stopped = False
        try:
            command = next(steps)
            while True:
                if command.changes:
                    say(" ".join(command.argv))
                result = _run(command, told if not stopped else [])
                if told and not stopped:
                    stopped = True
                    command = steps.throw(Stopped("it was stopped: what was begun is taken back"))
                else:
                    command = steps.send(result)
        except StopIteration as end:
            found: Found = end.value
            return found


@contextmanager
def _signalled() -> Iterator[list[int]]:
    """The signals that came; a wait ends when one does."""
    told: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, note) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield told
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _run(command: Command, told: list[int]) -> CommandResult:
    """Its end, its deadline, or a signal to us: then it is told to end, and left after two seconds."""
    try:
        child = Child(command.argv, time.monotonic() + command.deadline_seconds, time.monotonic, ENVIRONMENT)
    except OSError as error:
        return CommandResult(127, b"", f"{command.argv[0]}: {error.strerror}")
    asked = False
    while not child.step():
        if told and not asked:
            asked, child.deadline = True, min(child.deadline, time.monotonic() + 2.0)
            child.terminate()
        waiting = select.poll()
        for descriptor, _ in child.waits():
            waiting.register(descriptor, select.POLLIN)
        waiting.poll(min(max(child.deadline - time.monotonic(), 0.0), 0.5) * 1000)
    out, err = child.output()
    return CommandResult(child.status, out, err)


# --- what came of it


def as_document(nodes: tuple[str, ...], found: Found) -> dict[str, Any]:
    """docs/json.md. `verdict`: the worst of all nodes and transfers."""
    judged = judge(found.transfers)
    rows = [_row(one) for one in judged]
    told = {str(one.get("node")): str(one.get("verdict")) for one in found.documents}
    verdicts = {*told.values(), *(one.verdict for one in judged)}
    worst = next((word for word in ("failed", "slow", "ok") if word in verdicts), "not_looked")
    return {
        "schema": documents.SCHEMA,
        "nodes": [{"node": name, "verdict": told.get(name, "not_looked")} for name in nodes],
        "documents": list(found.documents),
        "transfers": rows,
        "suspects": [{"what": one.what, "names": list(one.names), "says": one.says} for one in suspects(judged)],
        "trouble": list(found.trouble),
        "verdict": worst,
    }


def _row(one: Judged) -> dict[str, Any]:
    of = one.transfer
    return {
        "sender": of.sender,
        "receiver": of.receiver,
        "rail": of.rail,
        "gbits": of.gbits,
        "verdict": one.verdict,
        "expected": one.expected,
        "says": one.says,
    }


def as_text(document: dict[str, Any]) -> str:
    """What a person reads: the nodes, what is not well between them, who is suspect."""
    lines = [f"{one['node']}: {one['verdict'].replace('_', ' ')}" for one in document["nodes"]]
    for whole in document["documents"]:
        bad = [one for one in whole.get("results", []) if one.get("verdict") in ("failed", "slow")]
        lines += [f"  {whole.get('node')} {one['verdict']}: {one['test']} {one['part']}: {one['says']}" for one in bad]
    rows = document["transfers"]
    if rows:
        lines += ["", "Between nodes"]
        lines += [f"  {r['sender']} > {r['receiver']} {r['rail']}  {r['verdict']}  {r['says']}".rstrip() for r in rows]
    if document["suspects"]:
        lines += ["", "Suspects"]
        lines += [f"  {one['what']} {' > '.join(one['names'])}: {one['says']}" for one in document["suspects"]]
    if document["trouble"]:
        lines += ["", "Not seen", *(f"  {sentence}" for sentence in document["trouble"])]
    return "\n".join(lines) + "\n"
