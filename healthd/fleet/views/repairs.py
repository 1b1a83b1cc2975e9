"""Describes how often each remedy ends a fault for good, and how long nodes are out of service until then."""

from __future__ import annotations

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, percent
from healthd.fleet.figures import Figure, bars, intervals, make_records, quantity
from healthd.fleet.view import COUNT, DURATION, PERCENT, Column, Detail, Row, Table, View, describe, interval

MAX_ROWS = 20
REMEDY_NAMES = {
    "gpu_reset": "GPU reset",
    "reboot": "boot",
    "person": "a person",
    "check_passed": "check passed",
    "time": "no repeat",
}
FIGURES = (
    Column("repairs", "repairs", COUNT),
    Column("nodes", "nodes", COUNT),
    Column("lasted 7 d", "lasted_7_days.share", PERCENT),
    Column("95 % interval", "lasted_7_days.interval", interval(PERCENT)),
    Column("followed 7 d", "lasted_7_days.repairs", COUNT),
    Column("lasted 28 d", "lasted_28_days.share", PERCENT),
    Column("followed 28 d", "lasted_28_days.repairs", COUNT),
    Column("median out", "out_seconds.median", DURATION),
    Column("p90 out", "out_seconds.p90", DURATION),
)
STEP_NAMES = {"gpu_reset": "GPU reset", "reboot": "reboot", "power_cycle": "power cycle"}
STEP_FIGURES = (
    Column("taken", "attempts", COUNT),
    Column("nodes", "nodes", COUNT),
    Column("succeeded", "succeeded", COUNT),
    Column("failed", "failed", COUNT),
    Column("lasted 7 d", "lasted_7_days.share", PERCENT),
    Column("95 % interval", "lasted_7_days.interval", interval(PERCENT)),
    Column("followed 7 d", "lasted_7_days.attempts", COUNT),
    Column("lasted 28 d", "lasted_28_days.share", PERCENT),
    Column("median out", "out_seconds.median", DURATION),
    Column("not possible", "impossible", COUNT),
    Column("stopped", "stopped", COUNT),
    Column("end unknown", "unknown", COUNT),
    Column("95 % interval 28 d", "lasted_28_days.interval", interval(PERCENT)),
    Column("followed 28 d", "lasted_28_days.attempts", COUNT),
    Column("p90 out", "out_seconds.p90", DURATION),
)


def _remedy(row: Row) -> str:
    return REMEDY_NAMES[row["remedy"]]


def _step(row: Row) -> str:
    step = str(row["step"])
    return STEP_NAMES.get(step, step)


REMEDY = Column("remedy", _remedy)
STEP = Column("step", _step)


def view(repairs: Document) -> View:
    steps = repairs["steps"]
    by_code = [row for row in repairs["by_code"] if row["remedy"] in ("gpu_reset", "reboot", "person")]
    return describe(
        repairs,
        "Repairs: how often a remedy lasts",
        _sentences(repairs),
        [
            Table("By remedy", (REMEDY, *FIGURES), repairs["by_remedy"]),
            Table(
                "By cause",
                (Column("cause", "cause"), REMEDY, *FIGURES),
                repairs["by_cause"],
                MAX_ROWS,
            ),
            Table("By fault", (Column("code", "code"), REMEDY, *FIGURES), by_code, MAX_ROWS),
            Table("Steps taken by healthd", (STEP, *STEP_FIGURES), steps["by_step"]),
            Table(
                "Steps taken by healthd, by fault",
                (Column("code", "code"), STEP, *STEP_FIGURES),
                steps["by_code"],
                MAX_ROWS,
            ),
        ],
        [_figure(repairs)],
        [*_suggested(repairs), *_suggested_order(steps)],
    )


def _sentences(repairs: Document) -> list[str]:
    steps = _step_sentences(repairs["steps"])
    if not repairs["repairs"]:
        return ["No fault that drained a node ended in this period.", *steps]
    found = [f"Faults that drained a node ended in {plural(repairs['repairs'], 'repair')}."]
    for row in repairs["by_remedy"]:
        lasted = row["lasted_7_days"]
        if row["remedy"] in ("gpu_reset", "reboot") and lasted["repairs"]:
            found.append(
                f"After a {_remedy(row)}, no fault returned within 7 days in {lasted['lasted']:,} of "
                f"{lasted['repairs']:,} cases ({percent(lasted['share'])})."
            )
    return [*found, *steps]


def _step_sentences(steps: Document) -> list[str]:
    """Return the sentences about the steps that healthd took itself (repair.mode = "act")."""
    found = []
    for row in steps["by_step"]:
        lasted = row["lasted_7_days"]
        share = (
            f", and no fault returned within 7 days in {lasted['lasted']:,} of {lasted['attempts']:,} "
            f"({percent(lasted['share'])})"
            if lasted["attempts"]
            else ""
        )
        if row["attempts"]:
            found.append(
                f"healthd took the step {_step(row)} {plural(row['attempts'], 'time')}: {row['succeeded']:,} succeeded"
                f"{share}."
            )
        if row["impossible"]:
            found.append(f"The step {_step(row)} could not be taken {plural(row['impossible'], 'time')}.")
    if steps["gave_up"]:
        codes = ", ".join(f"{code} ({count:,})" for code, count in [*steps["gave_up_by_code"].items()][:5])
        found.append(f"After the last step, {plural(steps['gave_up'], 'repair')} needed a person: {codes}.")
    if steps["refused"]:
        found.append(f"Tries that healthd refused, because a requirement was not met: {steps['refused']:,}.")
    return found


def _suggested(repairs: Document) -> list[Detail]:
    """Return the suggested settings, which an operator may install."""
    if not repairs["suggested"]:
        return []
    steps = ", ".join(f'"{code}" = "{step}"' for code, step in repairs["suggested"].items())
    reason = "The first step for these codes failed in most cases. To begin with the next one, add to healthd.toml:"
    return [Detail(reason, ("[repair]", f"first_step = {{ {steps} }}"))]


def _suggested_order(steps: Document) -> list[Detail]:
    if steps["suggested_order"] is None:
        return []
    order = ", ".join(f'"{step}"' for step in steps["suggested_order"])
    names = ", ".join(STEP_NAMES.get(step, step) for step in steps["failing"])
    reason = f"too often without success: {names}" if names else "no step failed too often"
    return [Detail(f"Suggested order of healthd's steps ({reason}):", ("[repair]", f"order = [{order}]"))]


def _figure(repairs: Document) -> Figure | None:
    followed = [row for row in repairs["by_remedy"] if row["lasted_7_days"]["repairs"]]
    if not followed:
        return None
    records = make_records(
        followed,
        {
            "remedy": _remedy,
            "share": "lasted_7_days.share",
            "low": "lasted_7_days.interval.0",
            "high": "lasted_7_days.interval.1",
        },
    )
    share = quantity("share", "share of repairs that lasted 7 days", ".0%")
    description = "; ".join(f"{_remedy(row)} {percent(row['lasted_7_days']['share'])}" for row in followed)
    return Figure(
        "Repairs that lasted 7 days", description, (bars(records, share, "remedy"), intervals(records, "remedy"))
    )
