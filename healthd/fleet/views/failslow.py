"""Slow jobs and their cost."""

from __future__ import annotations

from collections.abc import Mapping

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, listed, number, percent, share, span
from healthd.fleet.answers.failslow import FAILED
from healthd.fleet.figures import Figure, Record, bars, quantity
from healthd.fleet.view import COUNT, SPAN, Column, Form, Table, View, described

NODES_SHOWN, BARS_SHOWN = 20, 20
SECONDS = Form(lambda seconds: span(seconds) if seconds else "-")
NODES = (
    Column("node", "node"),
    Column("slow", "slow_seconds", SECONDS),
    Column("times", "times", COUNT),
    Column("worst", "worst_slowdown", Form(lambda slowdown: "-" if slowdown is None else f"+{percent(slowdown)}")),
    Column("GPU-hours lost", "lost_gpu_seconds", Form(lambda gpu_seconds: number(gpu_seconds / 3600))),
    Column("not known", "unknown_seconds", SECONDS),
    Column("validations failed", "failed_validations", COUNT),
    Column("validated slow", "slow_validations", COUNT),
)
REACTION = (
    Column("", "what"),
    Column("times", "episodes", COUNT),
    Column("median", "median_seconds", SPAN),
    Column("90 %", "p90_seconds", SPAN),
)
TOOK = {
    "reported": "onset to report",
    "acted": "report to reaction",
    "lasted": "onset to end",
}


def view(failslow: Document) -> View:
    took = [{**failslow["reaction"][key], "what": words} for key, words in TOOK.items()]
    return described(
        failslow,
        "Slow jobs and their cost",
        sentences(failslow),
        [
            Table("Nodes with the largest loss", NODES, failslow["nodes"], NODES_SHOWN),
            Table("Times to report and reaction", REACTION, [row for row in took if row["episodes"]]),
        ],
        [_nodes(failslow)],
    )


def sentences(failslow: Document) -> list[str]:
    nodes = [row for row in failslow["nodes"] if row["slow_seconds"]]
    failed = [row["node"] for row in failslow["validations"] if row["code"] == FAILED]
    found = []
    if not nodes:
        found.append("No node reported a slow job.")
    else:
        of = share(failslow["lost_gpu_seconds"], failslow["job_gpu_seconds"])
        whole = f", {percent(of)} of the jobs' GPU time" if of is not None else ""
        found.append(
            f"{plural(len(nodes), 'node')} reported slow jobs, for {_hours(failslow['slow_seconds'])} node-hours. They "
            f"cost {_hours(failslow['lost_gpu_seconds'])} GPU-hours{whole}, as far as known."
        )
        took = failslow["reaction"]
        if took["reported"]["episodes"]:
            found.append(
                f"The median time from onset to report was {span(took['reported']['median_seconds'])} in "
                f"{plural(took['episodes'], 'episode')}. {took['acted']['episodes']:,} had a reaction"
                f"{_by(took['acted']['by'])}; {took['ongoing']:,} are not over."
            )
    if failed:
        found.append(f"A validation failed on {plural(len(failed), 'node')}: {listed(failed, NODES_SHOWN)}.")
    return found


def _by(acts: Mapping[str, int]) -> str:
    words = {"acknowledged": "acknowledged", "unknown": "drained by unknown"}
    some = [f"{words.get(who, f'drained by {who}')} {count:,}" for who, count in sorted(acts.items())]
    return f" ({', '.join(some)})" if some else ""


def _hours(of_seconds: float) -> str:
    return number(of_seconds / 3600)


def _nodes(failslow: Document) -> Figure | None:
    several = len({row["cluster"] for row in failslow["nodes"]}) > 1
    records: list[Record] = [
        {
            "node": f"{row['cluster']} {row['node']}" if several else row["node"],
            "hours": row["lost_gpu_seconds"] / 3600,
        }
        for row in failslow["nodes"][:BARS_SHOWN]
        if row["lost_gpu_seconds"]
    ]
    if not records:
        return None
    words = "; ".join(f"{one['node']} {number(one['hours'])}" for one in records[:5]) + " GPU-hours lost to slow jobs."
    return Figure("Loss by node", words, (bars(records, quantity("hours", "GPU-hours lost"), "node"),))
