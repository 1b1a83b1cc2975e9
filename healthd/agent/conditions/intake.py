"""Turn kernel events and check results into conditions. All functions are pure and return a new ledger.

    kernel events -> coalesced -> evaluated by each event check -> configured -> absorbed -> repairs
    the result of a check's run                                 -> configured -> absorbed -> repairs

After coalescing, the daemon adds the jobs that caused the events (agent/scheduler/kernel_events.py).

The daemon, `healthd check` and the story tests all use this module. For another machine's log, scan/ uses the same
functions for coalescing and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from healthd.agent.conditions import absorb, bounds, endings
from healthd.agent.conditions.condition import EvidenceLevel, ended, evidence_level
from healthd.agent.conditions.ledger import EVENT_RETENTION_SECONDS, MAX_EVENTS, Ledger, with_conditions
from healthd.agent.kernel_log.coalesce import coalesce_events, limit_events, with_jobs
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


class EventCheck(Protocol):
    """A check that evaluates kernel events (see settings.registry.Check)."""

    @property
    def name(self) -> str: ...

    def correlate(
        self, events: Sequence[KernelEvent], node: Inventory, config: CheckConfig
    ) -> tuple[list[Finding], Failures]:
        """Return the findings for these events, and any events that make the check fail."""

    def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]: ...


EventChecks = Sequence[tuple[EventCheck, CheckConfig]]


class Coalesced(NamedTuple):
    """Result of coalescing.

    events         the kept events and all new events
    touched        sequence numbers of events that are new or grew
    next_sequence  sequence number of the next event
    """

    events: Events
    touched: tuple[int, ...]
    next_sequence: int


class EventIntake(NamedTuple):
    """The result of adding kernel events to the ledger.

    ledger      the new ledger
    events      all evaluated events, old and new; the ledger keeps fewer
    new_events  events that are new or grew, without history
    findings    each check's findings for all events, at the configured severity
    failures    events on which a check failed, with the errors; from now on they are unreadable lines
    """

    ledger: Ledger
    events: Events
    new_events: Events
    findings: dict[str, list[Finding]]
    failures: Failures

    @property
    def forgotten(self) -> int:
        """Number of evaluated events that are not kept."""
        return len(self.events) - len(self.ledger.events)


def coalesce(ledger: Ledger, incoming: Sequence[KernelEvent]) -> Coalesced:
    return Coalesced(*coalesce_events(ledger.events, incoming, ledger.next_sequence, EVENT_RETENTION_SECONDS))


def take_kernel_events(
    ledger: Ledger, incoming: Sequence[KernelEvent], event_checks: EventChecks, now: float
) -> EventIntake:
    """Add kernel events to the ledger, without their jobs."""
    return take_coalesced_events(ledger, coalesce(ledger, incoming), event_checks, now)


def take_coalesced_events(ledger: Ledger, coalesced: Coalesced, event_checks: EventChecks, now: float) -> EventIntake:
    """Add coalesced events to the ledger. All new events are evaluated before any is dropped."""
    recorded = (*ledger.conditions, *ledger.cleared)
    events, findings, failures = _evaluate(coalesced.events, event_checks, ledger.inventory, recorded)
    by_sequence = {event.sequence: event for event in events}
    touched = frozenset(coalesced.touched)
    conditions: dict[ConditionKey, Condition] = ledger.by_key()
    for name, found in findings.items():
        conditions = absorb.absorb_events(conditions, name, found, by_sequence, touched, ledger.boot_id, ledger.cleared)
    new_events = tuple(
        event for number in coalesced.touched if (event := by_sequence.get(number)) and not event.history
    )
    conditions = bounds.limit_conditions(_apply_repairs(conditions, new_events, event_checks, now))
    drain_sequences = {
        c.last_sequence for c in conditions.values() if c.severity >= Severity.DEGRADED and not c.observed
    }
    kept_events = limit_events(events, MAX_EVENTS, drain_sequences)
    after = replace(with_conditions(ledger, conditions), events=kept_events, next_sequence=coalesced.next_sequence)
    return EventIntake(after, events, new_events, findings, failures)


def _apply_repairs(
    conditions: Mapping[ConditionKey, Condition], new_events: Events, event_checks: EventChecks, now: float
) -> dict[ConditionKey, Condition]:
    """Apply the repairs that new events prove.

    A repair whose source users can forge clears only conditions from such sources.
    """
    new = dict(conditions)
    for observed in (False, True):
        matching = [event for event in new_events if event.observed is observed]
        repairs = [repair for check, _ in event_checks for repair in check.repairs(matching)] if matching else []
        clearable = {key: c for key, c in new.items() if c.observed} if observed else new
        new |= endings.after_repairs(clearable, repairs, now)
    return new


def _evaluate(
    events: Events, event_checks: EventChecks, node: Inventory, recorded: Sequence[Condition]
) -> tuple[Events, dict[str, list[Finding]], Failures]:
    """Return the events, each check's findings, and the events on which a check failed."""
    found, failures = _evaluate_events(events, event_checks, node, recorded)
    failed = {event.sequence: (event, error) for event, error in reversed(failures) if event is not None}
    if not failed:
        return events, found, failures
    readable = tuple(
        as_unread(e) if e.sequence in failed else e for e in events if e.sequence not in failed or e.kind != UNREAD
    )
    event_failures = tuple(failed[event.sequence] for event in events if event.sequence in failed)
    return readable, evaluate_events(readable, event_checks, node, recorded), event_failures


def evaluate_events(
    events: Sequence[KernelEvent], event_checks: EventChecks, node: Inventory, recorded: Sequence[Condition] = ()
) -> dict[str, list[Finding]]:
    """Return each event check's findings for the events that are still relevant, at the configured severity.

    `recorded` contains active and cleared conditions. A fault that was repaired, reset or acknowledged does not make
    later events more severe. For example, a harmless line is harmless even if it comes an hour after the repair of a
    fatal fault with the same code.
    """
    return _evaluate_events(events, event_checks, node, recorded)[0]


def _evaluate_events(
    events: Sequence[KernelEvent], event_checks: EventChecks, node: Inventory, recorded: Sequence[Condition]
) -> tuple[dict[str, list[Finding]], Failures]:
    settled: dict[ConditionKey, list[Condition]] = {}
    uncleared_keys = {condition.key for condition in recorded if not condition.cleared_at}
    for condition in recorded:
        if condition.last_sequence and (condition.cleared_at or condition.acknowledged_at):
            settled.setdefault(condition.key, []).append(condition)

    def settling_conditions(key: ConditionKey) -> Sequence[Condition]:
        """Return the conditions that settle a part. If the part has no name, overflow conditions are included."""
        if key in uncleared_keys:
            return settled.get(key, ())
        overflow = bounds.overflow_key(RunName(key.code.partition("/")[0]))
        return [condition for candidate in (key, overflow) for condition in settled.get(candidate, ())]

    findings: dict[str, list[Finding]] = {}
    failures: Failures = ()
    for check, config in event_checks:
        found, failed = _evaluate_by_level(
            events, partial(evaluate_check, check, config, node=node), settling_conditions
        )
        failures += failed
        if found:
            findings[check.name] = found
    return findings, failures


def evaluate_check(
    check: EventCheck, config: CheckConfig, events: Sequence[KernelEvent], node: Inventory
) -> tuple[list[Finding], Failures]:
    """Return a check's findings for these events at the configured severity, and the events on which it fails."""
    found, failed = check.correlate(events, node, config) if events else ([], ())
    return [absorb.as_configured(finding, config) for finding in found], failed


Evaluate = Callable[[Sequence[KernelEvent]], tuple[list[Finding], Failures]]
Settled = Callable[[ConditionKey], Sequence[Condition]]


def _evaluate_by_level(
    events: Sequence[KernelEvent], evaluate: Evaluate, settled: Settled
) -> tuple[list[Finding], Failures]:
    """Evaluate each evidence level separately, so that weak evidence does not change the result of strong evidence.

    If two findings have the same key, the one with stronger evidence is used.
    """
    by_level: dict[EvidenceLevel, list[KernelEvent]] = {level: [] for level in reversed(EvidenceLevel)}
    for event in events:
        by_level[evidence_level(event)].append(event)
    findings: list[Finding] = []
    failures: Failures = ()
    for level_events in by_level.values():
        keys = {finding.key for finding in findings}
        found, failed = _evaluate_unsettled(level_events, evaluate, settled)
        findings += [finding for finding in found if finding.key not in keys]
        failures += failed
    return findings, failures


def _evaluate_unsettled(
    events: Sequence[KernelEvent], evaluate: Evaluate, settled: Settled
) -> tuple[list[Finding], Failures]:
    """Evaluate the events. If a condition is settled, evaluate again, because only findings show which events a
    condition is based on."""
    found, failures = evaluate(events)
    settled_sequences = {
        event.sequence
        for finding in found
        for condition in settled(finding.key)
        for event in events
        if event.sequence in finding.events
        # Both tests are necessary: a storm can continue after it was cleared, and an older line can be read later.
        and event.sequence <= condition.last_sequence
        and event.last_time <= (condition.cleared_at or condition.acknowledged_at)
    }
    if not settled_sequences:
        return found, failures
    found, later_failures = evaluate([event for event in events if event.sequence not in settled_sequences])
    return found, failures + later_failures


def take_unreadable_line(ledger: Ledger, event: KernelEvent) -> Ledger:
    """Record an event as an unreadable line, because even adding it to the ledger failed."""
    return with_conditions(ledger, absorb.absorb_unreadable_line(ledger.by_key(), event, ledger.boot_id))


def take_jobs(ledger: Ledger, jobs: Mapping[int, str], event_checks: EventChecks) -> Ledger:
    """Add jobs that became known after their events. `jobs` maps an event's sequence number to its job.

    Only findings that depend on the jobs are new. The other findings are already open, counted or cleared.
    """

    def evaluate(events: Events) -> dict[str, list[Finding]]:
        return evaluate_events(events, event_checks, ledger.inventory, (*ledger.conditions, *ledger.cleared))

    events = with_jobs(ledger.events, jobs)
    found, found_without_jobs = evaluate(events), evaluate(ledger.events)
    found_before = {
        (finding.key, finding.events) for check_findings in found_without_jobs.values() for finding in check_findings
    }
    conditions = absorb.with_jobs(
        ledger.by_key(), [finding for check_findings in found.values() for finding in check_findings], jobs
    )
    by_sequence = {event.sequence: event for event in events}
    for name, check_findings in found.items():
        new = [f for f in check_findings if f.key not in conditions and (f.key, f.events) not in found_before]
        conditions = absorb.absorb_events(
            conditions, name, new, by_sequence, frozenset(jobs), ledger.boot_id, ledger.cleared
        )
    return with_conditions(replace(ledger, events=events), bounds.limit_conditions(conditions))


def take_inventory(ledger: Ledger, inventory: Inventory, event_checks: EventChecks) -> Ledger:
    """Add an inventory, and produce the findings for kept events that needed it. Lines then name their GPU or part.

    Only unknown values are filled in. A new GPU's name is not given to the fault of the GPU that it replaced. The last
    NVLink domain is kept until another one is read, because a fault may take the GPUs out of their domain.
    """
    before = ledger.inventory
    inventory = replace(inventory, domain=inventory.domain or before.domain or inventory.domain)
    filled = {name: getattr(before, name) or getattr(inventory, name) for name in Inventory.__struct_fields__}
    after, node = replace(ledger, inventory=inventory), Inventory(**filled)
    if node == before:
        return after
    recorded = (*ledger.conditions, *ledger.cleared)
    old_findings, new_findings = (evaluate_events(ledger.events, event_checks, inv, recorded) for inv in (before, node))
    unchanged_candidates = {
        (finding.key, finding.events): finding for check_findings in old_findings.values() for finding in check_findings
    }
    by_sequence = {event.sequence: event for event in ledger.events}
    conditions = ledger.by_key()
    for name, check_findings in new_findings.items():
        for finding in check_findings:
            if unchanged_candidates.pop((finding.key, finding.events), None) == finding:
                continue
            touched = frozenset(finding.events)
            conditions = absorb.absorb_events(
                conditions, name, [finding], by_sequence, touched, ledger.boot_id, ledger.cleared
            )
    new_keys = {
        (finding.key.code, finding.events): finding.key
        for check_findings in new_findings.values()
        for finding in check_findings
    }
    for key, events in unchanged_candidates:  # the part in these findings has a different name now
        new_key, old = new_keys.get((key.code, events)), conditions.get(key)
        if new_key is not None and old is not None and not old.last_level_seen:
            conditions[key] = ended(old, Ending.RENAMED, old.last_seen, f"renamed to {new_key}")
    return with_conditions(after, bounds.limit_conditions(conditions))


class ResultIntake(NamedTuple):
    """The result of adding one run's result to the ledger.

    The findings in `result` have the configured severity. Findings beyond the bound are merged.
    """

    ledger: Ledger
    result: CheckResult


def take_result(ledger: Ledger, result: CheckResult, config: CheckConfig, now: float) -> ResultIntake:
    """Add one run's result to the ledger. The run's repairs are used even if the check failed for some device."""
    if not (ledger.conditions or result.findings or result.repairs):
        return ResultIntake(ledger, result)
    before = ledger.by_key()
    configured_findings = tuple(absorb.as_configured(finding, config) for finding in result.findings)
    result = bounds.limit_findings(replace(result, findings=configured_findings), before)
    conditions = absorb.absorb_result(before, result, config.clear_after, ledger.boot_id, ledger.cleared)
    if result.outcome in (Outcome.COMPLETED, Outcome.FAILED):
        conditions = endings.after_repairs(conditions, result.repairs, now)
    return ResultIntake(with_conditions(ledger, bounds.limit_conditions(conditions)), result)
