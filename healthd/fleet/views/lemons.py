"""Describes nodes that keep failing: a list, their cost to large jobs, and the distribution of the signals."""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, format_time, number, percent
from healthd.fleet.answers.lemons import LEMON_RATE_FACTOR, MIN_OBSERVED_SHARE, NOT_DRAINED_NOTE, format_days
from healthd.fleet.figures import COLOURS, Figure, Record, layer, nominal, points, quantity
from healthd.fleet.view import COUNT, PERCENT, TIME, TWO_DIGITS, Column, Detail, Row, Table, View, describe

SIGNALS = {
    "excl_jobid_count": "jobs that excluded it",
    "xid_cnt": "different Xids",
    "tickets": "repair tickets",
    "out_count": "times out of service",
    "multi_node_node_fails": "multi-node failures",
    "single_node_node_fails": "single-node failures",
    "single_node_node_failure_rate": "single-node failures per job",
}
NODES = (
    Column("node", "node"),
    Column("times the fleet's rate", "score", TWO_DIGITS),
    Column("probability", "probability", PERCENT),
    Column("evidence", "text"),
    Column("out of service since", "out_since", TIME),
)
GPUS = (
    Column("serial number", lambda row: row["serial"] or row["uuid"]),
    Column("node", "node"),
    Column("slot", "subject"),
    Column("times the GPUs' rate", "score", TWO_DIGITS),
    Column("probability", "probability", PERCENT),
    Column("failures", "events", COUNT),
    Column("slots so far", lambda row: len(row["slots"]), COUNT),
    Column("codes", lambda row: ", ".join(sorted({code for item in row["evidence"] for code in item["codes"]}))),
)


def view(lemons: Document) -> View:
    clusters = {fleet["cluster"]: fleet["median_incidents"] for fleet in lemons["fleets"]}
    applied = [f"{row['node']}: {row['text']}" for row in lemons.get("applied") or ()]
    return describe(
        lemons,
        "Nodes that keep failing",
        _sentences(lemons),
        [Table("Nodes to take out", NODES, lemons["nodes"]), Table("GPUs to replace", GPUS, lemons["gpus"]["lemons"])],
        [_signal_figure(lemons)],
        [
            *(_node_detail(row, clusters) for row in lemons["nodes"]),
            *([Detail("Drains", tuple(applied))] if applied else ()),
        ],
    )


def _sentences(lemons: Document) -> list[str]:
    found, days = lemons["nodes"], lemons["window"]["days"]
    nodes = sum(fleet["nodes"] for fleet in lemons["fleets"])
    sentences = []
    if lemons.get("old") and any(row["command"] for row in found):
        sentences.append(
            f"The store ends at {format_time(lemons['window']['known_until'])} UTC, more than a day ago. Before you "
            "drain a node, check whether it has been repaired since then."
        )
    if found:
        fails = "fails" if len(found) == 1 else "fail"
        sentences.append(
            f"{len(found)} of {plural(nodes, 'node')} {fails} far more often than the others in {format_days(days)}."
        )
    else:
        sentences.append(
            f"None of {plural(nodes, 'node')} fails far more often than the others in {format_days(days)}."
        )
    gpus = lemons["gpus"]
    if gpus["recorded"]:
        count = len(gpus["lemons"])
        known = plural(gpus["known"], "GPU")
        keeps = "keeps" if count == 1 else "keep"
        sentences.append(
            f"{count:,} of {known} {keeps} failing, even after being moved (slots are listed below)."
            if count
            else f"None of the {known} keeps failing."
        )
    return [*sentences, *(_gain_sentence(gain) for gain in lemons["gain"] if gain["by_lemons"])]


def _gain_sentence(gain: Row) -> str:
    failing = f"{_format_shared_count(gain['failures'])} of {plural(gain['jobs'], 'job')}"
    without = f"{_format_shared_count(gain['failures_without'])} ({percent(gain['share_failing_without'])})"
    return (
        f"Nodes ended {failing} of more than {gain['more_than_gpus']} GPUs ({percent(gain['share_failing'])}); with "
        f"average nodes in their place, it would be {without}."
    )


def _format_shared_count(count: float) -> str:
    """Format a count that is a sum of shares, such as "5" or "3.1"."""
    return f"{count:,.1f}".removesuffix(".0")


def _node_detail(row: Row, medians: dict[str, float]) -> Detail:
    """Return a lemon's details: the command that drains it and the failures that count."""
    name = row["node"] if len(medians) == 1 else f"{row['cluster']}/{row['node']}"
    if row["out_since"] is not None:
        command = f"already out of service since {format_time(row['out_since'])} UTC"
    else:
        command = row["command"] or "not a valid Slurm node name: no command is shown"
    lines = [
        command,
        f"{number(row['score'], 2)} times the fleet's rate; more than {LEMON_RATE_FACTOR:g} times with a probability "
        f"of {percent(row['probability'])}",
    ]
    if not row["certain"]:
        lines.append(NOT_DRAINED_NOTE)
    if row["observed_share"] is not None and row["observed_share"] < MIN_OBSERVED_SHARE:
        lines.append(f"healthd observed {percent(row['observed_share'])} of the time, so there may be more events")
    items = tuple(f"{format_time(incident['time'])}: {incident['text']}" for incident in row["evidence"])
    return Detail(f"{name}: {row['text']}; fleet median {number(medians[row['cluster']])}", tuple(lines), items)


def _signal_figure(lemons: Document) -> Figure | None:
    """Draw each signal relative to its maximum, with a point for each lemon, as in figure 11 of arXiv 2410.21680."""
    greatest = {signal: max((value for value, _ in steps), default=0.0) for signal, steps in lemons["cdfs"].items()}
    signals = [signal for signal in lemons["cdfs"] if greatest[signal] > 0]
    if not signals:
        return None
    lines: list[Record] = []
    marked: list[Record] = []
    for signal in signals:
        steps = lemons["cdfs"][signal]
        lines += [
            {"signal": SIGNALS[signal], "part": value / greatest[signal], "nodes": fraction, "value": value}
            for value, fraction in ([[0.0, 0.0], *steps] if steps[0][0] > 0 else steps)
        ]
        marked += [
            {
                "signal": SIGNALS[signal],
                "part": (row["signals"][signal] or 0.0) / greatest[signal],
                "nodes": next(fraction for value, fraction in steps if value >= (row["signals"][signal] or 0.0)),
                "node": row["node"],
            }
            for row in lemons["nodes"]
        ]
    names = [SIGNALS[signal] for signal in signals]
    # There is only one legend, below the figure. On a narrow page, two legends beside the figure would run off the page
    # and over the heading.
    legend = {"orient": "bottom", "columns": 1, "labelLimit": 300, "title": None}
    channel_style: dict[str, Any] = {"title": None, "legend": legend}
    channels: dict[str, Any] = {
        "x": quantity("part", "value, as a share of the largest", "%"),
        "y": quantity("nodes", "nodes with this value or less", "%", scale={"zero": False}),
        "color": nominal("signal", scale={"domain": names, "range": list(COLOURS)}, **channel_style),
    }
    dash = nominal("signal", scale={"domain": names}, **channel_style)
    spread = "; ".join(
        f"{SIGNALS[signal]}: {percent(next(fraction for _, fraction in lemons['cdfs'][signal]))} of the nodes are at "
        f"{number(lemons['cdfs'][signal][0][0])}, the maximum is {number(greatest[signal])}"
        for signal in signals
    )
    return Figure(
        "Distribution of the signals over the nodes; points are lemons",
        spread,
        (
            layer("line", lines, {"interpolate": "step-after"}, **channels, strokeDash=dash),
            points(marked, 60, **channels, tooltip=[nominal("node"), nominal("signal")]),
        ),
    )
