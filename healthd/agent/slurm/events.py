"""What the stream is told of what is done in Slurm. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from healthd.agent.conditions.events import OPERATOR
from healthd.common.slurm.commands import Argv, CommandResult, change_of
from healthd.common.slurm.output import what_failed
from healthd.events.schema import Event


def of_command(argv: Argv, result: CommandResult | None) -> list[Event]:
    """A command that begins (None), or has ended. That it worked is told when Slurm shows it."""
    what, about = change_of(argv)
    if not what or (result is not None and result.status == 0):
        return []
    fields = {"drain": {"reason": about}, "requeue": {"job": about}}.get(what, {})
    how = {"stage": "sent"} if result is None else {"stage": "refused", "error": what_failed(argv, result)}
    return [Event(what, {**fields, **how})]


def of_look(reason: str, lifted: bool, acknowledged: bool, requeued: tuple[str, ...]) -> Iterator[Event]:
    """What a look saw. `reason`: of our drain before it. Our drain is told where the ledger changes."""
    if lifted or acknowledged:
        who = {} if lifted else {"who": OPERATOR}
        yield Event("resume", {"stage": "confirmed", "reason": reason, **who})
    for job in requeued:
        yield Event("requeue", {"stage": "confirmed", "job": job})
