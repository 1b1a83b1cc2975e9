"""The lemons, as a chapter: who they are, what they cost the large jobs, and how the signals spread (figure 11)."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.answers.document import Document, moment, number, percent, plural
from healthd.fleet.answers.lemons import lasting
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

IN_WORDS = {
    "excl_jobid_count": "jobs that excluded it",
    "xid_cnt": "different Xids",
    "tickets": "repair tickets",
    "out_count": "times out of service",
    "multi_node_node_fails": "multi-node failures",
    "single_node_node_fails": "single-node failures",
    "single_node_node_failure_rate": "single-node failures per job",
}


def chapter(lemons: Document) -> Chapter:
    found, days = lemons["nodes"], lemons["window"]["days"]
    nodes = sum(fleet["nodes"] for fleet in lemons["fleets"])
    sentences = [
        f"{len(found)} of {plural(nodes, 'node')} {'fails' if len(found) == 1 else 'fail'} far more often than the "
        f"others in {lasting(days)}."
        if found
        else f"None of {plural(nodes, 'node')} stands out in {lasting(days)}."
    ]
    sentences += [
        f"With average nodes in place of these, {percent(gain['share_failing_without'])} instead of "
        f"{percent(gain['share_failing'])} of the jobs of more than {gain['more_than_gpus']} GPUs would have failed by "
        "their nodes."
        for gain in lemons["gain"]
        if gain["by_lemons"]
    ]
    table = Table(
        "Nodes to take out",
        ("node", "times the fleet's rate", "probability", "what was seen", "out of service since"),
        tuple(
            (one["node"], number(one["score"], 2), percent(one["probability"]), one["words"], moment(one["out_since"]))
            for one in found
        ),
        frozenset({1, 2}),
    )
    return Chapter(
        "lemons",
        "Nodes that keep failing",
        tuple(sentences),
        _curves(lemons) if nodes else (),
        (table,) if found else (),
        tuple(lemons["notes"]),
    )


def _curves(lemons: Document) -> tuple[Chart, ...]:
    """Each signal over its greatest value, as figure 11 of arXiv 2410.21680 has them; where a lemon is, a point."""
    greatest = {signal: max((value for value, _ in steps), default=0.0) for signal, steps in lemons["cdfs"].items()}
    told = [signal for signal in lemons["cdfs"] if greatest[signal] > 0]
    if not told:
        return ()
    lines: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for signal in told:
        steps = lemons["cdfs"][signal]
        lines += [
            {"signal": IN_WORDS[signal], "part": value / greatest[signal], "nodes": below, "value": value}
            for value, below in ([[0.0, 0.0], *steps] if steps[0][0] > 0 else steps)
        ]
        points += [
            {
                "signal": IN_WORDS[signal],
                "part": (one["signals"][signal] or 0.0) / greatest[signal],
                "nodes": next(below for value, below in steps if value >= (one["signals"][signal] or 0.0)),
                "node": one["node"],
            }
            for one in lemons["nodes"]
        ]
    x = alt.X("part:Q", title="value, as a share of the largest", axis=alt.Axis(format="%"))
    y = alt.Y("nodes:Q", title="nodes with this value or less", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False))
    # One legend, below the chart: beside it, two of them ran off the page and over the heading of a narrow one.
    words = [IN_WORDS[signal] for signal in told]
    legend = alt.Legend(orient="bottom", columns=1, labelLimit=300, title=None)
    colour = alt.Color("signal:N", scale=alt.Scale(domain=words, range=list(COLOURS)), title=None, legend=legend)
    dash = alt.StrokeDash("signal:N", scale=alt.Scale(domain=words), title=None, legend=legend)
    curves = alt.Chart(rows_of(lines)).mark_line(interpolate="step-after")
    lemon = alt.Chart(rows_of(points)).mark_point(filled=True, size=60)
    drawing = alt.LayerChart(
        layer=[
            curves.encode(x, y, colour, dash),
            lemon.encode(x, y, colour, tooltip=["node:N", "signal:N"]),
        ]
    )
    spread = "; ".join(
        f"{IN_WORDS[signal]}: {percent(next(below for _, below in lemons['cdfs'][signal]))} of the nodes have "
        f"{number(lemons['cdfs'][signal][0][0])}, the most is {number(greatest[signal])}"
        for signal in told
    )
    return (chart("How the signals spread over the nodes; points are lemons", spread, drawing),)
