"""What slow jobs cost, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers import failslow as answer
from healthd.fleet.answers.document import Document, number
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

MOST_ROWS, MOST_BARS = 30, 20


def chapter(failslow: Document) -> Chapter:
    tables = []
    if rows := answer.node_cells(failslow):
        columns = frozenset(range(1, len(answer.NODE_COLUMNS)))
        tables.append(Table("Nodes that lost most", answer.NODE_COLUMNS, tuple(rows[:MOST_ROWS]), columns))
    if rows := answer.reaction_cells(failslow):
        tables.append(Table("How long it took", answer.REACTION_COLUMNS, tuple(rows), frozenset({1, 2, 3})))
    return Chapter(
        "failslow",
        "Slow jobs, and what they cost",
        tuple(answer.sentences(failslow)),
        _nodes(failslow),
        tuple(tables),
        tuple(failslow["notes"]),
    )


def _nodes(failslow: Document) -> tuple[Chart, ...]:
    several = len({row["cluster"] for row in failslow["nodes"]}) > 1
    bars = [
        {
            "node": f"{row['cluster']} {row['node']}" if several else row["node"],
            "hours": row["lost_gpu_seconds"] / 3600,
        }
        for row in failslow["nodes"][:MOST_BARS]
        if row["lost_gpu_seconds"]
    ]
    if not bars:
        return ()
    drawing = (
        alt.Chart(rows_of(bars))
        .mark_bar(color=COLOURS[0])
        .encode(x=alt.X("hours:Q", title="GPU-hours lost"), y=alt.Y("node:N", sort=None, title=None))
    )
    words = "; ".join(f"{one['node']} {number(one['hours'])}" for one in bars[:5]) + " GPU-hours lost to slowness."
    return (chart("Where slowness cost most", words, drawing),)
