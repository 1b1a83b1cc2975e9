"""Nodes that keep ending jobs despite repairs: which to take out of service, and why.

The seven signals and their 28 days are those of Kokolis, Kuchnik et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters" (HPCA 2025, arXiv 2410.21680). Their thresholds were not published. healthd's: observations
of one event count once (`lemon_score.merge_incidents`), and a node is a lemon if its rate exceeds LEMON_RATE_FACTOR
times the fleet's with a probability of at least DEFAULT_PROBABILITY (lemon_score). Never more than MAX_LEMON_SHARE of
the nodes.

A drain takes a node out of service without review, so `--apply` requires more: events with a total weight of
MIN_APPLY_EVENTS, and one signal of at least MIN_APPLY_EVENTS that is above the fleet's HIGH_SIGNAL_QUANTILE.
excl_jobid_count does not qualify: the paper found it a poor predictor.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from healthd.common.page import plural
from healthd.common.slurm import lemon_command
from healthd.fleet.answers.document import Document, Unanswerable, number, percent, share, span
from healthd.fleet.answers.lemon_evidence import LEAST_SHARE, Evidence, Key, Known, Outage, in_service, known
from healthd.fleet.answers.study import Study
from healthd.fleet.statistics.lemon_score import (
    DAY,
    MEMORY_DAYS,
    UNUSUAL,
    WINDOW_DAYS,
    Counted,
    Fleet,
    Incident,
    Record,
    counted,
    fleet_of,
    incidents,
    probability,
    score,
    share_named,
)

SIGNALS = (
    *("excl_jobid_count", "xid_cnt", "tickets", "out_count", "multi_node_node_fails", "single_node_node_fails"),
    "single_node_node_failure_rate",
)
NEVER_ALONE = "excl_jobid_count"
FLOOR = 2
QUANTILE = 0.95
MANY_TIMES = 3.0
# One in three: inspecting a good node costs less than the jobs that a lemon ends. In simulated histories (busy, idle,
# few faults) one in five named more good nodes than lemons where faults are few.
SURE = 1 / 3
MOST = 0.02  # of the nodes
HISTORY_SECONDS = round(2 * MEMORY_DAYS * DAY)
LARGE = (128, 512)  # the gain is given for jobs with more GPUs than these
LITTLE_OBSERVED = 0.5
# Below this share of the lemons the answer reports that its window is too short, and offers a longer one.
FEW_NAMED, MORE_NAMED = 2 / 3, 0.05
LONGER_DAYS = 180

NOT_DRAINED = "--apply drains it only with --probability, because its events are few or weak"


class Newest(NamedTuple):
    """Columns of lemons_newest.sql. source: a table of the store."""

    source: str
    cluster: str | None
    newest: int


class Signals(NamedTuple):
    """Columns of lemons_signals.sql."""

    cluster: str
    node: str
    cluster_nodes: int
    xids: int
    exclusions: int
    tickets: int
    single_jobs: int
    seconds: int
    observed_seconds: int


class Jobs(NamedTuple):
    """Columns of lemons_large_jobs.sql."""

    jobs: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """Data of one node in the window.

    record    its whole history
    counted   the same, discounted at the end of the window
    evidence  of the window, sorted by time
    """

    cluster: str
    node: str
    signals: Mapping[str, float | None]
    record: Record
    counted: Counted
    incidents: Sequence[Incident]
    evidence: Sequence[Evidence]
    outages: Sequence[Outage]
    observed_share: float | None

    @property
    def out(self) -> Outage | None:
        """The outage that is not over yet, if any."""
        return next((outage for outage in self.outages if outage.end_time is None), None)


def found(lemons: Document) -> bool:
    return bool(lemons["nodes"])


def lemons(study: Study, *, window_days: float | None = WINDOW_DAYS, least: float | None = None) -> Document:
    """Return the document of `healthd fleet lemons`.

    Args:
        window_days: the last days of the requested or known period; None: the whole period.
        min_probability: probability from which a node is named and drained (`--probability`); None:
        DEFAULT_PROBABILITY, and only
        certain lemons are drained.

    Raises Unanswerable if nothing in the store shows failures of nodes.
    """
    if not any(study.has(table) for table in ("jobs", "events", "node_states", "failures", "scraped_conditions")):
        raise Unanswerable("the store has no data about failing nodes: healthd fleet ingest --sacct, --events")
    newest = _newest(study)
    begin, end = _window(study, window_days, newest)
    all_known = known(study, begin - HISTORY_SECONDS, end)
    of_nodes = study.ask("lemons_signals", Signals, window_from=begin, window_to=end)
    suspects = _suspects(of_nodes, all_known, begin, end)
    every = [one for some in suspects.values() for one in some]
    judged = {cluster: judge(suspects[cluster], least) for cluster in sorted(suspects)}
    ranked = [one for cluster in judged for one in judged[cluster].ranked]
    cluster_nodes = {row.cluster: row.cluster_nodes for row in of_nodes}
    fleets = [
        {
            **_fleet(judged[cluster], suspects[cluster], cluster_nodes[cluster]),
            **_expected(judged[cluster], suspects[cluster], all_known.begins.get(cluster, begin), begin, end),
        }
        for cluster in judged
    ]
    return {
        **study.head("lemons", *_notes(study, every, begin, end, window_days), *few_named_notes(fleets, begin, end)),
        "from_time": begin,
        "to_time": end,
        "window": {"from_time": begin, "to_time": end, "days": (end - begin) / DAY, "known_until": known_until(newest)},
        "most_share": MOST,
        "least_probability": SURE if least is None else least,
        "nodes": [_node(one, judged[one.cluster], begin, end) for one in ranked if judged[one.cluster].is_lemon(one)],
        "fleets": fleets,
        "candidates": [
            {
                **_ranked(one, judged[one.cluster]),
                "signals": dict(one.signals),
                "lemon": judged[one.cluster].is_lemon(one),
            }
            for one in ranked
        ],
        "gain": [_gain(study, more_than, suspects, judged, begin, end) for more_than in LARGE],
        "cdfs": {signal: cdf(one.signals[signal] or 0.0 for one in every) for signal in SIGNALS},
    }


def _newest(study: Study) -> dict[str, int]:
    """Return the latest time in each table about the chosen cluster, before the end of the period."""
    found: dict[str, int] = {}
    for row in study.ask("lemons_newest", Newest):
        if study.chosen.cluster in ("", row.cluster):
            found[row.source] = max(found.get(row.source, row.newest), row.newest)
    return found


def known_until(newest: Mapping[str, int]) -> int | None:
    """Return until when the store is complete.

    Conditions and node states may have no rows for days without faults; jobs arrive every day.
    """
    return min(newest.get("jobs", max(newest.values())), max(newest.values())) if newest else None


def _window(study: Study, window_days: float | None, newest: Mapping[str, int]) -> tuple[int, int]:
    if window_days is None:
        return study.from_time, study.to_time
    end = min(study.to_time, max(newest.values()) + 1) if newest else study.to_time
    return max(study.from_time, end - round(window_days * DAY)), end


def _suspects(of_nodes: Iterable[Signals], all_known: Known, begin: int, end: int) -> dict[str, list[Suspect]]:
    """Return all chosen nodes, by cluster."""
    found: dict[str, list[Suspect]] = defaultdict(list)
    for row in of_nodes:
        key: Key = (row.cluster, row.node)
        evidence = sorted(
            all_known.evidence.get(key, ()),
            key=lambda one: (one.start_time, one.end_time, one.kind, one.code, one.db_index or 0),
        )
        outages = all_known.outages.get(key, [])
        whole = incidents(one.sign for one in evidence if one.weight >= LEAST_SHARE)
        first = all_known.first_seen.get(key, all_known.begins.get(key[0], begin))
        record = Record(whole, in_service(min(first, end), end, outages))
        within = [one for one in evidence if begin <= one.start_time < end]
        weighty = [one for one in within if one.weight >= LEAST_SHARE]
        found[key[0]].append(
            Suspect(
                *key,
                signals_of(within, sum(begin <= outage.start_time < end for outage in outages), row),
                record,
                counted(record, (begin, end)),
                [one for one in whole if any(one.start_time <= e.start_time <= one.end_time for e in weighty)],
                within,
                outages,
                share(row.observed_seconds, row.seconds),
            )
        )
    return found


# --- the decisions: pure


def signals_of(evidence: Iterable[Evidence], outs: int, of_node: Signals) -> dict[str, float | None]:
    """Return the seven signals by the paper's names.

    A failed job counts if this node is more likely the culprit than all other nodes together.
    """
    failed = [one for one in evidence if one.kind == "failed" and one.weight >= 0.5]
    single = sum((one.nodes or 1) == 1 for one in failed)
    return {
        "excl_jobid_count": of_node.exclusions,
        "xid_cnt": of_node.xids,
        "tickets": of_node.tickets,
        "out_count": outs,
        "multi_node_node_fails": len(failed) - single,
        "single_node_node_fails": single,
        "single_node_node_failure_rate": share(single, of_node.single_jobs),
    }


def counting(of_node: Iterable[Incident]) -> float:
    """Return the sum of the events' weights."""
    return math.fsum(sorted(one.weight for one in of_node))


@dataclass(frozen=True, slots=True)
class Judged:
    """Judgement of one cluster.

    fleet            None: no node failed
    min_probability  probability from which a node is a lemon
    high_signals     threshold of each signal
    ranked           nodes with an event in the window, most likely lemon first
    certain          lemons that --apply drains
    """

    fleet: Fleet | None
    least: float
    high: Mapping[str, float]
    ranked: Sequence[Suspect]
    lemons: frozenset[str]
    certain: frozenset[str]

    def is_lemon(self, one: Suspect) -> bool:
        return one.node in self.lemons


def most_lemons(nodes: int) -> int:
    """Return 2 % of the nodes, and at least one node of a fleet of two or more."""
    return max(1, math.floor(nodes * MOST + 1e-9)) if nodes > 1 else 0


def judge(suspects: Sequence[Suspect], least: float | None = None) -> Judged:
    """Compare the nodes of one cluster. min_probability: as in `lemons`."""
    fleet = fleet_of(one.counted for one in suspects)
    from_probability = SURE if least is None else least
    high = {name: quantile([one.signals[name] or 0.0 for one in suspects], QUANTILE) for name in SIGNALS}
    if fleet is None:
        return Judged(None, from_probability, high, (), frozenset(), frozenset())
    ranked = sorted(
        (one for one in suspects if one.incidents),
        key=lambda one: (-probability(one.counted, fleet, MANY_TIMES), -score(one.counted, fleet), one.node),
    )
    likely = [one for one in ranked if probability(one.counted, fleet, MANY_TIMES) >= from_probability]
    named = likely[: most_lemons(len(suspects))]
    certain = [one.node for one in named if least is not None or is_certain(one, high)]
    return Judged(fleet, from_probability, high, ranked, frozenset(one.node for one in named), frozenset(certain))


def is_certain(one: Suspect, high: Mapping[str, float]) -> bool:
    """Return True if --apply drains this lemon: its events have enough weight and a signal is high."""
    return counting(one.incidents) >= FLOOR - 1e-9 and stands_out(one.signals, high, one.evidence)


def stands_out(signals: Mapping[str, float | None], high: Mapping[str, float], evidence: Sequence[Evidence]) -> bool:
    """Return True if one signal alone is high, other than the users' exclusions.

    Failures recorded by another tool are not among the seven signals but count here too.
    """
    if sum(one.kind == "failure" for one in evidence) >= FLOOR:
        return True
    return any(
        (signals[name] or 0.0) >= FLOOR and (signals[name] or 0.0) > high[name]
        for name in SIGNALS
        if name != NEVER_ALONE
    )


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that a share `fraction` of the values does not exceed, or 0 if empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def cdf(values: Iterable[float]) -> list[list[float]]:
    """Return [[value, share of the nodes with at most this value]], each value once: figure 11 of the paper."""
    ordered = sorted(values)
    return [
        [value, (place + 1) / len(ordered)]
        for place, value in enumerate(ordered)
        if place + 1 == len(ordered) or ordered[place + 1] != value
    ]


def _gain(
    study: Study,
    more_than: int,
    suspects: Mapping[str, Sequence[Suspect]],
    judged: Mapping[str, Judged],
    begin: int,
    end: int,
) -> dict[str, Any]:
    """Return how many failures of jobs with more GPUs average nodes in place of the lemons would have avoided.

    An average node fails at 1 / score of the lemon's rate. The paper: "14 % to 4 %" of 512+ GPU jobs (arXiv
    2410.21680).
    """
    window = {"window_from": begin, "window_to": end}
    ((jobs,),) = study.ask("lemons_large_jobs", Jobs, **window, more_than_gpus=more_than)
    failed = by_lemons = spared = 0.0
    for cluster, some in suspects.items():
        for one in some:
            weights = math.fsum(e.weight for e in one.evidence if e.kind == "failed" and (e.gpus or 0) > more_than)
            failed += weights
            fleet = judged[cluster].fleet
            if fleet is not None and judged[cluster].is_lemon(one):
                by_lemons += weights
                spared += weights * max(0.0, 1 - 1 / score(one.counted, fleet))
    return {
        "more_than_gpus": more_than,
        "jobs": jobs,
        "failures": failed,
        "by_lemons": by_lemons,
        "failures_without": failed - spared,
        "share_failing": share(failed, jobs),
        "share_failing_without": share(failed - spared, jobs),
    }


# --- the document


def _fleet(judged: Judged, suspects: Sequence[Suspect], cluster_nodes: int) -> dict[str, Any]:
    medians = {name: statistics.median(one.signals[name] or 0.0 for one in suspects) for name in SIGNALS}
    fleet = judged.fleet
    return {
        "cluster": suspects[0].cluster,
        "nodes": len(suspects),
        "cluster_nodes": cluster_nodes,
        "most_lemons": most_lemons(len(suspects)),
        "incidents_per_1000_node_days": None if fleet is None else 1000 * fleet.rate,
        "median_incidents": statistics.median(counting(one.incidents) for one in suspects),
        "medians": medians,
        "high": dict(judged.high),
    }


def _expected(judged: Judged, suspects: Sequence[Suspect], known_from: int, begin: int, end: int) -> dict[str, Any]:
    """Return the share of lemons that the answer is expected to name.

    If it is small and the store has more history, `longer` is the same for a window of up to MAX_LONGER_DAYS with the
    same end.
    """
    if judged.fleet is None:
        return {"share_named": None, "longer": None}
    nodes = [one.counted for one in suspects]
    named = share_named(nodes, judged.fleet, (end - begin) / DAY, MANY_TIMES, judged.least)
    days = min(LONGER_DAYS, (end - known_from) // DAY)
    longer = None
    if named < FEW_NAMED and days * DAY > end - begin:
        window = (end - days * DAY, end)
        nodes = [counted(one.record, window) for one in suspects]
        fleet = fleet_of(nodes)
        if fleet is not None:
            longer = {"days": days, "share_named": share_named(nodes, fleet, days, MANY_TIMES, judged.least)}
    return {"share_named": named, "longer": longer}


def few_named_notes(fleets: Iterable[Mapping[str, Any]], begin: int, end: int) -> list[str]:
    """Return a note for each cluster whose window has too few failures, with the longer window that is possible."""
    found = []
    for fleet in fleets:
        named, longer = fleet["share_named"], fleet["longer"]
        if named is None or named >= FEW_NAMED:
            continue
        least, most = UNUSUAL
        advice = (
            f"A window of {longer['days']} days names about {longer['share_named']:.0%}: "
            f"healthd fleet lemons --days {longer['days']}."
            if longer is not None and longer["share_named"] > named + MORE_NAMED
            else "A store with a longer history names more."
        )
        cluster = f"cluster {fleet['cluster']}" if fleet["cluster"] else "the cluster"
        found.append(
            f"The window of {lasting((end - begin) / DAY)} has few failures of {cluster}: this answer names about "
            f"{named:.0%} of the nodes that fail {least:g} to {most:g} times as often as others. {advice}"
        )
    return [note.replace("%", " %") for note in found]


def _ranked(one: Suspect, judged: Judged) -> dict[str, Any]:
    """Return the keys that each ranked node has in the document."""
    fleet = judged.fleet
    assert fleet is not None, "without failures no node is ranked"
    return {
        "cluster": one.cluster,
        "node": one.node,
        "score": score(one.counted, fleet),
        "probability": probability(one.counted, fleet, MANY_TIMES),
        "incidents": counting(one.incidents),
        "events": len(one.incidents),
    }


def _node(one: Suspect, judged: Judged, begin: int, end: int) -> dict[str, Any]:
    days = (end - begin) / DAY
    out = one.out
    words = summary(one.signals, one.evidence, days)
    return {
        **_ranked(one, judged),
        "certain": one.node in judged.certain,
        "signals": dict(one.signals),
        "evidence": [told_of(incident, one.evidence) for incident in one.incidents],
        "text": words,
        "observed_share": one.observed_share,
        "out_since": None if out is None else out.start_time,
        "out_reason": None if out is None else out.reason,
        "reason": lemon_command.reason(words),
        "command": lemon_command.line(one.node, words) if out is None else None,
    }


def summary(signals: Mapping[str, float | None], evidence: Sequence[Evidence], days: float) -> str:
    """Return "5 multi-node failures (2 with 512 GPUs), 3 Xids, out 4 times in 28 d": only numbers and healthd's own
    words.
    """
    multi = [one for one in evidence if one.kind == "failed" and one.weight >= 0.5 and (one.nodes or 1) > 1]
    largest = max((one.gpus or 0 for one in multi), default=0)
    of_largest = f" ({sum(one.gpus == largest for one in multi)} with {largest} GPUs)" if largest else ""
    others = sum(one.kind == "failure" for one in evidence)
    parts = [
        _many(signals["multi_node_node_fails"], "multi-node failure", of_largest),
        _many(signals["single_node_node_fails"], "single-node failure"),
        _many(others, "failure"),
        _many(signals["xid_cnt"], "Xid"),
        f"out {_times(signals['out_count'])}" if signals["out_count"] else "",
        _many(signals["tickets"], "ticket"),
        f"excluded by {_many(signals[NEVER_ALONE], 'job')}" if signals[NEVER_ALONE] else "",
    ]
    return f"{', '.join(part for part in parts if part) or 'nothing'} in {lasting(days, 'd')}"


def lasting(days: float, unit: str = "days") -> str:
    """Format days as "28 days"; less than two days in hours."""
    return f"{days:.4g} {unit}" if days >= 2 else span(days * DAY)


def _many(count: float | None, what: str, more: str = "") -> str:
    return plural(round(count), what) + more if count else ""


def _times(count: float | None) -> str:
    return "once" if count == 1 else f"{count:.0f} times"


def told_of(incident: Incident, evidence: Sequence[Evidence]) -> dict[str, Any]:
    """Return one event with all its evidence."""
    its = [one for one in evidence if incident.start_time <= one.start_time <= incident.end_time]
    seen = list(dict.fromkeys((_words(one), one.kind) for one in its))
    return {
        "time": incident.start_time,
        "end_time": incident.end_time,
        "weight": incident.weight,
        "signs": list(dict.fromkeys(kind for _, kind in seen)),
        "jobs": sorted({one.job_id for one in its if one.job_id is not None}),
        "text": "; ".join(words for words, _ in seen),
    }


def _words(one: Evidence) -> str:
    if one.kind == "failed":
        size = plural(one.gpus, "GPU") if one.gpus is not None else "unknown size"
        how = (
            "it went down"
            if one.code == "down"
            else f"{one.code} was seen"
            if one.code
            else "its only node"
            if one.weight >= 0.999
            else "the node that failed is not known"
        )
        shared = "" if one.weight >= 0.999 else f", weight {percent(one.weight)}"
        return f"job {one.job_id} ({size} on {_many(one.nodes or 1, 'node')}) ended {one.state}: {how}{shared}"
    if one.kind == "out":
        by = {"down": "it went down", "person": "a person drained it", "unknown": "it was taken out of service"}.get(
            one.code, f"healthd drained it for {one.code}"
        )
        hours = (one.end_time - one.start_time) / 3600
        return f"{by}, out for {number(hours, 2)} h"
    if one.kind == "condition":
        return f"{one.code} was seen"
    if one.kind == "ticket":
        return "a ticket was opened"
    return "another tool recorded a failure" + (f" ({one.code})" if one.code else "")


def _notes(study: Study, nodes: Sequence[Suspect], begin: int, end: int, window_days: float | None) -> list[str]:
    found = study.coverage_notes("jobs") if study.has("jobs") else []
    if window_days is not None and end - begin < window_days * DAY - 3600:
        found.append(
            f"The window is only {lasting((end - begin) / DAY)}, not {window_days:g} days: few lemons can be found in "
            "such a short time."
        )
    if not study.has("jobs"):
        found.append("The store has no jobs: jobs that failed because of a node are not counted.")
    if not study.has("node_states"):
        found.append("The store has no node states: which node ended a multi-node job as NODE_FAIL is not known.")
    if not study.has("events") and not study.has("scraped_conditions"):
        found.append("The store has no conditions: a job that FAILED because of its node looks like a user's mistake.")
    if not study.has("nodes") and not study.has("jobs"):
        found.append("Only nodes that failed are known: nodes that never failed are missing from the fleet's rate.")
    unseen = sum(one.observed_share is not None and one.observed_share < LITTLE_OBSERVED for one in nodes)
    if unseen and study.has("events"):
        found.append(
            f"{unseen} of {plural(len(nodes), 'node')} {'was' if unseen == 1 else 'were'} observed for less than half "
            "of the time: only Slurm's records count there."
        )
    out = sum(one.out is not None for one in nodes)
    if out:
        found.append(
            f"{out} of {plural(len(nodes), 'node')} {'is' if out == 1 else 'are'} out of service at the end of this "
            "period: a node that is out cannot fail."
        )
    return found
