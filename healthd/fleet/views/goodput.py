"""Describes the work lost to node failures."""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, number, percent
from healthd.fleet.figures import Figure, Record, grouped_bars, quantity
from healthd.fleet.statistics.job_sizes import format_gpus, format_size
from healthd.fleet.view import COUNT, NUMBER, TEXT, TIME, Column, Form, Table, View, describe

MAX_LOOPS_SHOWN = 10
LABELS = {
    "node_fail": "- NODE_FAIL",
    "failed": "- FAILED with a failing check",
    "requeued": "- REQUEUED by healthd",
    "logged": "- logged by slurmctld",
    "inferred": "- inferred (a guess)",
}
LOST = (Column("lost", "what"), Column("jobs", "jobs", COUNT), Column("GPU-hours", "gpu_hours", NUMBER))
COST = Column("cost", "cost", Form(lambda cost: f"{cost:,.0f}"))
SIZES = (
    Column("GPUs", "gpus_up_to", Form(format_size)),
    Column("ended by nodes", "first_order.jobs", COUNT),
    Column("GPU-hours lost", "first_order.gpu_hours", NUMBER),
    Column("pre-empted", "second_order.jobs", COUNT),
    Column("their GPU-hours", "second_order.gpu_hours", NUMBER),
)
LOOPS = (
    Column("job", "job_id", TEXT),
    Column("GPUs", "gpus", NUMBER),
    Column("ended by nodes", "ends", Form(lambda ends: plural(ends, "time"))),
    Column("from", "first_time", TIME),
    Column("until", "last_time", TIME),
    Column("it pre-empted", lambda row: f"{plural(row['preemptions'], 'job')}, {plural(row['preempted_gpus'], 'GPU')}"),
    Column(
        "GPU-hours lost", lambda row: (row["first_order_gpu_seconds"] + row["second_order_gpu_seconds"]) / 3600, NUMBER
    ),
)


def view(goodput: Document) -> View:
    cost = () if goodput["price_per_gpu_hour"] is None else (COST,)
    return describe(
        goodput,
        "Work lost to node failures",
        _sentences(goodput),
        [
            Table("Losses", (*LOST, *cost), _loss_rows(goodput)),
            Table("By size", SIZES, goodput["by_size"]),
            Table("Requeue loops", LOOPS, goodput["requeue_loops"], MAX_LOOPS_SHOWN),
        ],
        [_by_size(goodput["by_size"])],
    )


def _loss_rows(goodput: Document) -> list[dict[str, Any]]:
    """Return the rows for first-order and second-order losses, each followed by rows for its parts."""
    first, second = goodput["first_order"], goodput["second_order"]
    return [
        {**first, "what": "ended by nodes (first order)"},
        *({**row, "what": LABELS[row["ended"]]} for row in first["by_end"]),
        {**second, "what": "pre-empted (second order)"},
        *({**row, "what": LABELS[row["how"]]} for row in second["by_how"]),
    ]


def _sentences(goodput: Document) -> list[str]:
    first, second, loops = goodput["first_order"], goodput["second_order"], goodput["requeue_loops"]
    found = [
        f"Nodes ended {plural(first['jobs'], 'job')}, which lost {number(first['gpu_hours'])} GPU-hours; "
        f"the requeued jobs pre-empted {plural(second['jobs'], 'other job')}, "
        f"which lost {number(second['gpu_hours'])} GPU-hours."
    ]
    if first["cost"] is not None:
        found.append(
            f"At {goodput['price_per_gpu_hour']:g} per GPU-hour, this costs {first['cost'] + second['cost']:,.0f}."
        )
    if loops:
        worst = loops[0]
        found.append(
            f"{plural(len(loops), 'job was', 'jobs were')} requeued over and over: job {worst['job_id']} was ended "
            f"{plural(worst['ends'], 'time')} and pre-empted {plural(worst['preemptions'], 'other')}."
        )
    share = goodput["share_second_order"]
    if share is None:
        return [*found, "No loss is known."]
    return [
        *found,
        f"{percent(share)} of the lost work is second-order: lost by jobs that a requeued job pre-empted.",
    ]


def _by_size(rows: list[dict[str, Any]]) -> Figure | None:
    """Draw lost goodput by job size. Second-order losses are next to first-order losses, as in the paper."""
    if not rows:
        return None
    records: list[Record] = [
        {"size": format_gpus(row["gpus_up_to"]), "order": label, "gpu_hours": row[key]["gpu_hours"]}
        for row in rows
        for key, label in (("first_order", "ended by nodes"), ("second_order", "pre-empted by them"))
    ]
    largest = max(rows, key=lambda row: row["first_order"]["gpu_hours"] + row["second_order"]["gpu_hours"])
    lost = number(largest["first_order"]["gpu_hours"] + largest["second_order"]["gpu_hours"])
    return Figure(
        "Lost work by size",
        f"Jobs of {format_gpus(largest['gpus_up_to'])} lost the most: {lost} GPU-hours.",
        (grouped_bars(records, quantity("gpu_hours", "GPU-hours lost"), "size", "order"),),
    )
