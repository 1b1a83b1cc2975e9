"""Links that fail more than others, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers.document import Document, number
from healthd.fleet.answers.links import (
    KIND_COLUMNS,
    PORT_COLUMNS,
    SWITCH_COLUMNS,
    kind_cells,
    port_cells,
    sentences,
    switch_cells,
)
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

MOST_ROWS = 30


def chapter(links: Document) -> Chapter:
    tables = [Table("All links", KIND_COLUMNS, tuple(kind_cells(links)), frozenset(range(1, len(KIND_COLUMNS))))]
    if ports := port_cells(links):
        tables.append(Table("Ports that stand out", PORT_COLUMNS, tuple(ports[:MOST_ROWS]), frozenset({2, 3, 4})))
    if switches := switch_cells(links):
        tables.append(
            Table("Switches that stand out", SWITCH_COLUMNS, tuple(switches[:MOST_ROWS]), frozenset(range(2, 7)))
        )
    return Chapter(
        "links",
        "Links: flaps, errors and lost speed, by port and switch",
        tuple(sentences(links)),
        _rates(links) + _switches(links),
        tuple(tables),
        tuple(links["notes"]),
    )


def _rates(links: Document) -> tuple[Chart, ...]:
    bars = [
        {
            "kind": row["kind"].replace("_", " "),
            "rate": row["per_1000_port_days"],
            "low": row["interval"][0],
            "high": row["interval"][1],
        }
        for row in links["kinds"]
        if row["interval"] is not None and row["episodes"]
    ]
    if not bars:
        return ()
    base = alt.Chart(rows_of(bars)).encode(y=alt.Y("kind:N", sort=None, title=None))
    drawing = alt.LayerChart(
        layer=[
            base.mark_bar(color=COLOURS[0]).encode(x=alt.X("rate:Q", title="episodes per 1000 port-days")),
            base.mark_rule(color="black").encode(x="low:Q", x2="high:Q"),
        ]
    )
    words = "; ".join(f"{one['kind']} {number(one['rate'])}" for one in bars) + ", per 1000 port-days"
    return (chart("How often links are in trouble", words, drawing),)


def _switches(links: Document) -> tuple[Chart, ...]:
    points = [
        {
            "switch": row["switch"],
            "kind": row["kind"],
            "expected": row["expected"],
            "episodes": row["episodes"],
            "stands out": "yes" if row["stands_out"] else "no",
        }
        for row in links["switches"]
    ]
    if not points:
        return ()
    worst = ", ".join(row["switch"] for row in links["switches"] if row["stands_out"])
    drawing = (
        alt.Chart(rows_of(points))
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X("expected:Q", title="episodes to be expected"),
            y=alt.Y("episodes:Q", title="episodes"),
            shape=alt.Shape("stands out:N", legend=alt.Legend() if worst else None),
            color=alt.Color("kind:N", scale=alt.Scale(range=list(COLOURS)), title=None),
            tooltip=["switch:N", "kind:N", "episodes:Q", "expected:Q"],
        )
    )
    words = f"Episodes of each switch's nodes beside what chance gives them; what stands out: {worst or 'none'}."
    return (chart("Switches", words, drawing),)
