"""Finds nodes that keep ending jobs despite repairs, so that they can be taken out of service.

The seven signals and the period of 28 days are from Kokolis, Kuchnik et al., "Revisiting Reliability in Large-Scale
Machine Learning Research Clusters" (HPCA 2025, arXiv 2410.21680). Their thresholds were not published. healthd counts
all observations of one event as one failure (`lemon_score.merge_incidents`). From the failures it computes the
probability that the node's failure rate exceeds LEMON_RATE_FACTOR times the fleet's rate (lemon_score). If this
probability is at least DEFAULT_PROBABILITY, the node is a lemon. healthd never names more than MAX_LEMON_SHARE of the
nodes.

`--apply` drains nodes without review, so it requires more: the node's events must have a total weight of
MIN_APPLY_EVENTS, and one signal must be at least MIN_APPLY_EVENTS and above the fleet's HIGH_SIGNAL_QUANTILE. The
signal excl_jobid_count does not qualify, because the paper found that this signal predicts lemons poorly.
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
from healthd.fleet.answers.document import Document, Unanswerable, format_duration, number, percent, share
from healthd.fleet.answers.lemon_evidence import (
    MIN_SHARE,
    Evidence,
    FleetEvidence,
    Key,
    Outage,
    load_evidence,
    service_spells,
)
from healthd.fleet.answers.lemon_gpus import find_lemon_gpus
from healthd.fleet.answers.study import Study
from healthd.fleet.statistics.lemon_score import (
    DAY,
    LEMON_RATES,
    MEMORY_DAYS,
    WINDOW_DAYS,
    DiscountedCounts,
    FleetPrior,
    Incident,
    Record,
    discounted_counts,
    fit_prior,
    merge_incidents,
    probability,
    score,
    share_named,
)

SIGNALS = (
    *("excl_jobid_count", "xid_cnt", "tickets", "out_count", "multi_node_node_fails", "single_node_node_fails"),
    "single_node_node_failure_rate",
)
EXCLUSION_SIGNAL = "excl_jobid_count"
MIN_APPLY_EVENTS = 2
HIGH_SIGNAL_QUANTILE = 0.95
LEMON_RATE_FACTOR = 3.0
# Up to one in three named nodes may be good, because inspecting a good node costs less than the jobs that a lemon ends.
# A limit of one in five good nodes was also tried in simulated histories (busy, idle, few faults). With few faults, it
# named more good nodes than lemons.
DEFAULT_PROBABILITY = 1 / 3
MAX_LEMON_SHARE = 0.02  # maximum share of the nodes
HISTORY_SECONDS = round(2 * MEMORY_DAYS * DAY)
LARGE_JOB_GPUS = (128, 512)  # the avoided failures are reported for jobs with more GPUs than each of these numbers
MIN_OBSERVED_SHARE = 0.5
# If the window is expected to find a smaller share of the lemons, the answer suggests a longer window.
MIN_NAMED_SHARE, MIN_NAMED_GAIN = 2 / 3, 0.05
MAX_LONGER_DAYS = 180

NO_GPUS_NOTE = "GPUs that keep failing are not recorded: no event stream in the store lists the GPUs of its node."
NOT_DRAINED_NOTE = "--apply drains it only with --probability, because its events are few or weak"


class NewestTime(NamedTuple):
    """A row returned by lemons_newest.sql. `source` is a table in the store."""

    source: str
    cluster: str | None
    newest: int


class Signals(NamedTuple):
    """A row returned by lemons_signals.sql."""

    cluster: str
    node: str
    cluster_nodes: int
    xids: int
    exclusions: int
    tickets: int
    single_jobs: int
    seconds: int
    observed_seconds: int


class JobCount(NamedTuple):
    """A row returned by lemons_large_jobs.sql."""

    jobs: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """Data of one node in the window.

    Attributes:
        record: the node's whole history.
        counted: the same history, discounted to the end of the window.
        evidence: evidence in the window, sorted by time.
    """

    cluster: str
    node: str
    signals: Mapping[str, float | None]
    record: Record
    counted: DiscountedCounts
    incidents: Sequence[Incident]
    evidence: Sequence[Evidence]
    outages: Sequence[Outage]
    observed_share: float | None

    @property
    def current_outage(self) -> Outage | None:
        """The outage that is not over yet, or None."""
        return next((outage for outage in self.outages if outage.end_time is None), None)


def has_findings(lemons: Document) -> bool:
    return bool(lemons["nodes"] or lemons["gpus"]["lemons"])


def lemons(study: Study, *, window_days: float | None = WINDOW_DAYS, min_probability: float | None = None) -> Document:
    """Return the document for `healthd fleet lemons`.

    Args:
        window_days: length of the window, which ends when the requested or known period ends; None for the whole
            period.
        min_probability: minimum probability for a node to be named and drained (`--probability`). None means
            DEFAULT_PROBABILITY; then only lemons with strong evidence are drained.

    Raises Unanswerable if nothing in the store shows node failures.
    """
    if not any(study.has_rows(table) for table in ("jobs", "events", "node_states", "failures", "scraped_conditions")):
        raise Unanswerable("the store has no data about failing nodes: healthd fleet ingest --sacct, --events")
    newest = _newest_times(study)
    begin, end = _window(study, window_days, newest)
    evidence = load_evidence(study, begin - HISTORY_SECONDS, end)
    node_signal_rows = study.query("lemons_signals", Signals, window_from=begin, window_to=end)
    suspects = _suspects(node_signal_rows, evidence, begin, end)
    all_suspects = [suspect for cluster_suspects in suspects.values() for suspect in cluster_suspects]
    judgements = {cluster: judge_cluster(suspects[cluster], min_probability) for cluster in sorted(suspects)}
    ranked = [suspect for cluster in judgements for suspect in judgements[cluster].ranked]
    cluster_nodes = {row.cluster: row.cluster_nodes for row in node_signal_rows}
    fleets = [
        {
            **_fleet_row(judgements[cluster], suspects[cluster], cluster_nodes[cluster]),
            **_expected_share_named(
                judgements[cluster], suspects[cluster], evidence.begins.get(cluster, begin), begin, end
            ),
        }
        for cluster in judgements
    ]
    probability_limit = DEFAULT_PROBABILITY if min_probability is None else min_probability
    rule = (probability_limit, LEMON_RATE_FACTOR, MAX_LEMON_SHARE)
    gpus = find_lemon_gpus(study, evidence, (begin, end), begin - HISTORY_SECONDS, rule)
    return {
        **study.head(
            "lemons",
            *_notes(study, all_suspects, begin, end, window_days),
            *([] if gpus["recorded"] else [NO_GPUS_NOTE]),
            *few_named_notes(fleets, begin, end),
        ),
        "from_time": begin,
        "to_time": end,
        "window": {
            "from_time": begin,
            "to_time": end,
            "days": (end - begin) / DAY,
            "known_until": complete_until(newest),
        },
        "most_share": MAX_LEMON_SHARE,
        "least_probability": probability_limit,
        "nodes": [
            _lemon_row(suspect, judgements[suspect.cluster], begin, end)
            for suspect in ranked
            if judgements[suspect.cluster].is_lemon(suspect)
        ],
        "gpus": gpus,
        "fleets": fleets,
        "candidates": [
            {
                **_ranked_row(suspect, judgements[suspect.cluster]),
                "signals": dict(suspect.signals),
                "lemon": judgements[suspect.cluster].is_lemon(suspect),
            }
            for suspect in ranked
        ],
        "gain": [_gain_row(study, more_than, suspects, judgements, begin, end) for more_than in LARGE_JOB_GPUS],
        "cdfs": {signal: cdf(suspect.signals[signal] or 0.0 for suspect in all_suspects) for signal in SIGNALS},
    }


def _newest_times(study: Study) -> dict[str, int]:
    """Return the latest time in each table for the chosen cluster before the end of the period."""
    found: dict[str, int] = {}
    for row in study.query("lemons_newest", NewestTime):
        if study.choice.cluster in ("", row.cluster):
            found[row.source] = max(found.get(row.source, row.newest), row.newest)
    return found


def complete_until(newest: Mapping[str, int]) -> int | None:
    """Return the time until which the store is complete.

    The newest job determines this time: conditions and node states may have no rows on days without faults, but jobs
    arrive every day.
    """
    return min(newest.get("jobs", max(newest.values())), max(newest.values())) if newest else None


def _window(study: Study, window_days: float | None, newest: Mapping[str, int]) -> tuple[int, int]:
    if window_days is None:
        return study.from_time, study.to_time
    end = min(study.to_time, max(newest.values()) + 1) if newest else study.to_time
    return max(study.from_time, end - round(window_days * DAY)), end


def _suspects(
    node_signal_rows: Iterable[Signals], fleet_evidence: FleetEvidence, begin: int, end: int
) -> dict[str, list[Suspect]]:
    """Return all chosen nodes by cluster."""
    found: dict[str, list[Suspect]] = defaultdict(list)
    for row in node_signal_rows:
        key: Key = (row.cluster, row.node)
        evidence = sorted(
            fleet_evidence.evidence.get(key, ()),
            key=lambda item: (item.start_time, item.end_time, item.kind, item.code, item.db_index or 0),
        )
        outages = fleet_evidence.outages.get(key, [])
        all_incidents = merge_incidents(item.sign for item in evidence if item.weight >= MIN_SHARE)
        first_time = fleet_evidence.first_seen.get(key, fleet_evidence.begins.get(key[0], begin))
        record = Record(all_incidents, service_spells(min(first_time, end), end, outages))
        window_evidence = [item for item in evidence if begin <= item.start_time < end]
        counted_evidence = [item for item in window_evidence if item.weight >= MIN_SHARE]
        found[key[0]].append(
            Suspect(
                *key,
                node_signals(window_evidence, sum(begin <= outage.start_time < end for outage in outages), row),
                record,
                discounted_counts(record, (begin, end)),
                [
                    item
                    for item in all_incidents
                    if any(item.start_time <= sign.start_time <= item.end_time for sign in counted_evidence)
                ],
                window_evidence,
                outages,
                share(row.observed_seconds, row.seconds),
            )
        )
    return found


# --- the decisions: pure


def node_signals(evidence: Iterable[Evidence], outage_count: int, signal_row: Signals) -> dict[str, float | None]:
    """Return the seven signals under the paper's names.

    A failed job is attributed to a node that is more likely to be the culprit than all other nodes together.
    """
    failed = [item for item in evidence if item.kind == "failed" and item.weight >= 0.5]
    single_node = sum((item.nodes or 1) == 1 for item in failed)
    return {
        "excl_jobid_count": signal_row.exclusions,
        "xid_cnt": signal_row.xids,
        "tickets": signal_row.tickets,
        "out_count": outage_count,
        "multi_node_node_fails": len(failed) - single_node,
        "single_node_node_fails": single_node,
        "single_node_node_failure_rate": share(single_node, signal_row.single_jobs),
    }


def total_weight(node_incidents: Iterable[Incident]) -> float:
    """Return the sum of the events' weights."""
    return math.fsum(sorted(incident.weight for incident in node_incidents))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of comparing the nodes of one cluster.

    Attributes:
        fleet: None if no node failed.
        min_probability: minimum probability for a node to be a lemon.
        high_signals: threshold for each signal.
        ranked: nodes with an event in the window; the most likely lemon comes first.
        certain: lemons with enough evidence for --apply to drain them.
    """

    fleet: FleetPrior | None
    min_probability: float
    high_signals: Mapping[str, float]
    ranked: Sequence[Suspect]
    lemons: frozenset[str]
    certain: frozenset[str]

    def is_lemon(self, suspect: Suspect) -> bool:
        return suspect.node in self.lemons


def max_lemons(nodes: int) -> int:
    """Return 2 % of the nodes, but at least one node in a fleet of two or more."""
    return max(1, math.floor(nodes * MAX_LEMON_SHARE + 1e-9)) if nodes > 1 else 0


def judge_cluster(suspects: Sequence[Suspect], min_probability: float | None = None) -> Judgement:
    """Compare the nodes of one cluster.

    Args:
        min_probability: as in `lemons`.
    """
    fleet = fit_prior(suspect.counted for suspect in suspects)
    probability_limit = DEFAULT_PROBABILITY if min_probability is None else min_probability
    high_signals = {
        name: quantile([suspect.signals[name] or 0.0 for suspect in suspects], HIGH_SIGNAL_QUANTILE) for name in SIGNALS
    }
    if fleet is None:
        return Judgement(None, probability_limit, high_signals, (), frozenset(), frozenset())
    ranked = sorted(
        (suspect for suspect in suspects if suspect.incidents),
        key=lambda suspect: (
            -probability(suspect.counted, fleet, LEMON_RATE_FACTOR),
            -score(suspect.counted, fleet),
            suspect.node,
        ),
    )
    probable = [
        suspect for suspect in ranked if probability(suspect.counted, fleet, LEMON_RATE_FACTOR) >= probability_limit
    ]
    named = probable[: max_lemons(len(suspects))]
    certain = [suspect.node for suspect in named if min_probability is not None or is_certain(suspect, high_signals)]
    return Judgement(
        fleet, probability_limit, high_signals, ranked, frozenset(suspect.node for suspect in named), frozenset(certain)
    )


def is_certain(suspect: Suspect, high_signals: Mapping[str, float]) -> bool:
    """Return True if --apply drains this lemon. Its events must have enough weight, and a signal must be high."""
    return total_weight(suspect.incidents) >= MIN_APPLY_EVENTS - 1e-9 and has_high_signal(
        suspect.signals, high_signals, suspect.evidence
    )


def has_high_signal(
    signals: Mapping[str, float | None], high_signals: Mapping[str, float], evidence: Sequence[Evidence]
) -> bool:
    """Return True if a signal other than the users' exclusions is high.

    A high number of failures recorded by another tool also counts, although it is not one of the seven signals.
    """
    if sum(item.kind == "failure" for item in evidence) >= MIN_APPLY_EVENTS:
        return True
    return any(
        (signals[name] or 0.0) >= MIN_APPLY_EVENTS and (signals[name] or 0.0) > high_signals[name]
        for name in SIGNALS
        if name != EXCLUSION_SIGNAL
    )


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile of the values (nearest rank), or 0 if there are none."""
    sorted_values = sorted(values)
    return (
        sorted_values[min(len(sorted_values) - 1, math.ceil(fraction * len(sorted_values)) - 1)]
        if sorted_values
        else 0.0
    )


def cdf(values: Iterable[float]) -> list[list[float]]:
    """Return [[value, share of the nodes with at most this value]], with each value once (figure 11 of the paper)."""
    sorted_values = sorted(values)
    return [
        [value, (index + 1) / len(sorted_values)]
        for index, value in enumerate(sorted_values)
        if index + 1 == len(sorted_values) or sorted_values[index + 1] != value
    ]


def _gain_row(
    study: Study,
    more_than: int,
    suspects: Mapping[str, Sequence[Suspect]],
    judgements: Mapping[str, Judgement],
    begin: int,
    end: int,
) -> dict[str, Any]:
    """Estimate how many failures of large jobs would have been avoided with average nodes in place of the lemons.

    Large jobs have more than `more_than` GPUs. A lemon fails `score` times as often as an average node. The paper
    reports that the share of failed jobs with 512+ GPUs fell from "14 % to 4 %" (arXiv 2410.21680).
    """
    window = {"window_from": begin, "window_to": end}
    ((jobs,),) = study.query("lemons_large_jobs", JobCount, **window, more_than_gpus=more_than)
    failed = by_lemons = avoided = 0.0
    for cluster, cluster_suspects in suspects.items():
        for suspect in cluster_suspects:
            weight = math.fsum(
                item.weight for item in suspect.evidence if item.kind == "failed" and (item.gpus or 0) > more_than
            )
            failed += weight
            fleet = judgements[cluster].fleet
            if fleet is not None and judgements[cluster].is_lemon(suspect):
                by_lemons += weight
                avoided += weight * max(0.0, 1 - 1 / score(suspect.counted, fleet))
    return {
        "more_than_gpus": more_than,
        "jobs": jobs,
        "failures": failed,
        "by_lemons": by_lemons,
        "failures_without": failed - avoided,
        "share_failing": share(failed, jobs),
        "share_failing_without": share(failed - avoided, jobs),
    }


# --- the document


def _fleet_row(judgement: Judgement, suspects: Sequence[Suspect], cluster_nodes: int) -> dict[str, Any]:
    medians = {name: statistics.median(suspect.signals[name] or 0.0 for suspect in suspects) for name in SIGNALS}
    fleet = judgement.fleet
    return {
        "cluster": suspects[0].cluster,
        "nodes": len(suspects),
        "cluster_nodes": cluster_nodes,
        "most_lemons": max_lemons(len(suspects)),
        "incidents_per_1000_node_days": None if fleet is None else 1000 * fleet.rate,
        "median_incidents": statistics.median(total_weight(suspect.incidents) for suspect in suspects),
        "medians": medians,
        "high": dict(judgement.high_signals),
    }


def _expected_share_named(
    judgement: Judgement, suspects: Sequence[Suspect], first_known_time: int, begin: int, end: int
) -> dict[str, Any]:
    """Estimate the share of lemons that the answer names.

    If this share is small and the store has more history, `longer` is the share for a longer window (up to
    MAX_LONGER_DAYS) with the same end.
    """
    if judgement.fleet is None:
        return {"share_named": None, "longer": None}
    nodes = [suspect.counted for suspect in suspects]
    named_share = share_named(nodes, judgement.fleet, (end - begin) / DAY, LEMON_RATE_FACTOR, judgement.min_probability)
    days = min(MAX_LONGER_DAYS, (end - first_known_time) // DAY)
    longer = None
    if named_share < MIN_NAMED_SHARE and days * DAY > end - begin:
        window = (end - days * DAY, end)
        nodes = [discounted_counts(suspect.record, window) for suspect in suspects]
        fleet = fit_prior(nodes)
        if fleet is not None:
            longer = {
                "days": days,
                "share_named": share_named(nodes, fleet, days, LEMON_RATE_FACTOR, judgement.min_probability),
            }
    return {"share_named": named_share, "longer": longer}


def few_named_notes(fleets: Iterable[Mapping[str, Any]], begin: int, end: int) -> list[str]:
    """Return a note for each cluster with too few failures in its window, and the longer window that is available."""
    found = []
    for fleet in fleets:
        named_share, longer = fleet["share_named"], fleet["longer"]
        if named_share is None or named_share >= MIN_NAMED_SHARE:
            continue
        min_factor, max_factor = LEMON_RATES
        advice = (
            f"A window of {longer['days']} days would name about {longer['share_named']:.0%}: "
            f"healthd fleet lemons --days {longer['days']}."
            if longer is not None and longer["share_named"] > named_share + MIN_NAMED_GAIN
            else "With a longer history in the store, it would name more."
        )
        cluster = f"cluster {fleet['cluster']}" if fleet["cluster"] else "the cluster"
        found.append(
            f"The window of {format_days((end - begin) / DAY)} has few failures in {cluster}: this answer names about "
            f"{named_share:.0%} of the nodes that fail {min_factor:g} to {max_factor:g} times as often as others. "
            f"{advice}"
        )
    return [note.replace("%", " %") for note in found]


def _ranked_row(suspect: Suspect, judgement: Judgement) -> dict[str, Any]:
    """Return the document's keys for a ranked node."""
    fleet = judgement.fleet
    assert fleet is not None, "nodes are ranked only if there are failures"
    return {
        "cluster": suspect.cluster,
        "node": suspect.node,
        "score": score(suspect.counted, fleet),
        "probability": probability(suspect.counted, fleet, LEMON_RATE_FACTOR),
        "incidents": total_weight(suspect.incidents),
        "events": len(suspect.incidents),
    }


def _lemon_row(suspect: Suspect, judgement: Judgement, begin: int, end: int) -> dict[str, Any]:
    days = (end - begin) / DAY
    out = suspect.current_outage
    summary_text = summary(suspect.signals, suspect.evidence, days)
    return {
        **_ranked_row(suspect, judgement),
        "certain": suspect.node in judgement.certain,
        "signals": dict(suspect.signals),
        "evidence": [incident_row(incident, suspect.evidence) for incident in suspect.incidents],
        "text": summary_text,
        "observed_share": suspect.observed_share,
        "out_since": None if out is None else out.start_time,
        "out_reason": None if out is None else out.reason,
        "reason": lemon_command.lemon_reason(summary_text),
        "command": lemon_command.shell_command(suspect.node, summary_text) if out is None else None,
    }


def summary(signals: Mapping[str, float | None], evidence: Sequence[Evidence], days: float) -> str:
    """Return a summary such as "5 multi-node failures (2 with 512 GPUs), 3 Xids, out 4 times in 28 d".

    The text contains only numbers and healthd's own words.
    """
    multi = [item for item in evidence if item.kind == "failed" and item.weight >= 0.5 and (item.nodes or 1) > 1]
    largest = max((item.gpus or 0 for item in multi), default=0)
    largest_text = f" ({sum(item.gpus == largest for item in multi)} with {largest} GPUs)" if largest else ""
    external_failures = sum(item.kind == "failure" for item in evidence)
    parts = [
        _count_text(signals["multi_node_node_fails"], "multi-node failure", largest_text),
        _count_text(signals["single_node_node_fails"], "single-node failure"),
        _count_text(external_failures, "failure"),
        _count_text(signals["xid_cnt"], "Xid"),
        f"out {_times_text(signals['out_count'])}" if signals["out_count"] else "",
        _count_text(signals["tickets"], "ticket"),
        f"excluded by {_count_text(signals[EXCLUSION_SIGNAL], 'job')}" if signals[EXCLUSION_SIGNAL] else "",
    ]
    return f"{', '.join(part for part in parts if part) or 'nothing'} in {format_days(days, 'd')}"


def format_days(days: float, unit: str = "days") -> str:
    """Format days as "28 days", or as hours if there are fewer than two days."""
    return f"{days:.4g} {unit}" if days >= 2 else format_duration(days * DAY)


def _count_text(count: float | None, noun: str, more: str = "") -> str:
    return plural(round(count), noun) + more if count else ""


def _times_text(count: float | None) -> str:
    return "once" if count == 1 else f"{count:.0f} times"


def incident_row(incident: Incident, evidence: Sequence[Evidence]) -> dict[str, Any]:
    """Return an event's row, with all its evidence."""
    incident_evidence = [item for item in evidence if incident.start_time <= item.start_time <= incident.end_time]
    descriptions = list(dict.fromkeys((_describe_evidence(item), item.kind) for item in incident_evidence))
    return {
        "time": incident.start_time,
        "end_time": incident.end_time,
        "weight": incident.weight,
        "signs": list(dict.fromkeys(kind for _, kind in descriptions)),
        "jobs": sorted({item.job_id for item in incident_evidence if item.job_id is not None}),
        "text": "; ".join(description for description, _ in descriptions),
    }


def _describe_evidence(item: Evidence) -> str:
    if item.kind == "failed":
        size = plural(item.gpus, "GPU") if item.gpus is not None else "unknown size"
        explanation = (
            "it went down"
            if item.code == "down"
            else f"{item.code} was seen"
            if item.code
            else "its only node"
            if item.weight >= 0.999
            else "the node that failed is not known"
        )
        shared = "" if item.weight >= 0.999 else f", weight {percent(item.weight)}"
        placement = f"{size} on {_count_text(item.nodes or 1, 'node')}"
        return f"job {item.job_id} ({placement}) ended {item.state}: {explanation}{shared}"
    if item.kind == "out":
        action = {
            "down": "it went down",
            "person": "a person drained it",
            "unknown": "it was taken out of service",
        }.get(item.code, f"healthd drained it for {item.code}")
        hours = (item.end_time - item.start_time) / 3600
        return f"{action}, out for {number(hours, 2)} h"
    if item.kind == "condition":
        return f"{item.code} was seen"
    if item.kind == "ticket":
        return "a ticket was opened"
    return "another tool recorded a failure" + (f" ({item.code})" if item.code else "")


def _notes(study: Study, nodes: Sequence[Suspect], begin: int, end: int, window_days: float | None) -> list[str]:
    found = study.coverage_notes("jobs") if study.has_rows("jobs") else []
    if window_days is not None and end - begin < window_days * DAY - 3600:
        found.append(
            f"The window is only {format_days((end - begin) / DAY)}, not {window_days:g} days. Few lemons can be found "
            "in such a short time."
        )
    if not study.has_rows("jobs"):
        found.append("The store has no jobs, so jobs that failed because of a node are not counted.")
    if not study.has_rows("node_states"):
        found.append("The store has no node states, so it is unknown which node ended a multi-node job as NODE_FAIL.")
    if not study.has_rows("events") and not study.has_rows("scraped_conditions"):
        found.append(
            "The store has no conditions, so a job that FAILED because of its node looks like a user's mistake."
        )
    if not study.has_rows("nodes") and not study.has_rows("jobs"):
        found.append("Only nodes that failed are known, so nodes that never failed are missing from the fleet's rate.")
    little_observed = sum(
        suspect.observed_share is not None and suspect.observed_share < MIN_OBSERVED_SHARE for suspect in nodes
    )
    if little_observed and study.has_rows("events"):
        found.append(
            f"{little_observed} of {plural(len(nodes), 'node')} {'was' if little_observed == 1 else 'were'} observed "
            "for less than half of the time. For these nodes, only Slurm's records count."
        )
    out = sum(suspect.current_outage is not None for suspect in nodes)
    if out:
        found.append(
            f"{out} of {plural(len(nodes), 'node')} {'is' if out == 1 else 'are'} out of service at the end of this "
            "period. A node that is out of service cannot fail."
        )
    return found
