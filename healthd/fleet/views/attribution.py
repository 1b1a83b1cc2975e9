"""Describes the causes of failed jobs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.causes import CAUSES, USER_CAUSE
from healthd.fleet.answers.document import Document, format_time, number, percent, share
from healthd.fleet.figures import (
    COLOURS,
    WHOLE_WEEK,
    Accessor,
    Figure,
    Record,
    category,
    layer,
    make_records,
    nominal,
    quantity,
    temporal,
    week,
)
from healthd.fleet.view import COUNT, DAY, GPU_HOURS, NUMBER, PERCENT, TIME, Column, Form, Row, Table, View, describe

MAX_CAUSES = 6  # maximum number of causes in the weekly figure; more lines would be hard to distinguish
MAX_JOBS = 20
DOMAINS = {
    "hardware": "hardware",
    "system_software": "system software",
    "user_program": "user program",
    None: "unknown",
}
CAUSE = Form(lambda cause: CAUSES[cause].label, right_aligned=False)
BY_CAUSE = (
    Column("cause", lambda row: f"{row['cause']}: {CAUSES[row['cause']].label}"),
    Column("domain", lambda row: DOMAINS[row["domain"]]),
    Column("jobs", "jobs", COUNT),
    Column("by chance", "by_chance", COUNT),
    Column("incidents", "incidents", COUNT),
    Column("nodes", "nodes", COUNT),
    Column("GPU-hours lost", "lost_gpu_seconds", GPU_HOURS),
    Column("per million GPU-hours", "jobs_per_million_gpu_hours", NUMBER),
)
TOGETHER = (
    Column("faults", "what"),
    Column("out of", "of", COUNT),
    Column("this fleet", "share", PERCENT),
    Column("paper, RSC-1", "paper.RSC-1", PERCENT),
    Column("paper, RSC-2", "paper.RSC-2", PERCENT),
)
JOBS = (
    Column("job", "job"),
    Column("ended (UTC)", "end_time", TIME),
    Column("GPUs", "gpus", COUNT),
    Column("cause", "cause", CAUSE),
    Column("code", "code"),
    Column("node", "node"),
    Column("confidence", "confidence"),
)
COST: dict[str, Accessor] = {
    "cause": lambda row: CAUSES[row["cause"]].label,
    "GPU-hours": lambda row: row["lost_gpu_seconds"] / 3600,
    "domain": lambda row: DOMAINS[row["domain"]],
    "jobs": "jobs",
}
BY_WEEK: dict[str, Accessor] = {
    "week": lambda row: row["week"] * 1000,
    "cause": lambda row: CAUSES[row["cause"]].label,
    "rate": "jobs_per_million_gpu_hours",
    "jobs": "jobs",
}
DOMAIN_FAULTS = (
    Column("time (UTC)", "time", TIME),
    Column("NVLink domain", "id"),
    Column("suspect", "suspect"),
    Column("nodes", lambda row: len(row["nodes"]), COUNT),
    Column("jobs", "jobs", COUNT),
)
CHECK_DATES = (
    Column("date (UTC)", "time", DAY),
    Column("check", "check"),
    Column("change", lambda row: row["event"].removeprefix("check_")),
    Column("version", "version"),
    Column("nodes", "nodes", COUNT),
)
SWAPS = (
    Column("date (UTC)", "time", DAY),
    Column("node", "node"),
    Column("slot", "subject"),
    Column("serial number", lambda row: row["serial"] or row["uuid"]),
    Column("replaced by", lambda row: row["next_serial"] or row["next_gpu"]),
    Column("fault or source", "why"),
)


def view(attribution: Document) -> View:
    found = attribution
    jobs = sorted(
        (job for job in found["jobs"] if job["cause"] != USER_CAUSE),
        key=lambda job: (-job["lost_gpu_seconds"], job["end_time"], job["cluster"], job["db_index"]),
    )
    largest = "Largest failures, except those caused by users' programs"
    return describe(
        found,
        "Causes of failed jobs",
        _sentences(found),
        [
            Table("By cause", BY_CAUSE, _sorted_by_cost(found["causes"])),
            Table("Co-occurrence", TOGETHER, [row for row in found["co_occurrence"] if row["of"]]),
            Table(largest, JOBS, jobs, MAX_JOBS),
            Table("Faults of NVLink domains", DOMAIN_FAULTS, found["domain_faults"], MAX_JOBS),
            Table("GPUs replaced after a fault", SWAPS, found["gpu_swaps"]["swaps"], MAX_JOBS),
            Table("Checks enabled, disabled or changed", CHECK_DATES, found["check_dates"], MAX_JOBS),
        ],
        [_cost_figure(found), _week_figure(found)],
    )


def _sorted_by_cost(causes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(causes, key=lambda row: (-row["lost_gpu_seconds"], -row["jobs"], row["cause"]))


# --- sentences


def _sentences(found: Document) -> list[str]:
    if not found["failures"]:
        return ["No job failed in this period."]
    because = found["unattributed_because"]
    have, have_none, have_no_list = (
        "has" if count == 1 else "have"
        for count in (found["attributed"], found["unattributed"], because["no_node_list"])
    )
    sentences = [
        f"Of {plural(found['failures'], 'job')} that failed or lost a node, {found['attributed']:,} {have} a most "
        "likely cause: "
        f"hardware for {found['by_domain']['hardware']:,}, system software for "
        f"{found['by_domain']['system_software']:,}, the user's program for {found['by_domain']['user_program']:,}.",
        f"{found['unattributed']:,} {have_none} none: in {because['observed']:,} cases, the nodes had no condition "
        f"that ends jobs; in {because['not_observed']:,}, the nodes were not observed the whole time; "
        f"{because['no_node_list']:,} {have_no_list} no node list.",
        f"By chance alone, {plural(found['expected_by_chance'], 'job')} would have a cause: the same rule finds as "
        "many when applied one hour before each failure.",
    ]
    if found["unattributed_node_fails"]:
        sentences.append(
            f"{found['unattributed_node_fails']:,} of the jobs without a cause ended in NODE_FAIL: Slurm lost a node "
            "that had no condition that ends jobs."
        )
    infrastructure_causes = [cause for cause in found["causes"] if cause["cause"] != USER_CAUSE]
    if infrastructure_causes:
        worst = max(infrastructure_causes, key=lambda cause_row: (cause_row["lost_gpu_seconds"], cause_row["cause"]))
        part = share(
            worst["lost_gpu_seconds"], sum(cause_row["lost_gpu_seconds"] for cause_row in infrastructure_causes)
        )
        sentences.append(
            f"Apart from users' programs, {CAUSES[worst['cause']].label} cost the most: "
            f"{worst['lost_gpu_seconds'] / 3600:,.0f} GPU-hours, {percent(part)} of the cost of these causes."
        )
    return [*sentences, *map(_spike_sentence, found["spikes"])]


def _spike_sentence(spike: Row) -> str:
    sentence = (
        f"In the week of {format_time(spike['week'])[:10]} there were {plural(spike['incidents'], 'incident')} of "
        f"{CAUSES[spike['cause']].label}, against {number(spike['expected'])} expected from the other weeks"
    )
    if not spike["nodes"]:
        return f"{sentence}. The incidents are spread over many nodes."
    names = ", ".join(f"{node['node']} ({node['incidents']})" for node in spike["nodes"])
    return f"{sentence}. {percent(spike['share_of_nodes'])} occurred on {plural(len(spike['nodes']), 'node')}: {names}."


# --- figures


def _cost_figure(found: Document) -> Figure | None:
    costs = [cost for cost in _sorted_by_cost(found["causes"]) if cost["jobs"]]
    if not costs:
        return None
    points = make_records(costs, COST)
    channels = {"x": quantity("GPU-hours", "GPU-hours lost"), "y": category("cause")}
    names = {"domain": list(DOMAINS.values()), "range": list(COLOURS[:4])}
    domain = nominal("domain", scale=names, legend=None)
    tooltip = [nominal("cause"), nominal("domain"), quantity("jobs"), quantity("GPU-hours", format=",.0f")]
    summary = "; ".join(f"{row['cause']} {row['GPU-hours']:,.0f} GPU-hours" for row in points[:5])
    bars = layer("bar", points, **channels, color=domain, tooltip=tooltip)
    labels = layer("text", points, {"align": "left", "dx": 4}, **channels, text=nominal("domain"))
    return Figure("GPU time lost by cause (at most half an hour per job)", summary, (bars, labels))


def _week_figure(found: Document) -> Figure | None:
    """Draw the largest causes except the user's program, and the dates on which checks were enabled or changed."""
    jobs: dict[str, int] = defaultdict(int)
    for row in found["weeks"]:
        jobs[row["cause"]] += row["jobs"]
    largest = sorted((cause for cause in jobs if cause != USER_CAUSE), key=lambda cause: (-jobs[cause], cause))[
        :MAX_CAUSES
    ]
    weeks = [
        row
        for row in found["weeks"]
        if row["cause"] in largest and row["days"] >= WHOLE_WEEK and row["jobs_per_million_gpu_hours"] is not None
    ]
    if len({row["week"] for row in weeks}) < 2:
        return None
    points = make_records(weeks, BY_WEEK)
    names = [CAUSES[cause].label for cause in largest]
    lines = layer(
        "line",
        points,
        x=week(points),
        y=quantity("rate", "failed jobs per million GPU-hours"),
        color=nominal("cause", scale={"domain": names, "range": list(COLOURS[:MAX_CAUSES])}, title=None),
        strokeDash=nominal("cause", scale={"domain": names}, title=None),
        tooltip=[temporal("week"), nominal("cause"), quantity("jobs"), quantity("rate", format=".3")],
    )
    description = "Failed jobs by cause, in each whole week: " + ", ".join(
        f"{CAUSES[cause].label} {jobs[cause]:,}" for cause in largest
    )
    dates = _dates(found)
    if not dates:
        return Figure("Causes by week", description, (lines,))
    dashes = {"color": "#555555", "strokeDash": [2, 2]}
    rules = layer("rule", dates, dashes, x=temporal("time"), tooltip=nominal("words"))
    label_style = {"align": "right", "baseline": "bottom", "angle": 270, "dy": -2, "color": "#333333"}
    labels = layer("text", dates, label_style, x=temporal("time"), y={"value": 2}, text=nominal("words"))
    description += ". Checks: " + "; ".join(
        f"{format_time(date['time'] // 1000)[:10]} {date['words']}" for date in dates
    )
    return Figure("Causes by week, and dates of check changes", description, (lines, rules, labels))


def _dates(found: Document) -> list[Record]:
    """Return a record for each day on which checks were enabled or changed, with the check's name, or the number of
    checks."""
    days: dict[int, list[str]] = defaultdict(list)
    for row in found["check_dates"]:
        days[row["time"] // 86400].append(f"{row['check']} {row['event'].removeprefix('check_')}")
    return [
        {"time": day * 86400 * 1000, "words": names[0] if len(names) == 1 else f"{len(names)} checks"}
        for day, names in sorted(days.items())
    ]
