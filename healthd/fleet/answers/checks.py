"""Value of each check: how often it provided the first or only evidence of an incident, and the time until the drain.

A failing sighting is a sighting of a condition that drains (degraded or critical). Failing sightings on a node form one
incident if each follows the previous one within `gap_seconds` (default: 15 minutes, the width of the attribution
window). Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680) let checks overlap on purpose: a PCIe fault may show up
as a GPU that does not answer, with no Xid. So a check that was never the only evidence should not be removed for that
reason. If a check never reported anything, this shows only that no fault it can detect occurred.
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
from healthd.fleet.answers.evidence import CheckCompletion, completed_checks
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import wilson

INCIDENT_GAP_SECONDS = 900
DRAIN_WITHIN_SECONDS = 86400  # later drains are not attributed to the incident
PERCENTILES = (50, 90, 99)
Node = tuple[str, str]  # cluster, node


@dataclass(frozen=True, slots=True)
class Incident:
    """A node's failing sightings that belong together.

    `checks` are names, sorted by first sighting, then severity, then name.
    """

    node: Node
    start_time: int
    end_time: int
    checks: tuple[str, ...]


# --- rows of the store


class Sighting(NamedTuple):
    """A row returned by checks_sightings.sql."""

    cluster: str
    node: str
    check_name: str
    time: int
    badness: int


class ReportedChecks(NamedTuple):
    """A row returned by checks_reported.sql."""

    check_name: str
    failing: int = 0
    warnings: int = 0
    codes: int = 0


class DeployedCheck(NamedTuple):
    """A row returned by checks_deployed.sql."""

    check_name: str
    since_time: int | None = None
    changes: int = 0
    disabled: int = 0


class Outage(NamedTuple):
    """A row returned by checks_outages.sql."""

    cluster: str
    node: str
    start_time: int
    end_time: int | None
    by_whom: str


class ConditionLife(NamedTuple):
    """A row returned by checks_conditions.sql."""

    cluster: str
    node: str
    check_name: str
    first_time: int
    last_time: int
    cleared_time: int | None


class DrainCommand(NamedTuple):
    """A row returned by checks_drain_commands.sql."""

    cluster: str
    node: str
    time: int


class UnobservedDay(NamedTuple):
    """A row returned by checks_unobserved_days.sql."""

    cluster: str
    node: str
    day: int


def checks(study: Study, *, gap_seconds: int = INCIDENT_GAP_SECONDS) -> Document:
    """Return the document for `healthd fleet checks`: checks, incidents, and the times from first evidence to drain.

    Raises Unanswerable if no source has conditions.

    Args:
        gap_seconds: if two sightings on a node are further apart than this, they belong to two incidents.
    """
    if not study.has_rows("scraped_conditions"):
        study.require("events")
    all_incidents = incidents(study.query("checks_sightings", Sighting), gap_seconds)
    outages = study.query("checks_outages", Outage)
    completed = completed_checks(study)
    deployed = {row.check_name: row for row in study.query("checks_deployed", DeployedCheck)}
    check_rows = by_check(all_incidents, study.query("checks_reported", ReportedChecks), completed, deployed)
    drain_rows = drains(
        [row for row in outages if study.from_time <= row.start_time < study.to_time],
        outages,
        study.query("checks_conditions", ConditionLife),
        study.query("checks_drain_commands", DrainCommand),
        {(row.cluster, row.node, row.day) for row in study.query("checks_unobserved_days", UnobservedDay)},
    )
    notes = study.coverage_notes("events")
    if not completed:
        notes.append("It is unknown which checks completed: no stream contains them (event alive).")
    if not outages:
        notes.append(
            "No drains are known: run healthd fleet ingest --node-states, or ingest the events of a healthd that "
            "drains."
        )
    deployed_names = {row["check"] for row in check_rows}
    return {
        **study.head("checks", *notes),
        "gap_seconds": gap_seconds,
        "incidents": len(all_incidents),
        "nodes_hit": len({item.node for item in all_incidents}),
        "checks": check_rows,
        "never": [row["check"] for row in check_rows if row["reported"] == "never"],
        "not_deployed": sorted(causes.checks() - deployed_names) if completed else [],
        "drain_within_seconds": DRAIN_WITHIN_SECONDS,
        "after": outcomes(all_incidents, outages, study.to_time),
        "drains": {
            "all": delays(drain_rows),
            "by_whom": [
                {"by_whom": origin, **delays([item for item in drain_rows if item["by_whom"] == origin])}
                for origin in sorted({item["by_whom"] for item in drain_rows})
            ],
            "by_check": [
                {"check": check, **delays([item for item in drain_rows if item["check"] == check])}
                for check in sorted({item["check"] for item in drain_rows if item["check"] is not None})
            ],
        },
    }


# --- incidents


def incidents(sighting_rows: Iterable[Sighting], gap_seconds: int) -> list[Incident]:
    """Group the failing sightings into incidents, sorted by node and time."""
    by_node: dict[Node, list[tuple[int, int, str]]] = defaultdict(list)
    for sighting in sighting_rows:
        by_node[sighting.cluster, sighting.node].append((sighting.time, -sighting.badness, sighting.check_name))
    found = []
    for node, sightings in sorted(by_node.items()):
        sightings.sort()
        begin = 0
        for index in range(1, len(sightings) + 1):
            if index == len(sightings) or sightings[index][0] > sightings[index - 1][0] + gap_seconds:
                check_names = dict.fromkeys(check for _, _, check in sightings[begin:index])
                found.append(Incident(node, sightings[begin][0], sightings[index - 1][0], tuple(check_names)))
                begin = index
    return found


def by_check(
    all_incidents: Sequence[Incident],
    reported: Iterable[ReportedChecks],
    completed: Mapping[str, CheckCompletion],
    deployed: Mapping[str, DeployedCheck],
) -> list[Row]:
    """Return the checks that are deployed or reported something.

    Those that were most often the first evidence come first.

    The shares of first evidence add up to 1. `reported` is "failing", "warnings" (nothing worse) or "never" (enabled,
    but reported nothing).
    """
    first = Counter(incident.checks[0] for incident in all_incidents)
    alone = Counter(incident.checks[0] for incident in all_incidents if len(incident.checks) == 1)
    incident_counts = Counter(check for incident in all_incidents for check in incident.checks)
    reported_by_check = {row.check_name: row for row in reported}
    rows = []
    for check in {*reported_by_check, *completed, *deployed}:
        report, completion, deployment = (
            reported_by_check.get(check, ReportedChecks(check)),
            completed.get(check),
            deployed.get(check),
        )
        rows.append(
            {
                "check": check,
                "reported": "failing" if report.failing else "warnings" if report.warnings else "never",
                "incidents": incident_counts[check],
                "first": first[check],
                "share_first": share(first[check], len(all_incidents)),
                "interval": _as_list(wilson(first[check], len(all_incidents))),
                "alone": alone[check],
                "share_alone": share(alone[check], incident_counts[check]),
                "warnings": report.warnings,
                "codes": report.codes,
                "nodes_running": completion.nodes if completion else 0,
                "node_days_running": completion.node_days if completion else 0,
                "since_time": deployment.since_time if deployment else completion.first_time if completion else None,
                "changes": deployment.changes if deployment else 0,
                "disabled": deployment.disabled if deployment else 0,
            }
        )
    return sorted(rows, key=lambda row: (-row["first"], -row["incidents"], -row["warnings"], row["check"]))


def _as_list(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


# --- drains


def outcomes(all_incidents: Iterable[Incident], outages: Iterable[Outage], to_time: int) -> Row:
    """Count the incidents by outcome.

    Keys:
        already_out: the incident began while the node was out of service.
        drained: the node went out of service within DRAIN_WITHIN_SECONDS of the incident's end.
        not_drained: the node was still in service after that time.
        too_recent: that time has not passed yet.
    """
    by_node: dict[Node, list[Outage]] = defaultdict(list)
    for row in outages:
        by_node[row.cluster, row.node].append(row)
    counts = Counter(_outcome(incident, by_node[incident.node], to_time) for incident in all_incidents)
    return {name: counts[name] for name in ("drained", "not_drained", "already_out", "too_recent")}


def _outcome(incident: Incident, outages: Sequence[Outage], to_time: int) -> str:
    deadline = incident.end_time + DRAIN_WITHIN_SECONDS
    for row in outages:
        if row.start_time < incident.start_time and (row.end_time is None or row.end_time > incident.start_time):
            return "already_out"
    if any(incident.start_time <= row.start_time <= deadline for row in outages):
        return "drained"
    return "not_drained" if deadline < to_time else "too_recent"


def drains(
    requested: Iterable[Outage],
    outages: Iterable[Outage],
    lives: Iterable[ConditionLife],
    sent: Iterable[DrainCommand],
    unobserved: set[tuple[str, str, int]],
) -> list[Row]:
    """Return each drain (or node that went down) with its first evidence.

    A failing condition is evidence if it was open when the drain began, was seen in the 24 hours before, and began
    after the node's previous outage. The first evidence is the first sighting of the earliest of these conditions.

    Keys:
        seconds: from the first evidence to the drain; None if no failing condition was open.
        sent_seconds: from the first evidence to healthd's last drain command before the drain; None if there is no
            such command.
        observed: True if the node was observed for at least half of the drain's day (UTC), or half of the day before.
    """
    ended: dict[Node, list[tuple[int, int]]] = defaultdict(list)
    for row in outages:
        if row.end_time is not None:
            ended[row.cluster, row.node].append((row.start_time, row.end_time))
    lives_by_node: dict[Node, list[ConditionLife]] = defaultdict(list)
    for life in lives:
        lives_by_node[life.cluster, life.node].append(life)
    commands: dict[Node, list[int]] = defaultdict(list)
    for command in sent:
        commands[command.cluster, command.node].append(command.time)
    rows = []
    for row in requested:
        node, time = (row.cluster, row.node), row.start_time
        previous_end = max((end for start, end in ended[node] if start < time), default=None)
        candidates = [
            candidate
            for candidate in lives_by_node[node]
            if candidate.first_time <= time
            and (previous_end is None or candidate.first_time > previous_end)
            and (candidate.cleared_time is None or candidate.cleared_time >= time)
            and max(candidate.last_time, candidate.first_time) >= time - 86400
        ]
        first = min(candidates, key=lambda candidate: (candidate.first_time, candidate.check_name), default=None)
        since = None if first is None else first.first_time
        last = commands[node][: bisect_right(commands[node], time)][-1:]
        day = time - time % 86400
        rows.append(
            {
                "cluster": node[0],
                "node": node[1],
                "by_whom": row.by_whom,
                "check": None if first is None else first.check_name,
                "seconds": None if since is None else time - since,
                "sent_seconds": last[0] - since if last and since is not None and last[0] >= since else None,
                "observed": (*node, day) not in unobserved or (*node, day - 86400) not in unobserved,
            }
        )
    return rows


def delays(drain_rows: Sequence[Row]) -> Row:
    """Count the drains and those with evidence, and compute percentiles of the time from evidence to drain.

    Percentiles are nearest-rank: for example, the 90th percentile is the shortest time within which 90 % of the nodes
    were drained. With fewer than 100 drains, the 99th percentile is the longest time.
    """
    delay_seconds = sorted(row["seconds"] for row in drain_rows if row["seconds"] is not None)
    sent_seconds = sorted(row["sent_seconds"] for row in drain_rows if row["sent_seconds"] is not None)
    without_evidence = [row for row in drain_rows if row["seconds"] is None]
    return {
        "drains": len(drain_rows),
        "with_evidence": len(delay_seconds),
        "nothing_seen": sum(row["observed"] for row in without_evidence),
        "not_observed": sum(not row["observed"] for row in without_evidence),
        "share_observed": share(sum(row["observed"] for row in drain_rows), len(drain_rows)),
        **{f"p{p}_seconds": nearest_rank(delay_seconds, p) for p in PERCENTILES},
        **{f"sent_p{p}_seconds": nearest_rank(sent_seconds, p) for p in PERCENTILES},
    }


def nearest_rank(values: Sequence[int], percentile: int) -> int | None:
    """Return the nearest-rank percentile of sorted `values`, or None if empty."""
    return values[max(0, math.ceil(len(values) * percentile / 100) - 1)] if values else None


has_findings = document.no_findings
