"""Describes which checks gave the first evidence, and the time until the drain."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable

from healthd.common.page import plural
from healthd.fleet.answers.checks import PERCENTILES
from healthd.fleet.answers.document import Document, format_duration, percent
from healthd.fleet.figures import COLOURS, Figure, category, layer, nominal, points, quantity
from healthd.fleet.view import COUNT, DAY, DURATION, PERCENT, Column, Form, Row, Table, View, describe, interval

CHECKS = (
    Column("check", "check"),
    Column("first", "first", COUNT),
    Column("share of incidents", "share_first", PERCENT),
    Column("95 % interval", "interval", interval(PERCENT)),
    Column("alone", "alone", COUNT),
    Column("incidents", "incidents", COUNT),
    Column("warned", "warnings", COUNT),
    Column("ran on", "node_days_running", Form(lambda days: f"{days:,} node-days")),
    Column("since", "since_time", DAY),
)
DRAINS = (
    Column("drains", "which"),
    Column("number", "drains", COUNT),
    Column("evidence", "with_evidence", COUNT),
    *(Column(f"{p} %", f"p{p}_seconds", DURATION) for p in PERCENTILES),
    Column("no finding", "nothing_seen", COUNT),
    Column("not observed", "not_observed", COUNT),
)


def view(checks: Document) -> View:
    return describe(
        checks,
        "First evidence by check, and time until the drain",
        _sentences(checks),
        [
            Table(
                "Checks that reported faults", CHECKS, [row for row in checks["checks"] if row["reported"] != "never"]
            ),
            Table("From the first evidence to the drain", DRAINS, _drains(checks)),
        ],
        [_order_figure(checks), _delay_figure(checks)],
    )


def _drains(checks: Document) -> list[Row]:
    """Return one row for all drains, one for each origin of drains, and one for each check that gave the first
    evidence."""
    drains = checks["drains"]
    if not drains["all"]["drains"]:
        return []
    return [
        {**drains["all"], "which": "all"},
        *({**row, "which": f"by {row['by_whom']}"} for row in drains["by_whom"]),
        *({**row, "which": f"after {row['check']}"} for row in drains["by_check"]),
    ]


def _sentences(checks: Document) -> list[str]:
    if not checks["incidents"]:
        found = ["No check failed in this period."]
    else:
        first = checks["checks"][0]
        after = checks["after"]
        found = [
            f"{plural(checks['incidents'], 'incident')} on {plural(checks['nodes_hit'], 'node')}. The most "
            f"frequent first evidence was {first['check']} ({percent(first['share_first'])}).",
            f"Incidents by outcome: node out of service within {format_duration(checks['drain_within_seconds'])} "
            f"({after['drained']:,}), node still in service ({after['not_drained']:,}), "
            f"node already out of service ({after['already_out']:,}).",
        ]
    drains = checks["drains"]["all"]
    if drains["with_evidence"]:
        found.append(
            "From the first evidence to the drain: half of the drains followed within "
            f"{format_duration(drains['p50_seconds'])}, 90 % within {format_duration(drains['p90_seconds'])}, 99 % "
            f"within {format_duration(drains['p99_seconds'])} ({drains['with_evidence']:,} of {drains['drains']:,} "
            f"drains had evidence). Drains without a failing check before: {drains['nothing_seen']:,}; "
            f"of a node that was not observed: {drains['not_observed']:,}."
        )
    if checks["never"]:
        found.append(f"Checks that are enabled but never reported anything: {', '.join(checks['never'])}.")
    if checks["not_deployed"]:
        found.append(
            f"Checks of this release that are not enabled on any of these nodes: {', '.join(checks['not_deployed'])}."
        )
    return found


# --- figures


ORDER_COUNTS: dict[str, Callable[[Row], int]] = {
    "first and alone": lambda row: row["alone"],
    "first of several": lambda row: row["first"] - row["alone"],
    "after another": lambda row: row["incidents"] - row["first"],
}


def _order_figure(checks: Document) -> Figure | None:
    bars_data = [
        {"check": row["check"], "what": position, "incidents": count(row), "place": order}
        for row in checks["checks"]
        if row["incidents"]
        for order, (position, count) in enumerate(ORDER_COUNTS.items())
    ]
    if not bars_data:
        return None
    first = checks["checks"][0]
    bars = layer(
        "bar",
        bars_data,
        {"stroke": "black", "strokeWidth": 0.5},
        x=quantity("incidents", "incidents"),
        y=category("check"),
        color=category("what", scale={"range": [COLOURS[0], COLOURS[4], "#DDDDDD"]}),
        order={"field": "place", "type": "ordinal"},
    )
    description = (
        f"{first['check']} was the first evidence of {first['first']:,} of {plural(checks['incidents'], 'incident')}."
    )
    return Figure("Order of the checks within incidents", description, (bars,))


_TICKS = {0: "0 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h", 864_000: "10 d"}
_TICK_NAMES = f"({json.dumps({str(seconds): name for seconds, name in _TICKS.items()})})[datum.value]"


def _ticks(maximum: float) -> list[int]:
    """Return the ticks of a duration axis. The last tick is the first one that is at least `maximum`."""
    ticks = list(_TICKS)
    return ticks[: bisect.bisect_left(ticks, maximum) + 1]


def _delay_figure(checks: Document) -> Figure | None:
    points_data = [
        {"check": row["check"], "within": f"{p} %", "seconds": row[f"p{p}_seconds"]}
        for row in checks["drains"]["by_check"]
        for p in PERCENTILES
        if row["with_evidence"]
    ]
    if not points_data:
        return None
    drains = checks["drains"]["all"]
    # Use a symmetric logarithm, which is linear from 0 to 1. Many drains took 0 s, which a plain logarithm cannot show.
    seconds = quantity(
        "seconds",
        "from the first evidence to the drain",
        scale={"type": "symlog", "domainMin": 0},
        axis={"values": _ticks(max(row["seconds"] for row in points_data)), "labelExpr": _TICK_NAMES},
    )
    within = nominal("within", title="share of the drains")
    delays = points(
        points_data,
        80,
        x=seconds,
        y=nominal("check", title=None),
        shape=within,
        color={**within, "scale": {"range": list(COLOURS[:3])}},
    )
    description = (
        f"All: half within {format_duration(drains['p50_seconds'])}, 99 % within "
        f"{format_duration(drains['p99_seconds'])}; {percent(drains['share_observed'])} of the drained nodes were "
        "observed."
    )
    return Figure("Time to the drain, by the first check", description, (delays,))
