"""Describes the rate at which nodes end large jobs, with figure 7 of Kokolis, Kuchnik et al. (HPCA 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers import hardware_ends
from healthd.fleet.answers.document import Document, format_duration, number
from healthd.fleet.figures import COLOURS, Figure, Record, layer, nominal, points, quantity
from healthd.fleet.statistics.intervals import LEVEL
from healthd.fleet.view import COUNT, DURATION, NUMBER, Column, Form, Row, Table, View, describe

HOUR = 3600


def _format_duration_interval(interval: Sequence[float | None] | None) -> str:
    """Format an interval of durations as "1.6 h to 2.0 h", or "over 1.6 h" if its end is unknown."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{format_duration(low)} to {format_duration(high)}" if high is not None else f"over {format_duration(low)}"


DURATION_INTERVAL = Form(_format_duration_interval)
MEASURED = (
    Column("GPUs up to", "gpus_up_to", COUNT),
    Column("jobs", "jobs", COUNT),
    Column("failures", "failures", COUNT),
    Column("node-days", "node_days", NUMBER),
    Column("r_f", "r_f", NUMBER),
    Column("MTTF", "mttf_seconds", DURATION),
    Column("95 %", "mttf_interval_seconds", DURATION_INTERVAL),
    Column("by r_f", "projected_mttf_seconds", DURATION),
)
PROJECTED = (
    Column("GPUs", "gpus", COUNT),
    Column("MTTF", "mttf_seconds", DURATION),
    Column("95 %", "interval_seconds", DURATION_INTERVAL),
)


def view(rate: Document) -> View:
    has_rate = rate["r_f"] is not None
    return describe(
        rate,
        "Rate at which nodes end large jobs",
        _sentences(rate),
        [
            Table("Measured, by size", MEASURED, rate["by_size"]),
            Table("Projected: MTTF = 1 / (N r_f)", PROJECTED, rate["projection"] if has_rate else []),
        ],
        [_mttf_figure(rate)],
    )


def _sentences(rate: Document) -> list[str]:
    jobs_text = f"of more than {plural(rate['more_than_gpus'], 'GPU')}"
    no_jobs = [] if rate["by_size"] else ["No job with GPUs ran in this period."]
    if rate["r_f"] is None:
        return [f"r_f is unknown: no job {jobs_text} ran.", *no_jobs]
    found = [
        f"r_f {number(rate['r_f'])} failures per 1000 node-days{format_confidence_interval(rate['interval'], number)}: "
        f"{plural(rate['failures'], 'failure')} in {number(rate['node_days'])} node-days of jobs {jobs_text}."
    ]
    if rate["failures"]:
        ended = ", ".join(
            f"{rate['by_end'][end_kind]:,} {label}" for end_kind, label in hardware_ends.END_LABELS.items()
        )
        found.append(f"{ended}. {plural(rate['incidents'], 'incident')}; {rate['why']}.")
    large = next(row for row in rate["projection"] if row["gpus"] == 16_384)
    if large["mttf_seconds"] is not None:
        found.append(
            f"At this rate, a job of 16,384 GPUs fails every {format_duration(large['mttf_seconds'])}"
            f" (95 %: {_format_duration_interval(large['interval_seconds'])})."
        )
    if rate["method"] == "bootstrap":
        found.append(
            f"These failures are {rate['incidents']:,} incidents on a few nodes, so the interval is wider than for "
            "independent failures."
        )
    return [*found, *no_jobs]


def format_confidence_interval(interval: Sequence[float] | None, write: Callable[[float], str]) -> str:
    """Format an interval as " (95 %: 5.9 to 7.2)", or "" for None."""
    return "" if interval is None else f" ({100 * LEVEL:.0f} %: {write(interval[0])} to {write(interval[1])})"


def _mttf_figure(rate: Document) -> Figure | None:
    """Draw the MTTF by number of GPUs, on logarithmic axes.

    A line shows the projection with its interval, and points show the measured value of each job size.
    """
    if rate["r_f"] is None or not rate["failures"]:
        return None
    line = [_point(row["gpus"], "projected", row, "interval_seconds") for row in rate["projection"]]
    measured = [
        _point(
            row["nodes"] * rate["gpus_per_node"] if row["nodes"] > 1 else row["gpus_up_to"],
            *("measured", row, "mttf_interval_seconds"),
        )
        for row in rate["by_size"]
        if row["mttf_seconds"] is not None
    ]
    log = {"type": "log"}
    x = quantity("gpus", "GPUs", "~s", scale=log)
    y = quantity("hours", "mean time to failure (hours)", scale=log)
    scale = {"domain": ["projected", "measured"], "range": [COLOURS[0], COLOURS[5]]}
    series = nominal("what", scale=scale, title=None)
    high = {"field": "high"}
    description = "; ".join(
        f"{row['gpus']:,} GPUs {format_duration(row['mttf_seconds'])}" for row in rate["projection"][::3]
    )
    return Figure(
        "Mean time to failure by size: projected (line) and measured (points), with 95 % intervals",
        description,
        (
            layer("area", line, {"opacity": 0.2}, x=x, y=quantity("low", scale=log), y2=high, color=series),
            layer("line", line, x=x, y=y, color=series),
            layer("rule", measured, x=x, y=quantity("low"), y2=high, color=series),
            points(measured, 60, x=x, y=y, color=series),
        ),
    )


def _point(gpus: int, series: str, row: Row, interval: str) -> Record:
    return {"gpus": gpus, "what": series, "hours": row["mttf_seconds"] / HOUR, **_hours(row[interval])}


def _hours(interval: list[float | None] | None) -> dict[str, Any]:
    """Return an interval in hours. An unbounded end becomes a large value that can be drawn."""
    low, high = interval or (None, None)
    if low is None:
        return {}
    return {"low": low / HOUR, "high": (high if high is not None else 1000 * low) / HOUR}
