"""From findings to conditions to a verdict: confirm, latch, worsen, clear, judge. Pure; `now` is an argument.

A condition's life:

    finding -> PENDING (for its confirm time) -> OPEN -> CLEARED, by what `clears` names
                                                  |  ^
                    an operator resumes the node  v  |  seen again, with other evidence
          `healthd ack`: a person knows of it     |  |  its time is over, or it has become worse
                                             ACKNOWLEDGED
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from healthd.config import CheckConfig
from healthd.model import (
    Ack,
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Finding,
    Found,
    Health,
    KernelEvent,
    Outcome,
    Repair,
    RunName,
    Severity,
    Verdict,
    Worsens,
)

Conditions = Mapping[ConditionKey, Condition]

# A REBOOT fault that opens again within it, after a boot or a repair in words, waits for an operator.
RELAPSE_SECONDS = 7 * 24 * 3600.0

UNREAD_SECONDS = 3600.0  # as the check "kernel" has it
LONGEST_WISH_SECONDS = 7 * 24 * 3600.0  # of a pause or an ack

_STANDING = (ConditionState.OPEN, ConditionState.ACKNOWLEDGED)
_LATCHED = (Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR)


def as_configured(finding: Finding, config: CheckConfig) -> Finding:
    """The finding at the severity that the site wants: overrides first, then `enforce = false` caps at WARNING, as
    does an expectation that nobody wrote down."""
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


# --- what a check that looked at the node's state says


def absorb_result(
    conditions: Conditions, result: CheckResult, clear_after: int, boot_id: str, cleared: Sequence[Condition]
) -> dict[ConditionKey, Condition]:
    """The conditions after one run of a check. `result.findings` are as configured.

    A run that did not complete says nothing about what it did not see; its own findings (a hang) count. It is absorbed
    when it ended; what it saw may have ended since it began.
    """
    now = result.started + result.duration_seconds
    new = dict(conditions)
    seen = set()
    for finding in sorted(result.findings, key=lambda f: f.severity):  # of two about one part the worse counts
        key = finding.key
        seen.add(key)
        old = new.get(key)
        if old is None:
            old = _first_sight(result.check, result.instance, finding, now, boot_id, cleared)
        elif old.state is ConditionState.ACKNOWLEDGED and not old.count:  # adopted: now the check knows it itself
            old = replace(old, check=result.check, instance=result.instance, clears=finding.clears)
        if old.last_event:  # what was told by the log is not undone by a look that finds less
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
        old = replace(old, opened_at=0.0, critical_at=0.0)  # another fault: its victims are the jobs of now
    if old.ack or (acknowledged and finding.evidence and finding.evidence == old.acknowledged_evidence):
        state = ConditionState.ACKNOWLEDGED
    elif old.state is ConditionState.PENDING and now - persists_since < finding.confirm_seconds:
        state = ConditionState.PENDING
    else:
        state = ConditionState.OPEN
    return _opened(
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
    """Whether it waits for an operator because it came back: then no clean time ends it."""
    return old.clears is Clears.OPERATOR and finding.relapse_seconds > 0


def _opened(condition: Condition, now: float) -> Condition:
    """Notes when a condition came to be open, and open and CRITICAL."""
    if condition.state is not ConditionState.OPEN:
        return condition
    return replace(
        condition,
        opened_at=condition.opened_at or now,
        critical_at=condition.critical_at or (now if condition.severity is Severity.CRITICAL else 0.0),
    )


def _not_seen(old: Condition, clear_after: int, now: float) -> Condition | None:
    """A completed run did not find it. A pending one is gone: it was back within its confirm time."""
    if old.state is ConditionState.PENDING:
        return None
    clean = replace(old, clean_runs=old.clean_runs + 1)
    by_pass = old.clears is Clears.PASS or (old.state is ConditionState.ACKNOWLEDGED and old.ack is None)
    if by_pass and clean.clean_runs >= clear_after:
        return _cleared(clean, "pass", now)
    return clean


def _cleared(condition: Condition, by: str, now: float) -> Condition:
    return replace(condition, state=ConditionState.CLEARED, cleared_at=now, cleared_by=by)


# --- what the kernel log says


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

    A finding that rests on none of the touched events was absorbed before. What the log held before healthd
    ever looked at it is history: INFO. What the log says is over ends what was last seen before.
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
            if old is not None and old.clears not in _LATCHED and old.last_seen <= when:
                new[key] = _cleared(old, finding.message, when)
            continue
        if old is not None and not live and not old.history:
            continue  # older news of what is known
        if old is None or (live and old.history):
            first = min(event.time for event in behind)
            sight = _first_sight(check, "", finding, first, boot_id, cleared if live else ())  # history is no relapse
            old = sight if old is None else replace(old, clears=sight.clears)
        finding = _as_latched(finding, old)
        fresh = [event for event in behind if event.sequence > old.last_sequence]
        was_known = old.state is ConditionState.ACKNOWLEDGED and when <= old.acknowledged_at
        new[key] = _opened(
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


# Of one code: no node has as many parts of a kind, and each costs each turn of the loop.
MOST_OF_A_CODE = 100
OTHERS = "others"  # the part that stands for those beyond it
ONE_OF_THEM = "; one of them: "


def bounded(conditions: Conditions) -> dict[ConditionKey, Condition]:
    """At most MOST_OF_A_CODE conditions of a code that the log told of: the worst, then the oldest. The rest are one,
    as bad as the worst of them: nothing that drains is lost, only which part of thousands it was."""
    told: dict[str, list[Condition]] = {}
    for condition in conditions.values():
        if condition.last_event and not condition.last_level_seen and condition.subject != OTHERS:
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
    """Sorted by it: what acts first, the worst, the oldest."""
    open_first = condition.state is not ConditionState.OPEN
    return (open_first, -condition.severity, condition.first_seen, condition.subject)


def unread(conditions: Conditions, event: KernelEvent, boot_id: str) -> dict[ConditionKey, Condition]:
    """A line of which not even that could be judged that it cannot be read: it is told all the same."""
    finding = Finding(
        Severity.WARNING, "kernel/unread", "", f"healthd fails to read this line, {event.text[:200]}", Clears.WINDOW
    )
    old = conditions.get(finding.key) or _first_sight("kernel", "", finding, event.time, boot_id, ())
    seen = replace(
        old,
        state=ConditionState.OPEN,
        message="".join(c if c.isprintable() else "?" for c in finding.message),
        window_seconds=UNREAD_SECONDS,
        last_seen=max(old.last_seen, event.last_time),
        last_event=max(old.last_event, event.last_time),
        count=old.count + 1,
        quiet_seconds=0.0,
    )
    return {**conditions, finding.key: _opened(seen, event.last_time)}


def with_jobs(
    conditions: Conditions, findings: Sequence[Finding], jobs: Mapping[int, str]
) -> dict[ConditionKey, Condition]:
    """What stands, with the jobs that became known later of the events behind it (`jobs`: by their sequences)."""
    new = dict(conditions)
    for finding in findings:
        key = finding.key
        job = next((jobs[sequence] for sequence in reversed(finding.events) if sequence in jobs), "")
        if job and key in new:
            new[key] = replace(new[key], job=job)
    return new


def _as_latched(finding: Finding, old: Condition) -> Finding:
    """A latched fault stays what it was until what it waits for: a harmless line of the same code a day later does
    not undo it, nor how it ends."""
    if (
        old.clears not in _LATCHED
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
    """What stands, at the severity that the site wants now: `enforce = false` takes back what a false alarm did, and
    without a setting it counts again as it was found."""

    def configured(condition: Condition) -> Condition:
        config = configs[condition.run]
        severity = config.severity.get(condition.code, found_severity(condition))
        if _only_warns(config, condition.expects):
            severity = min(severity, Severity.WARNING)
        return replace(condition, severity=min(severity, Severity.INFO) if condition.history else severity)

    return _where(conditions, lambda c: c.run in configs, configured)


def found_severity(condition: Condition) -> Severity:
    return condition.severity if condition.found is None else condition.found


# --- what ends a condition


def _where(
    conditions: Conditions, matches: Callable[[Condition], bool], change: Callable[[Condition], Condition]
) -> dict[ConditionKey, Condition]:
    return {key: change(c) if matches(c) else c for key, c in conditions.items()}


def after_boot(conditions: Conditions, boot_id: str, now: float) -> dict[ConditionKey, Condition]:
    """Another boot: clears what waits for a reboot or a reset, and lets windows run. Level checks look again.

    What was not confirmed is forgotten, and what worsens with time begins anew: the time in which the machine was
    down confirms nothing.
    """

    def booted(condition: Condition) -> Condition:
        if condition.clears in (Clears.REBOOT, Clears.GPU_RESET):
            return _cleared(condition, "reboot", now)
        return replace(condition, repaired=True, persists_since=now)

    kept = {key: c for key, c in conditions.items() if c.boot_id == boot_id or c.state is not ConditionState.PENDING}
    return _where(kept, lambda c: c.boot_id != boot_id and c.state is not ConditionState.CLEARED, booted)


def after_repairs(conditions: Conditions, repairs: Iterable[Repair], now: float) -> dict[ConditionKey, Condition]:
    """Evidence of a reset: clears what waits for one on that part and was not seen after the earlier reading."""
    new = dict(conditions)
    for repair in repairs:
        for key, c in new.items():
            if c.subject == repair.subject and _last_sight(c) <= repair.before and c.state in _STANDING:
                if c.clears is repair.clears:
                    new[key] = _cleared(c, f"{repair.clears.name.lower()}: {repair.message}", now)
                elif c.window_seconds:
                    new[key] = replace(c, repaired=True)
    return new


def after_quiet(conditions: Conditions, seconds: float, loaded: bool, now: float) -> dict[ConditionKey, Condition]:
    """`seconds` went by. A window counts only time in which the fault could have shown: under load, or after repair.

    For what a check finds it begins when the check completed without it, not merely between two of its runs.
    """

    def quieter(condition: Condition) -> Condition:
        quiet = condition.quiet_seconds + max(0.0, min(seconds, now - condition.last_seen))
        if quiet >= condition.window_seconds:
            return _cleared(condition, "window", now)
        return replace(condition, quiet_seconds=quiet)

    return _where(
        conditions,
        lambda c: (
            c.window_seconds > 0
            and c.state in _STANDING
            and (loaded or c.repaired)
            and (c.clean_runs > 0 or not c.last_level_seen)
        ),
        quieter,
    )


def repaired(
    conditions: Conditions, code: str, subject: str | None, by: str, now: float
) -> dict[ConditionKey, Condition]:
    """An engineer says that it is repaired: clears it, whatever it waits for. None: every part with that code.

    A sticky flag that a check still reads (it has evidence) is acknowledged instead, until it changes.
    """

    def settle(condition: Condition) -> Condition:
        if condition.evidence and condition.last_level_seen:
            return _acknowledged(condition, now)
        return _cleared(condition, f"repaired by {by}", now)

    return _where(
        conditions,
        lambda c: c.code == code and subject in (None, c.subject) and c.state is not ConditionState.CLEARED,
        settle,
    )


def known_for_a_while(
    conditions: Conditions, code: str, subject: str | None, ack: Ack
) -> dict[ConditionKey, Condition]:
    """A person knows of it (`healthd ack`): it does not act until `ack.until`. None: every part with that code."""
    return _where(
        conditions,
        lambda c: c.code == code and subject in (None, c.subject) and c.state is not ConditionState.CLEARED,
        lambda c: replace(c, state=ConditionState.ACKNOWLEDGED, ack=replace(ack, severity=c.severity)),
    )


def after_acks(conditions: Conditions, now: float) -> dict[ConditionKey, Condition]:
    """What a person knew of counts again: their time is over, or it is worse than what they knew."""
    return _where(
        conditions,
        lambda c: c.ack is not None and (now >= c.ack.until or c.severity > c.ack.severity),
        lambda c: _opened(replace(c, state=_state_without_ack(c), ack=None), now),
    )


def _state_without_ack(c: Condition) -> ConditionState:
    """As if nobody had said anything: what an operator's resume forgave before stays forgiven until it is seen anew."""
    if not c.opened_at and max(0.0, c.last_level_seen - c.persists_since) < c.confirm_seconds:
        return ConditionState.PENDING
    same = bool(c.evidence) and c.evidence == c.acknowledged_evidence
    seen = max(c.last_event, 0.0 if same else c.last_level_seen)
    return ConditionState.ACKNOWLEDGED if seen <= c.acknowledged_at else ConditionState.OPEN


def resumed_by_operator(conditions: Conditions, before: float, now: float) -> dict[ConditionKey, Condition]:
    """An operator resumed the node: they know what was open `before` (the last reading while the drain stood).
    Only what is seen again after `now` acts again, and what opened in between."""
    return _where(
        conditions,
        lambda c: c.state is ConditionState.OPEN and c.severity >= Severity.DEGRADED and c.opened_at <= before,
        lambda c: _acknowledged(c, now),
    )


def adopted(conditions: Conditions, code: str, subject: str, boot_id: str, now: float) -> dict[ConditionKey, Condition]:
    """A drain in our words that this ledger does not know (a stateless node, a lost disk): its fault, for a person.

    It never acts by itself and is never resumed by us.
    """
    if ConditionKey(code, subject) in conditions:
        return dict(conditions)
    finding = Finding(
        Severity.DEGRADED, code, subject, "adopted from the node's Reason in Slurm", clears=Clears.OPERATOR
    )
    condition = _first_sight(code.partition("/")[0], "", finding, now, boot_id, ())
    opened = replace(condition, state=ConditionState.ACKNOWLEDGED, acknowledged_at=now, opened_at=now)
    return {**conditions, opened.key: opened}


def _acknowledged(condition: Condition, now: float) -> Condition:
    return replace(
        condition,
        state=ConditionState.ACKNOWLEDGED,
        acknowledged_at=now,
        acknowledged_evidence=condition.evidence,
        ack=None,
    )


def shifted(condition: Condition, seconds: float, since: float = 0.0, until: float = float("inf")) -> Condition:
    """The clock was set: the same moments as the new clock tells them, so that no confirm time is cut short.

    Only moments in `since`..`until` (as the old clock told them): others were written while it was right.
    """

    def move(moment: float) -> float:
        return moment + seconds if moment and since <= moment <= until else moment

    return replace(
        condition,
        first_seen=move(condition.first_seen),
        last_seen=move(condition.last_seen),
        last_level_seen=move(condition.last_level_seen),
        last_event=move(condition.last_event),
        acknowledged_at=move(condition.acknowledged_at),
        persists_since=move(condition.persists_since),
        opened_at=move(condition.opened_at),
        critical_at=move(condition.critical_at),
        cleared_at=move(condition.cleared_at),
        ack=replace(ack, until=moved_end(ack.until, seconds, until), given=move(ack.given))
        if (ack := condition.ack)
        else None,
    )


def moved_end(moment: float, seconds: float, now: float) -> float:
    """When a pause or an ack ends after the clock was set at `now` of the old clock: it lasts as long as was said.

    One that is further away was given while the clock was right: this machine booted in the year 2000.
    """
    return moment + seconds if moment <= now + LONGEST_WISH_SECONDS else moment


# --- the verdict


def acts(condition: Condition, trusted_since: float) -> bool:
    """Whether a condition may drain: open, bad enough, and seen by us since we may be trusted with it."""
    since = max(trusted_since, condition.acknowledged_at)
    is_bad = condition.state is ConditionState.OPEN and condition.severity >= Severity.DEGRADED
    return is_bad and _last_sight(condition) > since


def _last_sight(condition: Condition) -> float:
    """The last moment of which anything shows that the fault was there then."""
    return max(condition.last_level_seen, condition.last_event)


def judge(
    conditions: Conditions,
    results: Mapping[RunName, CheckResult],
    expected: Iterable[RunName],
    trusted_since: float,
    optional: Container[RunName] = (),
) -> Verdict:
    """The node's health and what may drain it.

    `results`: the last run of each since the start; `expected`: those that should have run.
    `trusted_since`: events and sightings before it never act (first start, switch from observe, end of a pause).
    `optional`: those that no resume waits for when they cannot look.
    """
    standing = sorted(
        (c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        key=lambda c: (-c.severity, -c.opened_at, c.code, c.subject),
    )
    missing = [
        name for name in sorted(expected) if name not in results or results[name].outcome is not Outcome.COMPLETED
    ]
    unknown = tuple(_why_unknown(name, results.get(name)) for name in missing)
    open_ones = [c for c in standing if c.state is ConditionState.OPEN]
    worst = max((c.severity for c in open_ones), default=Severity.INFO)
    if worst is Severity.CRITICAL:
        health = Health.UNHEALTHY
    elif worst is Severity.DEGRADED:
        health = Health.DEGRADED
    elif unknown:
        health = Health.UNKNOWN
    elif any(c.severity >= Severity.WARNING for c in standing):
        health = Health.WARNING
    else:
        health = Health.HEALTHY
    causes = tuple(c for c in open_ones if acts(c, trusted_since))
    return Verdict(
        health=health,
        conditions=tuple(standing),
        causes=causes,
        unknown=unknown,
        may_resume=all(name in optional for name in missing)
        and not any(c.severity >= Severity.DEGRADED and c.state is not ConditionState.ACKNOWLEDGED for c in standing)
        and not any(_is_bad_news(finding, conditions) for result in results.values() for finding in result.findings),
        fault_time=max(
            (max(c.critical_at, c.last_event) for c in causes if c.severity is Severity.CRITICAL), default=0.0
        ),
    )


def _is_bad_news(finding: Finding, conditions: Conditions) -> bool:
    """Whether a check's last run found what drains, unless an operator knows it. Also where the condition is gone:
    somebody said "repaired", and the check has not looked since.
    """
    condition = conditions.get(finding.key)
    known = condition is not None and condition.state is ConditionState.ACKNOWLEDGED
    return finding.severity >= Severity.DEGRADED and not known


def _why_unknown(name: RunName, result: CheckResult | None) -> str:
    if result is None:
        return f"{name} has not run yet"
    what = {
        Outcome.FAILED: "failed",
        Outcome.TIMED_OUT: "did not answer in time",
        Outcome.STUCK: "waits for a hung worker",
    }[result.outcome]
    return f"{name} {what}{': ' + result.error if result.error else ''}"


def next_look(conditions: Conditions) -> dict[RunName, float]:
    """When a check should look again before its next round, to confirm or to see that it got worse.

    In epoch seconds. Only conditions that a level check saw.
    """
    looks: dict[RunName, float] = {}
    for c in conditions.values():
        if not c.last_level_seen or c.clean_runs:
            continue
        moments = []
        if c.state is ConditionState.PENDING:
            moments.append(c.persists_since + c.confirm_seconds)
        if c.worsens and c.severity < c.worsens.severity and c.state is not ConditionState.CLEARED:
            moments.append(c.persists_since + c.worsens.after_seconds)
        for moment in moments:
            if moment > c.last_level_seen:
                looks[c.run] = min(moment, looks.get(c.run, moment))
    return looks
