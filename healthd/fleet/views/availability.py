"""Time that the nodes were in service."""

from __future__ import annotations

import math
from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.availability import PLANNED, SHARES
from healthd.fleet.answers.document import Document, listed, moment, number, percent, span
from healthd.fleet.figures import COLOURS, Figure, Record, category, grouped_bars, layer, quantity
from healthd.fleet.view import COUNT, PERCENT, SPAN, YES, Column, Form, Row, Table, View, described

WORST_SHOWN, NAMED_SHOWN, RACKS_SHOWN = 10, 5, 20
REASONS = {
    "drained_healthd": "drained by healthd",
    "drained_people": "drained by people",
    "drained_slurm": "drained by Slurm",
    "drained_unknown": "drained by unknown",
    "down": "down",
    "not_observed": "not observed",
}
SHORT_REASONS = ("up", "healthd", "people", "slurm", "unknown", "down", "not observed")


def precise(value: float | None) -> str:
    """Format an availability as "99.53 %", rounded down so that less than 100 % never appears as 100 %."""
    return "-" if value is None else f"{math.floor(value * 10000) / 100:.2f} %"


FLEET = (
    Column("", "name"),
    Column("nodes", "nodes", COUNT),
    Column("available", "availability", Form(precise)),
    *(Column(title, f"shares.{kind}", PERCENT) for title, kind in zip(SHORT_REASONS, SHARES, strict=True)),
)
WORST = (
    Column("node", "node"),
    Column("available", "availability", PERCENT),
    Column("out", lambda row: row["repair"]["ended"] + row["repair"]["still_out"], Form(lambda n: plural(n, "time"))),
    Column("still out", "repair.still_out", YES),
    Column("mean time out", "repair.mean_seconds", SPAN),
    Column("not observed", "shares.not_observed", PERCENT),
)


def view(availability: Document) -> View:
    title, fleet = "Availability of the nodes", availability["fleet"]
    if not availability["nodes"]:
        return described(availability, title, ["No node is known."])
    return described(
        availability,
        title,
        [
            *_availability(fleet),
            *_repairs(fleet),
            *(_sla(availability["sla"]) if availability["sla"] else ()),
            *_planned(availability["planned"]),
        ],
        [
            Table("Where the time went", FLEET, _named(availability, "fleet", "model not known")),
            Table("Nodes with the lowest availability", WORST, _worst(availability["nodes"])),
        ],
        [_out(availability), _racks(availability)],
    )


def _named(availability: Document, fleet: str, unknown: str) -> list[dict[str, Any]]:
    """Return the row of the fleet, and those of its models if there are several."""
    models = availability["by_model"] if len(availability["by_model"]) > 1 else []
    return [
        {**availability["fleet"], "name": fleet},
        *({**row, "name": row["gpu_model"] or unknown} for row in models),
    ]


def _worst(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = [row for row in nodes if row["availability"] is not None and row["availability"] < 1]
    return sorted(known, key=lambda row: (row["availability"], row["cluster"], row["node"]))[:WORST_SHOWN]


# --- sentences


def _availability(fleet: Row) -> list[str]:
    if fleet["availability"] is None:
        return ["The availability of the nodes is not known."]
    return [
        f"The {plural(fleet['nodes'], 'node')} {'was' if fleet['nodes'] == 1 else 'were'} available for "
        f"{precise(fleet['availability'])} of the known time."
    ]


def _repairs(fleet: Row) -> list[str]:
    repair = fleet["repair"]
    times = repair["ended"] + repair["still_out"]
    if not times:
        return ["No node was out of service."]
    still = f" ({repair['still_out']} not over yet)" if repair["still_out"] else ""
    whole = f"Nodes were out {plural(times, 'time')}{still}."
    if not repair["ended"]:
        return [whole]
    took = f"mean {span(repair['mean_seconds'])}, median {span(repair['median_seconds'])}"
    return [whole, f"Time to repair (MTTR): {took}, 90th percentile {span(repair['p90_seconds'])}."]


def _planned(planned: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each kind of excluded time."""
    found = []
    for what, words in zip(PLANNED, ("Maintenance", "Other reservations"), strict=True):
        some = [row for row in planned if row["what"] == what]
        if some:
            days = number(sum(row["node_seconds"] for row in some) / 86400, 2)
            named = listed([f"{row['name']} from {moment(row['start_time'])}" for row in some], NAMED_SHOWN, "; ")
            reservations = plural(len(some), "reservation")
            found.append(f"{words}, not counted: {days} node-days in {reservations} ({named}).")
    return found


def _sla(sla: Row) -> list[str]:
    limit = f"{sla['percent']:g} %"
    if not sla["below"]:
        return [f"Nothing is below {limit}."]
    names = [
        f"{'the fleet' if row['of'] == 'fleet' else row['of'] + ' ' + row['name']} ({precise(row['availability'])})"
        for row in sla["below"]
    ]
    return [f"Below {limit}: {listed(names, 2 * WORST_SHOWN)}."]


# --- figures


def _out(availability: Document) -> Figure:
    """Draw the time that nodes were not up, by model. Including the time up would leave no room for the rest."""
    named = _named(availability, "fleet", "not known")
    records: list[Record] = [
        {"of": row["name"], "what": words, "share": row["shares"][kind] or 0.0}
        for row in named
        for kind, words in REASONS.items()
    ]
    share = quantity("share", "share of the time", ".1%")
    legend: dict[str, Any] | None = {} if len(named) > 1 else None
    shares = availability["fleet"]["shares"]
    words = "; ".join(f"{word} {percent(shares[kind])}" for kind, word in REASONS.items())
    return Figure(
        "Reasons why nodes were not up",
        f"Share of the fleet's time without planned maintenance: {words}.",
        (grouped_bars(records, share, "what", "of", COLOURS, legend=legend),),
    )


def _racks(availability: Document) -> Figure | None:
    known = [row for row in availability["by_rack"] if row["rack"] and row["availability"] is not None]
    if len(known) < 2:
        return None
    several = len({row["cluster"] for row in known}) > 1
    least = sorted(known, key=lambda row: (row["availability"], row["cluster"], row["rack"]))[:RACKS_SHOWN]
    drawn = [
        {"rack": f"{row['cluster']} {row['rack']}" if several else row["rack"], "share": row["availability"]}
        for row in least
    ]
    share = quantity("share", "availability", ".1%", scale={"zero": False})
    look = {"filled": True, "size": 70, "color": COLOURS[0]}
    layers = [layer("point", drawn, look, x=share, y=category("rack"))]
    if availability["sla"]:
        aim = [{"sla": availability["sla"]["percent"] / 100}]
        layers.append(layer("rule", aim, {"strokeDash": [6, 4]}, x=quantity("sla")))
    words = f"The lowest of {len(known):,} racks is {drawn[0]['rack']} with {precise(drawn[0]['share'])}."
    return Figure("Racks with the lowest availability", words, tuple(layers))
