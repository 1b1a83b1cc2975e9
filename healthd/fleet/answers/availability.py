"""Computes how long nodes were in service, out of service, in maintenance or not observed, and the reasons for outages.

It also finds SLA violations. Each second of a node is counted once, in the first of these categories that applies:
1. planned;
2. out of service (`OUT_KINDS`);
3. up: Slurm's node states were read for that second, or healthd observed the node;
4. not observed.

Planned time is excluded from the total. The query `out_of_service` lists the outages and who caused them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healthd.fleet.answers.document import (
    Document,
    Unanswerable,
    WrongChoice,
    percent,
    share,
)
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.spans import Span, intersect, merge, subtract, total_seconds
from healthd.fleet.tables import BIGINT, TEXT

# Ways for a node to be out of service. drained_unknown: drained in Slurm by a user whose name was not read.
OUT_KINDS = ("drained_healthd", "drained_people", "drained_slurm", "drained_unknown", "down")
SHARE_KINDS = ("up", *OUT_KINDS, "not_observed")
PLANNED_KINDS = ("maintenance", "reservation")


class Node(NamedTuple):
    """A row returned by availability_nodes.sql."""

    cluster: str
    node: str
    gpu_model: str | None
    rack: str | None
    gpus: int | None


class Outage(NamedTuple):
    """A row returned by availability_outages.sql."""

    cluster: str
    node: str
    by_whom: str
    first_state: str | None
    start_time: int
    end_time: int | None


class Reserved(NamedTuple):
    """A row returned by availability_reserved.sql."""

    cluster: str
    node: str
    name: str
    maintenance: bool
    start_time: int
    end_time: int | None


class ReadPeriod(NamedTuple):
    """A row returned by availability_read_periods.sql."""

    cluster: str
    from_time: int
    to_time: int | None


class Ingested(NamedTuple):
    """A row returned by availability_ingested.sql."""

    ingests: int


class CoverageEnd(NamedTuple):
    """A row returned by availability_coverage_ends.sql."""

    cluster: str | None
    until: int


class Observed(NamedTuple):
    """A row returned by availability_observed.sql."""

    cluster: str
    node: str
    begin_time: int
    end_time: int


@dataclass(slots=True)
class NodeTimes:
    """Times during which one node's state is known.

    Attributes:
        planned, out: times by kind, in any order.
        outages: outages as (kind, begin, end); end is None if the outage is not over yet.
        observed: times at which the node's state was known.
    """

    planned: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    out: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    outages: list[tuple[str, int, int | None]] = field(default_factory=list)
    observed: list[Span] = field(default_factory=list)


def availability(study: Study, *, sla: float | None = None, count_reservations: bool = False) -> Document:
    """Return the document for `healthd fleet availability` (docs/json.md).

    Keys: `fleet`, `by_model`, `by_rack` and `nodes` each have {seconds, planned: {maintenance, reservation}, shares,
    availability, repair}. `planned` lists the excluded reservations. `sla` is {percent, below}, or None if no SLA was
    given.

    Args:
        sla: percentage from 1 to 100. `below` lists the fleet, models and racks below it.
        count_reservations: count reservations without the flag MAINT like any other time.

    Raises Unanswerable if neither Slurm nor healthd reported node states, WrongChoice for an invalid SLA.
    """
    if sla is not None and not 1 <= sla <= 100:
        raise WrongChoice(f"--sla: {sla:g} is not a percentage from 1 to 100")
    ((ingests,),) = study.query("availability_ingested", Ingested)
    if not (ingests or study.has_rows("node_states") or study.has_rows("events")):
        raise Unanswerable("the store has no node states and no events: healthd fleet ingest --node-states --events")
    whole = (study.from_time, study.to_time)
    nodes = [node._asdict() for node in study.query("availability_nodes", Node)]
    node_times = {(row["cluster"], row["node"]): NodeTimes() for row in nodes}
    coverage_ends = {row.cluster: row.until for row in study.query("availability_coverage_ends", CoverageEnd)}
    for outage in study.query("availability_outages", Outage):
        times, kind = node_times[outage.cluster, outage.node], outage_kind(outage.by_whom, outage.first_state)
        until = max(
            (coverage_ends[key] for key in (outage.cluster, None) if key in coverage_ends), default=study.to_time
        )
        end = max(outage.start_time, until) if outage.end_time is None else outage.end_time
        times.out[kind].append((outage.start_time, end))
        times.outages.append((kind, outage.start_time, outage.end_time))
    reserved = study.query("availability_reserved", Reserved)
    for reservation in reserved:
        if reservation.maintenance or not count_reservations:
            end = study.to_time if reservation.end_time is None else reservation.end_time
            node_times[reservation.cluster, reservation.node].planned[_planned_kind(reservation)].append(
                (reservation.start_time, end)
            )
    unread_times = _add_observed_times(study, node_times, whole)
    parts = {key: divide_period(whole, times) for key, times in node_times.items()}
    repairs = {key: repair_times(whole, times) for key, times in node_times.items()}

    def of(rows: Sequence[Row]) -> Row:
        keys = [(row["cluster"], row["node"]) for row in rows]
        return total_times([parts[key] for key in keys], [times for key in keys for times in repairs[key]])

    by_model = _grouped(nodes, ("gpu_model",), of)
    by_rack = _grouped(nodes, ("cluster", "rack"), of)
    fleet = {"nodes": len(nodes), **of(nodes)}
    return {
        **study.head("availability", *_notes(study, fleet, unread_times, reserved, count_reservations)),
        "fleet": fleet,
        "by_model": by_model,
        "by_rack": by_rack,
        "nodes": [{**row, **of([row])} for row in nodes],
        "planned": _excluded_reservations(reserved, whole, count_reservations),
        "sla": None if sla is None else {"percent": sla, "below": below_sla(sla, fleet, by_model, by_rack)},
    }


def has_findings(availability: Document) -> bool:
    """Return True if the fleet, a model or a rack is below the SLA."""
    return bool(availability["sla"] and availability["sla"]["below"])


# --- decisions


def outage_kind(by_whom: str, state: str | None) -> str:
    """Return an outage's kind (one of `OUT_KINDS`), derived from its origin and Slurm's first state.

    If healthd or a person caused the outage, the kind names this origin, no matter which state was set. If Slurm itself
    set the state, the kind is down, unless the state is a drain (prolog, epilog, failed launch).
    """
    if by_whom == "healthd":
        return "drained_healthd"
    if by_whom == "person":
        return "drained_people"
    if state and "DRAIN" in state.upper() and "DOWN" not in state.upper():
        return "drained_slurm" if by_whom == "slurm" else "drained_unknown"
    return "down"


def divide_period(whole: Span, node_times: NodeTimes) -> dict[str, int]:
    """Return the seconds of `whole` for each kind of planned time and each kind of share. Each second is counted once.

    If times overlap, maintenance takes precedence over other reservations, and both take precedence over outages. A
    node that is down during maintenance therefore counts as planned.
    """
    found: dict[str, int] = {}
    remaining = merge([whole])
    for kinds, times in ((PLANNED_KINDS, node_times.planned), (OUT_KINDS, node_times.out)):
        for kind in kinds:
            kind_spans = intersect(remaining, merge(times.get(kind, ())))
            found[kind] = total_seconds(kind_spans)
            remaining = subtract(remaining, kind_spans)
    found["up"] = total_seconds(intersect(remaining, merge(node_times.observed)))
    found["not_observed"] = total_seconds(remaining) - found["up"]
    return found


def repair_times(whole: Span, node_times: NodeTimes) -> list[tuple[str, int | None]]:
    """Return (kind, seconds) for each outage in `whole`. `seconds` is None if the outage did not end in `whole`.

    The seconds include the part of the outage before `whole`, but exclude planned time. Outages entirely within planned
    time are skipped. Overlapping outages on a node would be counted separately, but the query `out_of_service` returns
    none.
    """
    planned = merge(span for times in node_times.planned.values() for span in times)
    found: list[tuple[str, int | None]] = []
    for kind, begin, end in node_times.outages:
        if end is None or end > whole[1]:
            if begin < whole[1] and subtract([(begin, whole[1])], planned):
                found.append((kind, None))
        elif end > whole[0]:
            duration = total_seconds(subtract(merge([(begin, end)]), planned))
            if duration:
                found.append((kind, duration))
    return found


def total_times(parts: Iterable[Mapping[str, int]], repairs: Iterable[tuple[str, int | None]]) -> Row:
    """Add up the times of several nodes. All seconds have the same weight. A share is None if the total is 0."""
    total = dict.fromkeys((*PLANNED_KINDS, *SHARE_KINDS), 0)
    for part in parts:
        for kind, value in part.items():
            total[kind] += value
    counted = sum(total[kind] for kind in SHARE_KINDS)
    by_kind: dict[str, list[int | None]] = defaultdict(list)
    for kind, duration in repairs:
        by_kind[kind].append(duration)
    return {
        "seconds": counted + sum(total[kind] for kind in PLANNED_KINDS),
        "planned": {kind: total[kind] for kind in PLANNED_KINDS},
        "counted_seconds": counted,
        "shares": {kind: share(total[kind], counted) for kind in SHARE_KINDS},
        "availability": share(total["up"], counted - total["not_observed"]),
        "repair": {
            **repair_statistics([duration for value in by_kind.values() for duration in value]),
            "by": {kind: repair_statistics(by_kind[kind]) for kind in OUT_KINDS if by_kind[kind]},
        },
    }


def repair_statistics(outage_seconds: Sequence[int | None]) -> Row:
    """Return the MTTR: the mean, median and 90th percentile of the durations of completed outages."""
    durations = sorted(seconds for seconds in outage_seconds if seconds is not None)
    return {
        "ended": len(durations),
        "still_out": len(outage_seconds) - len(durations),
        "mean_seconds": share(sum(durations), len(durations)),
        "median_seconds": quantile(durations, 0.5),
        "p90_seconds": quantile(durations, 0.9),
    }


def quantile(ordered: Sequence[float], fraction: float) -> float | None:
    """Return a quantile of sorted values by linear interpolation, or None for no values.

    Source: definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", The American Statistician 50
    (1996), which is the default of numpy and R.
    """
    if not ordered:
        return None
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _worst_first(rows: Iterable[Row]) -> list[Row]:
    rated = (row for row in rows if row["availability"] is not None)
    return sorted(rated, key=lambda row: float(row["availability"]))


def below_sla(sla: float, fleet: Row, by_model: Iterable[Row], by_rack: Iterable[Row]) -> list[Row]:
    """Return the groups that were up for less than `sla` percent of their known time: the fleet, models and racks.

    The fleet comes first, then models, then racks; models and racks are sorted by availability, lowest first. Nodes
    without a model or rack are included only in the fleet.
    """
    candidates = [("fleet", None, None, fleet)]
    candidates += [("model", None, row["gpu_model"], row) for row in _worst_first(by_model) if row["gpu_model"]]
    candidates += [("rack", row["cluster"], row["rack"], row) for row in _worst_first(by_rack) if row["rack"]]
    return [
        {"of": scope, "cluster": cluster, "name": name, "availability": row["availability"]}
        for scope, cluster, name, row in candidates
        if row["availability"] is not None and row["availability"] < sla / 100
    ]


# --- coverage of the store


def _add_observed_times(
    study: Study, node_times: Mapping[tuple[str, str], NodeTimes], whole: Span
) -> dict[str, list[Span]]:
    """Add the observed times to each node.

    Return, for each cluster, the times for which Slurm's node states were not read.
    """
    read: dict[str, list[Span]] = defaultdict(list)
    for row in study.query("availability_read_periods", ReadPeriod):
        read[row.cluster].append((row.from_time, row.from_time if row.to_time is None else row.to_time))
    clusters = sorted({cluster for cluster, _ in node_times})
    unread_times = {cluster: subtract([whole], merge(read[cluster])) for cluster in clusters}
    times = ((cluster, *span) for cluster, spans in unread_times.items() for span in spans)
    study.add_table("unread_times", {"cluster": TEXT, "begin_time": BIGINT, "end_time": BIGINT}, times)
    for observation in study.query("availability_observed", Observed):
        node_times[observation.cluster, observation.node].observed.append(
            (observation.begin_time, observation.end_time)
        )
    for (cluster, _), state_times in node_times.items():
        state_times.observed += read[cluster]
    return unread_times


def _notes(
    study: Study,
    fleet: Row,
    unread_times: Mapping[str, list[Span]],
    reserved: Sequence[Reserved],
    count_reservations: bool,
) -> list[str]:
    found = []
    for cluster, spans in unread_times.items():
        missing = share(total_seconds(spans), study.to_time - study.from_time)
        if missing:
            found.append(
                f"Slurm's node states were not read for {percent(missing)} of the time of {cluster}. During that "
                "time, a node counts as up if healthd observed it, and drains by people and by Slurm are unknown."
            )
    if not study.has_rows("events"):
        found.append("The store has no event streams: drains by healthd are recognised only by Slurm's Reason.")
    if fleet["shares"]["not_observed"]:
        found.append("Availability is up / (up + drained + down); time that was not observed is excluded.")
    other_reservations = len({(row.cluster, row.name, row.start_time) for row in reserved if not row.maintenance})
    if other_reservations and not count_reservations:
        found.append(
            f"The time of reservations without the flag MAINT ({other_reservations}) is excluded too, whatever the "
            "state of their nodes; use --count-reservations to include it."
        )
    if fleet["repair"]["still_out"]:
        found.append("Outages that are not over are excluded, so the MTTR is underestimated.")
    return found


def _planned_kind(row: Reserved) -> str:
    return "maintenance" if row.maintenance else "reservation"


def _excluded_reservations(reserved: Sequence[Reserved], whole: Span, count_reservations: bool) -> list[Row]:
    """Return the reservations whose time was excluded from the total."""
    by_name: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in reserved:
        if row.maintenance or not count_reservations:
            end = whole[1] if row.end_time is None else row.end_time
            node_seconds = total_seconds(intersect([whole], merge([(row.start_time, end)])))
            if node_seconds:
                by_name[row.start_time, row.cluster, row.name, row.end_time or 0, _planned_kind(row)].append(
                    node_seconds
                )
    return [
        {
            "what": kind,
            "cluster": cluster,
            "name": name,
            "start_time": start,
            "end_time": end or None,
            "nodes": len(node_seconds),
            "node_seconds": sum(node_seconds),
        }
        for (start, cluster, name, end, kind), node_seconds in sorted(by_name.items())
    ]


def _grouped(nodes: Sequence[Row], columns: tuple[str, ...], summarize: Callable[[list[Row]], Row]) -> list[Row]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in nodes:
        groups[tuple(row[column] or "" for column in columns)].append(row)
    return [
        {
            **{column: value or None for column, value in zip(columns, key, strict=True)},
            "nodes": len(rows),
            **summarize(rows),
        }
        for key, rows in sorted(groups.items())
    ]
