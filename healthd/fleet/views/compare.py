"""Describes the differences between two sides."""

from __future__ import annotations

from collections.abc import Sequence

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, number, percent
from healthd.fleet.figures import (
    COLOURS,
    Accessor,
    Figure,
    category,
    intervals,
    make_records,
    mark_at,
    nominal,
    points,
    quantity,
)
from healthd.fleet.view import TWO_DIGITS, Column, Form, Row, Table, View, describe

MAX_WRITTEN_FACTOR = 1000  # an upper end larger than this is written as "any"
MAX_DRAWN_FACTOR = 20.0  # in the figure, intervals beyond this factor (in either direction) are clipped


def _format_interval(interval: Sequence[float | None] | None) -> str:
    if interval is None:
        return "-"
    low, high = interval
    return f"{number(low, 2)} to {'any' if high is None or high > MAX_WRITTEN_FACTOR else number(high, 2)}"


def _rate(row: Row, side: str) -> str:
    rate = row[side]["rate"]
    return percent(rate) if row["per"] == 1 else number(rate)


RATE = Form(str)
COLUMNS = (
    Column("measure", "title"),
    Column("unit", "unit"),
    Column("A", lambda row: _rate(row, "a"), RATE),
    Column("B", lambda row: _rate(row, "b"), RATE),
    Column("B / A", "ratio", TWO_DIGITS),
    Column("95 % interval", "interval", Form(_format_interval)),
    Column("p, adjusted", "adjusted", TWO_DIGITS),
    Column("differs", "differs", Form(lambda differs: "yes" if differs else "", right_aligned=False)),
)


def view(compare: Document) -> View:
    return describe(
        compare,
        f"{compare['b']['name']} compared with {compare['a']['name']}",
        sentences(compare),
        [Table("Measures", COLUMNS, compare["measures"])],
        [_ratio_figure(compare)],
    )


def sentences(compare: Document) -> list[str]:
    differing = [row for row in compare["measures"] if row["differs"]]
    found = [f"A is {compare['a']['name']}, B is {compare['b']['name']}."]
    tested = sum(row["adjusted"] is not None for row in compare["measures"])
    if not tested:
        return [*found, "No measure is available for both sides."]
    if not differing:
        found.append(f"None of {plural(tested, 'measure')} differs by more than chance would explain.")
    for row in differing:
        more = "more" if row["b"]["rate"] > row["a"]["rate"] else "less"
        times = (
            "" if row["ratio"] is None else f": {number(row['ratio'], 2)} times ({_format_interval(row['interval'])})"
        )
        found.append(
            f"{row['title'][0].upper()}{row['title'][1:]}, {row['unit']}: B has {_rate(row, 'b')}, "
            f"{more} than A's {_rate(row, 'a')}{times}."
        )
    return found


def shorten_title(title: str) -> str:
    """Shorten a measure's title for an axis. The table shows the full title."""
    return title.removeprefix("jobs that ").removeprefix("nodes' ").removesuffix(" to node failures")


def _clamp(ratio: float) -> float:
    return min(max(ratio, 1 / MAX_DRAWN_FACTOR), MAX_DRAWN_FACTOR)


RATIO: dict[str, Accessor] = {
    "what": lambda row: shorten_title(row["title"]),
    "ratio": lambda row: _clamp(row["ratio"]),
    "low": lambda row: _clamp(row["interval"][0]),
    "high": lambda row: _clamp(row["interval"][1] or MAX_DRAWN_FACTOR),
    "differs": lambda row: "yes" if row["differs"] else "no",
}


def _ratio_figure(compare: Document) -> Figure | None:
    measures = [row for row in compare["measures"] if row["ratio"] and row["interval"] is not None]
    if not measures:
        return None
    drawn = make_records(measures, RATIO)
    log, domain = {"type": "log"}, ["no", "yes"]
    ratios = points(
        drawn,
        80,
        y=category("what"),
        x=quantity("ratio", "B / A, with its 95 % interval", scale=log),
        shape=nominal("differs", scale={"domain": domain}),
        color=nominal("differs", scale={"domain": domain, "range": [COLOURS[0], COLOURS[5]]}),
    )
    differing = ", ".join(row["title"] for row in compare["measures"] if row["differs"]) or "nothing"
    return Figure(
        "Ratios",
        f"B's rates divided by A's; different: {differing}.",
        (mark_at("same", 1.0, (4, 4)), intervals(drawn, "what", quantity("low", scale=log)), ratios),
    )
