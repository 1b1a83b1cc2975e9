"""The verdict: the node's health and the conditions that may drain it. All functions are pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from healthd.agent.conditions.condition import Conditions, fault_time, may_drain
from healthd.common.model import (
    CheckResult,
    Condition,
    ConditionState,
    Finding,
    Health,
    Outcome,
    RunName,
    Severity,
    Verdict,
)


def judge(
    conditions: Conditions,
    results: Mapping[RunName, CheckResult],
    expected: Iterable[RunName],
    trusted_since: float,
    optional: Container[RunName] = (),
) -> Verdict:
    """Return the node's health and the conditions that may drain the node.

        results        each run's last result since the start
        expected       the runs that should have a result
        trusted_since  earlier events and reports never drain (first start, change from mode observe, end of a pause)
        optional       runs that a resume does not require

    Conditions based only on a log that users can forge are at most a warning, and do not block a resume.
    """
    uncleared = sorted(
        (c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        key=lambda c: (-c.severity, -c.opened_at, c.code, c.subject),
    )
    missing = [
        name for name in sorted(expected) if name not in results or results[name].outcome is not Outcome.COMPLETED
    ]
    unknown = tuple(_unknown_reason(name, results.get(name)) for name in missing)
    open_conditions = [c for c in uncleared if c.state is ConditionState.OPEN]
    worst = max((c.severity for c in open_conditions if not c.observed), default=Severity.INFO)
    if worst is Severity.CRITICAL:
        health = Health.UNHEALTHY
    elif worst is Severity.DEGRADED:
        health = Health.DEGRADED
    elif unknown:
        health = Health.UNKNOWN
    elif any(c.severity >= Severity.WARNING for c in uncleared):
        health = Health.WARNING
    else:
        health = Health.HEALTHY
    causes = tuple(c for c in open_conditions if may_drain(c, trusted_since))
    return Verdict(
        health=health,
        conditions=tuple(uncleared),
        causes=causes,
        unknown=unknown,
        may_resume=all(name in optional for name in missing)
        and not any(_blocks_resume(c) for c in uncleared)
        and not any(
            _is_unacknowledged_drain(finding, conditions) for result in results.values() for finding in result.findings
        ),
        fault_time=max((fault_time(c) for c in causes if c.severity is Severity.CRITICAL), default=0.0),
    )


def _blocks_resume(c: Condition) -> bool:
    return c.severity >= Severity.DEGRADED and c.state is not ConditionState.ACKNOWLEDGED and not c.observed


def _is_unacknowledged_drain(finding: Finding, conditions: Conditions) -> bool:
    """Return True if a finding from a check's last run drains the node and is not acknowledged.

    This includes findings whose condition is gone, as between `healthd repaired` and the check's next run.
    """
    condition = conditions.get(finding.key)
    is_acknowledged = condition is not None and condition.state is ConditionState.ACKNOWLEDGED
    return finding.severity >= Severity.DEGRADED and not is_acknowledged


def _unknown_reason(name: RunName, result: CheckResult | None) -> str:
    if result is None:
        return f"{name} has not run yet"
    outcome_text = {
        Outcome.FAILED: "failed",
        Outcome.TIMED_OUT: "did not answer in time",
        Outcome.STUCK: "waits for a hung worker",
    }[result.outcome]
    return f"{name} {outcome_text}{': ' + result.error if result.error else ''}"


def early_run_times(conditions: Conditions) -> dict[RunName, float]:
    """Return the times at which checks must run before the next round to confirm or escalate a condition (epoch
    seconds).

    This applies only to conditions that a check's run reported, not to those from the kernel log.
    """
    times: dict[RunName, float] = {}
    for c in conditions.values():
        if not c.last_level_seen or c.clean_runs:
            continue
        moments = []
        if c.state is ConditionState.PENDING:
            moments.append(c.persists_since + c.confirm_seconds)
        if c.shared_cause and c.own_since and c.state is not ConditionState.CLEARED:
            moments.append(c.own_since + c.confirm_seconds)
        if c.worsens and c.severity < c.worsens.severity and c.state is not ConditionState.CLEARED:
            moments.append(c.persists_since + c.worsens.after_seconds)
        for moment in moments:
            if moment > c.last_level_seen:
                times[c.run] = min(moment, times.get(c.run, moment))
    return times
