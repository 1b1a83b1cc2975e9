"""Which check is the first evidence, and how long until the drain, as a chapter."""

from __future__ import annotations

import bisect
import json

import altair as alt

from healthd.fleet.answers.checks import COLUMNS, DRAIN_COLUMNS, cells, drain_cells, sentences
from healthd.fleet.answers.document import Document, percent, plural, span
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of


def chapter(checks: Document) -> Chapter:
    rows, drains = cells(checks), drain_cells(checks)
    tables = []
    if rows:
        tables.append(Table("Checks that reported faults", COLUMNS, tuple(rows), frozenset(range(1, len(COLUMNS) - 1))))
    if checks["drains"]["all"]["drains"]:
        tables.append(
            Table(
                "From the first evidence to the drain",
                DRAIN_COLUMNS,
                tuple(drains),
                frozenset(range(1, len(DRAIN_COLUMNS))),
            )
        )
    return Chapter(
        "checks",
        "Which check is the first evidence, and how long until the drain",
        tuple(sentences(checks)),
        (*_first(checks), *_delays(checks)),
        tuple(tables),
        tuple(checks["notes"]),
    )


_TICKS = {0: "0 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h", 864_000: "10 d"}
_TICK_NAMES = f"({json.dumps({str(seconds): name for seconds, name in _TICKS.items()})})[datum.value]"


def _ticks(longest: float) -> list[int]:
    """The ticks of an axis of durations: up to the first one that is not shorter than the longest."""
    ticks = list(_TICKS)
    return ticks[: bisect.bisect_left(ticks, longest) + 1]


def _first(checks: Document) -> tuple[Chart, ...]:
    bars = [
        {"check": row["check"], "what": what, "incidents": count, "place": place}
        for row in checks["checks"]
        if row["incidents"]
        for place, (what, count) in enumerate(
            (
                ("first and alone", row["alone"]),
                ("first of several", row["first"] - row["alone"]),
                ("after another", row["incidents"] - row["first"]),
            )
        )
    ]
    if not bars:
        return ()
    first = checks["checks"][0]
    drawing = (
        alt.Chart(rows_of(bars))
        .mark_bar(stroke="black", strokeWidth=0.5)
        .encode(
            x=alt.X("incidents:Q", title="incidents"),
            y=alt.Y("check:N", sort=None, title=None),
            color=alt.Color(
                "what:N", sort=None, scale=alt.Scale(range=[COLOURS[0], COLOURS[4], "#DDDDDD"]), title=None
            ),
            order="place:O",
        )
    )
    words = (
        f"Of {plural(checks['incidents'], 'incident')} {first['check']} was the first evidence of {first['first']:,}."
    )
    return (chart("Order of the checks within incidents", words, drawing),)


def _delays(checks: Document) -> tuple[Chart, ...]:
    rows = [
        {"check": row["check"], "within": f"{p} %", "seconds": row[f"p{p}_seconds"]}
        for row in checks["drains"]["by_check"]
        for p in (50, 90, 99)
        if row["with_evidence"]
    ]
    if not rows:
        return ()
    told = checks["drains"]["all"]
    # A symmetric logarithm is linear from 0 to 1: many drains take 0 s, which a logarithm cannot show.
    x = alt.X(
        "seconds:Q",
        scale=alt.Scale(type="symlog", domainMin=0),
        axis=alt.Axis(values=_ticks(max(row["seconds"] for row in rows)), labelExpr=_TICK_NAMES),
        title="from the first evidence to the drain",
    )
    drawing = (
        alt.Chart(rows_of(rows))
        .mark_point(filled=True, size=80)
        .encode(
            x=x,
            y=alt.Y("check:N", title=None),
            shape=alt.Shape("within:N", title="share of the drains"),
            color=alt.Color("within:N", scale=alt.Scale(range=list(COLOURS[:3])), title="share of the drains"),
        )
    )
    words = (
        f"All: half within {span(told['p50_seconds'])}, 99 % within {span(told['p99_seconds'])}; "
        f"{percent(told['share_observed'])} of the drains were of nodes that were observed."
    )
    return (chart("Time to the drain, by the first check", words, drawing),)
