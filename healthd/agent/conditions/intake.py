"""Intake: kernel events and results of checks become conditions. Pure: from the old ledger to the new one.

    kernel events -> coalesced -> evaluated by each event check -> configured -> absorbed -> repairs
    the result of a check's run                                 -> configured -> absorbed -> repairs

After coalescing, the daemon adds the jobs at the source of the events (agent/scheduler/kernel_events.py).

The daemon, `healthd check` and the story tests all use this module. The log of another machine (scan/) passes through
the same functions for coalescing and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from healthd.agent.conditions import absorb, bounds, endings
from healthd.agent.conditions.condition import Standing, ended, standing
from healthd.agent.conditions.ledger import KEEP_EVENTS, KEEP_EVENTS_SECONDS, Ledger, with_conditions
from healthd.agent.kernel_log.coalesce import coalesce_events, newest_of_each, with_jobs
from healthd.agent.kernel_log.parse import UNREAD, as_unread
from healthd.agent.settings.config import CheckConfig
from healthd.common.model import (
    CheckResult,
    Condition,
    ConditionKey,
    Ending,
    Failures,
    Finding,
    Inventory,
    KernelEvent,
    Outcome,
    Repair,
    RunName,
    Severity,
)

Events = tuple[KernelEvent, ...]


class Listens(Protocol):
    """A check that evaluates kernel events (settings.registry.Check)."""

    @property
    def name(self) -> str: ...

    def correlate(
        self, events: Sequence[KernelEvent], node: Inventory, config: CheckConfig
    ) -> tuple[list[Finding], Failures]:
        """Return the findings in these events, and the events on which the check fails."""

    def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]: ...


Listeners = Sequence[tuple[Listens, CheckConfig]]


class Coalesced(NamedTuple):
    """Result of coalescing.

    events         kept events and all new events
    touched        sequences of events that are new or grew
    next_sequence  sequence of the next event
    """

    events: Events
    touched: tuple[int, ...]
    next_sequence: int


class Heard(NamedTuple):
    """Result of the intake of kernel events.

    ledger      the new ledger
    events      all evaluated events, old and new; the ledger keeps fewer
    new_events  events that are new or grew, without history
    findings    findings of each check in all events, at the configured severity
    failures    events on which a check failed, with the errors; they count as unreadable lines from now on
    """

    ledger: Ledger
    events: Events
    news: Events
    findings: dict[str, list[Finding]]
    mistakes: Failures

    @property
    def forgotten(self) -> int:
        """Number of events that were evaluated but are not kept."""
        return len(self.events) - len(self.ledger.events)


def coalesced(ledger: Ledger, incoming: Sequence[KernelEvent]) -> Coalesced:
    return Coalesced(*coalesce_events(ledger.events, incoming, ledger.next_sequence, KEEP_EVENTS_SECONDS))


def heard(ledger: Ledger, incoming: Sequence[KernelEvent], listeners: Listeners, now: float) -> Heard:
    """Take kernel events without adding their jobs."""
    return judged(ledger, coalesced(ledger, incoming), listeners, now)


def judged(ledger: Ledger, taken: Coalesced, listeners: Listeners, now: float) -> Heard:
    """Take coalesced events. All new events are evaluated before any is dropped."""
    known = (*ledger.conditions, *ledger.cleared)
    events, findings, mistakes = _judged(taken.events, listeners, ledger.inventory, known)
    by_sequence = {event.sequence: event for event in events}
    touched = frozenset(taken.touched)
    conditions: dict[ConditionKey, Condition] = ledger.by_key()
    for name, found in findings.items():
        conditions = absorb.absorb_events(conditions, name, found, by_sequence, touched, ledger.boot_id, ledger.cleared)
    news = tuple(event for number in taken.touched if (event := by_sequence.get(number)) and not event.history)
    conditions = bounds.limit_conditions(_after_repairs(conditions, news, listeners, now))
    behind = {c.last_sequence for c in conditions.values() if c.severity >= Severity.DEGRADED and not c.observed}
    kept = newest_of_each(events, KEEP_EVENTS, behind)
    after = replace(with_conditions(ledger, conditions), events=kept, next_sequence=taken.next_sequence)
    return Heard(after, events, news, findings, mistakes)


def _after_repairs(
    conditions: Mapping[ConditionKey, Condition], news: Events, listeners: Listeners, now: float
) -> dict[ConditionKey, Condition]:
    """Apply the repairs in new events.

    A repair from a source that users can forge clears only conditions from such sources.
    """
    new = dict(conditions)
    for observed in (False, True):
        told = [event for event in news if event.observed is observed]
        repairs = [repair for check, _ in listeners for repair in check.repairs(told)] if told else []
        ends = {key: c for key, c in new.items() if c.observed} if observed else new
        new |= endings.after_repairs(ends, repairs, now)
    return new


def _judged(
    events: Events, listeners: Listeners, node: Inventory, known: Sequence[Condition]
) -> tuple[Events, dict[str, list[Finding]], Failures]:
    """Return the events, the findings of each check, and the events on which a check failed."""
    found, failures = _findings_of(events, listeners, node, known)
    failed = {event.sequence: (event, error) for event, error in reversed(failures) if event is not None}
    if not failed:
        return events, found, failures
    readable = tuple(
        as_unread(e) if e.sequence in failed else e for e in events if e.sequence not in failed or e.kind != UNREAD
    )
    mistakes = tuple(failed[event.sequence] for event in events if event.sequence in failed)
    return readable, findings_of(readable, listeners, node, known), mistakes


def findings_of(
    events: Sequence[KernelEvent], listeners: Listeners, node: Inventory, known: Sequence[Condition] = ()
) -> dict[str, list[Finding]]:
    """Return the findings of each event check in the events that still count, at the configured severity.

    `recorded`: active and cleared conditions. A fault that was repaired, reset or acknowledged does not make later
    events worse: a harmless line is harmless even an hour after a fatal one of the same code was repaired.
    """
    return _findings_of(events, listeners, node, known)[0]


def _findings_of(
    events: Sequence[KernelEvent], listeners: Listeners, node: Inventory, known: Sequence[Condition]
) -> tuple[dict[str, list[Finding]], Failures]:
    settled: dict[ConditionKey, list[Condition]] = {}
    named = {condition.key for condition in known if not condition.cleared_at}
    for condition in known:
        if condition.last_sequence and (condition.cleared_at or condition.acknowledged_at):
            settled.setdefault(condition.key, []).append(condition)

    def settled_by(key: ConditionKey) -> Sequence[Condition]:
        """Return the conditions that settle a part; for a part without a name also its overflow conditions."""
        if key in named:
            return settled.get(key, ())
        others = bounds.others_of(RunName(key.code.partition("/")[0]))
        return [condition for place in (key, others) for condition in settled.get(place, ())]

    every: dict[str, list[Finding]] = {}
    failures: Failures = ()
    for check, config in listeners:
        found, failed = _of_each_kind(events, partial(found_by, check, config, node=node), settled_by)
        failures += failed
        if found:
            every[check.name] = found
    return every, failures


def found_by(
    check: Listens, config: CheckConfig, events: Sequence[KernelEvent], node: Inventory
) -> tuple[list[Finding], Failures]:
    """Return the findings of one check in these events at the configured severity, and the events on which it fails."""
    found, failed = check.correlate(events, node, config) if events else ([], ())
    return [absorb.as_configured(finding, config) for finding in found], failed


Judge = Callable[[Sequence[KernelEvent]], tuple[list[Finding], Failures]]
Settled = Callable[[ConditionKey], Sequence[Condition]]


def _of_each_kind(events: Sequence[KernelEvent], judge: Judge, settled: Settled) -> tuple[list[Finding], Failures]:
    """Evaluate events of each evidence level separately, so that weak evidence does not change strong evidence.

    If two findings have one key, the finding with stronger evidence counts.
    """
    of_kind: dict[Standing, list[KernelEvent]] = {kind: [] for kind in reversed(Standing)}
    for event in events:
        of_kind[standing(event)].append(event)
    every: list[Finding] = []
    failures: Failures = ()
    for mine in of_kind.values():
        keys = {finding.key for finding in every}
        found, failed = _of_unsettled(mine, judge, settled)
        every += [finding for finding in found if finding.key not in keys]
        failures += failed
    return every, failures


def _of_unsettled(events: Sequence[KernelEvent], judge: Judge, settled: Settled) -> tuple[list[Finding], Failures]:
    """Evaluate a second time if a condition is settled: only findings show which events a condition is based on."""
    found, failures = judge(events)
    over = {
        event.sequence
        for finding in found
        for condition in settled(finding.key)
        for event in events
        if event.sequence in finding.events
        # Both conditions are necessary: a storm can continue after it was cleared, and an older line can be read later.
        and event.sequence <= condition.last_sequence
        and event.last_time <= (condition.cleared_at or condition.acknowledged_at)
    }
    if not over:
        return found, failures
    found, again = judge([event for event in events if event.sequence not in over])
    return found, failures + again


def unread(ledger: Ledger, event: KernelEvent) -> Ledger:
    """Record an event that could not even be taken as an unreadable line."""
    return with_conditions(ledger, absorb.unread(ledger.by_key(), event, ledger.boot_id))


def told_of_jobs(ledger: Ledger, jobs: Mapping[int, str], listeners: Listeners) -> Ledger:
    """Take jobs that became known after their events. `jobs`: by sequence of the event.

    Only findings that need the jobs are new. Findings without the jobs are already open, counted or cleared.
    """

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
    return with_conditions(replace(ledger, events=events), bounds.limit_conditions(conditions))


def with_inventory(ledger: Ledger, inventory: Inventory, listeners: Listeners) -> Ledger:
    """Take an inventory. Findings of kept events that needed it are made now: a line then names its GPU or part.

    Only unknown values are filled in. A GPU that was exchanged does not give its name to a fault of its predecessor.
    """
    before = ledger.inventory
    filled = {name: getattr(before, name) or getattr(inventory, name) for name in Inventory.__struct_fields__}
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
    for key, events in said:  # the part of these findings has another name now
        to, old = moved.get((key.code, events)), conditions.get(key)
        if to is not None and old is not None and not old.last_level_seen:
            conditions[key] = ended(old, Ending.RENAMED, old.last_seen, f"renamed to {to}")
    return with_conditions(after, bounds.limit_conditions(conditions))


class Looked(NamedTuple):
    """Result of the intake of one run.

    `result` has its findings at the configured severity, with those beyond the bound counted.
    """

    ledger: Ledger
    result: CheckResult


def looked(ledger: Ledger, result: CheckResult, config: CheckConfig, now: float) -> Looked:
    """Take the result of one run. Its repairs count even if the check failed on some device."""
    if not (ledger.conditions or result.findings or result.repairs):
        return Looked(ledger, result)
    before = ledger.by_key()
    wanted = tuple(absorb.as_configured(finding, config) for finding in result.findings)
    result = bounds.limit_findings(replace(result, findings=wanted), before)
    conditions = absorb.absorb_result(before, result, config.clear_after, ledger.boot_id, ledger.cleared)
    if result.outcome in (Outcome.COMPLETED, Outcome.FAILED):
        conditions = endings.after_repairs(conditions, result.repairs, now)
    return Looked(with_conditions(ledger, bounds.limit_conditions(conditions)), result)
