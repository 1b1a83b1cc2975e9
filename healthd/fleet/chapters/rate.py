"""How often large jobs fail by their nodes, as a chapter: figure 7 of Kokolis, Kuchnik et al. (HPCA 2025)."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.answers.document import Document, number, plural, span
from healthd.fleet.answers.rate import between, by_end, ends
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of

HOUR = 3600


def chapter(rate: Document) -> Chapter:
    sizes, projected = rate["by_size"], rate["projection"]
    known = rate["r_f"] is not None
    measured = Table(
        "Measured, by size",
        ("GPUs up to", "jobs", "failures", "node-days", "r_f", "MTTF", "95 %", "by r_f"),
        tuple(
            (
                f"{row['gpus_up_to']:,}",
                f"{row['jobs']:,}",
                f"{row['failures']:,}",
                number(row["node_days"]),
                number(row["r_f"]),
                span(row["mttf_seconds"]),
                ends(row["mttf_interval_seconds"]),
                span(row["projected_mttf_seconds"]),
            )
            for row in sizes
        ),
        frozenset(range(8)),
    )
    of_formula = Table(
        "Projected: MTTF = 1 / (N r_f)",
        ("GPUs", "MTTF", "95 %"),
        tuple((f"{row['gpus']:,}", span(row["mttf_seconds"]), ends(row["interval_seconds"])) for row in projected),
        frozenset(range(3)),
    )
    return Chapter(
        "rate",
        "How often large jobs fail by their nodes",
        _sentences(rate),
        (_mttf(rate),) if known and rate["failures"] else (),
        (*((measured,) if sizes else ()), *((of_formula,) if known else ())),
        tuple(rate["notes"]),
    )


def _sentences(rate: Document) -> tuple[str, ...]:
    if rate["r_f"] is None:
        return (
            f"No job of more than {plural(rate['more_than_gpus'], 'GPU')} ran: there is no rate of their failures.",
        )
    said = [
        f"Jobs of more than {plural(rate['more_than_gpus'], 'GPU')} failed by their nodes {rate['failures']:,} times "
        f"in {number(rate['node_days'])} node-days: {number(rate['r_f'])} per 1000"
        f"{between(rate['interval'], number)}."
    ]
    if rate["failures"]:
        said.append(f"Of these {by_end(rate)}.")
    by_gpus = {row["gpus"]: row for row in rate["projection"]}
    large = by_gpus[16_384]
    if large["mttf_seconds"] is not None:
        said.append(
            f"At this rate a job of 16,384 GPUs fails every {span(large['mttf_seconds'])}"
            f" (95 %: {ends(large['interval_seconds'])})."
        )
    if rate["method"] == "bootstrap":
        said.append(
            f"These are {rate['incidents']:,} incidents, and a few nodes have many of them: the interval is wider than "
            "that of failures which have nothing to do with each other."
        )
    return tuple(said)


def _mttf(rate: Document) -> Chart:
    """Hours over GPUs, both logarithmic: the projection with its interval, and what each size had."""
    line = [
        {
            "gpus": row["gpus"],
            "what": "projected",
            "hours": row["mttf_seconds"] / HOUR,
            **_ends(row["interval_seconds"]),
        }
        for row in rate["projection"]
    ]
    points = [
        {
            "gpus": row["nodes"] * rate["gpus_per_node"] if row["nodes"] > 1 else row["gpus_up_to"],
            "what": "measured",
            "hours": row["mttf_seconds"] / HOUR,
            **_ends(row["mttf_interval_seconds"]),
        }
        for row in rate["by_size"]
        if row["mttf_seconds"] is not None
    ]
    x = alt.X("gpus:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s"), title="GPUs")
    y = alt.Y("hours:Q", scale=alt.Scale(type="log"), title="mean time to failure (hours)")
    colour = alt.Color(
        "what:N", scale=alt.Scale(domain=["projected", "measured"], range=[COLOURS[0], COLOURS[5]]), title=None
    )
    base = alt.Chart(rows_of(line))
    drawing = alt.LayerChart(
        layer=[
            base.mark_area(opacity=0.2).encode(
                x=x, y=alt.Y("low:Q", scale=alt.Scale(type="log")), y2="high:Q", color=colour
            ),
            base.mark_line().encode(x=x, y=y, color=colour),
            alt.Chart(rows_of(points)).mark_rule().encode(x=x, y="low:Q", y2="high:Q", color=colour),
            alt.Chart(rows_of(points)).mark_point(filled=True, size=60).encode(x=x, y=y, color=colour),
        ]
    )
    words = "; ".join(f"{row['gpus']:,} GPUs {span(row['mttf_seconds'])}" for row in rate["projection"][::3])
    return chart("Mean time to failure by size: the line is projected, points are measured, with 95 %", words, drawing)


def _ends(interval: list[float | None] | None) -> dict[str, Any]:
    """An interval in hours; an open end is far."""
    low, high = interval or (None, None)
    if low is None:
        return {}
    return {"low": low / HOUR, "high": (high if high is not None else 1000 * low) / HOUR}
