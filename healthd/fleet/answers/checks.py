"""Value of each check: how often it gave the first or only evidence of an incident, and the time until the drain.

An incident consists of a node's failing sightings (conditions that drain: degraded or critical), each at most
`gap_seconds` after the previous one: 15 minutes, the width of the attribution window. Kokolis, Kuchnik et al. (HPCA
2025, arXiv 2410.21680) let checks overlap on purpose: a PCIe fault may show up as a GPU that does not answer, with no
Xid. So "never the only one" is no reason to remove a check, and "never" only means that nothing broke that the check
can detect.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from healthd.fleet.answers import causes, document
from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.evidence import Looked, looked_at
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import wilson

GAP_SECONDS = 900
DRAIN_WITHIN_SECONDS = 86400  # later drains are not attributed to the incident
PERCENTILES = (50, 90, 99)
Node = tuple[str, str]  # cluster, node


@dataclass(frozen=True, slots=True)
class Incident:
    """Failing sightings of one node that belong together. checks: names by first sighting, then severity, then name."""

    node: Node
    start_time: int
    end_time: int
    checks: tuple[str, ...]


# --- rows of the store


class Sight(NamedTuple):
    """Columns of checks_sights.sql."""

    cluster: str
    node: str
    check_name: str
    time: int
    badness: int


class Spoke(NamedTuple):
    """Columns of checks_spoke.sql."""

    check_name: str
    failing: int = 0
    warnings: int = 0
    codes: int = 0


class Deployed(NamedTuple):
    """Columns of checks_deployed.sql."""

    check_name: str
    since_time: int | None = None
    changes: int = 0
    disabled: int = 0


class Outage(NamedTuple):
    """Columns of checks_outages.sql."""

    cluster: str
    node: str
    start_time: int
    end_time: int | None
    by_whom: str


class Life(NamedTuple):
    """Columns of checks_lives.sql."""

    cluster: str
    node: str
    check_name: str
    first_time: int
    last_time: int
    cleared_time: int | None


class Sent(NamedTuple):
    """Columns of checks_sent.sql."""

    cluster: str
    node: str
    time: int


class Unseen(NamedTuple):
    """Columns of checks_unseen.sql."""

    cluster: str
    node: str
    day: int


def checks(study: Study, *, gap_seconds: int = GAP_SECONDS) -> Document:
    """Return the document of `healthd fleet checks`: checks, incidents, and the times from first evidence to drain.

    gap_seconds: sightings of a node further apart than this are two incidents. Raises Unanswerable if no source has
    conditions.
    """
    if not study.has("scraped_conditions"):
        study.must_have("events")
    every = incidents(study.ask("checks_sights", Sight), gap_seconds)
    outages = study.ask("checks_outages", Outage)
    looked = looked_at(study)
    deployed = {row.check_name: row for row in study.ask("checks_deployed", Deployed)}
    told = by_check(every, study.ask("checks_spoke", Spoke), looked, deployed)
    drained = drains(
        [row for row in outages if study.from_time <= row.start_time < study.to_time],
        outages,
        study.ask("checks_lives", Life),
        study.ask("checks_sent", Sent),
        {(row.cluster, row.node, row.day) for row in study.ask("checks_unseen", Unseen)},
    )
    notes = study.coverage_notes("events")
    if not looked:
        notes.append("The checks that completed are not known: no stream has them (event alive).")
    if not outages:
        notes.append("No drain is known: healthd fleet ingest --node-states, or the events of a healthd that drains.")
    there = {row["check"] for row in told}
    return {
        **study.head("checks", *notes),
        "gap_seconds": gap_seconds,
        "incidents": len(every),
        "nodes_hit": len({one.node for one in every}),
        "checks": told,
        "never": [row["check"] for row in told if row["reported"] == "never"],
        "not_deployed": sorted(causes.checks() - there) if looked else [],
        "drain_within_seconds": DRAIN_WITHIN_SECONDS,
        "after": outcomes(every, outages, study.to_time),
        "drains": {
            "all": delays(drained),
            "by_whom": [
                {"by_whom": who, **delays([one for one in drained if one["by_whom"] == who])}
                for who in sorted({one["by_whom"] for one in drained})
            ],
            "by_check": [
                {"check": check, **delays([one for one in drained if one["check"] == check])}
                for check in sorted({one["check"] for one in drained if one["check"] is not None})
            ],
        },
    }


# --- incidents


def incidents(sights: Iterable[Sight], gap_seconds: int) -> list[Incident]:
    """Return the incidents of failing sightings, sorted by node and time. Pure."""
    by_node: dict[Node, list[tuple[int, int, str]]] = defaultdict(list)
    for row in sights:
        by_node[row.cluster, row.node].append((row.time, -row.badness, row.check_name))
    found = []
    for node, its in sorted(by_node.items()):
        its.sort()
        begin = 0
        for at in range(1, len(its) + 1):
            if at == len(its) or its[at][0] > its[at - 1][0] + gap_seconds:
                spoke = dict.fromkeys(check for _, _, check in its[begin:at])
                found.append(Incident(node, its[begin][0], its[at - 1][0], tuple(spoke)))
                begin = at
    return found


def by_check(
    found: Sequence[Incident], spoke: Iterable[Spoke], looked: Mapping[str, Looked], deployed: Mapping[str, Deployed]
) -> list[Row]:
    """Return each check that is deployed or reported something, most frequent first evidence first. Pure.

    The shares of first evidence sum to one over all checks. said: failing, warnings (only) or never (enabled, but
    nothing reported).
    """
    first = Counter(one.checks[0] for one in found)
    alone = Counter(one.checks[0] for one in found if len(one.checks) == 1)
    part = Counter(check for one in found for check in one.checks)
    said = {row.check_name: row for row in spoke}
    made = []
    for check in {*said, *looked, *deployed}:
        words, look, known = said.get(check, Spoke(check)), looked.get(check), deployed.get(check)
        made.append(
            {
                "check": check,
                "reported": "failing" if words.failing else "warnings" if words.warnings else "never",
                "incidents": part[check],
                "first": first[check],
                "share_first": share(first[check], len(found)),
                "interval": _listed(wilson(first[check], len(found))),
                "alone": alone[check],
                "share_alone": share(alone[check], part[check]),
                "warnings": words.warnings,
                "codes": words.codes,
                "nodes_running": look.nodes if look else 0,
                "node_days_running": look.node_days if look else 0,
                "since_time": known.since_time if known else look.first_time if look else None,
                "changes": known.changes if known else 0,
                "disabled": known.disabled if known else 0,
            }
        )
    return sorted(made, key=lambda row: (-row["first"], -row["incidents"], -row["warnings"], row["check"]))


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


# --- drains


def outcomes(found: Iterable[Incident], outages: Iterable[Outage], to_time: int) -> Row:
    """Count how the incidents ended. Pure.

    already_out  it began while the node was out of service
    drained      out of service within DRAIN_WITHIN_SECONDS of its end
    not_drained  still in service after that time
    too_recent   that time is not over yet
    """
    by_node: dict[Node, list[Outage]] = defaultdict(list)
    for row in outages:
        by_node[row.cluster, row.node].append(row)
    counted = Counter(_outcome(one, by_node[one.node], to_time) for one in found)
    return {name: counted[name] for name in ("drained", "not_drained", "already_out", "too_recent")}


def _outcome(one: Incident, outages: Sequence[Outage], to_time: int) -> str:
    until = one.end_time + DRAIN_WITHIN_SECONDS
    for row in outages:
        if row.start_time < one.start_time and (row.end_time is None or row.end_time > one.start_time):
            return "already_out"
    if any(one.start_time <= row.start_time <= until for row in outages):
        return "drained"
    return "not_drained" if until < to_time else "too_recent"


def drains(
    asked: Iterable[Outage],
    outages: Iterable[Outage],
    lives: Iterable[Life],
    sent: Iterable[Sent],
    unseen: set[tuple[str, str, int]],
) -> list[Row]:
    """Return each drain (or node that went down) with its first evidence. Pure.

    The first evidence is the earliest first sighting of a failing condition that was open when the drain began, was
    seen in the day before, and began after the node's previous outage.

    seconds       from the first evidence to the drain; None: no failing condition was open
    sent_seconds  from the first evidence to healthd's drain command, if its stream has one since then
    observed      True if the node was observed for half of that day (UTC), or of the day before
    """
    ended: dict[Node, list[tuple[int, int]]] = defaultdict(list)
    for row in outages:
        if row.end_time is not None:
            ended[row.cluster, row.node].append((row.start_time, row.end_time))
    stood: dict[Node, list[Life]] = defaultdict(list)
    for life in lives:
        stood[life.cluster, life.node].append(life)
    commands: dict[Node, list[int]] = defaultdict(list)
    for command in sent:
        commands[command.cluster, command.node].append(command.time)
    found = []
    for row in asked:
        node, time = (row.cluster, row.node), row.start_time
        before = max((end for start, end in ended[node] if start < time), default=None)
        its = [
            one
            for one in stood[node]
            if one.first_time <= time
            and (before is None or one.first_time > before)
            and (one.cleared_time is None or one.cleared_time >= time)
            and max(one.last_time, one.first_time) >= time - 86400
        ]
        first = min(its, key=lambda one: (one.first_time, one.check_name), default=None)
        since = None if first is None else first.first_time
        last = commands[node][: bisect_right(commands[node], time)][-1:]
        day = time - time % 86400
        found.append(
            {
                "cluster": node[0],
                "node": node[1],
                "by_whom": row.by_whom,
                "check": None if first is None else first.check_name,
                "seconds": None if since is None else time - since,
                "sent_seconds": last[0] - since if last and since is not None and last[0] >= since else None,
                "observed": (*node, day) not in unseen or (*node, day - 86400) not in unseen,
            }
        )
    return found


def delays(drained: Sequence[Row]) -> Row:
    """Return the number of drains, how many have evidence, and percentiles of the time. Pure.

    Percentiles are nearest-rank: the shortest time within which that percentage was drained. With fewer than 100 drains
    the 99th percentile is the longest time.
    """
    known = sorted(row["seconds"] for row in drained if row["seconds"] is not None)
    sent = sorted(row["sent_seconds"] for row in drained if row["sent_seconds"] is not None)
    without = [row for row in drained if row["seconds"] is None]
    return {
        "drains": len(drained),
        "with_evidence": len(known),
        "nothing_seen": sum(row["observed"] for row in without),
        "not_observed": sum(not row["observed"] for row in without),
        "share_observed": share(sum(row["observed"] for row in drained), len(drained)),
        **{f"p{p}_seconds": nearest_rank(known, p) for p in PERCENTILES},
        **{f"sent_p{p}_seconds": nearest_rank(sent, p) for p in PERCENTILES},
    }


def nearest_rank(ordered: Sequence[int], percentile: int) -> int | None:
    """Return the nearest-rank percentile of sorted `values`, or None if empty. Pure."""
    return ordered[max(0, math.ceil(len(ordered) * percentile / 100) - 1)] if ordered else None


found = document.never
