"""Describes the report's figures as data: layers of marks, each with rows and channels. All functions are pure.

A figure becomes a Vega-Lite specification (https://vega.github.io/vega-lite/docs/), whose names for marks and channels
are used here. Colour is never the only difference between marks: a shape, a dash or text also distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

# Okabe and Ito's colours, which colour-blind people can distinguish. Neighbouring colours also differ when printed in
# grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HEIGHT = 260  # height of a figure in CSS pixels
# Days in a complete week. Weekly figures omit incomplete weeks at both ends, because their few jobs would look like a
# drop or a peak.
WHOLE_WEEK = 7

Record = Mapping[str, Any]
Accessor = str | Callable[[Record], Any]  # how to get a value from a row
Channel = dict[str, Any]


class Layer(NamedTuple):
    """A layer of marks.

    Attributes:
        mark: type and properties.
        channels: the record field for each channel (x, y, color, ...).
    """

    mark: dict[str, Any]
    records: Sequence[Record]
    channels: dict[str, Channel | list[Channel]]

    @property
    def spec(self) -> dict[str, Any]:
        return {"data": {"values": list(self.records)}, "mark": self.mark, "encoding": self.channels}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure. `description` is a text for readers who cannot see the figure."""

    title: str
    description: str
    layers: tuple[Layer, ...]

    @property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification. The figure is as wide as the page."""
        size = {"width": "container", "height": HEIGHT}
        if len(self.layers) == 1:
            return {**self.layers[0].spec, **size}
        return {"layer": [layer.spec for layer in self.layers], **size}


def get_value(row: Record, accessor: Accessor) -> Any:
    """Return a value from a row.

    Args:
        accessor: a function, or a key with dots for nested keys or indices ("interval.0").
    """
    if callable(accessor):
        return accessor(row)
    value: Any = row
    for key in accessor.split("."):
        value = value[int(key)] if isinstance(value, list | tuple) else value[key]
    return value


def make_records(rows: Iterable[Record], fields: Mapping[str, Accessor]) -> list[Record]:
    """Return a record for each row.

    Args:
        fields: maps each name in the record to its accessor.
    """
    return [{name: get_value(row, accessor) for name, accessor in fields.items()} for row in rows]


def layer(
    mark: str,
    records: Sequence[Record],
    properties: Mapping[str, Any] | None = None,
    **channels: Channel | list[Channel],
) -> Layer:
    """Return a layer of marks.

    Args:
        properties: the mark's properties, such as colour or size.
    """
    return Layer({"type": mark, **(properties or {})}, records, channels)


# --- channels


def quantity(field: str, title: str = "", form: str = "", **more: Any) -> Channel:
    """Return a channel for numbers.

    Args:
        form: the axis's d3-format.
    """
    return {
        "field": field,
        "type": "quantitative",
        **({"title": title} if title else {}),
        **({"axis": {"format": form}} if form else {}),
        **more,
    }


def nominal(field: str, **more: Any) -> Channel:
    """Return a channel for names."""
    return {"field": field, "type": "nominal", **more}


def temporal(field: str) -> Channel:
    """Return a channel for times in milliseconds since the epoch."""
    return {"field": field, "type": "temporal"}


def category(field: str, title: str | None = None, **more: Any) -> Channel:
    """Return a channel for names, in the order of the records."""
    return nominal(field, sort=None, title=title, **more)


def colours(field: str, names: Sequence[str], title: str | None = None, **more: Any) -> Channel:
    """Return a channel that gives each of these names a fixed colour."""
    scale = {"domain": list(names), "range": list(COLOURS[: len(names)])}
    return nominal(field, scale=scale, title=title, **more)


def week(records: Iterable[Record]) -> Channel:
    """Return the axis for `week` in these records (milliseconds since the epoch), with a tick for each week.

    It is in UTC, because otherwise a browser would use its own time zone.
    """
    ticks = [_utc(week) for week in sorted({record["week"] for record in records})]
    axis = {"format": "%-d %b", "values": ticks}
    return {"field": "week", "type": "temporal", "scale": {"type": "utc"}, "axis": axis, "title": "week from (UTC)"}


def _utc(milliseconds: int) -> dict[str, Any]:
    day = datetime.fromtimestamp(milliseconds // 1000, timezone.utc)
    return {"year": day.year, "month": day.month, "date": day.day, "utc": True}


# --- layers that several figures use


def bars(records: Sequence[Record], value: Channel, name: str, **channels: Channel) -> Layer:
    """Return horizontal bars, one for each `name`. They have one colour unless `channels` has "color"."""
    properties = {} if "color" in channels else {"color": COLOURS[0]}
    return layer("bar", records, properties, x=value, y=category(name), **channels)


def grouped_bars(
    records: Sequence[Record], value: Channel, name: str, group: str, range_: Sequence[str] = COLOURS[:2], **more: Any
) -> Layer:
    """Return horizontal bars. Each `name` has one bar for each `group`, side by side."""
    colour = category(group, scale={"range": list(range_)}, **more)
    return layer("bar", records, y=category(name), x=value, yOffset=nominal(group, sort=None), color=colour)


def intervals(records: Sequence[Record], name: str, low: Channel | None = None) -> Layer:
    """Return black lines from `low` to `high`, one for each `name`."""
    ends = {"x": low or quantity("low"), "x2": {"field": "high"}}
    return layer("rule", records, {"color": "black"}, y=category(name), **ends)


def points(records: Sequence[Record], size: int = 70, **channels: Channel | list[Channel]) -> Layer:
    """Return filled points."""
    return layer("point", records, {"filled": True, "size": size}, **channels)


def mark_at(field: str, value: float, dash: Sequence[int]) -> Layer:
    """Return a dashed vertical line at a value."""
    return layer("rule", [{field: value}], {"strokeDash": list(dash), "color": "black"}, x=quantity(field))
