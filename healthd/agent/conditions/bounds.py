"""Bound on the number of conditions. The worst conditions keep their names; the others are only counted. All functions
are pure.

A burst of kernel lines or a broken check can report thousands of parts. Each condition costs time in each turn of the
daemon's loop, a row in `healthd status` and a series in Prometheus.

At most MAX_CONDITIONS conditions are open, over all runs. `Rank` determines which ones. All others are counted in
overflow conditions (`CHECK/others others`). Each run has its own overflow condition, because only a run's own result
can clear its findings. A run's only condition keeps its name, because counting it would save nothing. If many runs have
one condition each, there can therefore be more than MAX_CONDITIONS conditions.

The overflow condition is as severe as its worst member and clears when its last member clears. Drains are therefore
neither lost nor ended too early. The reset of one part does not clear the overflow condition. A reboot does if it
clears all members. `healthd repaired CHECK/others others` always clears it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions.condition import ACTIVE_STATES, LATCHED, Conditions, evidence_level
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Finding,
    RunName,
    Severity,
)

MAX_CONDITIONS = 128  # a DGX has up to 144 NVLinks, and more rows are unreadable; docs/bench.md has the cost of each
OVERFLOW = "others"
WORST_SEPARATOR = "; the worst: "

# Endings from the earliest to the latest.
_ENDING_ORDER = (Clears.PASS, Clears.WINDOW, Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR)


class Rank(NamedTuple):
    """Sort key: drains, proven evidence, severity, then age. Conditions with the lowest rank keep their names first."""

    harmless: bool
    observed: bool
    mildness: int
    first_seen: float
    subject: str
    code: str


class Ranked(NamedTuple):
    """A condition's or finding's rank, and the run that reports it."""

    run: RunName
    rank: Rank


def overflow_key(run: RunName) -> ConditionKey:
    """Return the key of a run's overflow condition."""
    return ConditionKey(f"{run.check}/{OVERFLOW}", f"{OVERFLOW} of {run.instance}" if run.instance else OVERFLOW)


def limit_conditions(conditions: Conditions) -> dict[ConditionKey, Condition]:
    """Return the conditions, merging those beyond the bound. Pending conditions are not merged (see
    `limit_findings`).
    """
    new = dict(conditions)
    active = {key: condition for key, condition in conditions.items() if condition.state in ACTIVE_STATES}
    assigned = _assign_overflow({key: Ranked(condition.run, _rank(condition)) for key, condition in active.items()})
    for overflow in set(assigned.values()):
        members = [new.pop(key) for key, assigned_to in assigned.items() if assigned_to == overflow]
        new[overflow] = _merge_conditions(overflow, members)
    return new


def limit_findings(result: CheckResult, conditions: Conditions) -> CheckResult:
    """Return the result, with all findings beyond the bound merged into one.

    The condition for these findings is open while the check reports at least one finding beyond the bound.
    """
    if len(conditions) + len(result.findings) <= MAX_CONDITIONS:
        return result
    found = {finding.key: finding for finding in sorted(result.findings, key=lambda finding: finding.severity)}
    ranked = {
        key: Ranked(condition.run, _rank(condition))
        for key, condition in conditions.items()
        if condition.state in ACTIVE_STATES or condition.run != result.run
    }
    overflow = overflow_key(result.run)
    for key, finding in found.items():
        ranked[key] = Ranked(result.run, _rank_finding(finding, conditions.get(key), conditions.get(overflow)))
    assigned = _assign_overflow(ranked)
    counted = [finding for key, finding in found.items() if key in assigned]
    if [finding.key for finding in counted] in ([], [overflow]):
        return result
    named = (finding for key, finding in found.items() if key not in assigned)
    return replace(result, findings=(*named, _merge_findings(overflow, counted, ranked)))


def _assign_overflow(ranked: Mapping[ConditionKey, Ranked]) -> dict[ConditionKey, ConditionKey]:
    """Return a dict that maps each key that loses its name to the key of its overflow condition.

    Among equally bad conditions, runs take turns. A storm in one check therefore does not take a name from a smaller
    check.
    """
    excess = len(ranked) - MAX_CONDITIONS
    if excess <= 0:
        return {}
    positions: Counter[RunName] = Counter()
    order = []
    for key in sorted(ranked, key=lambda key: ranked[key].rank):
        run, rank = ranked[key]
        positions[run] += 1
        order.append(((rank.harmless, rank.observed, rank.mildness, positions[run], rank), key))
    members: dict[ConditionKey, list[ConditionKey]] = {
        overflow: [overflow] for run in positions if (overflow := overflow_key(run)) in ranked
    }
    for _, key in sorted(order, reverse=True):
        if excess <= 0:
            break
        overflow = overflow_key(ranked[key].run)
        if key != overflow:
            excess -= overflow in members  # the first condition would only get another name, which saves nothing
            members.setdefault(overflow, []).append(key)
    return {key: overflow for overflow, keys in members.items() if len(keys) > 1 for key in keys}


def _rank(c: Condition) -> Rank:
    drains = c.state is not ConditionState.ACKNOWLEDGED and c.severity >= Severity.DEGRADED and not c.observed
    return Rank(not drains, c.observed, -c.severity, c.first_seen, c.subject, c.code)


def _rank_finding(finding: Finding, condition: Condition | None, overflow: Condition | None) -> Rank:
    """Return the rank of a finding.

    A finding without its own condition may be counted in `overflow`. An ack of `overflow` then covers the finding.
    """
    if condition is not None and condition.state in ACTIVE_STATES:
        return _rank(replace(condition, severity=max(finding.severity, condition.severity), observed=False))
    is_acknowledged = overflow is not None and overflow.state is ConditionState.ACKNOWLEDGED
    drains = finding.severity >= Severity.DEGRADED and not (
        is_acknowledged and overflow and finding.severity <= overflow.severity
    )
    since = condition.first_seen if condition is not None else float("inf")
    return Rank(not drains, False, -finding.severity, since, finding.subject, finding.code)


def _merge_conditions(key: ConditionKey, members: Sequence[Condition]) -> Condition:
    """Return one condition for all members.

    The condition takes effect when the first member would, and stays open as long as the last member would.

    If there are proven members, the observed members and history are only counted.
    """
    ranked = sorted(members, key=_rank)
    worst = ranked[0]
    count = sum(c.count for c in members)
    members = [c for c in members if evidence_level(c) is evidence_level(worst)]
    in_worst_state = [c for c in members if c.state is worst.state]
    clears, window_seconds = _latest_ending((c.clears, c.window_seconds) for c in members)
    newest = max(members, key=lambda c: c.last_seen)
    return replace(
        worst,
        code=key.code,
        subject=key.subject,
        message=_message("seen once" if count == 1 else f"seen {count} times", worst.subject, worst.message),
        clears=clears,
        window_seconds=window_seconds,
        # A severity that a profile lowered stays lowered after a reload, until the next run reports again.
        found_severity=worst.severity,
        expects="",
        # Consider only members that have the same effect as the worst one. Acknowledged members and warnings do not
        # drain.
        shared_cause=all(
            c.shared_cause for c in in_worst_state if c.severity >= min(worst.severity, Severity.DEGRADED)
        ),
        job=next((c.job for c in ranked if c.job), ""),
        count=count,
        boot_id=newest.boot_id,
        first_seen=min(c.first_seen for c in members),
        last_seen=newest.last_seen,
        last_level_seen=max(c.last_level_seen for c in members),
        last_event=max(c.last_event for c in members),
        last_sequence=max(c.last_sequence for c in members),
        acknowledged_at=min(c.acknowledged_at for c in in_worst_state),
        opened_at=max(c.opened_at for c in in_worst_state),
        critical_at=max(c.critical_at for c in in_worst_state),
        persists_since=min(c.persists_since for c in in_worst_state),
        clean_runs=min(c.clean_runs for c in members),
        quiet_seconds=min(c.quiet_seconds for c in members),
        repaired=all(c.repaired for c in members),
        ack=min((c.ack for c in in_worst_state if c.ack), key=lambda ack: ack.until, default=None),
    )


def _merge_findings(key: ConditionKey, members: Sequence[Finding], ranked: Mapping[ConditionKey, Ranked]) -> Finding:
    worst = min(members, key=lambda finding: ranked[finding.key].rank)
    clears, window_seconds = _latest_ending((finding.clears, finding.window_seconds) for finding in members)
    text = "".join(sorted(f"{finding.key} {finding.evidence}\n" for finding in members))
    return replace(
        worst,
        code=key.code,
        subject=key.subject,
        message=_message(f"{len(members)} more", worst.subject, worst.message),
        clears=clears,
        window_seconds=window_seconds,
        expects="",
        found_severity=None,
        shared_cause=all(finding.shared_cause for finding in members),
        evidence=f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}" if all(f.evidence for f in members) else "",
    )


def later_ending(first: Clears, second: Clears) -> Clears:
    """Return the later of two endings."""
    return max(first, second, key=_ENDING_ORDER.index)


def _latest_ending(endings: Iterable[tuple[Clears, float]]) -> tuple[Clears, float]:
    """Return the latest ending and its window. The window is 0 if any member needs more than time to clear."""
    pairs = list(endings)
    last = max((clears for clears, _ in pairs), key=_ENDING_ORDER.index)
    windows = [seconds for clears, seconds in pairs if clears in LATCHED or last not in LATCHED]
    return last, max(windows) if all(windows) or last not in LATCHED else 0.0


def _message(count_text: str, subject: str, message: str) -> str:
    """Return text such as "seen 901 times, on unlisted parts; the worst: 0000:1b:00.0: Xid 31: ...".

    `message` may already have this form. The count is of kernel lines, not parts, because a part may occur in several
    lines.
    """
    _, separator, worst = message.partition(WORST_SEPARATOR)
    if not separator:
        worst = f"{subject}: {message}" if subject else message
    return f"{count_text}, on unlisted parts{WORST_SEPARATOR}{worst}"
