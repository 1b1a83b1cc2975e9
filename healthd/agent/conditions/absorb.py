"""Findings become conditions: confirm, latch, worsen. Pure; `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.conditions.bounds import ends_last, others_of
from healthd.agent.conditions.condition import (
    LATCHED,
    STANDING,
    Conditions,
    Standing,
    changed,
    ended,
    found_severity,
    opened,
    standing,
)
from healthd.agent.settings.config import CheckConfig, only_warns
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Ending,
    Finding,
    Found,
    KernelEvent,
    Outcome,
    RunName,
    Severity,
    Worsens,
)
from healthd.common.text import printable

# A REBOOT fault that opens again so soon after a boot or `healthd repaired` waits for an operator.
RELAPSE_SECONDS = 7 * 24 * 3600.0
RELAPSES_AFTER = frozenset({Ending.REBOOT, Ending.REPAIRED})
UNREAD_SECONDS = 3600.0  # as in the check "kernel"
CONFIRMS_SECONDS = 600.0  # so long the kernel's word on a part spares what is found there its confirm time: two rounds


def as_configured(finding: Finding, config: CheckConfig) -> Finding:
    """The finding at the severity that the site wants: overrides first, then a cap at WARNING where
    `enforce = false`, or where a profile guessed what the finding compares with. Its subject is printable: the kernel
    may print a name that a user chose."""
    if not finding.subject.isprintable():
        finding = replace(finding, subject=printable(finding.subject))
    severity = config.severity.get(finding.code, finding.severity)
    worsens = finding.worsens if finding.code not in config.severity else None
    if only_warns(config, finding.expects):
        severity = min(severity, Severity.WARNING)
        worsens = replace(worsens, severity=min(worsens.severity, Severity.WARNING)) if worsens else None
    if (severity, worsens) == (finding.severity, finding.worsens):
        return finding
    return replace(finding, severity=severity, worsens=worsens, found=_as_found(finding))


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
        finding, key = _confirmed(finding, conditions, now), finding.key
        seen.add(key)
        old = new.get(key)
        if old is None or old.observed:
            old = _first_sight(result.check, result.instance, finding, now, boot_id, cleared)
        elif old.state is ConditionState.ACKNOWLEDGED and not old.count:  # adopted: now the check knows it itself
            old = replace(old, check=result.check, instance=result.instance, clears=finding.clears)
        if key == others_of(result.run):
            old = replace(old, clears=ends_last(old.clears, finding.clears))
        if finding.log_decides and old.last_event > old.last_level_seen:
            finding = replace(finding, severity=old.severity, found=Found(found_severity(old)))
        # A look that finds less undoes neither what the log said nor what an earlier look found.
        new[key] = _seen_by_check(old, _as_latched(finding, old), result.started, now, boot_id)
    if result.outcome is Outcome.COMPLETED:
        for key, old in conditions.items():
            if old.run == result.run and key not in seen and old.last_level_seen:
                after = _not_seen(old, clear_after, now)
                if after is None:
                    del new[key]
                else:
                    new[key] = after
    return new


def _confirmed(finding: Finding, conditions: Conditions, now: float) -> Finding:
    """Without a confirm time where the kernel has just said of that part what the finding would wait for.

    What it said long ago, or before somebody knew of it (a resume, `healthd ack`), is no word on what is seen now.
    """
    said = any(
        c.code in finding.confirmed_by
        and finding.subject in ("", c.subject)
        and (c.state in STANDING and standing(c) is Standing.PROVEN)
        and c.last_event > max(now - CONFIRMS_SECONDS, c.acknowledged_at, c.ack.given if c.ack else 0.0)
        for c in conditions.values()
    )
    return replace(finding, confirm_seconds=0.0) if said and finding.confirm_seconds else finding


def _first_sight(
    check: str, instance: str, finding: Finding, now: float, boot_id: str, cleared: Sequence[Condition]
) -> Condition:
    reboots = finding.clears is Clears.REBOOT
    within = finding.relapse_seconds or (RELAPSE_SECONDS if reboots else 0.0)
    relapse = any(
        past.key == finding.key
        and not past.observed
        and (past.ending in RELAPSES_AFTER or not reboots)
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
        job=_jobs(finding),
        slowness=finding.slowness,
    )


def _jobs(finding: Finding) -> str:
    return ",".join(finding.slowness.jobs) if finding.slowness else ""


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
            shared_cause=finding.shared_cause,
            window_seconds=0.0 if _relapsed(old, finding) else finding.window_seconds,
            persists_since=persists_since,
            clean_runs=0,
            quiet_seconds=0.0,
            repaired=False,
            history=False,
            found=_worsened(found.severity, found.worsens, now - persists_since),
            expects=finding.expects,
            job=_jobs(finding) or old.job,
            slowness=finding.slowness,
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
        return ended(clean, Ending.PASS, now)
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
    looked at it is history: INFO. A line that says that a fault is over ends the condition if it was last seen before;
    one that can be forged ends and changes only what rests on such lines.
    """
    new = dict(conditions)
    for finding in findings:
        behind = [events[sequence] for sequence in finding.events if sequence in events]
        if not any(event.sequence in touched for event in behind):
            continue
        key = finding.key
        when = max(event.last_time for event in behind)
        sight = max(standing(event) for event in behind)
        live = sight is not Standing.HISTORY
        old = new.get(key)
        if finding.over:
            weaker = old is not None and sight is Standing.OBSERVED < standing(old)
            if old is not None and old.clears not in LATCHED and old.last_seen <= when and not weaker:
                new[key] = ended(old, Ending.RECOVERED, when, finding.message)
            continue
        if old is not None and sight < standing(old):
            continue  # history adds nothing to a condition that was seen live, nor does a line that can be forged
        if old is None or sight > standing(old):
            first = min(event.time for event in behind)
            anew = _first_sight(check, "", finding, first, boot_id, cleared if live else ())  # history is no relapse
            anew = replace(anew, last_sequence=_counted_up_to(new, anew))
            old = anew if old is None or old.observed else replace(old, clears=anew.clears)
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
                observed=sight is Standing.OBSERVED,
                found=_as_found(finding).severity,
                job=next((job for event in reversed(behind) if (job := dict(event.fields).get("job"))), old.job),
            ),
            when,
        )
    return new


def _counted_up_to(conditions: Conditions, sight: Condition) -> int:
    """Return the newest event of the condition that counts the rest of the run: the part may be one of the rest."""
    others = conditions.get(others_of(sight.run))
    return others.last_sequence if others else 0


def unread(conditions: Conditions, event: KernelEvent, boot_id: str) -> dict[ConditionKey, Condition]:
    """The condition for a line that failed even to be judged as one that cannot be read."""
    finding = Finding(
        Severity.WARNING,
        "kernel/rule_failed",
        "",
        f"healthd fails to read this line, {event.text[:200]}",
        Clears.WINDOW,
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
    """A latched fault stays as it is until what ends it comes: a harmless line of the same code a day later, or a look
    at a count that no longer grows, changes neither the fault nor its ending."""
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
        if only_warns(config, condition.expects):
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
