"""Which check is the first evidence, and how long until the drain, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers.checks import COLUMNS, DRAIN_COLUMNS, cells, drain_cells, sentences
from healthd.fleet.answers.document import Document, percent, plural, span
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of


def chapter(checks: Document) -> Chapter:
    rows, drains = cells(checks), drain_cells(checks)
    tables = []
    if rows:
        tables.append(Table("Checks that spoke", COLUMNS, tuple(rows), frozenset(range(1, len(COLUMNS) - 1))))
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


def _first(checks: Document) -> tuple[Chart, ...]:
    bars = [
        {"check": row["check"], "what": what, "incidents": count}
        for row in checks["checks"]
        if row["incidents"]
        for what, count in (
            ("first and alone", row["alone"]),
            ("first of several", row["first"] - row["alone"]),
            ("after another", row["incidents"] - row["first"]),
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
            order=alt.Order("what:N", sort="descending"),
        )
    )
    words = (
        f"Of {plural(checks['incidents'], 'incident')} {first['check']} was the first evidence of {first['first']:,}."
    )
    return (chart("What each check was in the incidents that it saw", words, drawing),)


def _delays(checks: Document) -> tuple[Chart, ...]:
    rows = [
        {"check": row["check"], "within": f"{p} %", "seconds": max(1, row[f"p{p}_seconds"])}
        for row in checks["drains"]["by_check"]
        for p in (50, 90, 99)
        if row["with_evidence"]
    ]
    if not rows:
        return ()
    told = checks["drains"]["all"]
    drawing = (
        alt.Chart(rows_of(rows))
        .mark_point(filled=True, size=80)
        .encode(
            x=alt.X("seconds:Q", scale=alt.Scale(type="log"), title="seconds from the first evidence to the drain"),
            y=alt.Y("check:N", title=None),
            shape=alt.Shape("within:N", title="of the drains"),
            color=alt.Color("within:N", scale=alt.Scale(range=list(COLOURS[:3])), title="of the drains"),
        )
    )
    words = (
        f"All: half within {span(told['p50_seconds'])}, 99 % within {span(told['p99_seconds'])}; "
        f"{percent(told['share_observed'])} of the drains were of nodes that were observed."
    )
    return (chart("How long until the drain, by the check that saw it first", words, drawing),)
