"""How long the nodes were in service, as a chapter."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.answers import availability as answer
from healthd.fleet.answers.document import Document, percent
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

WORDS = {
    "drained_healthd": "drained by healthd",
    "drained_people": "drained by people",
    "drained_slurm": "drained by Slurm",
    "drained_unknown": "drained by unknown",
    "down": "down",
    "not_observed": "not observed",
}
RACKS_SHOWN = 20


def chapter(availability: Document) -> Chapter:
    fleet, nodes = availability["fleet"], availability["nodes"]
    title, notes = "Availability of the nodes", tuple(availability["notes"])
    if not nodes:
        return Chapter("availability", title, ("No node is known.",), notes=notes)
    worst = tuple(answer.worst_cells(nodes))
    tables = [
        Table("Where the time went", answer.COLUMNS, tuple(answer.fleet_cells(availability)), frozenset(range(1, 10)))
    ]
    if worst:
        tables.append(Table("Nodes that were available least", answer.WORST_COLUMNS, worst, frozenset({1, 4, 5})))
    return Chapter(
        "availability",
        title,
        (
            *answer.availability_sentences(fleet),
            *answer.repair_sentences(fleet),
            *(answer.sla_sentences(availability) if availability["sla"] else ()),
            *answer.planned_sentences(availability),
        ),
        (_out(availability), *_racks(availability)),
        tuple(tables),
        notes,
    )


def _out(availability: Document) -> Chart:
    """What was not up, by model: up itself would leave the rest no room."""
    models = availability["by_model"]
    named = [(row["gpu_model"] or "not known", row) for row in models] if len(models) > 1 else []
    bars = [
        {"of": name, "what": words, "share": row["shares"][kind] or 0.0}
        for name, row in [("fleet", availability["fleet"]), *named]
        for kind, words in WORDS.items()
    ]
    drawing = (
        alt.Chart(rows_of(bars))
        .mark_bar()
        .encode(
            x=alt.X("share:Q", axis=alt.Axis(format=".1%"), title="share of the time"),
            y=alt.Y("what:N", sort=None, title=None),
            yOffset=alt.YOffset("of:N", sort=None),
            color=alt.Color(
                "of:N",
                sort=None,
                scale=alt.Scale(range=list(COLOURS)),
                title=None,
                legend=alt.Legend() if named else None,
            ),
        )
    )
    shares = availability["fleet"]["shares"]
    words = "; ".join(f"{word} {percent(shares[kind])}" for kind, word in WORDS.items())
    return chart("Why nodes were not up", f"Of the fleet's time without planned maintenance: {words}.", drawing)


def _racks(availability: Document) -> tuple[Chart, ...]:
    known = [row for row in availability["by_rack"] if row["rack"] and row["availability"] is not None]
    if len(known) < 2:
        return ()
    several = len({row["cluster"] for row in known}) > 1
    least = sorted(known, key=lambda row: (row["availability"], row["cluster"], row["rack"]))[:RACKS_SHOWN]
    points: list[dict[str, Any]] = [
        {"rack": f"{row['cluster']} {row['rack']}" if several else row["rack"], "share": row["availability"]}
        for row in least
    ]
    drawing: alt.Chart | alt.LayerChart = (
        alt.Chart(rows_of(points))
        .mark_point(filled=True, size=70, color=COLOURS[0])
        .encode(
            x=alt.X("share:Q", axis=alt.Axis(format=".1%"), scale=alt.Scale(zero=False), title="availability"),
            y=alt.Y("rack:N", sort=None, title=None),
        )
    )
    if availability["sla"]:
        aim = alt.Chart(rows_of([{"sla": availability["sla"]["percent"] / 100}]))
        drawing = drawing + aim.mark_rule(strokeDash=[6, 4]).encode(x="sla:Q")
    words = (
        f"The least available of {len(known):,} racks is {points[0]['rack']} with {answer.precise(points[0]['share'])}."
    )
    return (chart("The racks that were available least", words, drawing),)
