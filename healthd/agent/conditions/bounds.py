"""How many conditions there may be: the worst stand by name, the rest are counted in one. Pure.

A burst of lines, or a broken check, can name thousands of parts, and each condition costs time in each turn of the
daemon's loop, a row in `healthd status`, and a series in Prometheus.

    of one code of a run, beyond MOST_OF_A_CODE    are counted in CODE others
    of all codes of a run, beyond MOST_OF_A_RUN    are counted in CHECK/others others (an Xid of each number)
    of all runs, beyond MOST_OF_ALL                are counted in CHECK/others others of their runs, the mildest first

Only a run's own look says that what it found is over: so each run counts its rest by itself, and one that has a single
condition keeps it, also where more than MOST_OF_ALL runs have one.

What drains has a name first, then what is proven, then the worst, then what carries a job or is latched; at equal rank
what stood first.
The condition that counts the rest is as bad as the worst of them and ends as late as the one that ends last. So no
drain is lost and none comes too early to its end, only which of the thousands it was. No reset of one part ends it: a
reboot does where that ends them all, or `healthd repaired CODE others`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions.condition import LATCHED, STANDING, Conditions, found_severity, standing
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

MOST_OF_A_CODE = 64  # no node has more parts of a kind that anybody would look at one by one
MOST_OF_A_RUN = 128
MOST_OF_ALL = 256  # more than anybody reads; what each costs the loop and the status: docs/bench.md
OTHERS = "others"
WORST = "; the worst: "

# What ends a condition, the one that ends it last at the end.
_LATER = (Clears.PASS, Clears.WINDOW, Clears.GPU_RESET, Clears.REBOOT, Clears.OPERATOR)

Rank = tuple[bool, bool, int, bool, bool, bool, float, str, str]


class Place(NamedTuple):
    """Whose run it is of, and who has a name first: the least rank."""

    run: RunName
    rank: Rank


def others_of(run: RunName, code: str) -> ConditionKey:
    """The key of the condition that counts the rest of a code."""
    return ConditionKey(code, f"{OTHERS} of {run.instance}" if run.instance else OTHERS)


def others_of_all(run: RunName) -> ConditionKey:
    """The same for all codes of a run."""
    return others_of(run, f"{run.check}/{OTHERS}")


def bounded(conditions: Conditions) -> dict[ConditionKey, Condition]:
    """The conditions, those beyond the bounds counted in one. What is still pending is bounded by `with_others`."""
    new = dict(conditions)
    stand = {key: condition for key, condition in conditions.items() if condition.state in STANDING}
    if len(stand) <= MOST_OF_A_CODE:
        return new
    kept = _told_apart({key: Place(condition.run, _rank(condition)) for key, condition in stand.items()})
    members: dict[ConditionKey, list[Condition]] = {}
    for key, condition in stand.items():
        members.setdefault(kept[key], []).append(condition)
    for key, several in members.items():
        if [condition.key for condition in several] != [key]:
            for condition in several:
                new.pop(condition.key, None)
            new[key] = _counted(key, several)
    return new


def with_others(result: CheckResult, conditions: Conditions) -> CheckResult:
    """What one run found, the findings beyond the bounds counted in one: so they live the life of one condition, which
    is seen as long as one of them is."""
    mine = sum(condition.run == result.run for condition in conditions.values())
    if mine + len(result.findings) <= MOST_OF_A_CODE and len(conditions) + len(result.findings) <= MOST_OF_ALL:
        return result
    found = {finding.key: finding for finding in sorted(result.findings, key=lambda finding: finding.severity)}
    places = {
        key: Place(condition.run, _rank(condition))
        for key, condition in conditions.items()
        if condition.state in STANDING or condition.run != result.run
    }
    for key, finding in found.items():
        others = conditions.get(others_of(result.run, key.code)) or conditions.get(others_of_all(result.run))
        places[key] = Place(result.run, _rank_found(finding, conditions.get(key), others))
    kept = _told_apart(places)
    members: dict[ConditionKey, list[Finding]] = {}
    for key, finding in found.items():
        members.setdefault(kept[key], []).append(finding)
    if members.keys() == found.keys():
        return result
    single = (
        several[0] if several[0].key == key and len(several) == 1 else _one_finding(key, several, places)
        for key, several in members.items()
    )
    return replace(result, findings=tuple(single))


def _told_apart(places: Mapping[ConditionKey, Place]) -> dict[ConditionKey, ConditionKey]:
    """Under which key each stands: its own, or that of a condition that counts the rest."""
    runs: dict[RunName, dict[ConditionKey, Rank]] = {}
    for key, place in places.items():
        runs.setdefault(place.run, {})[key] = place.rank
    under: dict[ConditionKey, ConditionKey] = {}
    for run, ranks in runs.items():
        under |= {key: key for key in ranks} if len(ranks) <= MOST_OF_A_CODE else _of_a_run(run, ranks)
    return _of_all(under, places)


def _of_a_run(run: RunName, ranks: Mapping[ConditionKey, Rank]) -> dict[ConditionKey, ConditionKey]:
    codes: dict[str, list[ConditionKey]] = {}
    for key in sorted(ranks, key=lambda key: ranks[key]):
        codes.setdefault(key.code, []).append(key)
    all_others = others_of_all(run)
    under: dict[ConditionKey, ConditionKey] = {}
    for code, keys in codes.items():
        others = others_of(run, code)
        named = [key for key in keys if key != others]
        most = MOST_OF_A_CODE if len(named) == len(keys) else MOST_OF_A_CODE - 1
        if len(named) > most:
            named = named[: MOST_OF_A_CODE - 1]
        under |= {key: key if key in set(named) else others for key in keys}
    best = _best(under, ranks)
    named = sorted(best.keys() - {all_others}, key=lambda key: best[key])
    if len(named) > (MOST_OF_A_RUN - 1 if all_others in best else MOST_OF_A_RUN):
        rest = set(named[MOST_OF_A_RUN - 1 :])
        under = {key: all_others if stands in rest else stands for key, stands in under.items()}
    return under


def _of_all(
    under: Mapping[ConditionKey, ConditionKey], places: Mapping[ConditionKey, Place]
) -> dict[ConditionKey, ConditionKey]:
    """The mildest give up their names until there are MOST_OF_ALL. To count one alone would save nothing."""
    too_many = len(set(under.values())) - MOST_OF_ALL
    if too_many <= 0:
        return dict(under)
    best = _best(under, {key: place.rank for key, place in places.items()})
    all_others = {stands: others_of_all(places[key].run) for key, stands in under.items()}
    rest: dict[ConditionKey, list[ConditionKey]] = {others: [] for others in all_others.values() if others in best}
    for stands in sorted(best.keys() - rest.keys(), key=lambda key: best[key], reverse=True):
        if too_many == 0:
            break
        others = all_others[stands]
        too_many -= others in rest  # the first of a run would only get another name
        rest.setdefault(others, []).append(stands)
    given_up = {
        stands: others for others, several in rest.items() if others in best or len(several) > 1 for stands in several
    }
    return {key: given_up.get(stands, stands) for key, stands in under.items()}


def _best(under: Mapping[ConditionKey, ConditionKey], ranks: Mapping[ConditionKey, Rank]) -> dict[ConditionKey, Rank]:
    """The rank of what stands under each key: that of the first of them."""
    best: dict[ConditionKey, Rank] = {}
    for key, stands in under.items():
        best[stands] = min(ranks[key], best.get(stands, ranks[key]))
    return best


def _rank(c: Condition) -> Rank:
    """A sort key: who has a name first."""
    acts = c.state is not ConditionState.ACKNOWLEDGED and c.severity >= Severity.DEGRADED and not c.observed
    return (
        not acts,
        c.observed,
        -c.severity,
        not c.job,
        c.clears not in LATCHED,
        False,
        c.first_seen,
        c.subject,
        c.code,
    )


def _rank_found(finding: Finding, known: Condition | None, others: Condition | None) -> Rank:
    """`others`: what counts those of its code that have no name; it may be one of them, of which a person may know."""
    if known is not None and known.state in STANDING:
        return _rank(replace(known, severity=max(finding.severity, known.severity), observed=False))
    is_known = others is not None and others.state is ConditionState.ACKNOWLEDGED
    acts = finding.severity >= Severity.DEGRADED and not (is_known and others and finding.severity <= others.severity)
    since = known.first_seen if known is not None else 0.0
    is_new, is_mild = known is None, finding.clears not in LATCHED
    return (not acts, False, -finding.severity, True, is_mild, is_new, since, finding.subject, finding.code)


def _counted(key: ConditionKey, members: Sequence[Condition]) -> Condition:
    """One condition for all of these. Each of its moments is the one that keeps it the longest and acts the soonest.
    Beside a proven one, those that can be forged, and history, are counted only."""
    ranked = sorted(members, key=_rank)
    worst = ranked[0]
    count = sum(c.count for c in members)
    members = [c for c in members if standing(c) is standing(worst)]
    same = [c for c in members if c.state is worst.state]
    clears, window_seconds = _last_ending((c.clears, c.window_seconds) for c in members)
    expects = {c.expects for c in members}
    newest = max(members, key=lambda c: c.last_seen)
    return replace(
        worst,
        code=key.code,
        subject=key.subject,
        message=_words("seen once" if count == 1 else f"seen {count} times", worst.subject, worst.message),
        clears=clears,
        window_seconds=window_seconds,
        # What a profile guessed stays a warning also where the settings are read again.
        found=max(map(found_severity, same)) if len(expects) == 1 and key.code == worst.code else worst.severity,
        expects=worst.expects if len(expects) == 1 else "",
        # Of those that act as this does: what a person knows of, or a warning, decides nothing.
        shared_cause=all(c.shared_cause for c in same if c.severity >= min(worst.severity, Severity.DEGRADED)),
        job=next((c.job for c in ranked if c.job), ""),
        count=count,
        boot_id=newest.boot_id,
        first_seen=min(c.first_seen for c in members),
        last_seen=newest.last_seen,
        last_level_seen=max(c.last_level_seen for c in members),
        last_event=max(c.last_event for c in members),
        last_sequence=max(c.last_sequence for c in members),
        acknowledged_at=min(c.acknowledged_at for c in same),
        opened_at=max(c.opened_at for c in same),
        critical_at=max(c.critical_at for c in same),
        persists_since=min(c.persists_since for c in same),
        clean_runs=min(c.clean_runs for c in members),
        quiet_seconds=min(c.quiet_seconds for c in members),
        repaired=all(c.repaired for c in members),
        ack=min((c.ack for c in same if c.ack), key=lambda ack: ack.until, default=None),
    )


def _one_finding(key: ConditionKey, members: Sequence[Finding], places: Mapping[ConditionKey, Place]) -> Finding:
    worst = min(members, key=lambda finding: places[finding.key].rank)
    clears, window_seconds = _last_ending((finding.clears, finding.window_seconds) for finding in members)
    expects = {finding.expects for finding in members}
    told = "".join(sorted(f"{finding.key} {finding.evidence}\n" for finding in members))
    return replace(
        worst,
        code=key.code,
        subject=key.subject,
        message=_words(f"{len(members)} more", worst.subject, worst.message),
        clears=clears,
        window_seconds=window_seconds,
        expects=worst.expects if len(expects) == 1 else "",
        found=worst.found if len(expects) == 1 and key.code == worst.code else None,
        shared_cause=all(finding.shared_cause for finding in members),
        evidence=f"{zlib.crc32(told.encode('utf-8', 'replace')):08x}" if all(f.evidence for f in members) else "",
    )


def ends_last(one: Clears, other: Clears) -> Clears:
    """That of two endings for which people wait longer."""
    return max(one, other, key=_LATER.index)


def _last_ending(endings: Iterable[tuple[Clears, float]]) -> tuple[Clears, float]:
    """What ends all of them, and the time without news that does: 0 where none of them ends by that alone."""
    known = list(endings)
    last = max((clears for clears, _ in known), key=_LATER.index)
    windows = [seconds for clears, seconds in known if clears in LATCHED or last not in LATCHED]
    return last, max(windows) if all(windows) or last not in LATCHED else 0.0


def _words(how_many: str, subject: str, message: str) -> str:
    """ "seen 901 times, on parts that are not named; the worst: 0000:1b:00.0: Xid 31: ..."; `message` may be such
    words. Kernel lines are counted, not parts: one part may repeat. Of one look the parts are: "937 more, on parts"."""
    _, told, worst = message.partition(WORST)
    if not told:
        worst = f"{subject}: {message}" if subject else message
    return f"{how_many}, on parts that are not named{WORST}{worst}"
