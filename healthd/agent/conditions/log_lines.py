"""Log lines about a change to the ledger, as values. events.py has the events for the same change. All functions are
pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions import log_fields
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.log_fields import Fields
from healthd.common.model import Condition, ConditionKey, ConditionState, Severity


class Line(NamedTuple):
    """A log line. It is logged as an error if `severity` is above WARNING. `fields` are the journal fields
    (log_fields.py)."""

    severity: Severity
    text: str
    fields: Fields


def change_lines(before: Ledger, after: Ledger) -> Iterator[Line]:
    """Yield a line for each condition that opened, worsened or was cleared. `after.cleared` must not be trimmed yet."""
    if after.conditions is before.conditions:
        return
    previous, history = before.by_key(), set(map(id, before.cleared))
    for condition in (*after.conditions, *(c for c in after.cleared if id(c) not in history)):
        yield from _condition_lines(previous.get(condition.key), condition)


def _condition_lines(before: Condition | None, after: Condition) -> Iterator[Line]:
    """Yield a condition's lines. There are two if the condition opened and was cleared in one change."""
    if before is None and after.state is ConditionState.CLEARED:
        opened = replace(after, state=ConditionState.OPEN)
        yield from _condition_lines(None, opened)
        before = opened
    if text := _condition_text(before, after):
        yield Line(min(after.severity, Severity.WARNING), text, log_fields.condition_fields(after))


def _condition_text(before: Condition | None, after: Condition) -> str:
    """Return the text for a change, or "" if it is not logged."""
    key = after.key
    if before is None or after.state is not before.state:
        if after.state is ConditionState.PENDING:
            return f"{key}: {after.message} (pending: opens if it lasts {after.confirm_seconds:g} s)"
        if after.state is ConditionState.CLEARED:
            return f"{key}: cleared: {after.cleared_by}"
        return f"{key}: {after.severity.name.lower()}, {after.state.value}: {after.message}"
    if after.severity > before.severity:
        return f"{key}: now {after.severity.name.lower()}: {after.message}"
    return ""


def ended_ack_lines(
    before: Mapping[ConditionKey, Condition], after: Mapping[ConditionKey, Condition]
) -> Iterator[Line]:
    for key, current in after.items():
        previous = before[key]
        if previous.ack and not current.ack:
            reason = "the condition became worse" if current.severity > previous.ack.severity else "it expired"
            yield Line(Severity.INFO, f"{key}: the ack by {previous.ack.user} ended, {reason}: {previous.ack.why}", {})


def renamed_part_lines(before: Ledger, after: Ledger) -> Iterator[Line]:
    """Yield messages that now name a part that was unknown when the condition opened."""
    messages = {c.key: c.message for c in before.conditions}
    for c in after.conditions:
        if messages.get(c.key, c.message) != c.message:
            yield Line(Severity.INFO, f"{c.key}: {c.message}", log_fields.condition_fields(c))
