"""Describes job outcomes: the jobs' states, the GPU time and its use."""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers import hardware_ends
from healthd.fleet.answers.document import Document, format_time, number, percent, share
from healthd.fleet.figures import (
    COLOURS,
    Figure,
    category,
    grouped_bars,
    layer,
    make_records,
    nominal,
    points,
    quantity,
)
from healthd.fleet.statistics.job_sizes import format_gpus, format_size
from healthd.fleet.view import COUNT, GPU_HOURS, PERCENT, Column, Form, Row, Table, View, describe

SHARES = (
    Column("jobs", "jobs", COUNT),
    Column("of jobs", "share_of_jobs", PERCENT),
    Column("GPU-hours", "gpu_seconds", GPU_HOURS),
    Column("of GPU time", "share_of_gpu_time", PERCENT),
)
STATES = (Column("state", lambda row: row["state"] or "not known"), *SHARES)
SIZES = (
    Column("GPUs", "gpus_up_to", Form(format_size)),
    *SHARES,
    Column("completed", lambda row: _completed(row), PERCENT),
    Column("ended by nodes", lambda row: share(row["by_hardware"]["jobs"], row["jobs"]), PERCENT),
    Column("their GPU time", lambda row: share(row["by_hardware"]["gpu_seconds"], row["gpu_seconds"]), PERCENT),
)


def view(states: Document) -> View:
    title, rows, split = "Outcome of the jobs", states["by_state"], states["split"]
    if not rows:
        return describe(states, title, ["No job ended in this period."])
    return describe(
        states,
        title,
        [*_sentences(states), *(_split_sentences(split) if split else ())],
        [Table("By state", STATES, rows), Table("By size", SIZES, states["by_size"])],
        [_by_state(rows), _by_size(states["by_size"]), _split_figure(split)],
    )


def _completed(row: Row) -> float:
    return next((state_row["share_of_jobs"] for state_row in row["by_state"] if state_row["state"] == "COMPLETED"), 0.0)


def _sentences(states: Document) -> list[str]:
    """Describe the jobs that ended, the jobs that nodes ended, the use of the GPUs, and the mix of job sizes."""
    ended, use, mix = states["infrastructure"], states["use"], states["size_mix"]
    jobs = sum(row["jobs"] for row in states["by_state"])
    gpu_hours = sum(row["gpu_seconds"] for row in states["by_state"]) / 3600
    parts = ", ".join(f"{row['jobs']:,} {hardware_ends.END_LABELS[row['ended']]}" for row in ended["by_end"])
    found = [
        f"{plural(jobs, 'job')} ended, after {gpu_hours:,.0f} GPU-hours.",
        f"Nodes ended {percent(ended['share_of_jobs'])} of the jobs, which accounted for "
        f"{percent(ended['share_of_runtime'])} of the runtime and {percent(ended['share_of_gpu_time'])} of the GPU "
        f"time ({parts}).",
    ]
    if use["utilisation"] is not None:
        found.append(
            f"{number(use['jobs_per_day'])} jobs ended per day. Jobs used {percent(use['utilisation'])} of the time of "
            f"{use['gpus']:,} GPUs (utilisation), or {percent(use['normalised_goodput'])} without lost work, "
            f"which equals {number(use['goodput'])} GPUs (goodput)."
        )
    if mix["jobs"]:
        small, server, big = mix["one_gpu"], mix["up_to_8_gpus"], mix["256_gpus_or_more"]
        found.append(
            f"{percent(small['share_of_jobs'])} of the jobs with GPUs had one GPU; {percent(server['share_of_jobs'])} "
            f"had at most eight and used {percent(server['share_of_gpu_time'])} of the GPU time; jobs with 256 or more "
            f"used {percent(big['share_of_gpu_time'])}."
        )
    return found


def _split_sentences(split: Row) -> list[str]:
    large, before, after = f"{split['large_gpus']:,}", split["before"], split["after"]
    found = [
        f"Jobs of {large} or more GPUs that ended before {format_time(split['at'])} UTC: {before['jobs']:,}; since "
        f"then: {after['jobs']:,}."
    ]
    for key, label in (("completed", "Completed"), ("by_hardware", "Ended by nodes")):
        if split["change"][key]["difference"] is not None:
            found.append(
                f"{label}: {_interval(before[key])} before, {_interval(after[key])} after; "
                f"{_points(split['change'][key])}."
            )
    found.append(
        "Differences are in percentage points. Each restart of a job counts separately. Something else may also have "
        "changed on the date of the split."
    )
    return found


def _interval(counted: Row) -> str:
    low, high = counted["interval"]
    return f"{percent(counted['share'])} ({percent(low)} to {percent(high)})"


def _points(change: Row) -> str:
    low, high = change["interval"]
    return f"{100 * change['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"


# --- figures


def _by_state(rows: list[dict[str, Any]]) -> Figure:
    description = "; ".join(f"{row['state']} {percent(row['share_of_gpu_time'])} of the GPU time" for row in rows[:5])
    return _shares("Jobs and GPU time by state", description, [(row["state"] or "not known", row) for row in rows])


def _by_size(rows: list[dict[str, Any]]) -> Figure:
    named = [(format_gpus(row["gpus_up_to"]), row) for row in rows]
    largest = max(named, key=lambda entry: entry[1]["gpu_seconds"])
    description = f"Jobs of {largest[0]} used the most GPU time: {percent(largest[1]['share_of_gpu_time'])}."
    return _shares("Jobs and GPU time by size", description, named)


def _shares(title: str, description: str, named: list[tuple[str, dict[str, Any]]]) -> Figure:
    drawn = [
        {"name": name, "of": measure, "share": row[key] or 0.0}
        for name, row in named
        for measure, key in (("jobs", "share_of_jobs"), ("GPU time", "share_of_gpu_time"))
    ]
    return Figure(title, description, (grouped_bars(drawn, quantity("share", "share", "%"), "name", "of"),))


def _split_figure(split: dict[str, Any] | None) -> Figure | None:
    if not split or not split["before"]["jobs"] or not split["after"]["jobs"]:
        return None
    large = f"jobs of {split['large_gpus']:,} or more GPUs"
    outcomes = [
        {**split[side][key], "outcome": label, "when": f"{side} {format_time(split['at'])}"}
        for key, label in (("completed", "completed"), ("by_hardware", "ended by nodes"))
        for side in ("before", "after")
    ]
    fields = {"outcome": "outcome", "when": "when", "share": "share", "low": "interval.0", "high": "interval.1"}
    drawn = make_records(outcomes, fields)
    channels = {"y": category("outcome"), "yOffset": nominal("when", sort=None)}
    when = category("when", scale={"range": list(COLOURS[:2])})
    low = quantity("low", f"share of {large}", "%")
    change = _points(split["change"]["completed"])
    return Figure(
        "Large jobs before and after",
        f"The share of {large} that completed changed by {change}; the lines are 95 % intervals.",
        (
            layer("rule", drawn, **channels, x=low, x2={"field": "high"}, color=when),
            points(drawn, 90, **channels, x=quantity("share"), color=when, shape=category("when")),
        ),
    )
