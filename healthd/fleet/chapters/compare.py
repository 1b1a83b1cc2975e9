"""What differs between two sides, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers.compare import COLUMNS, cells, sentences
from healthd.fleet.answers.document import Document
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

WIDEST = 20.0  # an interval beyond so many times, either way, is cut in the picture


def chapter(compare: Document) -> Chapter:
    rows = cells(compare)
    return Chapter(
        "compare",
        f"{compare['b']['name']} beside {compare['a']['name']}",
        tuple(sentences(compare)),
        _ratios(compare),
        (Table("Measures", COLUMNS, tuple(rows), frozenset({2, 3, 4, 5, 6})),) if rows else (),
        tuple(compare["notes"]),
    )


def short(title: str) -> str:
    """The title of a measure for an axis; the table below the chart has it in full."""
    return title.removeprefix("jobs that ").removeprefix("nodes' ").removesuffix(" to nodes' failures")


def _ratios(compare: Document) -> tuple[Chart, ...]:
    points = [
        {
            "what": short(row["title"]),
            "ratio": min(max(row["ratio"], 1 / WIDEST), WIDEST),
            "low": min(max(row["interval"][0], 1 / WIDEST), WIDEST),
            "high": min(max(row["interval"][1] or WIDEST, 1 / WIDEST), WIDEST),
            "differs": "yes" if row["differs"] else "no",
        }
        for row in compare["measures"]
        if row["ratio"] and row["interval"] is not None
    ]
    if not points:
        return ()
    base = alt.Chart(rows_of(points)).encode(y=alt.Y("what:N", sort=None, title=None))
    drawing = alt.LayerChart(
        layer=[
            alt.Chart(rows_of([{"same": 1.0}])).mark_rule(strokeDash=[4, 4], color="black").encode(x="same:Q"),
            base.mark_rule(color="black").encode(x=alt.X("low:Q", scale=alt.Scale(type="log")), x2="high:Q"),
            base.mark_point(filled=True, size=80).encode(
                x=alt.X("ratio:Q", scale=alt.Scale(type="log"), title="B / A, with its 95 % interval"),
                shape=alt.Shape("differs:N", scale=alt.Scale(domain=["no", "yes"])),
                color=alt.Color("differs:N", scale=alt.Scale(domain=["no", "yes"], range=[COLOURS[0], COLOURS[5]])),
            ),
        ]
    )
    differing = ", ".join(row["title"] for row in compare["measures"] if row["differs"]) or "nothing"
    return (chart("Ratios", f"The rates of B divided by those of A; what differs: {differing}.", drawing),)
