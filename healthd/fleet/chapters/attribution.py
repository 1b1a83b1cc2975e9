"""What ended the jobs that failed, as a chapter."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import altair as alt

from healthd.fleet.answers.causes import CAUSES, USER
from healthd.fleet.answers.document import Document, moment, number, percent, plural, share
from healthd.fleet.chapters.chapter import COLOURS, WHOLE_WEEK, Chapter, Chart, Table, chart, rows_of, weeks_axis

MOST_CAUSES = 6  # in the chart by week: more lines than that nobody tells apart
MOST_JOBS = 20
DOMAINS = {
    "hardware": "hardware",
    "system_software": "system software",
    "user_program": "user program",
    None: "unknown",
}


def chapter(attribution: Document) -> Chapter:
    told = attribution
    charts = (*_costs(told), *_weeks(told))
    return Chapter(
        "attribution",
        "What ended the jobs that failed",
        tuple(_sentences(told)),
        charts,
        tuple(table for table in (_causes(told), _together(told), _largest(told), _check_dates(told)) if table.rows),
        tuple(told["notes"]),
    )


def _sentences(told: Document) -> list[str]:
    if not told["failures"]:
        return ["No job failed in this time."]
    because = told["unattributed_because"]
    have, none = ("has" if told[key] == 1 else "have" for key in ("attributed", "unattributed"))
    found = [
        f"Of {plural(told['failures'], 'job')} that failed or lost a node, {told['attributed']:,} {have} a most "
        "likely cause: "
        f"{told['by_domain']['hardware']:,} hardware, {told['by_domain']['system_software']:,} system software, "
        f"{told['by_domain']['user_program']:,} the user's program.",
        f"{told['unattributed']:,} {none} none: on the nodes of {because['observed']:,} nothing was seen that ends a "
        f"job, the nodes of {because['not_observed']:,} were not observed all the time, "
        f"{because['no_node_list']:,} {'has' if because['no_node_list'] == 1 else 'have'} no list of nodes.",
        f"By chance alone {plural(told['expected_by_chance'], 'job')} would have a cause: the same rule, applied one "
        "hour before each failure, finds that many.",
    ]
    ours = [cause for cause in told["causes"] if cause["cause"] != USER]
    if ours:
        worst = max(ours, key=lambda one: (one["lost_gpu_seconds"], one["cause"]))
        part = share(worst["lost_gpu_seconds"], sum(one["lost_gpu_seconds"] for one in ours))
        found.append(
            f"Of what is not the user's program, {CAUSES[worst['cause']].words} cost most: "
            f"{worst['lost_gpu_seconds'] / 3600:,.0f} GPU-hours, {percent(part)} of what these causes cost."
        )
    for one in told["spikes"]:
        if one["nodes"]:
            names = ", ".join(node["node"] for node in one["nodes"])
            found.append(
                f"In the week of {moment(one['week'])[:10]} {percent(one['share_of_nodes'])} of "
                f"{plural(one['incidents'], 'incident')} of {CAUSES[one['cause']].words} fell on {names} alone."
            )
    return found


def _costs(told: Document) -> tuple[Chart, ...]:
    rows = [
        {
            "cause": CAUSES[one["cause"]].words,
            "GPU-hours": one["lost_gpu_seconds"] / 3600,
            "domain": DOMAINS[one["domain"]],
            "jobs": one["jobs"],
        }
        for one in sorted(told["causes"], key=lambda one: (-one["lost_gpu_seconds"], one["cause"]))
        if one["jobs"]
    ]
    if not rows:
        return ()
    base = alt.Chart(rows_of(rows)).encode(
        x=alt.X("GPU-hours:Q", title="GPU-hours lost"),
        y=alt.Y("cause:N", sort=None, title=None),
    )
    bars = base.mark_bar().encode(
        color=alt.Color(
            "domain:N", scale=alt.Scale(domain=list(DOMAINS.values()), range=list(COLOURS[:4])), legend=None
        ),
        tooltip=["cause:N", "domain:N", "jobs:Q", alt.Tooltip("GPU-hours:Q", format=",.0f")],
    )
    words = base.mark_text(align="left", dx=4).encode(text="domain:N")
    most = "; ".join(f"{row['cause']} {row['GPU-hours']:,.0f} GPU-hours" for row in rows[:5])
    return (chart("GPU time lost by cause, at most half an hour of each job", most, bars + words),)


def _weeks(told: Document) -> tuple[Chart, ...]:
    """Lines of the largest causes but the program's, and the dates at which a check of one of them came or changed."""
    jobs: dict[str, int] = defaultdict(int)
    for row in told["weeks"]:
        jobs[row["cause"]] += row["jobs"]
    largest = sorted((cause for cause in jobs if cause != USER), key=lambda cause: (-jobs[cause], cause))[:MOST_CAUSES]
    rows = [
        {
            "week": row["week"] * 1000,
            "cause": CAUSES[row["cause"]].words,
            "rate": row["jobs_per_million_gpu_hours"],
            "jobs": row["jobs"],
        }
        for row in told["weeks"]
        if row["cause"] in largest and row["days"] >= WHOLE_WEEK and row["jobs_per_million_gpu_hours"] is not None
    ]
    if len({row["week"] for row in rows}) < 2:
        return ()
    names = [CAUSES[cause].words for cause in largest]
    lines = (
        alt.Chart(rows_of(rows))
        .mark_line()
        .encode(
            x=weeks_axis(rows),
            y=alt.Y("rate:Q", title="failed jobs per million GPU-hours"),
            color=alt.Color("cause:N", scale=alt.Scale(domain=names, range=list(COLOURS[:MOST_CAUSES])), title=None),
            strokeDash=alt.StrokeDash("cause:N", scale=alt.Scale(domain=names), title=None),
            tooltip=["week:T", "cause:N", "jobs:Q", alt.Tooltip("rate:Q", format=".3")],
        )
    )
    words = "Failed jobs by cause, in each whole week: " + ", ".join(
        f"{CAUSES[cause].words} {jobs[cause]:,}" for cause in largest
    )
    dates = _dates(told)
    if not dates:
        return (chart("How often each cause, by week", words, lines),)
    rules = (
        alt.Chart(rows_of(dates)).mark_rule(color="#555555", strokeDash=[2, 2]).encode(x="time:T", tooltip="words:N")
    )
    labels = (
        alt.Chart(rows_of(dates))
        .mark_text(align="right", baseline="bottom", angle=270, dy=-2, color="#333333")
        .encode(x="time:T", y=alt.value(2), text="words:N")
    )
    words += ". Checks: " + "; ".join(f"{moment(date['time'] // 1000)[:10]} {date['words']}" for date in dates)
    return (chart("How often each cause, by week, and when checks came", words, lines + rules + labels),)


def _dates(told: Document) -> list[dict[str, Any]]:
    """A row for each day on which a check came or changed: of several, how many."""
    days: dict[int, list[str]] = defaultdict(list)
    for row in told["check_dates"]:
        days[row["time"] // 86400].append(f"{row['check']} {row['event'].removeprefix('check_')}")
    return [
        {"time": day * 86400 * 1000, "words": names[0] if len(names) == 1 else f"{len(names)} checks"}
        for day, names in sorted(days.items())
    ]


def _causes(told: Document) -> Table:
    return Table(
        "By cause",
        ("cause", "domain", "jobs", "by chance", "incidents", "nodes", "GPU-hours lost", "per million GPU-hours"),
        tuple(
            (
                f"{one['cause']}: {CAUSES[one['cause']].words}",
                DOMAINS[one["domain"]],
                f"{one['jobs']:,}",
                f"{one['by_chance']:,}",
                f"{one['incidents']:,}",
                f"{one['nodes']:,}",
                f"{one['lost_gpu_seconds'] / 3600:,.0f}",
                number(one["jobs_per_million_gpu_hours"]),
            )
            for one in sorted(told["causes"], key=lambda one: (-one["lost_gpu_seconds"], one["cause"]))
        ),
        frozenset({2, 3, 4, 5, 6, 7}),
    )


def _together(told: Document) -> Table:
    return Table(
        "Seen together",
        ("what", "of", "here", "paper, RSC-1", "paper, RSC-2"),
        tuple(
            (
                row["what"],
                f"{row['of']:,}",
                percent(row["share"]),
                percent(row["paper"]["RSC-1"]),
                percent(row["paper"]["RSC-2"]),
            )
            for row in told["co_occurrence"]
            if row["of"]
        ),
        frozenset({1, 2, 3, 4}),
    )


def _largest(told: Document) -> Table:
    jobs = sorted(
        (job for job in told["jobs"] if job["cause"] != USER),
        key=lambda job: (-job["lost_gpu_seconds"], job["end_time"], job["cluster"], job["db_index"]),
    )
    return Table(
        "The largest failures with a cause that is not the user's program",
        ("job", "ended (UTC)", "GPUs", "cause", "code", "node", "confidence"),
        tuple(
            (
                str(job["job"]),
                moment(job["end_time"]),
                f"{job['gpus']:,}",
                CAUSES[job["cause"]].words,
                job["code"],
                job["node"],
                job["confidence"],
            )
            for job in jobs[:MOST_JOBS]
        ),
        frozenset({2}),
    )


def _check_dates(told: Document) -> Table:
    return Table(
        "When checks came, went or changed",
        ("date (UTC)", "check", "what", "version", "nodes"),
        tuple(
            (
                moment(row["time"])[:10],
                row["check"],
                row["event"].removeprefix("check_"),
                row["version"],
                f"{row['nodes']:,}",
            )
            for row in told["check_dates"]
        ),
        frozenset({4}),
    )
