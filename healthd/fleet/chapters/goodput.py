"""The work that was lost when nodes failed, as a chapter."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.answers import goodput as answer
from healthd.fleet.answers.document import Document, number
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of
from healthd.fleet.statistics.job_sizes import gpus_named


def chapter(goodput: Document) -> Chapter:
    loops = goodput["requeue_loops"]
    tables = [Table("What was lost", answer.columns(goodput), tuple(answer.order_cells(goodput)), frozenset({1, 2, 3}))]
    if goodput["by_size"]:
        cells = tuple(answer.size_cells(goodput["by_size"]))
        tables.append(Table("By size", answer.SIZE_COLUMNS, cells, frozenset(range(1, 5))))
    if loops:
        cells = tuple(answer.loop_cells(loops))
        tables.append(Table("Requeue loops", answer.LOOP_COLUMNS, cells, frozenset({1, 6})))
    return Chapter(
        "goodput",
        "Work lost to failures of the nodes",
        (*answer.sentences(goodput), answer.share_sentence(goodput)),
        (_by_size(goodput["by_size"]),) if goodput["by_size"] else (),
        tuple(tables),
        tuple(goodput["notes"]),
    )


def _by_size(rows: list[dict[str, Any]]) -> Chart:
    """As in the paper: lost goodput by the size of the jobs, the second order beside the first."""
    bars = [
        {"size": gpus_named(row["gpus_up_to"]), "order": words, "gpu_hours": row[key]["gpu_hours"]}
        for row in rows
        for key, words in (("first_order", "ended by nodes"), ("second_order", "gave way to them"))
    ]
    drawing = (
        alt.Chart(rows_of(bars))
        .mark_bar()
        .encode(
            x=alt.X("gpu_hours:Q", title="GPU-hours lost"),
            y=alt.Y("size:N", sort=None, title=None),
            yOffset=alt.YOffset("order:N", sort=None),
            color=alt.Color("order:N", sort=None, scale=alt.Scale(range=list(COLOURS[:2])), title=None),
        )
    )
    most = max(rows, key=lambda row: row["first_order"]["gpu_hours"] + row["second_order"]["gpu_hours"])
    lost = number(most["first_order"]["gpu_hours"] + most["second_order"]["gpu_hours"])
    return chart(
        "Lost work by size",
        f"Most was lost by jobs of {gpus_named(most['gpus_up_to'])}: {lost} GPU-hours.",
        drawing,
    )
