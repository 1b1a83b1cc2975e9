"""Describes completed jobs that saw a failing check."""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, number, percent
from healthd.fleet.figures import (
    COLOURS,
    WHOLE_WEEK,
    Figure,
    bars,
    intervals,
    layer,
    make_records,
    mark_at,
    quantity,
    week,
)
from healthd.fleet.view import COUNT, Column, Form, Table, View, describe, interval


def format_small_share(value: float | None) -> str:
    """Format a share with two significant digits, because it may be far below 1 %."""
    return "-" if value is None else f"{number(100 * value, 2)} %"


SMALL_SHARE = Form(format_small_share)
COLUMNS = (
    Column("check", "name"),
    Column("code", "code"),
    Column("jobs", "jobs", COUNT),
    Column("share", "share", SMALL_SHARE),
    Column("95 % interval", "interval", interval(SMALL_SHARE)),
    Column("conditions", "alarms", COUNT),
    Column("already failing", "already_open_jobs", COUNT),
    Column("warned", "warned_jobs", COUNT),
)


SHARE = quantity("share", "share of the completed jobs", ".2~%")


def view(alarms: Document) -> View:
    return describe(
        alarms,
        "Completed jobs that saw a failing check",
        _sentences(alarms),
        [Table("By check and code", COLUMNS, _table_rows(alarms))],
        [_by_check(alarms), _by_week(alarms)],
    )


def _table_rows(alarms: Document) -> list[dict[str, Any]]:
    """Return a row for each check and, if a check has several codes, a row for each code."""
    rows = []
    for check in alarms["checks"]:
        codes = check["codes"]
        rows.append(
            {**check, "name": check["check"], "code": codes[0]["code"] if len(codes) == 1 else f"{len(codes)} codes"}
        )
        rows += [{**code, "name": ""} for code in codes if len(codes) > 1]
    return rows


def _sentences(alarms: Document) -> list[str]:
    if not alarms["placed_jobs"]:
        return ["No job completed in this period."]
    lines = [
        f"{plural(alarms['placed_jobs'], 'job')} completed. Jobs during which a check began to fail on a node: "
        f"{alarms['jobs']:,}, or {format_small_share(alarms['share'])} "
        f"({interval(SMALL_SHARE).write(alarms['interval'])}; the paper's aim is less than 1 %). Jobs during "
        f"which a check was already failing: {alarms['already_open_jobs']:,}. "
        f"Jobs with only warnings: {alarms['warned_jobs']:,}."
    ]
    above = [row for row in alarms["checks"] if row["above"]]
    if above:
        checks_above = ", ".join(
            f"{row['check']} ({format_small_share(row['share'])}"
            f"{'' if row['significantly_above'] else ', not significantly'})"
            for row in above
        )
        lines.append(f"Checks above {percent(alarms['limit'])}: {checks_above}.")
    else:
        lines.append(f"No check is above {percent(alarms['limit'])}.")
    observed = alarms["observed"]
    if observed["jobs"] < alarms["placed_jobs"]:
        lines.append(
            f"Share among jobs whose nodes were observed every day ({plural(observed['jobs'], 'job')}): "
            f"{format_small_share(observed['share'])}."
        )
    return lines


def _by_check(alarms: Document) -> Figure | None:
    failing = [row for row in alarms["checks"] if row["jobs"]]
    if not failing:
        return None
    points = make_records(failing, {"check": "check", "share": "share", "low": "interval.0", "high": "interval.1"})
    description = "; ".join(f"{row['check']} {percent(row['share'])}" for row in failing[:5])
    limit = mark_at("limit", alarms["limit"], (6, 3))
    return Figure("By check", description, (bars(points, SHARE, "check"), intervals(points, "check"), limit))


def _by_week(alarms: Document) -> Figure | None:
    weeks = [row for row in alarms["by_week"] if row["days"] >= WHOLE_WEEK]
    if len(weeks) < 2:
        return None
    points = make_records(weeks, {"week": lambda row: row["week_time"] * 1000, "share": "share", "jobs": "jobs"})
    line = layer("line", points, {"point": True, "color": COLOURS[0]}, x=week(points), y=SHARE)
    description = "Weekly share of the completed jobs that saw a failing check (whole weeks only)."
    return Figure("By week", description, (line,))
