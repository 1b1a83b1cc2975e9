"""Kernel events become conditions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from healthd.model import Condition, ConditionKey, Finding, KernelEvent

Correlate = Callable[[Sequence[KernelEvent]], "Iterable[Finding] | None"]


def findings_in(events: Sequence[KernelEvent], correlate: Correlate, known: Iterable[Condition]) -> list[Finding]:
    """What a check finds in the events that still count. `known`: conditions that stand or were cleared.

    What was repaired, reset or acknowledged makes no later event worse, and what is history no live one: a harmless
    line an hour after a repaired fatal one of the same code is harmless.
    """
    settled: dict[ConditionKey, list[Condition]] = {}
    for condition in known:
        if condition.last_sequence and (condition.cleared_at or condition.acknowledged_at):
            settled.setdefault(condition.key, []).append(condition)
    live = _unsettled([event for event in events if not event.history], correlate, settled)
    keys = {finding.key for finding in live}
    old = _unsettled([event for event in events if event.history], correlate, settled)
    return [*live, *(finding for finding in old if finding.key not in keys)]


def _unsettled(
    events: Sequence[KernelEvent], correlate: Correlate, settled: Mapping[ConditionKey, list[Condition]]
) -> list[Finding]:
    """Twice where something is settled: only the findings tell which events are behind which condition."""
    found = list(correlate(events) or ()) if events else []
    over = {
        event.sequence
        for finding in found
        for condition in settled.get(finding.key, ())
        for event in events
        if event.sequence in finding.events
        # By both: a storm grows on after it was cleared, and a line from before that may have been read later.
        and event.sequence <= condition.last_sequence
        and event.last_time <= (condition.cleared_at or condition.acknowledged_at)
    }
    return list(correlate([e for e in events if e.sequence not in over]) or ()) if over else found
