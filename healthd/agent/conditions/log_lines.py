"""Lines of healthd's log about a change of the ledger, as values. Pure. events.py has the events of the same change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions import log_fields
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.conditions.log_fields import Fields
from healthd.common.model import Condition, ConditionKey, ConditionState, Severity


class Line(NamedTuple):
    """A line of the log. `severity`: above WARNING it is logged as an error; `fields`: of the journal
    (log_fields.py)."""

    severity: Severity
    words: str
    fields: Fields


def of_change(before: Ledger, after: Ledger) -> Iterator[Line]:
    """Yield the conditions that opened, worsened or were cleared. `after.cleared` must not be trimmed yet."""
    if after.conditions is before.conditions:
        return
    known, history = before.by_key(), set(map(id, before.cleared))
    for condition in (*after.conditions, *(c for c in after.cleared if id(c) not in history)):
        yield from _of_condition(known.get(condition.key), condition)


def _of_condition(before: Condition | None, after: Condition) -> Iterator[Line]:
    """Yield two lines if a condition opened and was cleared in one change."""
    if before is None and after.state is ConditionState.CLEARED:
        opened = replace(after, state=ConditionState.OPEN)
        yield from _of_condition(None, opened)
        before = opened
    if words := _words(before, after):
        yield Line(min(after.severity, Severity.WARNING), words, log_fields.of_condition(after))


def _words(before: Condition | None, after: Condition) -> str:
    """Return the text of a change, "" if it is not logged."""
    what = after.key
    if before is None or after.state is not before.state:
        if after.state is ConditionState.PENDING:
            return f"{what}: {after.message} (pending: opens if it lasts {after.confirm_seconds:g} s)"
        if after.state is ConditionState.CLEARED:
            return f"{what}: cleared: {after.cleared_by}"
        return f"{what}: {after.severity.name.lower()}, {after.state.value}: {after.message}"
    if after.severity > before.severity:
        return f"{what}: now {after.severity.name.lower()}: {after.message}"
    return ""


def of_ended_acks(before: Mapping[ConditionKey, Condition], after: Mapping[ConditionKey, Condition]) -> Iterator[Line]:
    for key, now in after.items():
        was = before[key]
        if was.ack and not now.ack:
            worse = "the condition is worse" if now.severity > was.ack.severity else "it expired"
            yield Line(Severity.INFO, f"{key}: the ack by {was.ack.who} ended, {worse}: {was.ack.why}", {})


def of_names(before: Ledger, after: Ledger) -> Iterator[Line]:
    """Yield the messages that now name a part which was unknown when the condition opened."""
    said = {c.key: c.message for c in before.conditions}
    for c in after.conditions:
        if said.get(c.key, c.message) != c.message:
            yield Line(Severity.INFO, f"{c.key}: {c.message}", log_fields.of_condition(c))
