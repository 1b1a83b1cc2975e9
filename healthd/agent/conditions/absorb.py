"""Turn findings into conditions: confirmation, latching and escalation. All functions are pure and take `now` as an
argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.conditions.bounds import later_ending, overflow_key
from healthd.agent.conditions.condition import (
    ACTIVE_STATES,
    LATCHED,
    Conditions,
    EvidenceLevel,
    ended,
    evidence_level,
    found_severity,
    update_matching,
    with_open_times,
)
from healthd.agent.settings.config import CheckConfig, is_capped
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Ending,
    Finding,
    FoundSeverity,
    KernelEvent,
    Outcome,
    RunName,
    Severity,
    Worsens,
)
from healthd.common.text import printable

# If a REBOOT fault opens again this soon after a boot or `healthd repaired`, it waits for an operator.
RELAPSE_SECONDS = 7 * 24 * 3600.0
RELAPSE_ENDINGS = frozenset({Ending.REBOOT, Ending.REPAIRED})
UNREADABLE_LINE_WINDOW_SECONDS = 3600.0  # the same as in the check "kernel"
CONFIRMATION_WINDOW_SECONDS = (
    600.0  # two rounds; for this time after a kernel line, a finding about the same part needs no confirm time
)


def as_configured(finding: Finding, config: CheckConfig) -> Finding:
    """Return the finding with the severity that the settings require.

    Overrides apply first. Then the severity is capped at WARNING if `enforce = false`, or if the finding is a
    comparison with a value from a profile. Unprintable characters in the part are replaced, because a user may have
    chosen the name that the kernel prints.
    """
    if not finding.subject.isprintable():
        finding = replace(finding, subject=printable(finding.subject))
    severity = config.severity.get(finding.code, finding.severity)
    worsens = finding.worsens if finding.code not in config.severity else None
    if is_capped(config, finding.expects):
        severity = min(severity, Severity.WARNING)
        worsens = replace(worsens, severity=min(worsens.severity, Severity.WARNING)) if worsens else None
    if (severity, worsens) == (finding.severity, finding.worsens):
        return finding
    return replace(finding, severity=severity, worsens=worsens, found_severity=_as_found(finding))


def _as_found(finding: Finding) -> FoundSeverity:
    return finding.found_severity or FoundSeverity(finding.severity, finding.worsens)


def absorb_result(
    conditions: Conditions, result: CheckResult, clear_after: int, boot_id: str, cleared: Sequence[Condition]
) -> dict[ConditionKey, Condition]:
    """Return the conditions after one run of a check. `result.findings` must be configured (`as_configured`).

    If a run did not complete, a missing finding is not evidence that the problem is gone. Findings that the run did
    report (a hang) are used. A run is absorbed when it ends, so a problem that it found may already be over.
    """
    now = result.started + result.duration_seconds
    new = dict(conditions)
    reported_keys = set()
    for finding in sorted(result.findings, key=lambda f: f.severity):  # for equal keys, the worse is used
        finding, key = _confirm_by_kernel_log(finding, conditions, now), finding.key
        reported_keys.add(key)
        old = new.get(key)
        if old is None or old.observed:
            old = _new_condition(result.check, result.instance, finding, now, boot_id, cleared)
        elif old.state is ConditionState.ACKNOWLEDGED and not old.count:  # adopted earlier, now reported by the check
            old = replace(old, check=result.check, instance=result.instance, clears=finding.clears)
        if key == overflow_key(result.run):
            old = replace(old, clears=later_ending(old.clears, finding.clears))
        if finding.log_sets_severity and old.last_event > old.last_level_seen:
            finding = replace(finding, severity=old.severity, found_severity=FoundSeverity(found_severity(old)))
        # A milder finding does not cancel a fault that the log or an earlier run reported.
        new[key] = _after_report(old, _as_latched(finding, old), result.started, now, boot_id)
    if result.outcome is Outcome.COMPLETED:
        for key, old in conditions.items():
            if old.run == result.run and key not in reported_keys and old.last_level_seen:
                after = _after_clean_run(old, clear_after, now)
                if after is None:
                    del new[key]
                else:
                    new[key] = after
    return new


def _confirm_by_kernel_log(finding: Finding, conditions: Conditions, now: float) -> Finding:
    """Return the finding without its confirm time if the kernel log has just reported a fault that confirms it.

    Reports older than CONFIRMATION_WINDOW_SECONDS are ignored. So are reports from before an operator resumed the node
    or ran `healthd ack`.
    """
    is_confirmed = any(
        c.code in finding.confirmed_by
        and finding.subject in ("", c.subject)
        and (c.state in ACTIVE_STATES and evidence_level(c) is EvidenceLevel.PROVEN)
        and c.last_event
        > max(now - CONFIRMATION_WINDOW_SECONDS, c.acknowledged_at, c.ack.requested_at if c.ack else 0.0)
        for c in conditions.values()
    )
    return replace(finding, confirm_seconds=0.0) if is_confirmed and finding.confirm_seconds else finding


def _new_condition(
    check: str, instance: str, finding: Finding, now: float, boot_id: str, cleared: Sequence[Condition]
) -> Condition:
    clears_by_reboot = finding.clears is Clears.REBOOT
    relapse_seconds = finding.relapse_seconds or (RELAPSE_SECONDS if clears_by_reboot else 0.0)
    is_relapse = any(
        previous.key == finding.key
        and not previous.observed
        and (previous.ending in RELAPSE_ENDINGS or not clears_by_reboot)
        and now - previous.cleared_at < relapse_seconds
        for previous in cleared
    )
    return Condition(
        check=check,
        instance=instance,
        code=finding.code,
        subject=finding.subject,
        severity=finding.severity,
        message=finding.message,
        clears=Clears.OPERATOR if is_relapse else finding.clears,
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
        own_since=0.0 if finding.shared_cause else now,
        persists_since=now,
        found_severity=_as_found(finding).severity,
        expects=finding.expects,
        job=_jobs(finding),
        slowness=finding.slowness,
    )


def _jobs(finding: Finding) -> str:
    return ",".join(finding.slowness.jobs) if finding.slowness else ""


def _after_report(old: Condition, finding: Finding, started: float, now: float, boot_id: str) -> Condition:
    persists_since = now if old.clean_runs else old.persists_since
    own_since = _own_since(old, finding, now)
    severity = _worsened(finding.severity, finding.worsens, now - persists_since)
    found = _as_found(finding)
    found_severity_now = _worsened(found.severity, found.worsens, now - persists_since)
    is_acknowledged = old.state is ConditionState.ACKNOWLEDGED and old.ack is None
    if is_acknowledged and finding.evidence and finding.evidence != old.acknowledged_evidence:
        # New evidence is a new fault, which hits the current jobs.
        old = replace(old, opened_at=0.0, critical_at=0.0, worsened_at=now)
    if old.ack or (is_acknowledged and finding.evidence and finding.evidence == old.acknowledged_evidence):
        state = ConditionState.ACKNOWLEDGED
    elif old.state is ConditionState.PENDING and now - persists_since < finding.confirm_seconds:
        state = ConditionState.PENDING
    else:
        state = ConditionState.OPEN
    return with_open_times(
        replace(
            old,
            severity=severity,
            message=finding.message,
            state=state,
            last_seen=now,
            last_level_seen=started,
            count=old.count + 1,
            boot_id=boot_id,
            worsens=finding.worsens,
            evidence=finding.evidence,
            shared_cause=finding.shared_cause or _is_still_shared(old, finding, now - own_since),
            own_since=own_since,
            window_seconds=0.0 if _is_relapsed(old, finding) else finding.window_seconds,
            persists_since=persists_since,
            clean_runs=0,
            quiet_seconds=0.0,
            repaired=False,
            history=False,
            found_severity=found_severity_now,
            worsened_at=_worsened_at(old, found_severity_now, now),
            expects=finding.expects,
            job=_jobs(finding) or old.job,
            slowness=finding.slowness,
        ),
        now,
    )


def _own_since(old: Condition, finding: Finding, now: float) -> float:
    if finding.shared_cause:
        return 0.0
    return now if old.clean_runs or not old.own_since else old.own_since


def _is_still_shared(old: Condition, finding: Finding, own_seconds: float) -> bool:
    """Return True if the reports have been without a shared cause for less than the confirm time.

    A shared fault begins and ends on each part at a different moment, and in between looks like a fault of some parts.
    """
    return old.shared_cause and own_seconds < finding.confirm_seconds


def _worsened(severity: Severity, worsens: Worsens | None, lasted_seconds: float) -> Severity:
    return max(severity, worsens.severity) if worsens and lasted_seconds >= worsens.after_seconds else severity


def _worsened_at(old: Condition, severity: Severity, now: float) -> float:
    """Return the condition's `worsened_at` after live evidence with this severity before the site's settings."""
    was_milder = old.history or found_severity(old) < Severity.DEGRADED
    return now if was_milder and severity >= Severity.DEGRADED else old.worsened_at


def _is_relapsed(old: Condition, finding: Finding) -> bool:
    """Return True if the condition recurred and now requires an operator. Clean time does not clear such a
    condition.
    """
    return old.clears is Clears.OPERATOR and finding.relapse_seconds > 0


def _after_clean_run(old: Condition, clear_after: int, now: float) -> Condition | None:
    """Return the condition after a completed run without its finding.

    Return None for a pending condition, because the problem did not last.
    """
    if old.state is ConditionState.PENDING:
        return None
    clean = replace(old, clean_runs=old.clean_runs + 1)
    clears_by_pass = old.clears is Clears.PASS or (old.state is ConditionState.ACKNOWLEDGED and old.ack is None)
    if clears_by_pass and clean.clean_runs >= clear_after:
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
    """Return the conditions after correlate() has evaluated a window of events. `touched` contains events that are new
    or grew.

    A finding that is not based on a touched event has already been absorbed. Lines from before healthd first read the
    log are history and have severity INFO. A line that reports the end of a fault clears the condition if the condition
    was last seen before that line. If users can forge a line, it only clears or changes conditions that are based on
    such lines.
    """
    new = dict(conditions)
    for finding in findings:
        source_events = [events[sequence] for sequence in finding.events if sequence in events]
        if not any(event.sequence in touched for event in source_events):
            continue
        key = finding.key
        last_time = max(event.last_time for event in source_events)
        level = max(evidence_level(event) for event in source_events)
        is_live = level is not EvidenceLevel.HISTORY
        old = new.get(key)
        if finding.recovered:
            is_weaker = old is not None and level is EvidenceLevel.OBSERVED < evidence_level(old)
            if old is not None and old.clears not in LATCHED and old.last_seen <= last_time and not is_weaker:
                new[key] = ended(old, Ending.RECOVERED, last_time, finding.message)
            continue
        if old is not None and level < evidence_level(old):
            continue  # history and forgeable lines add nothing to a condition with better evidence
        if old is None or level > evidence_level(old):
            first_time = min(event.time for event in source_events)
            restarted = _new_condition(
                check, "", finding, first_time, boot_id, cleared if is_live else ()
            )  # history is not a relapse
            restarted = replace(restarted, last_sequence=_last_counted_event(new, restarted))
            old = restarted if old is None or old.observed else replace(old, clears=restarted.clears)
        finding = _as_latched(finding, old)
        new_events = [event for event in source_events if event.sequence > old.last_sequence]
        was_acknowledged = old.state is ConditionState.ACKNOWLEDGED and last_time <= old.acknowledged_at
        new[key] = with_open_times(
            replace(
                old,
                severity=finding.severity if is_live else min(finding.severity, Severity.INFO),
                clears=old.clears if old.clears is Clears.OPERATOR else finding.clears,
                message=finding.message,
                state=ConditionState.ACKNOWLEDGED if was_acknowledged or old.ack else ConditionState.OPEN,
                last_seen=max(last_time, old.last_seen),
                last_event=max(last_time, old.last_event),
                last_sequence=max([old.last_sequence, *(event.sequence for event in new_events)]),
                count=old.count + len(new_events),
                boot_id=boot_id,
                window_seconds=finding.window_seconds,
                clean_runs=0,
                quiet_seconds=0.0,
                repaired=False,
                history=not is_live,
                observed=level is EvidenceLevel.OBSERVED,
                found_severity=_as_found(finding).severity,
                worsened_at=_worsened_at(old, _as_found(finding).severity, last_time) if is_live else old.worsened_at,
                job=next((job for event in reversed(source_events) if (job := dict(event.fields).get("job"))), old.job),
            ),
            last_time,
        )
    return new


def _last_counted_event(conditions: Conditions, condition: Condition) -> int:
    """Return the sequence number of the newest event in the run's overflow condition, which may include the part."""
    overflow = conditions.get(overflow_key(condition.run))
    return overflow.last_sequence if overflow else 0


def absorb_unreadable_line(conditions: Conditions, event: KernelEvent, boot_id: str) -> dict[ConditionKey, Condition]:
    """Return the conditions after a line that healthd could not even record as unreadable."""
    finding = Finding(
        Severity.WARNING,
        "kernel/rule_failed",
        "",
        f"healthd failed to read this line: {event.text[:200]}",
        Clears.WINDOW,
    )
    old = conditions.get(finding.key) or _new_condition("kernel", "", finding, event.time, boot_id, ())
    updated = replace(
        old,
        state=ConditionState.OPEN,
        message=printable(finding.message),
        window_seconds=UNREADABLE_LINE_WINDOW_SECONDS,
        last_seen=max(old.last_seen, event.last_time),
        last_event=max(old.last_event, event.last_time),
        count=old.count + 1,
        quiet_seconds=0.0,
    )
    return {**conditions, finding.key: with_open_times(updated, event.last_time)}


def with_jobs(
    conditions: Conditions, findings: Sequence[Finding], jobs: Mapping[int, str]
) -> dict[ConditionKey, Condition]:
    """Return the conditions with jobs that became known after their events. `jobs` maps an event's sequence number to
    its job."""
    new = dict(conditions)
    for finding in findings:
        key = finding.key
        job = next((jobs[sequence] for sequence in reversed(finding.events) if sequence in jobs), "")
        if job and key in new:
            new[key] = replace(new[key], job=job)
    return new


def _as_latched(finding: Finding, old: Condition) -> Finding:
    """Return the finding, or its condition's latched state if the condition is latched.

    A latched fault does not change until an event clears it. Neither a harmless line with the same code a day later nor
    a count that no longer grows changes the fault or its ending.
    """
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
        found_severity=FoundSeverity(found_severity(old)),
        clears=old.clears,
        window_seconds=old.window_seconds,
        message=old.message,
    )


def reconfigured(conditions: Conditions, configs: Mapping[RunName, CheckConfig]) -> dict[ConditionKey, Condition]:
    """Return the conditions with the severities that the current settings require.

    `enforce = false` withdraws a false alarm. Without a setting, a condition keeps its original severity.
    """

    def reconfigure(condition: Condition) -> Condition:
        config = configs[condition.run]
        severity = config.severity.get(condition.code, found_severity(condition))
        if is_capped(config, condition.expects):
            severity = min(severity, Severity.WARNING)
        return replace(condition, severity=min(severity, Severity.INFO) if condition.history else severity)

    return update_matching(conditions, lambda c: c.run in configs, reconfigure)


def adopted(conditions: Conditions, code: str, subject: str, boot_id: str, now: float) -> dict[ConditionKey, Condition]:
    """Return the conditions plus a fault for a drain that has healthd's format but is not in this ledger.

    Such a drain is found on a stateless node, or after a disk loss. The condition is only informational: it never
    drains, and healthd never resumes the node.
    """
    if ConditionKey(code, subject) in conditions:
        return dict(conditions)
    finding = Finding(
        Severity.DEGRADED, code, subject, "adopted from the node's Reason in Slurm", clears=Clears.OPERATOR
    )
    condition = _new_condition(code.partition("/")[0], "", finding, now, boot_id, ())
    acknowledged_condition = replace(condition, state=ConditionState.ACKNOWLEDGED, acknowledged_at=now, opened_at=now)
    return {**conditions, acknowledged_condition.key: acknowledged_condition}
