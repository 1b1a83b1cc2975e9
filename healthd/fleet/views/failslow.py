"""Describes slow jobs and their cost."""

from __future__ import annotations

from collections.abc import Mapping

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, format_duration, join_limited, number, percent, share
from healthd.fleet.answers.failslow import FAILED_CODE
from healthd.fleet.figures import Figure, Record, bars, quantity
from healthd.fleet.view import COUNT, DURATION, Column, Form, Table, View, describe

MAX_NODES_SHOWN, MAX_BARS_SHOWN = 20, 20
SECONDS = Form(lambda seconds: format_duration(seconds) if seconds else "-")
NODES = (
    Column("node", "node"),
    Column("slow", "slow_seconds", SECONDS),
    Column("times", "times", COUNT),
    Column("worst", "worst_slowdown", Form(lambda slowdown: "-" if slowdown is None else f"+{percent(slowdown)}")),
    Column("GPU-hours lost", "lost_gpu_seconds", Form(lambda gpu_seconds: number(gpu_seconds / 3600))),
    Column("cost unknown", "unknown_seconds", SECONDS),
    Column("validations failed", "failed_validations", COUNT),
    Column("validated slow", "slow_validations", COUNT),
)
REACTION = (
    Column("", "what"),
    Column("times", "episodes", COUNT),
    Column("median", "median_seconds", DURATION),
    Column("90 %", "p90_seconds", DURATION),
)
DURATION_LABELS = {
    "reported": "onset to report",
    "acted": "report to reaction",
    "lasted": "onset to end",
}


def view(failslow: Document) -> View:
    durations = [{**failslow["reaction"][key], "what": label} for key, label in DURATION_LABELS.items()]
    return describe(
        failslow,
        "Slow jobs and their cost",
        sentences(failslow),
        [
            Table("Nodes with the largest loss", NODES, failslow["nodes"], MAX_NODES_SHOWN),
            Table("Time to report and to react", REACTION, [row for row in durations if row["episodes"]]),
        ],
        [_node_figure(failslow)],
    )


def sentences(failslow: Document) -> list[str]:
    nodes = [row for row in failslow["nodes"] if row["slow_seconds"]]
    failed = [row["node"] for row in failslow["validations"] if row["code"] == FAILED_CODE]
    found = []
    if not nodes:
        found.append("No node reported a slow job.")
    else:
        lost_share = share(failslow["lost_gpu_seconds"], failslow["job_gpu_seconds"])
        share_text = f", {percent(lost_share)} of the jobs' GPU time" if lost_share is not None else ""
        found.append(
            f"{plural(len(nodes), 'node')} reported slow jobs, for {_hours(failslow['slow_seconds'])} node-hours. "
            f"The known cost is {_hours(failslow['lost_gpu_seconds'])} GPU-hours{share_text}."
        )
        reaction = failslow["reaction"]
        if reaction["reported"]["episodes"]:
            found.append(
                f"The median time from onset to report was {format_duration(reaction['reported']['median_seconds'])} "
                f"in {plural(reaction['episodes'], 'episode')}. Reactions: {reaction['acted']['episodes']:,}"
                f"{_acts_text(reaction['acted']['by'])}; still open: {reaction['ongoing']:,}."
            )
    if failed:
        found.append(f"A validation failed on {plural(len(failed), 'node')}: {join_limited(failed, MAX_NODES_SHOWN)}.")
    return found


def _acts_text(acts: Mapping[str, int]) -> str:
    labels = {"acknowledged": "acknowledged", "unknown": "drained, origin unknown"}
    texts = [f"{labels.get(actor, f'drained by {actor}')} {count:,}" for actor, count in sorted(acts.items())]
    return f" ({', '.join(texts)})" if texts else ""


def _hours(duration_seconds: float) -> str:
    return number(duration_seconds / 3600)


def _node_figure(failslow: Document) -> Figure | None:
    several = len({row["cluster"] for row in failslow["nodes"]}) > 1
    records: list[Record] = [
        {
            "node": f"{row['cluster']} {row['node']}" if several else row["node"],
            "hours": row["lost_gpu_seconds"] / 3600,
        }
        for row in failslow["nodes"][:MAX_BARS_SHOWN]
        if row["lost_gpu_seconds"]
    ]
    if not records:
        return None
    description = (
        "; ".join(f"{record['node']} {number(record['hours'])}" for record in records[:5])
        + " GPU-hours lost to slow jobs."
    )
    return Figure("Loss by node", description, (bars(records, quantity("hours", "GPU-hours lost"), "node"),))
