"""The jobs' ends, the GPUs' time and its use, as a chapter."""

from __future__ import annotations

from typing import Any

import altair as alt

from healthd.fleet.answers import states as answer
from healthd.fleet.answers.document import Document, moment, percent, plural
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of
from healthd.fleet.statistics.job_sizes import gpus_named


def chapter(states: Document) -> Chapter:
    title, notes = "What became of the jobs", tuple(states["notes"])
    rows = states["by_state"]
    if not rows:
        return Chapter("states", title, ("No job ended in this time.",), notes=notes)
    jobs = sum(row["jobs"] for row in rows)
    gpu_hours = sum(row["gpu_seconds"] for row in rows) / 3600
    split = states["split"]
    return Chapter(
        "states",
        title,
        (
            f"{plural(jobs, 'job')} ended, after {gpu_hours:,.0f} GPU-hours.",
            *answer.sentences(states),
            *(answer.split_sentences(split) if split else ()),
        ),
        (_by_state(rows), _by_size(states["by_size"]), *((_split(split),) if _both_sides(split) else ())),
        (
            Table("By state", answer.STATE_COLUMNS, tuple(answer.state_cells(rows)), frozenset(range(1, 5))),
            Table("By size", answer.SIZE_COLUMNS, tuple(answer.size_cells(states["by_size"])), frozenset(range(1, 8))),
        ),
        notes,
    )


def _by_state(rows: list[dict[str, Any]]) -> Chart:
    words = "; ".join(f"{row['state']} {percent(row['share_of_gpu_time'])} of the GPU time" for row in rows[:5])
    return _shares("Jobs and GPU time by state", words, [(row["state"] or "not known", row) for row in rows])


def _by_size(rows: list[dict[str, Any]]) -> Chart:
    named = [(gpus_named(row["gpus_up_to"]), row) for row in rows]
    most = max(named, key=lambda one: one[1]["gpu_seconds"])
    words = f"Jobs of {most[0]} took most GPU time: {percent(most[1]['share_of_gpu_time'])}."
    return _shares("Jobs and GPU time by size", words, named)


def _shares(title: str, words: str, named: list[tuple[str, dict[str, Any]]]) -> Chart:
    bars = [
        {"name": name, "of": of, "share": row[key] or 0.0}
        for name, row in named
        for of, key in (("jobs", "share_of_jobs"), ("GPU time", "share_of_gpu_time"))
    ]
    drawing = (
        alt.Chart(rows_of(bars))
        .mark_bar()
        .encode(
            x=alt.X("share:Q", axis=alt.Axis(format="%"), title="share"),
            y=alt.Y("name:N", sort=None, title=None),
            yOffset=alt.YOffset("of:N", sort=None),
            color=alt.Color("of:N", sort=None, scale=alt.Scale(range=list(COLOURS[:2])), title=None),
        )
    )
    return chart(title, words, drawing)


def _both_sides(split: dict[str, Any] | None) -> bool:
    return bool(split and split["before"]["jobs"] and split["after"]["jobs"])


def _split(split: dict[str, Any]) -> Chart:
    large = f"jobs of {split['large_gpus']:,} GPUs and more"
    points = [
        {
            "outcome": words,
            "when": f"{side} {moment(split['at'])}",
            "share": split[side][key]["share"],
            "low": split[side][key]["interval"][0],
            "high": split[side][key]["interval"][1],
        }
        for key, words in (("completed", "completed"), ("by_hardware", "ended by nodes"))
        for side in ("before", "after")
    ]
    base = alt.Chart(rows_of(points)).encode(
        y=alt.Y("outcome:N", sort=None, title=None), yOffset=alt.YOffset("when:N", sort=None)
    )
    shape = alt.Shape("when:N", sort=None, title=None)
    colour = alt.Color("when:N", sort=None, scale=alt.Scale(range=list(COLOURS[:2])), title=None)
    drawing = base.mark_rule().encode(
        x=alt.X("low:Q", axis=alt.Axis(format="%"), title=f"share of {large}"), x2="high:Q", color=colour
    ) + base.mark_point(filled=True, size=90).encode(x="share:Q", color=colour, shape=shape)
    change = split["change"]["completed"]
    words = f"Of {large}, the share that completed changed by {answer.points(change)}; the lines are 95 % intervals."
    return chart("Large jobs before and after", words, drawing)
