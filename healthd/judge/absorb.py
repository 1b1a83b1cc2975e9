"""Findings become conditions: confirm, latch, worsen. Pure; `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from healthd.config import CheckConfig
from healthd.judge.condition import LATCHED, Conditions, changed, ended, found_severity, opened
from healthd.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Finding,
    Found,
    KernelEvent,
    Outcome,
    RunName,
    Severity,
    Worsens,
)
from healthd.text import printable

# A REBOOT fault that opens again so soon after a boot or `healthd repaired` waits for an operator.
RELAPSE_SECONDS = 7 * 24 * 3600.0
UNREAD_SECONDS = 3600.0  # as in the check "kernel"


def as_configured(finding: Finding, config: CheckConfig) -> Finding:
    """The finding at the severity that the site wants: overrides first, then a cap at WARNING where
    `enforce = false`, or where a profile guessed what the finding compares with."""
    severity = config.severity.get(finding.code, finding.severity)
    worsens = finding.worsens if finding.code not in config.severity else None
    if _only_warns(config, finding.expects):
        severity = min(severity, Severity.WARNING)
        worsens = replace(worsens, severity=min(worsens.severity, Severity.WARNING)) if worsens else None
    if (severity, worsens) == (finding.severity, finding.worsens):
        return finding
    return replace(finding, severity=severity, worsens=worsens, found=_as_found(finding))


def _only_warns(config: CheckConfig, expects: str) -> bool:
    return not config.enforce or expects in config.guessed or "name" in config.guessed


def _as_found(finding: Finding) -> Found:
    return finding.found or Found(finding.severity, finding.worsens)


def absorb_result(
    conditions: Conditions, result: CheckResult, clear_after: int, boot_id: str, cleared: Sequence[Condition]
) -> dict[ConditionKey, Condition]:
    """The conditions after one run of a check. `result.findings` are as configured.

    A run that did not complete says nothing about what it did not see; its own findings (a hang) count. A run is
    absorbed at its end; a problem that it saw may be over by then.
    """
    now = result.started + result.duration_seconds
    new = dict(conditions)
    seen = set()
    for finding in sorted(result.findings, key=lambda f: f.severity):  # the worse of two about one part counts
        key = finding.key
        seen.add(key)
        old = new.get(key)
        if old is None:
            old = _first_sight(result.check, result.instance, finding, now, boot_id, cleared)
        elif old.state is ConditionState.ACKNOWLEDGED and not old.count:  # adopted: now the check knows it itself
            old = replace(old, check=result.check, instance=result.instance, clears=finding.clears)
        if old.last_event:  # a look that finds less does not undo what the log said
            finding = _as_latched(finding, old)
        new[key] = _seen_by_check(old, finding, result.started, now, boot_id)
    if result.outcome is Outcome.COMPLETED:
        for key, old in conditions.items():
            if old.run == result.run and key not in seen and old.last_level_seen:
                after = _not_seen(old, clear_after, now)
                if after is None:
                    del new[key]
                else:
                    new[key] = after
    return new


def _first_sight(
    check: str, instance: str, finding: Finding, now: float, boot_id: str, cleared: Sequence[Condition]
) -> Condition:
    reboots = finding.clears is Clears.REBOOT
    within = finding.relapse_seconds or (RELAPSE_SECONDS if reboots else 0.0)
    relapse = any(
        past.key == finding.key
        and (past.cleared_by.startswith(("reboot", "repaired by ")) or not reboots)
        and now - past.cleared_at < within
        for past in cleared
    )
    return Condition(
        check=check,
        instance=instance,
        code=finding.code,
        subject=finding.subject,
        severity=finding.severity,
        message=finding.message,
        clears=Clears.OPERATOR if relapse else finding.clears,
        state=ConditionState.PENDING,
        first_seen=now,
        last_seen=now,
        count=0,
        boot_id=boot_id,
        confirm_seconds=finding.confirm_seconds,
        window_seconds=finding.window_seconds,
        worsens=finding.worsens,
        evidence=finding.evidence,
        shared_cause=finding.shared_cause,
        persists_since=now,
        found=_as_found(finding).severity,
        expects=finding.expects,
    )


def _seen_by_check(old: Condition, finding: Finding, began: float, now: float, boot_id: str) -> Condition:
    persists_since = now if old.clean_runs else old.persists_since
    severity = _worsened(finding.severity, finding.worsens, now - persists_since)
    found = _as_found(finding)
    acknowledged = old.state is ConditionState.ACKNOWLEDGED and old.ack is None
    if acknowledged and finding.evidence and finding.evidence != old.acknowledged_evidence:
        old = replace(old, opened_at=0.0, critical_at=0.0)  # another fault: its victims are the jobs that run now
    if old.ack or (acknowledged and finding.evidence and finding.evidence == old.acknowledged_evidence):
        state = ConditionState.ACKNOWLEDGED
    elif old.state is ConditionState.PENDING and now - persists_since < finding.confirm_seconds:
        state = ConditionState.PENDING
    else:
        state = ConditionState.OPEN
    return opened(
        replace(
            old,
            severity=severity,
            message=finding.message,
            state=state,
            last_seen=now,
            last_level_seen=began,
            count=old.count + 1,
            boot_id=boot_id,
            worsens=finding.worsens,
            evidence=finding.evidence,
            window_seconds=0.0 if _relapsed(old, finding) else finding.window_seconds,
            persists_since=persists_since,
            clean_runs=0,
            quiet_seconds=0.0,
            repaired=False,
            history=False,
            found=_worsened(found.severity, found.worsens, now - persists_since),
            expects=finding.expects,
        ),
        now,
    )


def _worsened(severity: Severity, worsens: Worsens | None, lasted_seconds: float) -> Severity:
    return max(severity, worsens.severity) if worsens and lasted_seconds >= worsens.after_seconds else severity


def _relapsed(old: Condition, finding: Finding) -> bool:
    """Whether a condition waits for an operator because it came back: then no clean time ends it."""
    return old.clears is Clears.OPERATOR and finding.relapse_seconds > 0


def _not_seen(old: Condition, clear_after: int, now: float) -> Condition | None:
    """The condition after a completed run that did not find it; None if it was pending: it did not last."""
    if old.state is ConditionState.PENDING:
        return None
    clean = replace(old, clean_runs=old.clean_runs + 1)
    by_pass = old.clears is Clears.PASS or (old.state is ConditionState.ACKNOWLEDGED and old.ack is None)
    if by_pass and clean.clean_runs >= clear_after:
        return ended(clean, "pass", now)
    return clean


def absorb_events(
    conditions: Conditions,
    check: str,
    findings: Iterable[Finding],
    events: Mapping[int, KernelEvent],
    touched: frozenset[int],
    boot_id: str,
    cleared: Sequence[Condition],
) -> dict[ConditionKey, Condition]:
    """The conditions after correlate() looked at a window of events, of which `touched` are new or grew.

    A finding that rests on none of the touched events was absorbed before. What the log held before healthd first
    looked at it is history: INFO. A line that says that a fault is over ends the condition if it was last seen before.
    """
    new = dict(conditions)
    for finding in findings:
        behind = [events[sequence] for sequence in finding.events if sequence in events]
        if not any(event.sequence in touched for event in behind):
            continue
        key = finding.key
        when = max(event.last_time for event in behind)
        live = any(not event.history for event in behind)
        old = new.get(key)
        if finding.over:
            if old is not None and old.clears not in LATCHED and old.last_seen <= when:
                new[key] = ended(old, finding.message, when)
            continue
        if old is not None and not live and not old.history:
            continue  # history adds nothing to a condition that was seen live
        if old is None or (live and old.history):
            first = min(event.time for event in behind)
            sight = _first_sight(check, "", finding, first, boot_id, cleared if live else ())  # history is no relapse
            old = sight if old is None else replace(old, clears=sight.clears)
        finding = _as_latched(finding, old)
        fresh = [event for event in behind if event.sequence > old.last_sequence]
        was_known = old.state is ConditionState.ACKNOWLEDGED and when <= old.acknowledged_at
        new[key] = opened(
            replace(
                old,
                severity=finding.severity if live else min(finding.severity, Severity.INFO),
                clears=old.clears if old.clears is Clears.OPERATOR else finding.clears,
                message=finding.message,
                state=ConditionState.ACKNOWLEDGED if was_known or old.ack else ConditionState.OPEN,
                last_seen=max(when, old.last_seen),
                last_event=max(when, old.last_event),
                last_sequence=max([old.last_sequence, *(event.sequence for event in fresh)]),
                count=old.count + len(fresh),
                boot_id=boot_id,
                window_seconds=finding.window_seconds,
                clean_runs=0,
                quiet_seconds=0.0,
                repaired=False,
                history=not live,
                found=_as_found(finding).severity,
                job=next((job for event in reversed(behind) if (job := dict(event.fields).get("job"))), old.job),
            ),
            when,
        )
    return new


# Conditions of one code: no node has so many parts of a kind, and each costs time in each turn of the loop.
MOST_OF_A_CODE = 100
OTHERS = "others"  # the part that stands for those beyond that number
ONE_OF_THEM = "; one of them: "


def bounded(conditions: Conditions) -> dict[ConditionKey, Condition]:
    """Keep at most MOST_OF_A_CODE conditions of a code that came from the log: the worst, then the oldest. The rest
    become one, as bad as the worst of them: no drain is lost, only which of thousands of parts it was."""
    told: dict[str, list[Condition]] = {}
    for condition in conditions.values():
        stands = condition.state is not ConditionState.CLEARED and condition.subject != OTHERS
        if stands and condition.last_event and not condition.last_level_seen:
            told.setdefault(condition.code, []).append(condition)
    new = dict(conditions)
    for code, mine in told.items():
        rest = sorted(mine, key=_weight)[MOST_OF_A_CODE - 1 :]
        if len(mine) < MOST_OF_A_CODE:
            continue
        for condition in rest:
            del new[condition.key]
        others = [c for c in (*rest, conditions.get(ConditionKey(code, OTHERS))) if c is not None]
        worst, count = min(others, key=_weight), sum(c.count for c in others)
        words = worst.message.rpartition(ONE_OF_THEM)[2]
        new[ConditionKey(code, OTHERS)] = replace(
            worst,
            subject=OTHERS,
            message=f"{count} more, of other parts than the first {MOST_OF_A_CODE - 1}{ONE_OF_THEM}{words}",
            count=count,
            first_seen=min(c.first_seen for c in others),
            last_seen=max(c.last_seen for c in others),
            last_event=max(c.last_event for c in others),
            last_sequence=max(c.last_sequence for c in others),
        )
    return new


def _weight(condition: Condition) -> tuple[bool, int, float, str]:
    """A sort key: open ones first, then the worst, then the oldest."""
    open_first = condition.state is not ConditionState.OPEN
    return (open_first, -condition.severity, condition.first_seen, condition.subject)


def unread(conditions: Conditions, event: KernelEvent, boot_id: str) -> dict[ConditionKey, Condition]:
    """The condition for a line that failed even to be judged as one that cannot be read."""
    finding = Finding(
        Severity.WARNING, "kernel/unread", "", f"healthd fails to read this line, {event.text[:200]}", Clears.WINDOW
    )
    old = conditions.get(finding.key) or _first_sight("kernel", "", finding, event.time, boot_id, ())
    seen = replace(
        old,
        state=ConditionState.OPEN,
        message=printable(finding.message),
        window_seconds=UNREAD_SECONDS,
        last_seen=max(old.last_seen, event.last_time),
        last_event=max(old.last_event, event.last_time),
        count=old.count + 1,
        quiet_seconds=0.0,
    )
    return {**conditions, finding.key: opened(seen, event.last_time)}


def with_jobs(
    conditions: Conditions, findings: Sequence[Finding], jobs: Mapping[int, str]
) -> dict[ConditionKey, Condition]:
    """The conditions, with the jobs that became known after their events (`jobs`: by the events' sequences)."""
    new = dict(conditions)
    for finding in findings:
        key = finding.key
        job = next((jobs[sequence] for sequence in reversed(finding.events) if sequence in jobs), "")
        if job and key in new:
            new[key] = replace(new[key], job=job)
    return new


def _as_latched(finding: Finding, old: Condition) -> Finding:
    """A latched fault stays as it is until what ends it comes: a harmless line of the same code a day later changes
    neither the fault nor its ending."""
    if (
        old.clears not in LATCHED
        or old.history
        or (old.state is not ConditionState.OPEN and old.ack is None)
        or _as_found(finding).severity >= found_severity(old)
    ):
        return finding
    return replace(
        finding,
        severity=old.severity,
        found=Found(found_severity(old)),
        clears=old.clears,
        window_seconds=old.window_seconds,
        message=old.message,
    )


def reconfigured(conditions: Conditions, configs: Mapping[RunName, CheckConfig]) -> dict[ConditionKey, Condition]:
    """The conditions, at the severity that the site wants now: `enforce = false` takes a false alarm back, and without
    a setting a condition counts again as it was found."""

    def configured(condition: Condition) -> Condition:
        config = configs[condition.run]
        severity = config.severity.get(condition.code, found_severity(condition))
        if _only_warns(config, condition.expects):
            severity = min(severity, Severity.WARNING)
        return replace(condition, severity=min(severity, Severity.INFO) if condition.history else severity)

    return changed(conditions, lambda c: c.run in configs, configured)


def adopted(conditions: Conditions, code: str, subject: str, boot_id: str, now: float) -> dict[ConditionKey, Condition]:
    """The fault of a drain in our words that this ledger does not know (a stateless node, a lost disk), for a person.

    The condition never acts by itself, and we never resume the node.
    """
    if ConditionKey(code, subject) in conditions:
        return dict(conditions)
    finding = Finding(
        Severity.DEGRADED, code, subject, "adopted from the node's Reason in Slurm", clears=Clears.OPERATOR
    )
    condition = _first_sight(code.partition("/")[0], "", finding, now, boot_id, ())
    opened = replace(condition, state=ConditionState.ACKNOWLEDGED, acknowledged_at=now, opened_at=now)
    return {**conditions, opened.key: opened}
