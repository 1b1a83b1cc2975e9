"""Time that nodes were in service, out of service (and by whom), planned away or not observed, and SLA violations.

Each second of a node is exactly one of: planned; else out (`OUT_KINDS`); else up, if Slurm's node states were read for
that time or healthd observed the node; else not observed. Planned time is excluded from the total. The query
`out_of_service` gives the outages and who caused them.
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
from healthd.fleet.statistics.spans import Span, joined, seconds, within, without
from healthd.fleet.tables import BIGINT, TEXT

# How a node can be out. drained_unknown: drained in Slurm, by a user that was not read.
OUT = ("drained_healthd", "drained_people", "drained_slurm", "drained_unknown", "down")
SHARES = ("up", *OUT, "not_observed")
PLANNED = ("maintenance", "reservation")


class Node(NamedTuple):
    """Columns of availability_nodes.sql."""

    cluster: str
    node: str
    gpu_model: str | None
    rack: str | None
    gpus: int | None


class Outage(NamedTuple):
    """Columns of availability_outages.sql."""

    cluster: str
    node: str
    by_whom: str
    first_state: str | None
    start_time: int
    end_time: int | None


class Reserved(NamedTuple):
    """Columns of availability_reserved.sql."""

    cluster: str
    node: str
    name: str
    maintenance: bool
    start_time: int
    end_time: int | None


class Read(NamedTuple):
    """Columns of availability_read.sql."""

    cluster: str
    from_time: int
    to_time: int | None


class Ingested(NamedTuple):
    """Columns of availability_ingested.sql."""

    ingests: int


class Until(NamedTuple):
    """Columns of availability_until.sql."""

    cluster: str | None
    until: int


class Observed(NamedTuple):
    """Columns of availability_observed.sql."""

    cluster: str
    node: str
    begin_time: int
    end_time: int


@dataclass(slots=True)
class Told:
    """Known times of one node.

    planned, out  kind -> its times, in any order
    outages       each outage as (kind, begin, end); end None: not over yet
    observed      times at which the node's state was known
    """

    planned: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    out: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    spells: list[tuple[str, int, int | None]] = field(default_factory=list)
    known: list[Span] = field(default_factory=list)


def availability(study: Study, *, sla: float | None = None, count_reservations: bool = False) -> Document:
    """Return the document of `healthd fleet availability` (docs/json.md).

    fleet, by_model, by_rack, nodes: each {seconds, planned: {maintenance, reservation}, shares, availability, repair}.
    planned: the excluded reservations. sla: {percent, below}, None if no SLA was given.

    Args:
        sla: percent, 1 to 100; `below` lists the fleet, models and racks under it.
        count_reservations: count the time of reservations without the flag MAINT like any other time.

    Raises Unanswerable if neither Slurm nor healthd reported node states, WrongChoice for an invalid SLA.
    """
    if sla is not None and not 1 <= sla <= 100:
        raise WrongChoice(f"--sla: {sla:g} is not a percentage from 1 to 100")
    ((ingests,),) = study.ask("availability_ingested", Ingested)
    if not (ingests or study.has("node_states") or study.has("events")):
        raise Unanswerable("the store has no node states and no events: healthd fleet ingest --node-states --events")
    whole = (study.from_time, study.to_time)
    nodes = [node._asdict() for node in study.ask("availability_nodes", Node)]
    told = {(row["cluster"], row["node"]): Told() for row in nodes}
    read_until = {row.cluster: row.until for row in study.ask("availability_until", Until)}
    for out in study.ask("availability_outages", Outage):
        one, kind = told[out.cluster, out.node], how_out(out.by_whom, out.first_state)
        until = max((read_until[key] for key in (out.cluster, None) if key in read_until), default=study.to_time)
        end = max(out.start_time, until) if out.end_time is None else out.end_time
        one.out[kind].append((out.start_time, end))
        one.spells.append((kind, out.start_time, out.end_time))
    reserved = study.ask("availability_reserved", Reserved)
    for booked in reserved:
        if booked.maintenance or not count_reservations:
            end = study.to_time if booked.end_time is None else booked.end_time
            told[booked.cluster, booked.node].planned[_planned(booked)].append((booked.start_time, end))
    untold = _known(study, told, whole)
    parts = {key: divided(whole, one) for key, one in told.items()}
    repairs = {key: repaired(whole, one) for key, one in told.items()}

    def of(rows: Sequence[Row]) -> Row:
        keys = [(row["cluster"], row["node"]) for row in rows]
        return summed([parts[key] for key in keys], [one for key in keys for one in repairs[key]])

    by_model = _grouped(nodes, ("gpu_model",), of)
    by_rack = _grouped(nodes, ("cluster", "rack"), of)
    fleet = {"nodes": len(nodes), **of(nodes)}
    return {
        **study.head("availability", *_notes(study, fleet, untold, reserved, count_reservations)),
        "fleet": fleet,
        "by_model": by_model,
        "by_rack": by_rack,
        "nodes": [{**row, **of([row])} for row in nodes],
        "planned": _named(reserved, whole, count_reservations),
        "sla": None if sla is None else {"percent": sla, "below": below(sla, fleet, by_model, by_rack)},
    }


def found(availability: Document) -> bool:
    """Return True if something is below the SLA."""
    return bool(availability["sla"] and availability["sla"]["below"])


# --- decisions


def how_out(by_whom: str, state: str | None) -> str:
    """Return the kind of an outage, one of `OUT_KINDS`, from its origin and Slurm's first state.

    An outage by healthd or a person counts as theirs, whatever state they set. States that Slurm set itself count as
    down, except drains (prolog, epilog, failed launch).
    """
    if by_whom == "healthd":
        return "drained_healthd"
    if by_whom == "person":
        return "drained_people"
    if state and "DRAIN" in state.upper() and "DOWN" not in state.upper():
        return "drained_slurm" if by_whom == "slurm" else "drained_unknown"
    return "down"


def divided(whole: Span, told: Told) -> dict[str, int]:
    """Divide `whole` into seconds of each planned and share kind; each second counts once.

    Planned time takes precedence over outages, and maintenance over other reservations: a node that is down during
    maintenance counts as planned.
    """
    found: dict[str, int] = {}
    left = joined([whole])
    for kinds, times in ((PLANNED, told.planned), (OUT, told.out)):
        for kind in kinds:
            its = within(left, joined(times.get(kind, ())))
            found[kind] = seconds(its)
            left = without(left, its)
    found["up"] = seconds(within(left, joined(told.known)))
    found["not_observed"] = seconds(left) - found["up"]
    return found


def repaired(whole: Span, told: Told) -> list[tuple[str, int | None]]:
    """Return (kind, seconds out) of each outage that ended in `whole`, including its time before; None: not over yet.

    Planned time does not count, and outages entirely within planned time are skipped. Overlapping outages of a node
    would count separately; the query `out_of_service` returns none.
    """
    planned = joined(one for times in told.planned.values() for one in times)
    found: list[tuple[str, int | None]] = []
    for kind, begin, end in told.spells:
        if end is None or end > whole[1]:
            if begin < whole[1] and without([(begin, whole[1])], planned):
                found.append((kind, None))
        elif end > whole[0]:
            took = seconds(without(joined([(begin, end)]), planned))
            if took:
                found.append((kind, took))
    return found


def summed(parts: Iterable[Mapping[str, int]], repairs: Iterable[tuple[str, int | None]]) -> Row:
    """Add up the times of several nodes, each node's second with equal weight. The share of an empty total is None."""
    total = dict.fromkeys((*PLANNED, *SHARES), 0)
    for one in parts:
        for kind, its in one.items():
            total[kind] += its
    counted = sum(total[kind] for kind in SHARES)
    by_kind: dict[str, list[int | None]] = defaultdict(list)
    for kind, took in repairs:
        by_kind[kind].append(took)
    return {
        "seconds": counted + sum(total[kind] for kind in PLANNED),
        "planned": {kind: total[kind] for kind in PLANNED},
        "counted_seconds": counted,
        "shares": {kind: share(total[kind], counted) for kind in SHARES},
        "availability": share(total["up"], counted - total["not_observed"]),
        "repair": {
            **repair([took for its in by_kind.values() for took in its]),
            "by": {kind: repair(by_kind[kind]) for kind in OUT if by_kind[kind]},
        },
    }


def repair(took: Sequence[int | None]) -> Row:
    """Return the MTTR: mean, median and 90th percentile of the durations of outages that are over."""
    over = sorted(seconds for seconds in took if seconds is not None)
    return {
        "ended": len(over),
        "still_out": len(took) - len(over),
        "mean_seconds": share(sum(over), len(over)),
        "median_seconds": quantile(over, 0.5),
        "p90_seconds": quantile(over, 0.9),
    }


def quantile(ordered: Sequence[float], at: float) -> float | None:
    """Return a quantile of sorted values by linear interpolation, or None for no values.

    Source: definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", The American Statistician 50
    (1996), which is the default of numpy and R.
    """
    if not ordered:
        return None
    place = at * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _worst_first(rows: Iterable[Row]) -> list[Row]:
    known = (row for row in rows if row["availability"] is not None)
    return sorted(known, key=lambda row: float(row["availability"]))


def below(sla: float, fleet: Row, by_model: Iterable[Row], by_rack: Iterable[Row]) -> list[Row]:
    """Return which of the fleet, its models and its racks were up for less than `sla` percent of their known time.

    In this order; models and racks with the lowest availability first. Nodes without a model or rack count for the
    fleet only.
    """
    named = [("fleet", None, None, fleet)]
    named += [("model", None, row["gpu_model"], row) for row in _worst_first(by_model) if row["gpu_model"]]
    named += [("rack", row["cluster"], row["rack"], row) for row in _worst_first(by_rack) if row["rack"]]
    return [
        {"of": what, "cluster": cluster, "name": name, "availability": row["availability"]}
        for what, cluster, name, row in named
        if row["availability"] is not None and row["availability"] < sla / 100
    ]


# --- coverage of the store


def _known(study: Study, told: Mapping[tuple[str, str], Told], whole: Span) -> dict[str, list[Span]]:
    """Add the observed times to each node. Return the times of each cluster for which Slurm's node states were not
    read.
    """
    read: dict[str, list[Span]] = defaultdict(list)
    for row in study.ask("availability_read", Read):
        read[row.cluster].append((row.from_time, row.from_time if row.to_time is None else row.to_time))
    clusters = sorted({cluster for cluster, _ in told})
    untold = {cluster: without([whole], joined(read[cluster])) for cluster in clusters}
    times = ((cluster, *span) for cluster, spans in untold.items() for span in spans)
    study.given("unread_times", {"cluster": TEXT, "begin_time": BIGINT, "end_time": BIGINT}, times)
    for seen in study.ask("availability_observed", Observed):
        told[seen.cluster, seen.node].known.append((seen.begin_time, seen.end_time))
    for (cluster, _), one in told.items():
        one.known += read[cluster]
    return untold


def _notes(
    study: Study, fleet: Row, untold: Mapping[str, list[Span]], reserved: Sequence[Reserved], count_reservations: bool
) -> list[str]:
    found = []
    for cluster, spans in untold.items():
        missing = share(seconds(spans), study.to_time - study.from_time)
        if missing:
            found.append(
                f"Slurm's node states were not read for {percent(missing)} of the time of {cluster}. In that time a "
                "node counts as up if healthd observed it, and drains by people and by Slurm are not known."
            )
    if not study.has("events"):
        found.append("The store has no event streams: drains by healthd are recognised by Slurm's Reason only.")
    if fleet["shares"]["not_observed"]:
        found.append("Availability is up / (up + drained + down); time that was not observed is excluded.")
    others = len({(row.cluster, row.name, row.start_time) for row in reserved if not row.maintenance})
    if others and not count_reservations:
        found.append(
            f"The time of reservations without the flag MAINT ({others}) is excluded too, whatever the state of their "
            "nodes; use --count-reservations to include it."
        )
    if fleet["repair"]["still_out"]:
        found.append("Outages that are not over are excluded from the MTTR, which underestimates it.")
    return found


def _planned(row: Reserved) -> str:
    return "maintenance" if row.maintenance else "reservation"


def _named(reserved: Sequence[Reserved], whole: Span, count_reservations: bool) -> list[Row]:
    """Return the reservations whose time was excluded."""
    by_name: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in reserved:
        if row.maintenance or not count_reservations:
            end = whole[1] if row.end_time is None else row.end_time
            its = seconds(within([whole], joined([(row.start_time, end)])))
            if its:
                by_name[row.start_time, row.cluster, row.name, row.end_time or 0, _planned(row)].append(its)
    return [
        {
            "what": what,
            "cluster": cluster,
            "name": name,
            "start_time": start,
            "end_time": end or None,
            "nodes": len(its),
            "node_seconds": sum(its),
        }
        for (start, cluster, name, end, what), its in sorted(by_name.items())
    ]


def _grouped(nodes: Sequence[Row], by: tuple[str, ...], of: Callable[[list[Row]], Row]) -> list[Row]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in nodes:
        groups[tuple(row[column] or "" for column in by)].append(row)
    return [
        {**{column: value or None for column, value in zip(by, key, strict=True)}, "nodes": len(rows), **of(rows)}
        for key, rows in sorted(groups.items())
    ]
