"""What a chapter of the report is made of, and how its charts look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import altair as alt

# Okabe and Ito's colours, which differ for who sees few of them, in an order whose greys differ too; black is text.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HEIGHT = 260  # of a chart, CSS pixels
# Days. Charts by week leave out the part weeks at both ends: their few jobs would draw a fall or a peak.
WHOLE_WEEK = 7


@dataclass(frozen=True, slots=True)
class Table:
    """rows: cells as text, as many in each row as there are columns. numbers: the columns that are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Chart:
    """words: what the chart shows, for who does not see it; spec: Vega-Lite, with its data in it."""

    title: str
    words: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chapter:
    """name: of the answer; sentences: what it says, in plain words; notes: what limits it."""

    name: str
    title: str
    sentences: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def chart(title: str, words: str, drawing: alt.Chart | alt.LayerChart) -> Chart:
    """As wide as the page. Colour is never the only difference: say a shape, a dash or words too."""
    return Chart(title, words, drawing.properties(width="container", height=HEIGHT).to_dict())


def weeks_axis(records: Sequence[dict[str, Any]]) -> alt.X:
    """The axis of `week` in these records, milliseconds since the epoch, with a tick for each week.

    In UTC: a browser would show its own time zone."""
    axis = alt.Axis(format="%-d %b", values=[_utc(week) for week in sorted({record["week"] for record in records})])
    return alt.X("week:T", scale=alt.Scale(type="utc"), axis=axis, title="week from (UTC)")


def _utc(milliseconds: int) -> alt.DateTime:
    day = datetime.fromtimestamp(milliseconds // 1000, timezone.utc)
    return alt.DateTime(year=day.year, month=day.month, date=day.day, utc=True)


def rows_of(records: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Records as the data of a chart."""
    return alt.InlineData(values=list(records))
