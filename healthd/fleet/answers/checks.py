"""Which check is worth what: which was the first evidence of an incident, which the only one, which never said a word;
and how long it took from the first evidence until the node was out.

An incident is a node's failing sights (what drains: degraded or critical), each at most `gap_seconds` after the one
before: 15 minutes, the width of the attribution's window. Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680) let
checks overlap on purpose: a PCIe fault may show as a GPU that does not answer, with no Xid. So "never the only one" is
no reason to remove a check, and "never" says only that nothing broke of what it looks for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.common.page import Page
from healthd.fleet.answers import document
from healthd.fleet.answers.causes import CHECKS
from healthd.fleet.answers.document import Document, moment, percent, plural, share, span
from healthd.fleet.answers.evidence import evidence, looked_at
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import wilson
from healthd.fleet.table import table

GAP_SECONDS = 900
DRAIN_WITHIN_SECONDS = 86400  # an incident that is not drained for by then was not drained for
PERCENTILES = (50, 90, 99)
Node = tuple[str, str]  # cluster, node


@dataclass(frozen=True, slots=True)
class Incident:
    """checks: which spoke, the first before all others (of one second: the worse, then by name)."""

    node: Node
    start_time: int
    end_time: int
    checks: tuple[str, ...]


# --- what is asked of the store

_SIGHTS = """
SELECT cluster, node, check_name, time, badness
FROM evidence SEMI JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
WHERE badness >= 2 AND time >= from_time AND time < to_time
ORDER BY ALL
"""

_SPOKE = """
SELECT
  check_name AS "check", count(*) FILTER (badness >= 2) AS failing, count(*) FILTER (badness = 1) AS warnings,
  count(DISTINCT code) FILTER (badness >= 1) AS codes
FROM evidence SEMI JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
WHERE time >= from_time AND time < to_time AND badness >= 1
GROUP BY check_name ORDER BY check_name
"""

# What was said of it: since when it is configured, and in how many changes. Also of the time before.
_DEPLOYED = """
SELECT
  check_name AS "check", min(coalesce(since_time, time)) AS since_time,
  count(DISTINCT (cluster, node)) FILTER (event = 'check_enabled') AS enabled_nodes,
  count(*) FILTER (event = 'check_changed' AND time >= from_time) AS changes,
  count(*) FILTER (event = 'check_disabled' AND time >= from_time) AS disabled
FROM events SEMI JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
WHERE event IN ('check_enabled', 'check_changed', 'check_disabled') AND time < to_time AND check_name IS NOT NULL
GROUP BY check_name ORDER BY check_name
"""

_OUTAGES = """
SELECT cluster, node, start_time, end_time, by_whom
FROM out_of_service SEMI JOIN chosen_nodes USING (cluster, node)
WHERE what = 'outage' ORDER BY cluster, node, start_time
"""

# Conditions that failed at their worst: from the first sight, however mild, until they were over.
_LIVES = """
SELECT cluster, node, coalesce(check_name, split_part(code, '/', 1)) AS "check", first_time, last_time, cleared_time
FROM conditions SEMI JOIN chosen_nodes USING (cluster, node)
WHERE severity IN ('degraded', 'critical') AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE)
ORDER BY cluster, node, first_time, "check", last_time
"""

_SENT = """
SELECT cluster, node, time FROM lines WHERE event = 'drain' AND stage = 'sent' ORDER BY cluster, node, time
"""

_UNSEEN = """
SELECT cluster, node, day FROM observed SEMI JOIN chosen_nodes USING (cluster, node)
WHERE observed_seconds * 2 < seconds
"""


def checks(study: Study, *, gap_seconds: int = GAP_SECONDS) -> Document:
    """checks: each that is deployed or spoke; incidents; drains: the time from the first evidence to the drain.

    gap_seconds: sights of a node that lie further apart are two incidents. Raises Unanswerable where no source tells of
    conditions.
    """
    if not study.has("scraped_conditions"):
        study.must_have("events")
    evidence(study)
    study.need("conditions", "out_of_service", "observed")
    every = incidents(study.rows(_SIGHTS), gap_seconds)
    outages = study.rows(_OUTAGES)
    looked = {row["check"]: row for row in looked_at(study)}
    deployed = {row["check"]: row for row in study.rows(_DEPLOYED)}
    told = by_check(every, study.rows(_SPOKE), looked, deployed)
    drained = drains(
        [row for row in outages if study.from_time <= row["start_time"] < study.to_time],
        outages,
        study.rows(_LIVES),
        study.rows(_SENT),
        {(row["cluster"], row["node"], row["day"]) for row in study.rows(_UNSEEN)},
    )
    notes = study.coverage_notes("events")
    if not looked:
        notes.append("Which checks looked is not known: no node's stream says so (alive).")
    if not outages:
        notes.append("No drain is known: healthd fleet ingest --node-states, or a healthd that drains, tells of them.")
    there = {row["check"] for row in told}
    return {
        **study.head("checks", *notes),
        "gap_seconds": gap_seconds,
        "incidents": len(every),
        "nodes_hit": len({one.node for one in every}),
        "checks": told,
        "never": [row["check"] for row in told if row["said"] == "never"],
        "not_deployed": sorted(CHECKS - there) if looked else [],
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


def incidents(sights: Iterable[Row], gap_seconds: int) -> list[Incident]:
    """The incidents of failing sights (cluster, node, check_name, time, badness), in order of node and time. Pure."""
    by_node: dict[Node, list[tuple[int, int, str]]] = defaultdict(list)
    for row in sights:
        by_node[row["cluster"], row["node"]].append((row["time"], -row["badness"], row["check_name"]))
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
    found: Sequence[Incident], spoke: Iterable[Row], looked: dict[str, Row], deployed: dict[str, Row]
) -> list[Row]:
    """Each check that is deployed or spoke, the most often first evidence first. The shares of being first sum to one
    over all checks. Pure.

    said   failing | warnings (only) | never (enabled, and it said nothing)
    """
    first = Counter(one.checks[0] for one in found)
    alone = Counter(one.checks[0] for one in found if len(one.checks) == 1)
    part = Counter(check for one in found for check in one.checks)
    said = {row["check"]: row for row in spoke}
    made = []
    for check in {*said, *looked, *deployed}:
        words, look, known = said.get(check, {}), looked.get(check, {}), deployed.get(check, {})
        made.append(
            {
                "check": check,
                "said": "failing" if words.get("failing") else "warnings" if words.get("warnings") else "never",
                "incidents": part[check],
                "first": first[check],
                "share_first": share(first[check], len(found)),
                "interval": _listed(wilson(first[check], len(found))),
                "alone": alone[check],
                "share_alone": share(alone[check], part[check]),
                "warnings": words.get("warnings", 0),
                "codes": words.get("codes", 0),
                "looked_nodes": look.get("nodes", 0),
                "looked_node_days": look.get("node_days", 0),
                "since_time": known.get("since_time", look.get("first_time")),
                "changes": known.get("changes", 0),
                "disabled": known.get("disabled", 0),
            }
        )
    return sorted(made, key=lambda row: (-row["first"], -row["incidents"], -row["warnings"], row["check"]))


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


# --- drains


def outcomes(found: Iterable[Incident], outages: Iterable[Row], to_time: int) -> Row:
    """What came after the incidents: already_out (it began while the node was out), drained (out within
    DRAIN_WITHIN_SECONDS of its end), not_drained, too_recent (that time is not over yet). Pure."""
    by_node: dict[Node, list[Row]] = defaultdict(list)
    for row in outages:
        by_node[row["cluster"], row["node"]].append(row)
    counted = Counter(_outcome(one, by_node[one.node], to_time) for one in found)
    return {name: counted[name] for name in ("drained", "not_drained", "already_out", "too_recent")}


def _outcome(one: Incident, outages: Sequence[Row], to_time: int) -> str:
    until = one.end_time + DRAIN_WITHIN_SECONDS
    for row in outages:
        if row["start_time"] < one.start_time and (row["end_time"] is None or row["end_time"] > one.start_time):
            return "already_out"
    if any(one.start_time <= row["start_time"] <= until for row in outages):
        return "drained"
    return "not_drained" if until < to_time else "too_recent"


def drains(
    asked: Iterable[Row],
    outages: Iterable[Row],
    lives: Iterable[Row],
    sent: Iterable[Row],
    unseen: set[tuple[str, str, int]],
) -> list[Row]:
    """Each drain (or node that went down) with its first evidence: the earliest first sight of a condition that failed,
    stood when the drain began, was seen in the day before it, and began after the node's outage before. Pure.

    seconds   from there to the drain; None: nothing failing stood
    sent_seconds   from there to healthd's command, where its stream tells of one since the first evidence
    observed  whether the node was observed for half of that day (UTC), or of the day before
    """
    ended: dict[Node, list[tuple[int, int]]] = defaultdict(list)
    for row in outages:
        if row["end_time"] is not None:
            ended[row["cluster"], row["node"]].append((row["start_time"], row["end_time"]))
    stood: dict[Node, list[Row]] = defaultdict(list)
    for row in lives:
        stood[row["cluster"], row["node"]].append(row)
    commands: dict[Node, list[int]] = defaultdict(list)
    for row in sent:
        commands[row["cluster"], row["node"]].append(row["time"])
    found = []
    for row in asked:
        node, time = (row["cluster"], row["node"]), row["start_time"]
        before = max((end for start, end in ended[node] if start < time), default=None)
        its = [
            one
            for one in stood[node]
            if one["first_time"] <= time
            and (before is None or one["first_time"] > before)
            and (one["cleared_time"] is None or one["cleared_time"] >= time)
            and max(one["last_time"], one["first_time"]) >= time - 86400
        ]
        first = min(its, key=lambda one: (one["first_time"], one["check"]), default=None)
        since = None if first is None else first["first_time"]
        last = commands[node][: bisect_right(commands[node], time)][-1:]
        day = time - time % 86400
        found.append(
            {
                "cluster": node[0],
                "node": node[1],
                "by_whom": row["by_whom"],
                "check": None if first is None else first["check"],
                "seconds": None if since is None else time - since,
                "sent_seconds": last[0] - since if last and since is not None and last[0] >= since else None,
                "observed": (*node, day) not in unseen or (*node, day - 86400) not in unseen,
            }
        )
    return found


def delays(drained: Sequence[Row]) -> Row:
    """How many drains, of how many the evidence is known, and the percentiles of the time. Pure.

    A percentile is the nearest rank: the shortest time within which so many of 100 were drained. Of fewer than 100 the
    99th is the longest of all.
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
    """Of numbers in their order; None of none. Pure."""
    return ordered[max(0, math.ceil(len(ordered) * percentile / 100) - 1)] if ordered else None


# --- for people

found = document.never
COLUMNS = ("check", "first", "of incidents", "95 % interval", "alone", "incidents", "warned", "looked", "since")
DRAIN_COLUMNS = ("drains", "how many", "evidence", "50 %", "90 %", "99 %", "nothing seen", "not observed")


def cells(checks: Document) -> list[tuple[str, ...]]:
    """A line for each check that spoke. Pure."""
    return [
        (
            row["check"],
            f"{row['first']:,}",
            percent(row["share_first"]),
            "-" if row["interval"] is None else f"{percent(row['interval'][0])} to {percent(row['interval'][1])}",
            f"{row['alone']:,}",
            f"{row['incidents']:,}",
            f"{row['warnings']:,}",
            f"{row['looked_node_days']:,} node-days",
            moment(row["since_time"])[:10],
        )
        for row in checks["checks"]
        if row["said"] != "never"
    ]


def drain_cells(checks: Document) -> list[tuple[str, ...]]:
    """A line for all drains, for each by whom, and for each check that was their first evidence. Pure."""
    told = checks["drains"]
    rows = [
        ("all", told["all"]),
        *((f"by {row['by_whom']}", row) for row in told["by_whom"]),
        *((f"after {row['check']}", row) for row in told["by_check"]),
    ]
    return [
        (
            name,
            f"{row['drains']:,}",
            f"{row['with_evidence']:,}",
            *(span(row[f"p{p}_seconds"]) for p in PERCENTILES),
            f"{row['nothing_seen']:,}",
            f"{row['not_observed']:,}",
        )
        for name, row in rows
    ]


def sentences(checks: Document) -> list[str]:
    """What the numbers say, for people. Pure."""
    if not checks["incidents"]:
        said = ["No check failed in this time."]
    else:
        first = checks["checks"][0]
        after = checks["after"]
        said = [
            f"{plural(checks['incidents'], 'incident')} on {plural(checks['nodes_hit'], 'node')}. The first evidence "
            f"was {first['check']} most often ({percent(first['share_first'])}).",
            f"After {after['drained']:,} of them the node was out of service within "
            f"{span(checks['drain_within_seconds'])}, after {after['not_drained']:,} it was not; "
            f"{after['already_out']:,} began while it was already out.",
        ]
    told = checks["drains"]["all"]
    if told["with_evidence"]:
        said.append(
            f"From the first evidence to the drain: half within {span(told['p50_seconds'])}, 90 % within "
            f"{span(told['p90_seconds'])}, 99 % within {span(told['p99_seconds'])}, of the {told['with_evidence']:,} "
            f"of {told['drains']:,} drains that had any. Before {told['nothing_seen']:,} drains no check failed, "
            f"and before {told['not_observed']:,} the node was not observed."
        )
    if checks["never"]:
        said.append(f"Enabled, and never reported anything: {', '.join(checks['never'])}.")
    if checks["not_deployed"]:
        said.append(f"In this release, but enabled on none of these nodes: {', '.join(checks['not_deployed'])}.")
    return said


def text(checks: Document, page: Page) -> str:
    blocks: list[Any] = ["\n".join(page.wrap(sentence)) for sentence in sentences(checks)]
    if rows := cells(checks):
        blocks.append(table(COLUMNS, rows, page))
    if checks["drains"]["all"]["drains"]:
        blocks.append(table(DRAIN_COLUMNS, drain_cells(checks), page))
    return document.told("Which check is the first evidence, and how long until the drain", checks, blocks, page)
