"""Completed jobs that saw a failing check, as a chapter."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers.alarms import COLUMNS, cells, sentences
from healthd.fleet.answers.document import Document, percent
from healthd.fleet.answers.study import Row
from healthd.fleet.chapters.chapter import COLOURS, WHOLE_WEEK, Chapter, Table, chart, rows_of, weeks_axis

_WEEKS = "The share of the completed jobs that saw a failing check, in each whole week."


def chapter(alarms: Document) -> Chapter:
    rows = cells(alarms)
    failing = [row for row in alarms["checks"] if row["jobs"]]
    weeks = [row for row in alarms["by_week"] if row["days"] >= WHOLE_WEEK]
    return Chapter(
        "alarms",
        "Completed jobs that saw a failing check",
        tuple(sentences(alarms)),
        (
            *((chart("By check", _words(failing), _by_check(alarms)),) if failing else ()),
            *((chart("By week", _WEEKS, _by_week(weeks)),) if len(weeks) > 1 else ()),
        ),
        (Table("By check and code", COLUMNS, tuple(rows), frozenset(range(2, len(COLUMNS)))),) if rows else (),
        tuple(alarms["notes"]),
    )


def _words(failing: list[Row]) -> str:
    return "; ".join(f"{row['check']} {percent(row['share'])}" for row in failing[:5])


def _by_check(alarms: Document) -> alt.LayerChart:
    bars = [
        {"check": row["check"], "share": row["share"], "low": row["interval"][0], "high": row["interval"][1]}
        for row in alarms["checks"]
        if row["jobs"]
    ]
    base = alt.Chart(rows_of(bars)).encode(y=alt.Y("check:N", sort=None, title=None))
    limit = alt.Chart(rows_of([{"limit": alarms["limit"]}]))
    return alt.LayerChart(
        layer=[
            base.mark_bar(color=COLOURS[0]).encode(
                x=alt.X("share:Q", axis=alt.Axis(format=".2~%"), title="share of the completed jobs")
            ),
            base.mark_rule(color="black").encode(x="low:Q", x2="high:Q"),
            limit.mark_rule(strokeDash=[6, 3], color="black").encode(x="limit:Q"),
        ]
    )


def _by_week(weeks: list[Row]) -> alt.Chart:
    points = [{"week": row["week_time"] * 1000, "share": row["share"], "jobs": row["jobs"]} for row in weeks]
    drawing: alt.Chart = (
        alt.Chart(rows_of(points))
        .mark_line(point=True, color=COLOURS[0])
        .encode(
            x=weeks_axis(points),
            y=alt.Y("share:Q", axis=alt.Axis(format=".2~%"), title="share of the completed jobs"),
        )
    )
    return drawing
