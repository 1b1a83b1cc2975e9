"""The one way in: what was heard or seen becomes conditions. Pure: from the ledger before to the ledger after.

    kernel events -> coalesced -> judged by each check that listens, as the site wants it -> absorbed -> repairs
    the result of a check's run                                                           -> absorbed -> repairs

The daemon, `healthd check` and the tests' stories all use it. A log of another machine (scan/) is coalesced and judged
by the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple, Protocol

from healthd.config import CheckConfig
from healthd.judge import absorb, bounds, endings
from healthd.judge.condition import Standing, ended, standing
from healthd.judge.ledger import KEEP_EVENTS, KEEP_EVENTS_SECONDS, Ledger, with_conditions
from healthd.kernel.coalesce import coalesce_events, newest_of_each
from healthd.kernel.parse import UNREAD, as_unread
from healthd.model import (
    CheckResult,
    Condition,
    ConditionKey,
    Finding,
    Inventory,
    KernelEvent,
    Outcome,
    Repair,
    Severity,
)

Unjudged = Callable[[KernelEvent, Exception], object]
Events = tuple[KernelEvent, ...]


class Listens(Protocol):
    """A check that judges kernel events (settings.registry.Check)."""

    @property
    def name(self) -> str: ...

    def correlate(
        self, events: Sequence[KernelEvent], node: Inventory, config: CheckConfig, unjudged: Unjudged
    ) -> list[Finding] | None:
        """The findings in these events. An event that the check fails on goes to `unjudged`."""

    def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]: ...


Listeners = Sequence[tuple[Listens, CheckConfig]]


class Heard(NamedTuple):
    """ledger     as it is now
    events     all that were judged, new and old: the ledger keeps fewer
    news       the events that are new or grew, without history
    findings   what each check finds in all events, at the site's severity
    mistakes   events that a check failed on, and how: from now on they count as lines that could not be read
    """

    ledger: Ledger
    events: Events
    news: Events
    findings: dict[str, list[Finding]]
    mistakes: tuple[tuple[KernelEvent, Exception], ...]

    @property
    def forgotten(self) -> int:
        """How many events were judged, but are not kept."""
        return len(self.events) - len(self.ledger.events)


def heard(
    ledger: Ledger,
    incoming: Sequence[KernelEvent],
    listeners: Listeners,
    now: float,
    named: Callable[[Events, Collection[int]], Events] = lambda events, _touched: events,
) -> Heard:
    """Take in kernel events. All new ones are judged before any is forgotten.

    `named`: returns the events; those that were touched have the jobs at their source.
    """
    events, touched, sequence = coalesce_events(ledger.events, incoming, ledger.next_sequence, KEEP_EVENTS_SECONDS)
    known = (*ledger.conditions, *ledger.cleared)
    events, findings, mistakes = _judged(named(events, touched), listeners, ledger.inventory, known)
    by_sequence = {event.sequence: event for event in events}
    conditions: dict[ConditionKey, Condition] = ledger.by_key()
    for name, found in findings.items():
        conditions = absorb.absorb_events(
            conditions, name, found, by_sequence, frozenset(touched), ledger.boot_id, ledger.cleared
        )
    news = tuple(event for number in touched if (event := by_sequence.get(number)) and not event.history)
    conditions = bounds.bounded(_after_repairs(conditions, news, listeners, now))
    behind = {c.last_sequence for c in conditions.values() if c.severity >= Severity.DEGRADED and not c.observed}
    kept = newest_of_each(events, KEEP_EVENTS, behind)
    after = replace(with_conditions(ledger, conditions), events=kept, next_sequence=sequence)
    return Heard(after, events, news, findings, mistakes)


def _after_repairs(
    conditions: Mapping[ConditionKey, Condition], news: Events, listeners: Listeners, now: float
) -> dict[ConditionKey, Condition]:
    """A repair that only a source that can be forged tells of ends nothing but what such a source told."""
    new = dict(conditions)
    for observed in (False, True):
        told = [event for event in news if event.observed is observed]
        repairs = [repair for check, _ in listeners for repair in check.repairs(told)] if told else []
        ends = {key: c for key, c in new.items() if c.observed} if observed else new
        new |= endings.after_repairs(ends, repairs, now)
    return new


def _judged(
    events: Events, listeners: Listeners, node: Inventory, known: Sequence[Condition]
) -> tuple[Events, dict[str, list[Finding]], tuple[tuple[KernelEvent, Exception], ...]]:
    """(the events, what each check finds in them, those that a check failed on)."""
    failed: dict[int, Exception] = {}
    found = findings_of(events, listeners, node, known, lambda event, error: failed.setdefault(event.sequence, error))
    if not failed:
        return events, found, ()
    readable = tuple(
        as_unread(e) if e.sequence in failed else e for e in events if e.sequence not in failed or e.kind != UNREAD
    )
    mistakes = tuple((event, failed[event.sequence]) for event in events if event.sequence in failed)
    return readable, findings_of(readable, listeners, node, known), mistakes


def findings_of(
    events: Sequence[KernelEvent],
    listeners: Listeners,
    node: Inventory,
    known: Sequence[Condition] = (),
    unjudged: Unjudged = lambda _event, _error: None,
) -> dict[str, list[Finding]]:
    """What each check that listens finds in the events that still count, at the site's severity.

    `known`: conditions that stand or were cleared. A fault that was repaired, reset or acknowledged makes no later
    event worse: a harmless line is harmless also an hour after a fatal one of the same code was repaired.
    """
    settled: dict[ConditionKey, list[Condition]] = {}
    named = {condition.key for condition in known if not condition.cleared_at}
    for condition in known:
        if condition.last_sequence and (condition.cleared_at or condition.acknowledged_at):
            settled.setdefault(condition.key, []).append(condition)

    def settled_by(key: ConditionKey) -> Sequence[Condition]:
        """Of a part without a condition of its own also what counted it among others."""
        own = settled.get(key, ())
        return own if key in named else (*own, *settled.get(ConditionKey(key.code, bounds.OTHERS), ()))

    every = {}
    for check, config in listeners:
        judge = partial(found_by, check, config, node=node, unjudged=unjudged)
        if found := _of_each_kind(events, judge, settled_by):
            every[check.name] = found
    return every


def found_by(
    check: Listens, config: CheckConfig, events: Sequence[KernelEvent], node: Inventory, unjudged: Unjudged
) -> list[Finding]:
    """What one check finds in these events, at the site's severity. `unjudged` is told of an event that it fails on."""
    found = check.correlate(events, node, config, unjudged) if events else ()
    return [absorb.as_configured(finding, config) for finding in found or ()]


Judge = Callable[[Sequence[KernelEvent]], "list[Finding]"]
Settled = Callable[[ConditionKey], Sequence[Condition]]


def _of_each_kind(events: Sequence[KernelEvent], judge: Judge, settled: Settled) -> list[Finding]:
    """Live events, those of a source that can be forged, and history are judged apart: none makes a better one worse,
    and of two findings with one key the better one counts."""
    of_kind: dict[Standing, list[KernelEvent]] = {kind: [] for kind in reversed(Standing)}
    for event in events:
        of_kind[standing(event)].append(event)
    every: list[Finding] = []
    for mine in of_kind.values():
        keys = {finding.key for finding in every}
        every += [finding for finding in _of_unsettled(mine, judge, settled) if finding.key not in keys]
    return every


def _of_unsettled(events: Sequence[KernelEvent], judge: Judge, settled: Settled) -> list[Finding]:
    """Judge twice if a condition is settled: only the findings tell which events are behind which condition."""
    found = judge(events)
    over = {
        event.sequence
        for finding in found
        for condition in settled(finding.key)
        for event in events
        if event.sequence in finding.events
        # Both must hold: a storm grows on after it was cleared, and a line from before may be read after that.
        and event.sequence <= condition.last_sequence
        and event.last_time <= (condition.cleared_at or condition.acknowledged_at)
    }
    return judge([event for event in events if event.sequence not in over]) if over else found


def unread(ledger: Ledger, event: KernelEvent) -> Ledger:
    """An event that failed even to be taken in as a line that cannot be read."""
    return with_conditions(ledger, absorb.unread(ledger.by_key(), event, ledger.boot_id))


def told_of_jobs(ledger: Ledger, jobs: Mapping[int, str], listeners: Listeners) -> Ledger:
    """The jobs at the source of events became known later (`jobs`: by the events' sequences). What only the jobs show
    is found now: what was found without them stands, is counted among others, or is over."""

    def found_in(events: Events) -> dict[str, list[Finding]]:
        return findings_of(events, listeners, ledger.inventory, (*ledger.conditions, *ledger.cleared))

    events = with_jobs(ledger.events, jobs)
    found, without = found_in(events), found_in(ledger.events)
    known = {(finding.key, finding.events) for mine in without.values() for finding in mine}
    conditions = absorb.with_jobs(ledger.by_key(), [finding for mine in found.values() for finding in mine], jobs)
    by_sequence = {event.sequence: event for event in events}
    for name, mine in found.items():
        new = [f for f in mine if f.key not in conditions and (f.key, f.events) not in known]
        conditions = absorb.absorb_events(
            conditions, name, new, by_sequence, frozenset(jobs), ledger.boot_id, ledger.cleared
        )
    return with_conditions(replace(ledger, events=events), bounds.bounded(conditions))


def with_inventory(ledger: Ledger, inventory: Inventory, listeners: Listeners) -> Ledger:
    """What this node has became known, or is known anew. Of the events that are kept, that is said which could not be
    said without it: a line that was read before the first inventory then names its GPU, or its part.

    Only what was not known at all is filled in. A GPU that was exchanged does not give its name to the fault of the one
    before it.
    """
    before = ledger.inventory
    filled = {f.name: getattr(before, f.name) or getattr(inventory, f.name) for f in fields(Inventory)}
    after, node = replace(ledger, inventory=inventory), Inventory(**filled)
    if node == before:
        return after
    known = (*ledger.conditions, *ledger.cleared)
    then, now = (findings_of(ledger.events, listeners, inv, known) for inv in (before, node))
    said = {(finding.key, finding.events): finding for mine in then.values() for finding in mine}
    by_sequence = {event.sequence: event for event in ledger.events}
    conditions = ledger.by_key()
    for name, mine in now.items():
        for finding in mine:
            if said.pop((finding.key, finding.events), None) == finding:
                continue
            touched = frozenset(finding.events)
            conditions = absorb.absorb_events(
                conditions, name, [finding], by_sequence, touched, ledger.boot_id, ledger.cleared
            )
    moved = {(finding.key.code, finding.events): finding.key for mine in now.values() for finding in mine}
    for key, events in said:  # the part of these has another name now
        to, old = moved.get((key.code, events)), conditions.get(key)
        if to is not None and old is not None and not old.last_level_seen:
            conditions[key] = ended(old, f"it is {to}", old.last_seen)
    return with_conditions(after, bounds.bounded(conditions))


def with_jobs(events: Iterable[KernelEvent], jobs: Mapping[int, str]) -> Events:
    """`events` with these jobs, by sequence, in their field "job"."""
    return tuple(
        replace(event, fields=(*event.fields, ("job", jobs[event.sequence]))) if event.sequence in jobs else event
        for event in events
    )


def looked(ledger: Ledger, result: CheckResult, config: CheckConfig, now: float) -> Ledger:
    """Take in one run of a check. The repairs that it saw count also if it failed on some device."""
    if not (ledger.conditions or result.findings or result.repairs):
        return ledger
    before = ledger.by_key()
    result = bounds.with_others(result, before)
    conditions = absorb.absorb_result(before, result, config.clear_after, ledger.boot_id, ledger.cleared)
    if result.outcome in (Outcome.COMPLETED, Outcome.FAILED):
        conditions = endings.after_repairs(conditions, result.repairs, now)
    return with_conditions(ledger, bounds.bounded(conditions))
