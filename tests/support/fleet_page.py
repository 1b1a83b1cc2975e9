"""A report of made-up chapters: every kind of mark, and names that would like to be more than names."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.chapters.chapter import COLOURS, Chapter, Table, chart, rows_of
from healthd.fleet.report_page import Assets, Report, page

HOSTILE = (
    "</script><script>window.taken=1</script>",
    "<img src=https://example.org/x onerror=window.taken=1>",
    '"><svg onload=window.taken=1>',
    "<!--<script>",
    "]]>'; window.taken=1; '",
    "\u2028{{constructor.constructor('window.taken=1')()}}",
)


def drawings(names: tuple[str, ...]) -> dict[str, Any]:
    """A chart of each kind, with these names as its categories and tooltips."""
    rows = [{"name": name, "n": place, "of": f"of {place % 2}"} for place, name in enumerate(names, 1)]
    base = alt.Chart(rows_of(rows))
    colour = alt.Color("of:N", scale=alt.Scale(range=list(COLOURS[:2])))
    return {
        "bars": base.mark_bar(tooltip=True).encode(x="n:Q", y="name:N", color=colour),
        "line": base.mark_line(point=True).encode(x="n:Q", y="n:Q", strokeDash="of:N", color=colour),
        "points": base.mark_point().encode(x="n:Q", y="name:N", shape="of:N", color=colour),
        "layers": base.mark_rule().encode(x="n:Q", y="name:N")
        + base.mark_text().encode(x="n:Q", y="name:N", text="name:N"),
    }


NO_PROGRAM = Assets("", "1;", "2;")


def made(names: tuple[str, ...] = ("gpu-1", "gpu-2", "gpu-3"), with_: Assets = NO_PROGRAM) -> str:
    """The page. The names stand wherever text of others can. with_: assets() where it is to be drawn."""
    charts = tuple(chart(f"{kind} of {names[0]}", " ".join(names), one) for kind, one in drawings(names).items())
    table = Table(names[0], ("node", names[0]), tuple((name, "1") for name in names), frozenset({1}))
    chapter = Chapter("made", f"Made of {names[0]}", names, charts, (table,), names)
    return page(
        Report(
            title="A made report",
            covered=names[0],
            opening=names,
            chapters=(chapter,),
            ways={"made": names[0]},
            limits=names,
            sources=table,
            made_by=names[0],
            command=names[0],
        ),
        with_,
    )
