"""Describes the share of time for which nodes were in service."""

from __future__ import annotations

import math
from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.availability import PLANNED_KINDS, SHARE_KINDS
from healthd.fleet.answers.document import Document, format_duration, format_time, join_limited, number, percent
from healthd.fleet.figures import COLOURS, Figure, Record, category, grouped_bars, layer, quantity
from healthd.fleet.view import COUNT, DURATION, PERCENT, YES_NO, Column, Form, Row, Table, View, describe

MAX_WORST_SHOWN, MAX_NAMED_SHOWN, MAX_RACKS_SHOWN = 10, 5, 20
REASONS = {
    "drained_healthd": "drained by healthd",
    "drained_people": "drained by people",
    "drained_slurm": "drained by Slurm",
    "drained_unknown": "drained, origin unknown",
    "down": "down",
    "not_observed": "not observed",
}
SHORT_REASONS = ("up", "healthd", "people", "slurm", "unknown", "down", "not observed")


def format_availability(value: float | None) -> str:
    """Format an availability as "99.53 %", rounded down so that a value below 100 % never appears as 100 %."""
    return "-" if value is None else f"{math.floor(value * 10000) / 100:.2f} %"


FLEET = (
    Column("", "name"),
    Column("nodes", "nodes", COUNT),
    Column("available", "availability", Form(format_availability)),
    *(Column(title, f"shares.{kind}", PERCENT) for title, kind in zip(SHORT_REASONS, SHARE_KINDS, strict=True)),
)
WORST = (
    Column("node", "node"),
    Column("available", "availability", PERCENT),
    Column("out", lambda row: row["repair"]["ended"] + row["repair"]["still_out"], Form(lambda n: plural(n, "time"))),
    Column("still out", "repair.still_out", YES_NO),
    Column("mean time out", "repair.mean_seconds", DURATION),
    Column("not observed", "shares.not_observed", PERCENT),
)


def view(availability: Document) -> View:
    title, fleet = "Availability of the nodes", availability["fleet"]
    if not availability["nodes"]:
        return describe(availability, title, ["No nodes are known."])
    return describe(
        availability,
        title,
        [
            *_availability(fleet),
            *_repairs(fleet),
            *(_sla(availability["sla"]) if availability["sla"] else ()),
            *_planned(availability["planned"]),
        ],
        [
            Table("Where the time went", FLEET, _fleet_and_models(availability, "fleet", "unknown model")),
            Table("Nodes with the lowest availability", WORST, _worst_nodes(availability["nodes"])),
        ],
        [_outage_figure(availability), _rack_figure(availability)],
    )


def _fleet_and_models(availability: Document, fleet: str, unknown: str) -> list[dict[str, Any]]:
    """Return a row for the fleet and, if there are several models, a row for each."""
    models = availability["by_model"] if len(availability["by_model"]) > 1 else []
    return [
        {**availability["fleet"], "name": fleet},
        *({**row, "name": row["gpu_model"] or unknown} for row in models),
    ]


def _worst_nodes(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rated = [row for row in nodes if row["availability"] is not None and row["availability"] < 1]
    return sorted(rated, key=lambda row: (row["availability"], row["cluster"], row["node"]))[:MAX_WORST_SHOWN]


# --- sentences


def _availability(fleet: Row) -> list[str]:
    if fleet["availability"] is None:
        return ["The availability of the nodes is unknown."]
    return [
        f"The {plural(fleet['nodes'], 'node')} {'was' if fleet['nodes'] == 1 else 'were'} available for "
        f"{format_availability(fleet['availability'])} of the known time."
    ]


def _repairs(fleet: Row) -> list[str]:
    repair = fleet["repair"]
    times = repair["ended"] + repair["still_out"]
    if not times:
        return ["No node was out of service."]
    still = f" ({repair['still_out']} still out)" if repair["still_out"] else ""
    whole = f"Nodes were out of service {plural(times, 'time')}{still}."
    if not repair["ended"]:
        return [whole]
    took = f"mean {format_duration(repair['mean_seconds'])}, median {format_duration(repair['median_seconds'])}"
    return [whole, f"Time to repair (MTTR): {took}, 90th percentile {format_duration(repair['p90_seconds'])}."]


def _planned(planned: list[dict[str, Any]]) -> list[str]:
    """Return one sentence for each kind of excluded time."""
    found = []
    for planned_kind, label in zip(PLANNED_KINDS, ("Maintenance", "Other reservations"), strict=True):
        reservations_of_kind = [row for row in planned if row["what"] == planned_kind]
        if reservations_of_kind:
            days = number(sum(row["node_seconds"] for row in reservations_of_kind) / 86400, 2)
            named = join_limited(
                [f"{row['name']} from {format_time(row['start_time'])}" for row in reservations_of_kind],
                MAX_NAMED_SHOWN,
                "; ",
            )
            reservations = plural(len(reservations_of_kind), "reservation")
            found.append(f"{label}, not counted: {days} node-days in {reservations} ({named}).")
    return found


def _sla(sla: Row) -> list[str]:
    limit = f"{sla['percent']:g} %"
    if not sla["below"]:
        return [f"Neither the fleet nor any part of it is below {limit}."]
    names = [
        f"{'the fleet' if row['of'] == 'fleet' else row['of'] + ' ' + row['name']} "
        f"({format_availability(row['availability'])})"
        for row in sla["below"]
    ]
    return [f"Below {limit}: {join_limited(names, 2 * MAX_WORST_SHOWN)}."]


# --- figures


def _outage_figure(availability: Document) -> Figure:
    """Draw the time for which nodes were not up, by model. Uptime is left out, because it would dwarf the rest."""
    rows = _fleet_and_models(availability, "fleet", "not known")
    records: list[Record] = [
        {"of": row["name"], "what": description, "share": row["shares"][kind] or 0.0}
        for row in rows
        for kind, description in REASONS.items()
    ]
    share = quantity("share", "share of the time", ".1%")
    legend: dict[str, Any] | None = {} if len(rows) > 1 else None
    shares = availability["fleet"]["shares"]
    description = "; ".join(f"{label} {percent(shares[kind])}" for kind, label in REASONS.items())
    return Figure(
        "Reasons why nodes were not up",
        f"Share of the fleet's time without planned maintenance: {description}.",
        (grouped_bars(records, share, "what", "of", COLOURS, legend=legend),),
    )


def _rack_figure(availability: Document) -> Figure | None:
    rated = [row for row in availability["by_rack"] if row["rack"] and row["availability"] is not None]
    if len(rated) < 2:
        return None
    several = len({row["cluster"] for row in rated}) > 1
    worst = sorted(rated, key=lambda row: (row["availability"], row["cluster"], row["rack"]))[:MAX_RACKS_SHOWN]
    points_data = [
        {"rack": f"{row['cluster']} {row['rack']}" if several else row["rack"], "share": row["availability"]}
        for row in worst
    ]
    share = quantity("share", "availability", ".1%", scale={"zero": False})
    point_style = {"filled": True, "size": 70, "color": COLOURS[0]}
    layers = [layer("point", points_data, point_style, x=share, y=category("rack"))]
    if availability["sla"]:
        sla_line = [{"sla": availability["sla"]["percent"] / 100}]
        layers.append(layer("rule", sla_line, {"strokeDash": [6, 4]}, x=quantity("sla")))
    lowest = points_data[0]
    description = (
        f"The lowest of the {len(rated):,} racks is {lowest['rack']} at {format_availability(lowest['share'])}."
    )
    return Figure("Racks with the lowest availability", description, tuple(layers))
